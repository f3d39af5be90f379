"""Which optimizer trains which parameter, at which rate; a new optimizer is one function."""

import json

import pytest
import torch
from models import small_model
from runs import RECIPE, assert_same, read_losses
from safetensors.torch import load_file
from torch import nn

from mixer.common.errors import UserError
from mixer.comparison.side_by_side import entrant
from mixer.training.config import OPTIMIZERS, load_config, override
from mixer.training.muon import skip_and_scale
from mixer.training.optim import (
    LAGS_LR,
    LONG,
    LONG_LAGS_LR,
    Kinds,
    OptimConfig,
    adamw,
    build_optimizer,
    learning_rate,
    set_learning_rate,
)

LLAMA = "model.architecture=llama"


@pytest.mark.parametrize("form", ("full", "lags"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_kind_of_parameter_has_the_rate_that_is_given_for_it_and_only_weights_decay(
    name, form
):
    model = small_model(num_mixer_heads=2, mixing_weight=form)
    given = {"matrices_lr": 2.0, "vectors_lr": 3.0, "mixing_lr": 0.5, "lags_lr": 4.0}
    optimizer = build_optimizer(model, OptimConfig(name=name, **given))
    set_learning_rate(optimizer, 0.1)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(groups) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        of_matrix, mixing = name.endswith("_proj.weight"), name.endswith("conv.weight")
        lags, group = name.endswith("conv.lags"), groups[id(parameter)]
        vector = name.endswith("bias") or "norm" in name
        expected = 0.2 if of_matrix else 0.3 if vector else 0.05 if mixing else 0.1
        assert group["lr"] == pytest.approx(0.4 if lags else expected), name
        assert (group["weight_decay"] == 0) == (vector or lags), name


@pytest.mark.parametrize(("context", "factor"), ((LONG, LAGS_LR), (LONG + 1, LONG_LAGS_LR)))
def test_lags_learn_slower_in_a_long_context(context, factor):
    lags = nn.Parameter(torch.zeros(1, 1, context))
    (part,) = adamw(Kinds(lags=[lags]), OptimConfig(), None, None)
    assert [group["lr_factor"] for group in part.param_groups] == [factor]


def test_the_learning_rate_warms_up_and_falls_to_its_floor():
    cosine = OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(cosine, step, 110) for step in range(111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)
    linear = OptimConfig(lr=1.0, warmup_steps=0, schedule="linear")
    assert learning_rate(linear, 25, 100) == pytest.approx(0.75)
    assert learning_rate(OptimConfig(lr=1.0, warmup_steps=0, schedule="constant"), 99, 100) == 1.0


def test_lags_are_refused_for_a_llama_and_a_comparison_leaves_them_to_the_mixers():
    with pytest.raises(UserError, match="mixing_weight is 'lags', which architecture llama does"):
        load_config(None, [LLAMA, *RECIPE[:2]])
    for name in ("auto", "llama"):
        overrides = [override(*item) for item in entrant(name).items()]
        run = load_config(None, [*RECIPE, *overrides])
        assert (run.optim.name, run.model.mixing_weight == "lags") == ("muon", name == "auto")


class Signs(torch.optim.Optimizer):
    """Lion without weight decay (arXiv 2302.06675): the sign of a momentum is the update."""

    _step_supports_amp_scaling = True

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                skip, scale = skip_and_scale(self, parameter.device)
                gradient = parameter.grad / scale
                update = torch.lerp(average, gradient, 0.1).sign()
                parameter -= group["lr"] * update.masked_fill(skip > 0, 0)
                average.copy_(average.where(skip > 0, average.lerp(gradient, 0.01)))


def signs(kinds, config, group, compile) -> list[torch.optim.Optimizer]:
    every = [*kinds.matrices, *kinds.mixing, *kinds.embeddings, *kinds.vectors]
    return [Signs(every, config.lr)]


def register_signs() -> None:
    OPTIMIZERS["signs"] = f"{__name__}:signs"


def test_a_new_optimizer_is_one_function_and_resumes_exactly(write_config, launch, tmp_path):
    command = ("--config", write_config(), "optim.name=signs")
    launch(*command, "name=whole", before=register_signs).succeed()
    whole, parts = tmp_path / "runs/whole", tmp_path / "runs/parts"
    first = launch(*command, "name=parts", "checkpoint.save_every=5", before=register_signs)
    first.until((parts / "step-5").exists).kill()
    launch(*command, "name=parts", before=register_signs).succeed()
    assert_same(parts, whole, 12)
    losses = read_losses(whole)
    assert losses[12] < losses[1] - 0.2
    trainer = json.loads((whole / "step-12/trainer_state/trainer.json").read_text())
    assert trainer["settings"]["optim"]["name"] == "signs"
    state = load_file(whole / "step-12/trainer_state/optimizer-1-of-1.safetensors")
    assert len(state) > 10 and all(name.endswith("/average") for name in state)
    refused = launch(*command, "name=parts", "optim.name=muon")
    assert refused.wait() == [2]
    assert "another optimizer: optim.name = muon (was signs)" in refused.output
