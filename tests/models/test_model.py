"""The model: its definition, saving and loading, generation, and the counts of its operations."""

import os
import subprocess
import sys

import pytest
import torch
from models import MIXINGS, SMALL, lively_model, small_model, tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.models.masked_mixer.convolution import LAGS, SPANS
from mixer.models.masked_mixer.mixing import gelu, rotations, short_gelu

HALF_TYPES = (torch.bfloat16, torch.float16)
ONE_TAP = ("keyed", "rows", "columns")  # the mixings that have no more
TIED_WITH_NORM = {"tie_word_embeddings": True, "final_norm": True}
every_form = pytest.mark.parametrize("form", ["full", "lags"])


def test_the_flat_mixer_is_the_papers_block():
    model = small_model()
    ids = tokens()
    x = model.model.embed_tokens(ids)
    for block in model.model.layers:
        conv = nn.Conv1d(12, 12, 1)
        conv.weight.data = block.mixing.conv.weight.data[0, 0].tril()[..., None]
        conv.bias.data = block.mixing.conv.bias.data[0]
        x = x + conv(block.mixing_norm(x))
        x = x + nn.Sequential(block.mlp.up_proj, nn.GELU(), block.mlp.down_proj)(block.mlp_norm(x))
    torch.testing.assert_close(model(ids).logits, x @ model.lm_head.weight.T)


def test_mixing_in_the_mlp_is_one_layer():
    model = small_model(mixing_in_mlp=True)
    ids = tokens()
    x = model.model.embed_tokens(ids)
    for block in model.model.layers:
        normed = block.mlp_norm(x)
        weight = block.mixing.conv.weight.data[0, 0].tril()
        mixed = weight @ normed + block.mixing.conv.bias.data[0, :, None]
        x = x + block.mlp(normed + mixed)
    torch.testing.assert_close(model(ids).logits, x @ model.lm_head.weight.T)


@pytest.mark.parametrize("taps", [1, 3])
def test_heads_without_projections_mix_their_own_channels(taps):
    model = small_model(num_mixer_heads=4, mixer_projections=False, mixer_kernel_size=taps)
    mixing, x, residual = model.model.layers[0].mixing, *torch.randn(2, 3, 12, 16)
    torch.testing.assert_close(mixing(x, residual), residual + mixed_by_heads(mixing.conv, x))


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("taps", [1, 3])
def test_gated_mixing_is_its_formula(heads, taps):
    model = small_model(num_mixer_heads=heads, mixer_gate=True, mixer_kernel_size=taps)
    mixing, x, residual = model.model.layers[0].mixing, *torch.randn(2, 3, 12, 16)
    projected = x @ mixing.in_proj.weight.T + mixing.in_proj.bias
    query, key, value = projected.unflatten(-1, (3, 16)).unbind(-2)
    gated = query * mixed_by_heads(mixing.conv, key * value)
    expected = residual + gated @ mixing.out_proj.weight.T + mixing.out_proj.bias
    torch.testing.assert_close(mixing(x, residual), expected)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("length", [12, 150])  # of one panel and of more
def test_keyed_mixing_is_its_formula(heads, length):
    model = small_model(num_mixer_heads=heads, mixer_key_size=3, max_position_embeddings=length)
    mixing, x, residual = model.model.layers[0].mixing, *torch.randn(2, 2, length, 16)
    projected = x @ mixing.in_proj.weight.T + mixing.in_proj.bias
    query, key = projected[..., : 6 * heads].unflatten(-1, (2, heads, 3)).unbind(-3)
    value = projected[..., 6 * heads :].unflatten(-1, (heads, -1))
    # Exponentials of products over their mean, times mixing weights.
    seen = torch.ones(length, length).tril()
    products = torch.einsum("bthk,bshk->bhts", query, key)
    matches = (products / 3**0.5).exp() * seen  # (batch, heads, tokens, tokens)
    matches = matches / matches.sum(-1, keepdim=True) * seen.sum(-1, keepdim=True)
    scores = matches * mixing.keyed_conv.weight[:, 0].tril()
    mixed = torch.einsum("bhts,bshc->bthc", scores, value)
    mixed = mixed + mixing.keyed_conv.bias.T[..., None]
    expected = residual + mixed.flatten(-2) @ mixing.out_proj.weight.T + mixing.out_proj.bias
    torch.testing.assert_close(mixing(x, residual), expected)


