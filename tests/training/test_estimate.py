"""The memory that a run is said to need before its first step."""

from types import SimpleNamespace

import pytest
import torch
from runs import ROOT

from mixer.models.architecture import model_config, new_model
from mixer.training import estimate
from mixer.training.config import load_config
from mixer.training.estimate import activation_bytes, needed_gb
from mixer.training.passes import set_recompute

SIZES = ["model.hidden_size=64", "model.num_hidden_layers=3", "model.max_position_embeddings=64"]
LONG = ["model.max_position_embeddings=1024", "train.batch_size=1", "model.num_mixer_heads=8"]
LONG += ["model.mixing_weight=lags"]
KEYED = ["model.mixer_key_size=16", "model.num_mixer_heads=4"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["train.mixed_precision=bf16"],
        ["train.recompute=activation"],
        ["train.recompute=block"],
        ["train.objective=contrastive"],
        ["model.num_mixer_heads=4"],
        ["model.mixing_weight=mixed", "model.num_mixer_heads=4"],
        [*LONG, "model.mixing_window=4"],
        [*LONG, "model.mixing_window=64"],
        [*LONG, "model.mixing_window=64", "model.mixing_in_mlp=true"],
        [*LONG, "model.mixing_window=512"],
        LONG,
        KEYED,
        [*KEYED, "train.batch_size=16"],
        ["model.architecture=llama"],
        ["model.architecture=qwen3"],
    ],
    ids=lambda options: " ".join(options) or "defaults",
)
def test_the_estimate_is_about_what_a_pass_keeps(options):
    run = load_config(None, [*SIZES, *options])
    config = model_config(run.model, 600, 0)
    model = new_model(config)
    set_recompute(model, run.train.recompute)
    loss = run.build_objective().loss(model).train()
    texts = torch.randint(600, (2, run.train.batch_size, run.model.max_position_embeddings))
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    is_mixed = run.train.mixed_precision == "bf16"
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=is_mixed),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        loss(*texts)
    for weight in model.parameters():
        storages.pop(weight.untyped_storage().data_ptr(), None)
    kept_bytes = sum(storage.nbytes() for storage in storages.values())
    if run.build_objective().reads_logits:
        kept_bytes += 4 * 600 * texts[0].numel()  # the first gradient, of the logits
    assert 0.7 < activation_bytes(model, run, on_gpu=False) / kept_bytes < 1.3


def test_what_a_gpu_needs_is_counted_without_the_squares_that_kernels_do_not_keep(monkeypatch):
    """configs/long.yaml with gated mixing was measured at 20 GB, and in plain PyTorch needs far
    more.
    """
    data = SimpleNamespace(vocab_size=8000, eos_token_id=0)
    gated = ["model.mixing_in_mlp=false", "model.mixer_gate=true", "model.mixer_projections=true"]
    run = load_config(str(ROOT / "configs/long.yaml"), [*gated, "model.mixing_window=0"])
    world = SimpleNamespace(device=torch.device("cuda"), size=1, is_sharded=False)
    assert 20 < needed_gb(run, data, world) < 30
    world.device = torch.device("cpu")
    monkeypatch.setattr(estimate, "memory_limit", lambda device: 2**40)
    assert needed_gb(run, data, world) > 80
