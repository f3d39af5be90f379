"""The kernels of keyed mixing on a GPU: `pytest tests/ops/test_keyed_cuda.py`."""

import random

import pytest
import torch
from keyed_cases import Case, check, drawn

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.models.masked_mixer.convolution import KeyedConv
from mixer.ops import keyed, keyed_conv
from mixer.ops.strips import weights_of

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("seed", range(24))
def test_random_cases_are_right(seed):
    rng = random.Random(seed)
    case = drawn(rng, [16, 32, 64, 128], [1, 63, 64, 65, 200, 512, 1000], DTYPES)
    device = torch.device("cuda", 0)
    sizes = (case.key, case.value, case.context)
    for by_lag in (True, False):
        assert keyed.uses_kernels(device, case.dtype, *sizes, by_lag)
    check(case, "cuda")


@pytest.mark.parametrize("tokens", [65, 256, 257, 700])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("offset", [1, 8])
def test_queries_keys_and_values_may_begin_anywhere(tokens, dtype, offset):
    """With 8, tokens stand no multiple of 16 numbers apart."""
    case = Case(
        batch=2,
        heads=2,
        key=32,
        value=16,
        tokens=tokens,
        context=tokens,
        dtype=dtype,
        wide_weight=True,
        form="lags",
        offset=offset,
    )
    check(case, "cuda")


@pytest.mark.parametrize("tokens", [512, 200])
def test_weights_by_lag_are_one_operator_to_compiled_code_and_graphs(tokens):
    """Tiles that fill the tokens and tiles that do not: the same results compiled and captured."""
    torch.manual_seed(0)
    shapes = [(4, tokens, 64)] * 2 + [(4, tokens, 128), (2, 1, 512), (2, 512)]
    leaves = [torch.randn(shape, device="cuda") for shape in shapes]
    leaves = [x.bfloat16() for x in leaves[:3]] + leaves[3:]
    leaves = [x.requires_grad_() for x in leaves]
    decay = torch.tensor([0.0, 1 / 64], device="cuda")
    strips = weights_of(leaves[3], decay, tokens, torch.bfloat16)
    torch.library.opcheck(torch.ops.mixer.keyed_conv.default, [*leaves, *strips])

    def conv(query, key, value, lags, bias) -> torch.Tensor:
        return keyed_conv(query, key, value, bias=bias, lags=lags, decay=decay, backend="cuda")

    def results(conv) -> list[torch.Tensor]:
        y = conv(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    expected = results(conv)
    compiled = results(torch.compile(conv, fullgraph=True))
    for ours, eager in zip(compiled, expected, strict=True):
        # The compiler may round the strips another way.
        assert (ours - eager).norm() <= 1e-3 * eager.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(conv)
    graph.replay()
    assert all(map(torch.equal, captured, expected))


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
        for module in model.modules():
            if isinstance(module, KeyedConv):
                module.backend = backend
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    plain, ours, again = (gradients(backend) for backend in ("dense", "cuda", "cuda"))
    names = ["loss", *(name for name, _ in model.named_parameters())]
    for name, first, second in zip(names, ours, again, strict=True):
        # The compiler adds up an embedding's gradient by atomics, in any order.
        assert "embed" in name or torch.equal(first, second), name
    for result, expected in zip(ours, plain, strict=True):
        # Both round to bf16 in each layer.
        assert (result - expected).norm() <= 5e-2 * expected.norm()