def test_queries_and_keys_are_shifted_normed_and_rotated_as_written():
    """By complex numbers, a token at a time; then softmax attention."""
    model = lively_model(**MIXINGS["keyed-attention"], mixer_key_shift=True).double()
    mixing = model.model.layers[0].mixing
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    mixing.query_key.gain.data.normal_()
    projections = mixing.in_proj(x)[0].chunk(3, -1)
    query, key, value = (projection.unflatten(-1, (4, 4)) for projection in projections)
    share = mixing.key_share.unflatten(0, (4, 4))
    gain = mixing.query_key.gain.unflatten(0, (4, 4))
    key = torch.cat([key[:1], key[1:] + share * key[:-1]])

    def turned(x):  # (tokens, heads, 4)
        x = x / x.square().mean(-1, keepdim=True).sqrt()
        angles = torch.arange(12.0)[:, None, None] * torch.tensor([1.0, 0.01])
        pairs = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * angles.double())
        return torch.cat([pairs.real, pairs.imag], -1)

    scores = torch.einsum("ihc,jhc->hij", turned(query) * gain, turned(key)) / 2
    matches = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).softmax(-1)
    expected = mixing.out_proj(torch.einsum("hij,jhc->ihc", matches, value).flatten(1))
    rotation = rotations(torch.arange(12)[None], 4)
    mixed = mixing(x, torch.zeros_like(x), rotation=rotation)[0]
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)


def test_keyed_mixing_in_every_second_block_leaves_the_others_to_flat_or_gated_mixing():
    for gate, unkeyed in ((False, "Flat"), (True, "Gated")):
        model = small_model(
            num_hidden_layers=5,
            num_mixer_heads=4,
            mixer_gate=gate,
            mixer_key_size=2,
            mixer_keyed_every=2,
        )
        names = [type(layer.mixing).__name__ for layer in model.model.layers]
        assert names == [unkeyed, "Keyed", unkeyed, "Keyed", unkeyed]
        assert model.model.layers[0].mixing.conv.heads == (4 if gate else 1)


def test_keyed_mixing_stands_in_the_blocks_of_a_list_which_a_saved_model_keeps(tmp_path):
    shape = {"num_hidden_layers": 4, "num_mixer_heads": 4, "mixer_key_size": 2}
    small_model(**shape, mixer_keyed_blocks=[3, 4]).save_pretrained(tmp_path)
    model = MaskedMixerForCausalLM.from_pretrained(tmp_path)
    names = [type(layer.mixing).__name__ for layer in model.model.layers]
    assert names == ["Flat", "Flat", "Keyed", "Keyed"]
    torch.manual_seed(0)
    listed = small_model(**shape, mixer_keyed_blocks=[2, 4])
    torch.manual_seed(0)
    every_second = small_model(**shape, mixer_keyed_every=2)
    ids = torch.randint(0, 50, (2, 12))
    assert torch.equal(listed(ids).logits, every_second(ids).logits)


def mixed_by_heads(conv, x):
    """x (batch, 12, channels), each head's channels mixed by an nn.Conv1d with a masked weight."""
    mixed = []
    taps = conv.weight.shape[1]
    for head, channels in enumerate(x.chunk(conv.heads, dim=-1)):
        layer = nn.Conv1d(12, 12, taps, padding="same")
        layer.weight.data = conv.weight.data[head].tril().permute(1, 2, 0)
        layer.bias.data = conv.bias.data[head]
        mixed.append(layer(channels))
    return torch.cat(mixed, dim=-1)


def test_without_biases_and_with_relu2_the_mlp_is_its_formula():
    model = small_model(linear_bias=False, hidden_act="relu2")
    x = torch.randn(2, 3, 16)
    mlp = model.model.layers[0].mlp
    hidden = (x @ mlp.up_proj.weight.T).clamp(min=0) ** 2
    torch.testing.assert_close(mlp(x), hidden @ mlp.down_proj.weight.T)


@pytest.mark.parametrize("mixing", MIXINGS)
def test_under_autocast_the_residual_stream_has_the_autocast_type(mixing):
    model = small_model(**MIXINGS[mixing])
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(tokens(), output_hidden_states=True).hidden_states
    assert {state.dtype for state in states} == {torch.bfloat16}


def test_weights_start_as_pytorchs_own_layers_do():
    model = small_model(hidden_size=64, max_position_embeddings=64)
    torch.manual_seed(0)
    conv = nn.Conv1d(64, 64, 1)
    linear = nn.Linear(64, 256)
    block = model.model.layers[0]
    weight = block.mixing.conv.weight[0, 0]
    lower = torch.ones(64, 64).tril().bool()
    assert torch.count_nonzero(weight[~lower]) == 0
    for ours, pytorchs in (
        (weight[lower], conv.weight),
        (block.mlp.up_proj.weight, linear.weight),
        (model.model.embed_tokens.weight, torch.randn(10000)),
    ):
        assert ours.std().item() == pytest.approx(pytorchs.std().item(), rel=0.1)


