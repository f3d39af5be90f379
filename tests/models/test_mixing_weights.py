"""Mixing weights that do not grow with the square of the context: by lag, one number for each
distance of two tokens; and recurrent, with which generation has a state of constant size.
"""

import pytest
import torch
from checkpoints import continuations
from models import MIXINGS, generate, lively_model, padded, prompts, small_model, tokens
from runs import read_losses
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from mixer import MaskedMixerForCausalLM
from mixer.models.masked_mixer.cache import MixingCache
from mixer.models.masked_mixer.configuration import RECURRENT, MaskedMixerConfig
from mixer.models.masked_mixer.convolution import RecurrentConv, TriangularConv
from mixer.training.config import load_config
from mixer.training.loop import train

BY_LAG = ["model.mixing_weight=lags", "model.num_mixer_heads=2", "model.mixing_init=shift"]
BY_LAG += ["model.max_position_embeddings=24"]  # no other size of the small run
every_form = pytest.mark.parametrize("form", RECURRENT)
HEADS = {"num_mixer_heads": 2, "mixing_decay": True}


def some_conv(form: str, context: int, **changes) -> RecurrentConv:
    """In fp64, with decays inside and outside of what is allowed."""
    torch.manual_seed(0)
    options = {"hidden_size": 8, "num_mixer_heads": 4, "mixing_decay": True, "mixing_weight": form}
    options |= {"max_position_embeddings": context} | changes
    conv = RecurrentConv(MaskedMixerConfig(**options))
    for parameter in conv.double().parameters():
        torch.nn.init.normal_(parameter)
    if conv.decay is not None:
        conv.decay.data.copy_(torch.tensor([0.03, -0.01, 0.2, 0.1], dtype=torch.float64))
    return conv


@every_form
@pytest.mark.parametrize("decay", [True, False])
def test_a_form_is_its_sum(form, decay):
    """In a context of two decays' length, and behind its end, where the last numbers go on."""
    context = 1024
    tokens = 1030
    conv = some_conv(form, context, mixing_decay=decay)
    x, residual = torch.randn(2, 2, tokens, 8, dtype=torch.float64)
    y = conv(x, residual)
    base = [0.97, 1.0, 0.9, 0.9] if decay else [1.0] * 4
    for i in (0, 1, 500, 1023, 1024, 1029):
        for head in range(4):
            channels = slice(2 * head, 2 * head + 2)
            by_row = form == "rows" or form == "mixed" and head < 2
            expected = conv.bias[head, min(i, context - 1)] + residual[:, i, channels]
            for j in range(i + 1):
                scale = conv.scale[head, 0, min(i if by_row else j, context - 1)]
                expected = expected + scale * base[head] ** ((i - j) / 2) * x[:, j, channels]
            assert torch.allclose(y[:, i, channels], expected, rtol=1e-9)


