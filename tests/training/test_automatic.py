"""auto takes the best that can run, and says in one line what cannot."""

import pytest

from mixer.common.errors import UserError
from mixer.training.config import TrainConfig
from mixer.training.parallelize import Devices, settle_compilation

H200 = Devices("cuda", (9, 0), has_triton=True)
P100 = Devices("cuda", (6, 0), has_triton=True)
FSDP = Devices("cuda", (9, 0), has_triton=True, is_sharded=True)
ALL = "auto: train.compile=blocks, train.cuda_graphs=true"
MADE = "they are made of what is compiled"
# (the settings, the devices, what is said); a run's settings are auto where not given
CASES = {
    "one GPU": ({}, H200, ALL),
    "V100": ({}, Devices("cuda", (7, 0), has_triton=True), ALL),
    "P100": ({}, P100, "auto: train.compile=no (Triton needs compute capability 7.0)"),
    "no Triton": ({}, Devices("cuda", (9, 0)), "train.compile=no (Triton is not installed)"),
    "CPU": ({}, Devices("cpu"), ""),
    "compiled on a CPU": ({"compile": "blocks"}, Devices("cpu"), ""),
    "FSDP": ({}, FSDP, "train.compile=blocks, train.cuda_graphs=false (FSDP moves the weights)"),
    "accumulation": (
        {"gradient_accumulation_steps": 2},
        H200,
        "train.cuda_graphs=false (each backward pass would overwrite the gradients",
    ),
    "recompute": ({"recompute": "block"}, H200, "train.cuda_graphs=false (blocks that are comp"),
    "activation": ({"recompute": "activation"}, H200, ALL),
    "not compiled": ({"compile": "no"}, H200, f"auto: train.cuda_graphs=false ({MADE})"),
    "model": ({"compile": "model"}, H200, "auto: train.cuda_graphs=true"),
    "all given": ({"compile": "no", "cuda_graphs": "false"}, H200, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_auto_takes_what_can_run_and_says_what_cannot(name):
    settings, devices, said = CASES[name]
    settled = settle_compilation(TrainConfig(**settings), devices)
    assert said in settled.line and bool(said) == bool(settled.line)
    # What is done is what is said, and what was given stays.
    expected = settings.get("compile", "no" if "compile=no" in said or not said else "blocks")
    assert (settled.how, settled.graphs) == (expected, "cuda_graphs=true" in said)


@pytest.mark.parametrize("name", ["P100", "no Triton", "CPU", "FSDP", "accumulation", "recompute"])
def test_graphs_that_were_asked_for_and_cannot_be_are_refused(name):
    settings, devices, _ = CASES[name]
    with pytest.raises(UserError, match=r"cuda_graphs = true cannot be had .*; allowed here: auto"):
        settle_compilation(TrainConfig(**settings, cuda_graphs="true"), devices)