@pytest.mark.parametrize(
    ("mixing", "taps"),
    [(m, 1) for m in MIXINGS] + [(m, 3) for m in MIXINGS if not m.startswith(ONE_TAP)],
)
@pytest.mark.parametrize("options", [{}, TIED_WITH_NORM], ids=["", "tied-norm"])
def test_every_variant_is_causal_and_survives_saving(mixing, taps, options, tmp_path):
    model = small_model(**MIXINGS[mixing] | {"mixer_kernel_size": taps} | options)
    ids = tokens()
    logits = model(ids).logits
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 50
    assert torch.equal(model(changed).logits[:, :7], logits[:, :7])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is MaskedMixerForCausalLM
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == loaded.config.to_dict()
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(loaded(ids).logits, logits, rtol=1e-4, atol=1e-5)


def test_loss_is_the_mean_cross_entropy_of_the_next_token():
    model = small_model()
    ids = tokens()
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_scored(side):
    model = small_model()
    ids = tokens(batch=2, length=6)
    pad = (2, 0) if side == "left" else (0, 2)
    padded, mask = (nn.functional.pad(x, pad) for x in (ids, torch.ones_like(ids)))
    loss = model(padded, attention_mask=mask, labels=padded).loss
    torch.testing.assert_close(loss, model(ids, labels=ids).loss)


def test_outputs_are_a_tuple_where_a_call_or_the_configuration_says_so():
    model = small_model()
    ids = tokens()
    loss, logits = model(ids, labels=ids, return_dict=False)
    torch.testing.assert_close((loss, logits), model(ids, labels=ids).to_tuple())
    model.config.return_dict = False
    (logits,) = model(ids)
    torch.testing.assert_close(logits, model(ids, return_dict=True).logits)
    assert model.generate(ids[:, :4], max_new_tokens=3).shape == (3, 7)


@pytest.mark.parametrize("mixing", ["flat", "keyed", "keyed-lags", "gate-heads"])
def test_torch_export_serves_batches_of_any_size_and_length(mixing):
    model = small_model(mixing_backend="dense", **MIXINGS[mixing])
    ids = tokens(batch=4)
    sizes = [torch.export.Dim("batch", min=2, max=64), torch.export.Dim("tokens", min=3, max=11)]
    exported = torch.export.export(
        model,
        (),
        {"input_ids": ids[:3, :7]},
        dynamic_shapes={"input_ids": tuple(sizes)},
        strict=False,
    ).module()
    for shorter in (ids[:2, :5], ids[:, :11]):
        torch.testing.assert_close(exported(input_ids=shorter).logits, model(shorter).logits)


def test_operations_counted_by_hand():
    counts = small_model(mixing_backend="dense").flops_per_token()
    linear = 2 * (2 * 2 * 16 * 64) + 2 * 16 * 50  # two blocks of two Linears, lm_head
    mixing = 2 * 2 * 16 * (12 + 1) / 2  # two blocks, (tokens + 1) / 2 products a token
    assert counts["useful"] == 3 * (linear + mixing)
    assert counts["token_mixing"] == 3 * mixing
    heads = small_model(num_mixer_heads=2).flops_per_token()  # in- and out-projection besides
    assert heads["useful"] == 3 * (linear + 2 * 2 * 2 * 16 * 16 + mixing)
    bare = small_model(num_mixer_heads=2, mixer_projections=False).flops_per_token()
    assert bare["useful"] == 3 * (linear + mixing)
    gated = small_model(mixer_gate=True).flops_per_token()  # an in-projection of three parts
    assert gated["useful"] == 3 * (linear + 2 * 2 * 4 * 16 * 16 + mixing)
    # In one block of two, queries and keys of half as many numbers as channels.
    keyed = small_model(num_mixer_heads=4, mixer_key_size=2, mixer_keyed_every=2).flops_per_token()
    assert keyed["useful"] == 3 * (linear + 2 * 16 * (16 + 16 + 16) + 1.25 * mixing)


