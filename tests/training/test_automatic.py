"""auto takes the best that can run, and says in one line what cannot."""

import pytest

from mixer.common.errors import UserError
from mixer.training.automatic import Environment, choose
from mixer.training.config import TrainConfig, load_config

H200 = Environment("cuda", (9, 0), has_triton=True)
ALL = "auto: train.compile=blocks, train.cuda_graphs=true"
OVERWRITES = "each backward pass would overwrite the gradients of the one before"
MADE = "they are made of what is compiled"
# (the settings, the devices and processes, what is said); a run's settings are auto where not given
CASES = {
    "one GPU": ({}, H200, ALL),
    "V100": ({}, Environment("cuda", (7, 0), has_triton=True), ALL),
    "P100": (
        {},
        Environment("cuda", (6, 0), has_triton=True),
        "auto: train.compile=no (Triton needs compute capability 7.0), "
        f"train.cuda_graphs=false ({MADE})",
    ),
    "no Triton": (
        {},
        Environment("cuda", (9, 0)),
        f"auto: train.compile=no (Triton is not installed), train.cuda_graphs=false ({MADE})",
    ),
    "CPU": ({}, Environment("cpu"), ""),
    "compiled on a CPU": ({"compile": "blocks"}, Environment("cpu"), ""),
    "FSDP": (
        {},
        Environment("cuda", (9, 0), has_triton=True, is_sharded=True),
        "auto: train.compile=blocks, train.cuda_graphs=false (FSDP moves the weights)",
    ),
    "accumulation": (
        {"gradient_accumulation_steps": 2},
        H200,
        f"auto: train.compile=blocks, train.cuda_graphs=false ({OVERWRITES})",
    ),
    "recompute": (
        {"recompute": "block"},
        H200,
        "auto: train.compile=blocks, train.cuda_graphs=false (blocks that are computed again "
        "cannot be recorded)",
    ),
    "activation": ({"recompute": "activation"}, H200, ALL),
    "not compiled": ({"compile": "no"}, H200, f"auto: train.cuda_graphs=false ({MADE})"),
    "model": ({"compile": "model"}, H200, "auto: train.cuda_graphs=true"),
    "all given": ({"compile": "no", "cuda_graphs": "false"}, H200, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_auto_takes_what_can_run_and_says_what_cannot(name):
    settings, environment, said = CASES[name]
    chosen = choose(TrainConfig(**settings), environment)
    assert chosen.line == said
    # What is done is what is said, and what was given stays.
    given = {key: value for key, value in settings.items() if hasattr(chosen, key)}
    for key, value in given.items():
        assert str(getattr(chosen, key)).lower() == value
    for key in ("compile", "cuda_graphs"):
        if f"train.{key}=" in said:
            assert f"train.{key}={str(getattr(chosen, key)).lower()}" in said
    if environment.device == "cpu":
        compiled = settings.get("compile", "no")
        assert (chosen.compile, chosen.cuda_graphs) == (compiled, False)


@pytest.mark.parametrize("name", ["P100", "no Triton", "CPU", "FSDP", "recompute"])
def test_graphs_that_were_asked_for_and_cannot_be_are_refused(name):
    settings, environment, _ = CASES[name]
    with pytest.raises(UserError, match=r"train.cuda_graphs = true .*; set train.cuda_graphs=auto"):
        choose(TrainConfig(**settings, cuda_graphs="true"), environment)


def test_true_and_false_are_choices_in_yaml_and_on_the_command_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("train: {cuda_graphs: true}\n")
    assert load_config(str(path), []).train.cuda_graphs == "true"
    assert load_config(str(path), ["train.cuda_graphs=false"]).train.cuda_graphs == "false"
    assert load_config(None, []).train.cuda_graphs == "auto"
    with pytest.raises(UserError, match="train.compile = True is a bool; allowed: str"):
        path.write_text("train: {compile: true}\n")
        load_config(str(path), [])
