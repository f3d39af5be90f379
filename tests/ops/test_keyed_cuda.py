"""The kernels of keyed mixing on a GPU: `pytest tests/ops/test_keyed_cuda.py`."""

import random

import pytest
import torch
from keyed_cases import check, drawn

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.models.masked_mixer.convolution import KeyedConv
from mixer.ops import choice

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("seed", range(24))
def test_random_cases_are_right(seed):
    rng = random.Random(seed)
    case = drawn(rng, [16, 32, 64, 128], [1, 63, 64, 65, 200, 512, 1000], DTYPES)
    sizes = (case.heads, case.key, case.value, case.context)
    reason = choice.keyed_unavailable_reason(torch.device("cuda", 0), case.dtype, *sizes)
    assert reason is None, reason
    check(case, "cuda")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_has_the_gradients_of_plain_pytorch_and_the_same_bits_each_time(compiled):
    torch.manual_seed(0)
    config = MaskedMixerConfig(
        vocab_size=64, hidden_size=256, num_hidden_layers=2, max_position_embeddings=200,
        num_mixer_heads=4, mixer_key_size=64, mixing_init="shift",
    )  # fmt: skip
    model = MaskedMixerForCausalLM(config).cuda()
    ids = torch.randint(64, (3, 200), device="cuda")
    call = torch.compile(model, fullgraph=True) if compiled else model

    def gradients(backend: str) -> list[torch.Tensor]:
        for part in model.modules():
            if isinstance(part, KeyedConv):
                part.backend = backend
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    plain, ours, again = (gradients(backend) for backend in ("dense", "cuda", "cuda"))
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, one, other in zip(names, ours, again, strict=True):
        # The compiler adds up an embedding's gradient by atomics, in any order.
        assert "embed" in name or torch.equal(one, other), name
    for one, other in zip(ours, plain, strict=True):
        assert (one - other).norm() <= 5e-2 * other.norm()  # both round to bf16 in each layer
