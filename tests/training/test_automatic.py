"""auto takes the best that can run, and says in one line what cannot."""

import pytest
import torch

from mixer.common.errors import UserError
from mixer.training.compile import obstacle_to_graphs, parts_compiled
from mixer.training.config import TrainConfig

MADE = "they are made of what is compiled"
# (the settings, the device, what is compiled, the obstacle to CUDA graphs)
CASES = {
    "one GPU": ({}, "cuda", "blocks", ""),
    "CPU": ({}, "cpu", "no", "they are for GPUs"),
    "compiled on a CPU": ({"compile": "blocks"}, "cpu", "blocks", "they are for GPUs"),
    "FSDP": ({}, "sharded", "blocks", "FSDP moves the weights"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "cuda", "blocks", "each backward pass wo"),
    "recompute": ({"recompute": "block"}, "cuda", "blocks", "blocks that are computed again"),
    "activation": ({"recompute": "activation"}, "cuda", "blocks", ""),
    "not compiled": ({"compile": "no"}, "cuda", "no", MADE),
    "model": ({"compile": "model"}, "cuda", "model", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_auto_takes_what_can_run_and_says_what_cannot(name):
    settings, where, how, obstacle = CASES[name]
    device, is_sharded = torch.device(where.replace("sharded", "cuda")), where == "sharded"
    assert parts_compiled(TrainConfig(**settings), device) == how
    found = obstacle_to_graphs(TrainConfig(**settings), device, is_sharded)
    assert found.startswith(obstacle) and bool(found) == bool(obstacle)
    assert obstacle_to_graphs(TrainConfig(**settings, cuda_graphs="false"), device, is_sharded)
    asked = TrainConfig(**settings, cuda_graphs="true")
    if not obstacle:
        assert obstacle_to_graphs(asked, device, is_sharded) == ""
        return
    with pytest.raises(UserError, match=r"cuda_graphs = true cannot be had .*; allowed here: auto"):
        obstacle_to_graphs(asked, device, is_sharded)
