"""The configuration: every problem is named at once, and what is given arrives."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from launching import run_python

from mixer.common.errors import UserError
from mixer.models.architecture import model_config
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM
from mixer.training.config import RunConfig, describe_options, load_config
from mixer.training.record import save_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def flat(sections: dict, prefix: str = "") -> dict:
    """{"train": {"steps": 1}} -> {"train.steps": 1}"""
    found = {}
    for name, value in sections.items():
        is_section = isinstance(value, dict)
        found |= flat(value, f"{name}.") if is_section else {f"{prefix}{name}": value}
    return found


FLOATS = [key for key, value in flat(asdict(RunConfig())).items() if isinstance(value, float)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_each_shipped_configuration_builds_its_model(path):
    run = load_config(str(path), [])
    with torch.device("meta"):
        model = MaskedMixerForCausalLM(model_config(run.model, run.data.vocab_size, 0))
    assert model.config.max_position_embeddings == run.model.max_position_embeddings
    assert run.name == path.stem


def test_the_papers_setting_and_its_switched_twin():
    paper, dense = (
        load_config(str(ROOT / "configs" / name), []) for name in ("v100.yaml", "v100_dense.yaml")
    )
    model = (
        paper.model.hidden_size,
        paper.model.num_hidden_layers,
        paper.model.max_position_embeddings,
    )
    assert (*model, paper.data.vocab_size) == (1024, 16, 512, 8000)
    assert (paper.train.batch_size, paper.train.mixed_precision, paper.train.steps) == (
        32,
        "fp16",
        200_000,
    )
    assert (paper.optim.lr, paper.optim.warmup_steps) == (5e-4, 500)
    dense.model.mixing_backend, dense.name = paper.model.mixing_backend, paper.name
    assert dense == paper  # nothing but the switch


def test_every_problem_is_reported_at_once(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(
        "model: {hiden_size: 64, num_mixer_heads: 3}\n"
        "train: {steps: many, batch_size: 1.5}\n"
        "optim: {schedule: cosin}\n"
    )
    with pytest.raises(UserError) as caught:
        graphs = [
            "train.cuda_graphs=true",
            "train.compile=no",
            "train.gradient_accumulation_steps=2",
            "train.recompute=block",
        ]
        load_config(
            str(path),
            [
                "lr=1",
                "data.packed=maybe",
                "optim.beta1=1.0",
                "nonsense",
                "seed=[",
                "data.path=${x}",
                *graphs,
            ],
        )
    message = str(caught.value)
    for expected in (
        "14 problems",
        "unknown key model.hiden_size = 64; did you mean model.hidden_size?",
        "train.steps = 'many' is a str; allowed: int",
        "train.batch_size = 1.5 is a float; allowed: int",
        "optim.schedule = 'cosin'; allowed: cosine, linear, constant; did you mean cosine?",
        "unknown key lr = 1; did you mean optim.lr?",
        "data.packed = 'maybe' is a str; allowed: bool",
        "model.num_mixer_heads is 3, which does not divide hidden_size 1024",
        "optim.beta1 = 1.0; allowed: 0 or more and below 1",
        "train.cuda_graphs = true with train.compile = 'no'; allowed with it: auto, blocks, model",
        "train.cuda_graphs = true with train.recompute = 'block', which cannot be recorded; "
        "allowed with it: none, activation",
        "allowed with train.gradient_accumulation_steps = 2: auto, false",
        "seed: '[' cannot be read as a YAML value: ",
        "data.path = '${x}'; allowed: no ${...} and no ???; write the value itself",
        "'nonsense' on the command line: write overrides as section.key=value",
    ):
        assert expected in message


def test_overrides_win_and_the_resolved_configuration_reads_back_the_same(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("optim: {lr: 5e-4}\nmodel: {intermediate_size: null}\ntrain:\n")
    run = load_config(
        str(path),
        [
            "optim.lr=1e-3",
            "--train.steps=700",
            "train.mixed_precision=no",
            "train.tf32=false",
            "data.path=",
            "name=42",
        ],
    )
    assert (run.optim.lr, run.train.steps, run.train.mixed_precision, run.train.tf32) == (
        1e-3,
        700,
        "no",
        False,
    )
    assert (run.data.path, run.name) == ("", "42")
    save_config(run, tmp_path / "resolved.yaml", {})
    assert load_config(str(tmp_path / "resolved.yaml"), []) == run
    assert yaml.safe_load((tmp_path / "resolved.yaml").read_text())["train"]["steps"] == 700


@pytest.mark.parametrize("name", ["configs/v10.yaml", "demo.yaml"])
def test_a_missing_file_names_those_that_exist_and_exits_with_2(name, tmp_path):
    done = run_python("train.py", "--config", name, output=tmp_path / "printed")
    assert done.returncode == 2
    assert f"no configuration file {name}; there are: " in done.stdout
    assert "configs/comparison.yaml, configs/demo.yaml" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_refused(key, value):
    with pytest.raises(
        UserError, match=rf"1 problem.*\n.*{key} (=|is) {value}; (allowed:|it must)"
    ):
        load_config(None, [f"{key}=.{value}".replace(".-", "-.")])


def test_a_value_out_of_bounds_is_refused_with_what_is_allowed():
    for given, allowed in {
        "train.steps=0": "1 or more",
        "model.max_position_embeddings=1": "2 or more",  # a single token has nothing to mix
        "optim.eps=0": "above 0",
        "optim.min_lr_ratio=1.5": "0 or more and at most 1",
        "data.validation_fraction=0": "above 0 and below 1",
        "data.validation_fraction=1": "above 0 and below 1",
        "checkpoint.keep=1": "2 or more",
        "logging.tracker=on": "none, wandb, tensorboard",
    }.items():
        with pytest.raises(UserError, match=f"allowed: {allowed}"):
            load_config(None, [given])
    assert load_config(None, ["optim.min_lr_ratio=1"]).optim.min_lr_ratio == 1


# Given values, and what the one line about each says.
UNUSABLE = {
    "train.steps=!!int x": "train.steps: '!!int x' cannot be read as a YAML value",
    "optim.lr=!!float x": "optim.lr: '!!float x' cannot be read as a YAML value",
    "data.packed=!!bool x": "data.packed: '!!bool x' cannot be read as a YAML value",
    "optim.lr=&a [*a]": "optim.lr: '&a [*a]' cannot be read as a YAML value",
    "seed=" + "[" * 3000: "cannot be read as a YAML value",
    "seed=" + "9" * 5000: "cannot be read as a YAML value",
    "optim.lr=1" + "0" * 400: "is out of range; allowed: integers of 64 bits",
    "train.steps=1e30": "is out of range; allowed: integers of 64 bits",
    "seed=4294967296": "seed = 4294967296; allowed: 0 or more and below 4294967296",
    "name=" + "é" * 128: "name has 256 bytes; allowed: at most 255",
    "name=a\0b": "allowed: text without null characters and lone surrogates",
    "output_dir=\udcff": "allowed: text without null characters and lone surrogates",
    "data.vocab_size=1000000000": "allowed: 257 or more and at most 1048576",
    "model.num_hidden_layers=1000000000000": "allowed: 1 or more and at most 1000",
    "model.intermediate_size=1000000000000": "allowed: 1 or more and at most 1048576",
    "logging.wandb=offline": "it is now logging.tracker=wandb, with WANDB_MODE=offline",
    "train.batch_size=1000000000000": "allowed: 1 or more and at most 1048576",
}
TEXTS = [
    "run #3",
    "1e5",
    "null",
    "42",
    "on",
    "no",
    "~",
    '"q"',
    "'q'",
    "a: b",
    " x ",
    "0x1F",
    "[",
    "!",
]


@pytest.mark.parametrize(("given", "said"), UNUSABLE.items(), ids=range(len(UNUSABLE)))
@pytest.mark.parametrize("place", ["command line", "file"])
def test_a_value_that_nothing_can_use_is_one_line(tmp_path, given, said, place):
    key, _, value = given.partition("=")
    section, _, name = key.rpartition(".")
    text = f"{section}: {{{name}: {value}}}" if section else f"{name}: {value}"
    (tmp_path / "config.yaml").write_text(text, "utf-8", "surrogateescape")
    in_file = str(tmp_path / "config.yaml"), []
    with pytest.raises(UserError) as raised:
        load_config(*(in_file if place == "file" else (None, [given])))
    message = str(raised.value)
    assert said in message or "cannot be read as YAML: " in message
    assert message.count("\n  - ") == (0 if "as YAML: " in message else 1)


@pytest.mark.parametrize("text", TEXTS)
def test_an_option_that_is_text_takes_its_value_as_it_is_and_reads_back_the_same(tmp_path, text):
    run = load_config(None, [f"name={text}", f"data.directory={text}", "seed=3"])
    assert (run.name, run.data.directory, run.seed) == (text, text, 3)
    save_config(run, tmp_path / "config.yaml", {})
    assert load_config(str(tmp_path / "config.yaml"), []) == run


def test_a_date_is_text_also_one_that_no_calendar_has(tmp_path):
    assert load_config(None, ["name=2024-02-30"]).name == "2024-02-30"
    (tmp_path / "config.yaml").write_text("name: 2024-02-28")
    assert load_config(str(tmp_path / "config.yaml"), []).name == "2024-02-28"


def test_a_section_given_twice_and_a_number_with_a_leading_zero_are_refused(tmp_path):
    """PyYAML would drop the first section, and read 8 and 90."""
    path = tmp_path / "config.yaml"
    path.write_text("train: {steps: 700}\nseed: 3\ntrain:\n  batch_size: 2\n")
    with pytest.raises(UserError, match=r"(?s)the key 'train' is given twice.*line 3"):
        load_config(str(path), [])
    for number in ("010", "1:30"):
        with pytest.raises(UserError, match=f"train.steps = '{number}' is a str; allowed: int"):
            load_config(None, [f"train.steps={number}"])
    assert load_config(None, ["train.steps=1_000", "seed=0"]).train.steps == 1000


def test_help_lists_every_key_with_its_default_meaning_and_allowed_values():
    text = describe_options()
    for key, value in flat(asdict(RunConfig())).items():
        assert re.search(
            rf"^  {key}: .+ = {re.escape(repr(value))}(; allowed: .+)?\n {{6}}\w", text, re.M
        ), key
    assert "optim.lr: float = 0.0005; allowed: 0 or more\n      peak learning rate" in text
    assert "optim.schedule: str = 'cosine'; allowed: cosine, linear, constant\n" in text


def test_a_config_yaml_of_an_earlier_version_is_read_and_what_is_gone_is_refused():
    """It has every key of its time."""
    before = Path(__file__).parents[1] / "checkpoints/written_before/runs/small/config.yaml"
    assert load_config(str(before), []).train.steps == 8
    with pytest.raises(UserError, match="unknown key train.all_reduce = 'copy_engines'"):
        load_config(str(before), ["train.all_reduce=copy_engines"])