def test_options_that_do_not_go_together_are_refused():
    for change, words in (
        ({"hidden_size": 16.5}, "hidden_size = 16.5; allowed: a whole number, 1 or more"),
        ({"mixer_key_size": 2, "mixer_gate": True}, "mixer_keyed_every = 1; allowed: mixer_keyed"),
        ({"mixer_keyed_every": 2}, "mixer_keyed_every = 2; allowed: with a mixer_key_size"),
        ({"mixing_weight": "rows", "mixer_kernel_size": 3}, "3; allowed: full or lags"),
        ({"mixer_keyed_blocks": [1]}, "mixer_keyed_blocks = .1.; allowed: with a mixer_key_size"),
        ({"mixer_key_size": 2, "mixer_keyed_blocks": [0]}, "numbers of blocks, from 1 to num_"),
        ({"mixer_key_size": 2, "mixer_keyed_blocks": "2"}, "mixer_keyed_blocks = '2'; allowed: a"),
    ):
        with pytest.raises(ValueError, match=words):
            MaskedMixerConfig(**(SMALL | change))


def test_training_needs_no_datasets_wandb_or_matplotlib_and_its_idle_threads_sleep():
    code = "import sys, mixer, mixer.training.loop; "
    code += "print([m for m in ('datasets', 'wandb', 'matplotlib') if m in sys.modules])"
    environment = {name: os.environ[name] for name in os.environ if name != "OMP_WAIT_POLICY"}
    environment["OMP_DISPLAY_ENV"] = "verbose"  # OpenMP says on stderr what it has read
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
    assert "GOMP_SPINCOUNT = '0'" in process.stderr  # unset it spins, but says 'PASSIVE', too


@every_form
def test_blocks_that_start_without_mixing_are_their_mlp_alone(form):
    model = small_model(mixing_init="zero", mixing_weight=form)
    layer = model.model.layers[0]
    x = torch.randn(2, 12, model.config.hidden_size)
    assert (layer.mixing.conv.mixing_weight() == 0).all()
    bias = layer.mixing.conv.bias[0, :12, None]
    assert bias.abs().min() > 0
    torch.testing.assert_close(layer.mixing(x, torch.zeros_like(x)), bias.expand_as(x))


@every_form
def test_heads_that_start_as_shifts_pass_on_earlier_tokens(form):
    """At the start, head h of block l copies the token LAGS[l + h] positions back, plus noise."""
    model = small_model(num_mixer_heads=4, mixing_init="shift", mixing_weight=form)
    for block, layer in enumerate(model.model.layers):
        for head, weight in enumerate(layer.mixing.conv.mixing_weight()[:, 0]):
            lag = LAGS[block + head]
            largest = weight[lag:].abs().argmax(-1)
            assert torch.equal(largest, torch.arange(12 - lag)), (block, head)
            assert (weight.triu(1) == 0).all() and weight.abs().median() < 0.3 / 12**0.5


@every_form
def test_keyed_mixing_starts_as_means_of_earlier_tokens(form):
    """Which fall by exp(-lag / SPANS[block + head])."""
    model = small_model(
        num_mixer_heads=4,
        mixer_key_size=2,
        mixing_init="shift",
        mixing_weight=form,
        max_position_embeddings=512,
    )
    for block, layer in enumerate(model.model.layers):
        for head, weight in enumerate(layer.mixing.keyed_conv.mixing_weight()[:, 0]):
            torch.testing.assert_close(weight.sum(-1), torch.ones(512))
            assert (weight.triu(1) == 0).all()
            fall = torch.tensor(-1 / SPANS[(block + head) % 4]).exp()
            for row in (weight[511], weight[3, :4]):
                torch.testing.assert_close(row[:-1] / row[1:], fall.expand(len(row) - 1))


def every_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def assert_rounded_once(y: torch.Tensor, exact: torch.Tensor) -> None:
    """Off by the last bit of its type at most, and by the 3e-7 of the distribution."""
    allowed = torch.finfo(y.dtype).eps * exact.abs() + 3e-7
    assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_every_16_bit_value_has_the_gelu_and_the_derivative_of_the_exact_one(dtype):
    x = every_value(dtype)
    x = x[x.isfinite()].requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y = short_gelu(x)
    exact = x64 * torch.special.ndtr(x64)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (slope,) = torch.autograd.grad(exact.sum(), x64)
    assert y.dtype == dx.dtype == dtype
    assert_rounded_once(y, exact)
    assert_rounded_once(dx, slope)
    with torch.no_grad():
        assert torch.equal(short_gelu(x), y)  # as generation computes it


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_code_compiled_for_a_gpu_has_the_short_gelu(dtype):
    x = every_value(dtype).cuda()
    x = x[x.isfinite()]
    torch._dynamo.reset()
    compiled = torch.compile(gelu, fullgraph=True)(x)
    short = short_gelu(x)
    torch.testing.assert_close(compiled, short, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert (compiled != nn.functional.gelu(x)).any()  # far below zero torch's own is less exact
