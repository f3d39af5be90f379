"""Mixing weights by lag: one number for each distance of two tokens, and nothing larger."""

import pytest
import torch
from models import MIXINGS, generate, small_model, tokens
from runs import read_losses
from safetensors.torch import load_file

from mixer import MaskedMixerForCausalLM
from mixer.common.errors import UserError
from mixer.training.config import load_config
from mixer.training.loop import train

BY_LAG = ["model.mixing_weight=lags", "model.num_mixer_heads=2", "model.mixing_init=shift"]

CONTEXT = "model.max_position_embeddings=24"  # no other size of the small run


@pytest.mark.parametrize("start", ("zero", "shift", "keyed"))
def test_initial_lags_are_those_that_full_weights_start_from(start):
    """But for the random numbers beside a shift, which are small."""
    kind = {"num_mixer_heads": 4, "mixing_init": "zero" if start == "zero" else "shift"}
    if start == "keyed":
        kind |= {"mixer_key_size": 2, "max_position_embeddings": 512}
    models = [small_model(**kind, mixing_weight=form) for form in ("lags", "full")]
    ours, theirs = (
        [part.mixing_weight().tril() for part in model.modules() if hasattr(part, "mixing_weight")]
        for model in models
    )
    apart = 0.6 / 12**0.5 if start == "shift" else 1e-6
    torch.testing.assert_close(ours, theirs, rtol=0, atol=apart)


@pytest.mark.parametrize("kind", ("lags", "keyed-lags"))
def test_a_model_reads_and_writes_beyond_its_context(kind):
    model, ids = small_model(**MIXINGS[kind]), tokens(batch=2, length=30)
    before = model(ids[:, :12]).logits
    with pytest.raises(ValueError, match="the input has 30 tokens; .* the model's context of 12"):
        model(ids)
    with pytest.raises(ValueError, match=r"or call model.extend_context\(38\)"):
        generate(model, ids)
    model.extend_context(40)
    assert torch.allclose(model(ids).logits[:, :12], before, atol=1e-6)
    written = generate(model, ids)
    assert torch.equal(written, generate(model, ids, use_cache=False))
    with pytest.raises(ValueError, match="mixing_weight 'full' .*; allowed: a longer context"):
        small_model().extend_context(40)


@pytest.mark.parametrize(
    "kind", (["model.mixer_gate=true"], ["model.mixer_key_size=4"]), ids=("gated", "keyed")
)
def test_training_keeps_nothing_that_grows_with_the_square_of_the_context(
    kind, write_config, tmp_path
):
    path = str(write_config(name="lags"))
    model = train(load_config(path, [*BY_LAG, *kind, "optim.name=muon", "optim.lr=1e-2", CONTEXT]))
    losses = read_losses(tmp_path / "runs/lags")
    assert losses[12] < losses[1] - 0.2
    context, step = model.config.max_position_embeddings, tmp_path / "runs/lags/step-12"
    for file in (step / "model.safetensors", *step.glob("trainer_state/optimizer*.safetensors")):
        for name, tensor in load_file(file).items():
            assert tensor.shape[-1:] != (context,) or tensor.numel() < context**2, (
                f"{name} in {file.name}"
            )
    again, ids = MaskedMixerForCausalLM.from_pretrained(step), tokens(length=context)
    assert torch.equal(again(ids).logits, model.cpu().eval()(ids).logits)


def test_what_lags_do_not_have_is_refused():
    with pytest.raises(UserError, match="shared_lags = true, .* with mixing_weight lags .*: false"):
        load_config(None, [*BY_LAG, "optim.shared_lags=true"])
