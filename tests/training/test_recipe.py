"""Training with Muon and shared lags: the trainer's promises hold as they do with AdamW, for a new
optimizer too.
"""

import json

import pytest
import torch
from runs import RECIPE, assert_same, read_losses
from safetensors.torch import load_file

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.common.errors import UserError
from mixer.comparison.entrants import entrant
from mixer.training.config import load_config, override
from mixer.training.loop import train
from mixer.training.optim import OPTIMIZERS, OptimConfig, build_optimizer

LLAMA = "model.architecture=llama"


def test_processes_that_share_the_matrices_out_and_micro_batches_have_the_losses_of_one(
    write_config, small_run, launch, tmp_path
):
    """With three layers there are three matrices of a shape, which 2 processes do not divide; of
    4 processes one has none.
    """
    model = small_run["model"] | {"num_hidden_layers": 3}
    command = ("--config", write_config(model=model), *RECIPE)
    launch(*command, "name=one").succeed()
    accumulated = ["train.batch_size=4", "train.gradient_accumulation_steps=2"]
    launch(*command, "name=accumulated", *accumulated).succeed()
    for processes in (2, 4):
        batch = f"train.batch_size={8 // processes}"
        launch(*command, f"name={processes}", batch, processes=processes).succeed()
    one = read_losses(tmp_path / "runs/one")
    assert one[12] < one[1] - 0.2
    for name in ("accumulated", "2", "4"):
        assert read_losses(tmp_path / "runs" / name) == pytest.approx(one, rel=1e-5), name


def test_a_llama_is_trained_by_muon(write_config, tmp_path):
    train(load_config(str(write_config()), [LLAMA, "optim.name=muon", "optim.lr=1e-2"]))
    losses = read_losses(tmp_path / "runs/small")
    assert losses[12] < losses[1] - 0.5
    state = load_file(tmp_path / "runs/small/step-12/trainer_state/optimizer-1-of-1.safetensors")
    by_muon = {name.split(".")[-2] for name in state if name.endswith("/momentum")}
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    assert by_muon == {*attention, *mlp}


def test_shared_lags_are_refused_for_a_llama_and_a_comparison_leaves_them_to_the_mixers():
    with pytest.raises(UserError) as caught:
        load_config(None, [LLAMA, *RECIPE[:2]])
    wanted = "optim.shared_lags = true, which is for the mixing weights of masked mixers; allowed"
    assert f"{wanted} for architecture llama: false" in str(caught.value)
    overrides = [[override(*item) for item in entrant(name).items()] for name in ENTRANTS]
    optim = [load_config(None, [*RECIPE, *given]).optim for given in overrides]
    assert [each.name for each in optim] == ["muon"] * 3
    assert [each.shared_lags for each in optim] == [True, False, False]


ENTRANTS = ("auto", "llama", "llama:64x2")


@pytest.mark.parametrize(
    "context, given, wanted", [(512, None, 3), (2048, None, 3), (2049, None, 1), (2049, 0.5, 0.5)]
)
def test_the_rate_of_shared_lags_goes_by_the_context_unless_it_is_given(context, given, wanted):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    with torch.device("meta"):
        model = MaskedMixerForCausalLM(MaskedMixerConfig(max_position_embeddings=context, **sizes))
    config = OptimConfig(shared_lags=True, shared_lags_lr=given)
    groups = build_optimizer(model, config).param_groups
    assert [group["shared_lags"] for group in groups if "shared_lags" in group] == [wanted]


def test_an_unknown_optimizer_is_refused_with_the_nearest_one():
    with pytest.raises(UserError) as caught:
        load_config(None, ["optim.name=moun"])
    wanted = "optim.name = 'moun'; allowed: adamw, muon; did you mean muon?"
    assert wanted in str(caught.value)


class Signs(torch.optim.Optimizer):
    """Lion without weight decay (arXiv 2302.06675): the sign of a momentum is the update."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter -= group["lr"] * torch.lerp(average, parameter.grad, 0.1).sign()
                average.lerp_(parameter.grad, 0.01)


def signs(kinds, config, processes, compile) -> list[torch.optim.Optimizer]:
    every = [*kinds.matrices, *kinds.mixing, *kinds.embeddings, *kinds.vectors]
    return [Signs(every, config.lr)]


def register_signs() -> None:
    OPTIMIZERS["signs"] = signs


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
    assert trainer["optimizer"]["optim.name"] == "signs"
    state = load_file(whole / "step-12/trainer_state/optimizer-1-of-1.safetensors")
    assert len(state) > 10 and all(name.endswith("/average") for name in state)
    refused = launch(*command, "name=parts", "optim.name=muon")
    assert refused.wait() == [2]
    assert "optim.name: 'signs' in the checkpoint, now 'muon'" in refused.output