@every_form
def test_a_form_is_the_convolution_with_its_weight(form):
    context = 10
    conv = some_conv(form, context)
    config = MaskedMixerConfig(hidden_size=8, num_mixer_heads=4, max_position_embeddings=context)
    full = TriangularConv(config).double()
    full.set_mixing_weight(conv.mixing_weight())
    full.bias.data.copy_(conv.bias)
    x = torch.randn(2, context, 8, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(conv(x), full(x), rtol=1e-9)
    conv.decay.data.clamp_(0.01, 0.09)  # no slope at the ends of what is allowed
    parameters = tuple(conv.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: conv(x), (x, *parameters))


@every_form
@torch.no_grad()
def test_steps_behind_the_context_are_those_of_the_forward_and_the_state_does_not_grow(form):
    model = lively_model(mixing_weight=form, **HEADS)
    ids = tokens(batch=2, length=50)
    expected = model(ids).logits
    cache = MixingCache(model.config)
    sizes = set()
    for start, end in ((0, 5), (5, 40), *((i, i + 1) for i in range(40, 50))):
        logits = model(ids[:, start:end], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected[:, start:end], rtol=1e-4, atol=1e-4)
        sizes.add(tuple(memory.shape for memory in cache.memories.values()))
    assert sizes == {((2, 16), (2, 16))} and cache.get_seq_length() == 50


@every_form
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_padded_texts_go_on_behind_the_context_as_each_alone(form, settings):
    model = lively_model(mixing_weight=form, **HEADS)
    ids, mask = padded("left")
    alone = [generate(model, p[None], new=20, use_cache=False, **settings) for p in prompts()]
    written = generate(model, ids, new=20, attention_mask=mask, **settings)
    assert torch.equal(written, torch.cat(alone))


def test_a_run_trains_scale_and_decay_and_its_checkpoint_writes_behind_the_context(
    write_config, tmp_path
):
    overrides = ["model.mixing_weight=mixed", "model.mixing_decay=true", "model.num_mixer_heads=2"]
    run = load_config(str(write_config(name="mixed")), [*overrides, "optim.lr=1e-2"])
    start = small_model(mixing_weight="mixed", **HEADS).model.layers[0].mixing.conv
    assert not start.decay.any() and not start.bias.any()
    model = train(run)
    losses = read_losses(tmp_path / "runs/mixed")
    assert losses[12] < losses[1] - 0.2
    checkpoint = tmp_path / "runs/mixed/step-12"
    saved = AutoModelForCausalLM.from_pretrained(checkpoint)
    context = saved.config.max_position_embeddings
    ids = tokens(batch=1, length=2 * context)
    assert torch.equal(saved(ids).logits, model.cpu().eval()(ids).logits)
    assert all(layer.mixing.conv.decay.all() for layer in saved.model.layers)
    assert len(continuations(checkpoint, ["def"], 2 * context, 0.0, 0)[0]) > context


def test_a_sum_cannot_forget_tokens():
    model = small_model(mixing_weight="rows")
    with pytest.raises(ValueError, match="cannot forget tokens|cache that can be cropped"):
        model.generate(tokens(1), max_new_tokens=4, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("mixing", ("lags", "keyed-lags", "attention"))
def test_by_lag_a_token_mixes_the_last_context_tokens_of_a_text_of_any_length(mixing):
    """In one layer it has the same logits in a text that begins so many tokens before it."""
    options = MIXINGS["keyed-lags"] | {"mixer_attention": True, "mixer_key_size": 4}
    options = MIXINGS.get(mixing, options | {"mixer_rotary": True})
    model = small_model(num_hidden_layers=1, **options).double()
    ids = tokens(batch=2, length=30)
    logits = model(ids).logits
    for end in (12, 13, 30):
        assert torch.allclose(model(ids[:, end - 12 : end]).logits[:, -1], logits[:, end - 1])
    for cache_implementation in (None, "static"):
        written = generate(model, ids, 20, cache_implementation=cache_implementation)
        assert torch.equal(written, generate(model, ids, 20, use_cache=False))
    cache = MixingCache(model.config, static=True, room=12)
    with pytest.raises(ValueError, match="30 tokens; allowed: .* 12, .* a larger MixingCache"):
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="the input has 30 tokens; allowed: .* at most 12, "):
        small_model()(ids)


@pytest.mark.parametrize(
    "override", ("model.mixer_gate=true", "model.mixer_key_size=4"), ids=("gated", "keyed")
)
def test_training_keeps_nothing_that_grows_with_the_square_of_the_context(
    override, write_config, tmp_path
):
    path = str(write_config(name="lags"))
    model = train(load_config(path, [*BY_LAG, override, "optim.name=muon", "optim.lr=1e-2"]))
    losses = read_losses(tmp_path / "runs/lags")
    assert losses[12] < losses[1] - 0.2
    context = model.config.max_position_embeddings
    step = tmp_path / "runs/lags/step-12"
    for file in (step / "model.safetensors", *step.glob("trainer_state/optimizer*.safetensors")):
        for name, tensor in load_file(file).items():
            is_square = tensor.shape[-1:] == (context,) and tensor.numel() >= context**2
            assert not is_square, f"{name} in {file.name}"
    again = MaskedMixerForCausalLM.from_pretrained(step)
    ids = tokens(length=context)
    assert torch.equal(again(ids).logits, model.cpu().eval()(ids).logits)


class Largest(TorchDispatchMode):
    """The numbers of the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_keyed_mixing_past_the_context_needs_no_square_of_the_text():
    model = small_model(
        mixer_key_size=4,
        num_mixer_heads=2,
        mixing_weight="lags",
        mixing_init="shift",
        max_position_embeddings=16,
    )
    with torch.no_grad(), Largest() as largest:
        model(tokens(1, 2048))
    assert largest.numbers < 2048**2 / 4
