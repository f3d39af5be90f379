"""The configuration: every problem is named at once, and what is given arrives."""

from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import yaml
from runs import ROOT

from mixer.checkpoints.settings import save_config
from mixer.commands.train import main
from mixer.common.errors import UserError
from mixer.models.architecture import model_config
from mixer.models.config import ARCHITECTURES, ModelConfig
from mixer.models.masked_mixer.modeling import MaskedMixerForCausalLM
from mixer.ops import BACKENDS
from mixer.training.config import (
    OPTIMIZERS,
    OPTIONS,
    RunConfig,
    flatten,
    load_config,
    used_configuration,
)

CONFIGS = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs/author").glob("*.yaml")])
KEYS = dict(flatten(asdict(RunConfig())))
FLOATS = [key for key, value in KEYS.items() if isinstance(value, float)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_each_shipped_configuration_builds_its_model(path):
    run = load_config(str(path), [])
    with torch.device("meta"):
        model = MaskedMixerForCausalLM(model_config(run.model, run.data.vocab_size, 0))
    assert model.config.max_position_embeddings == run.model.max_position_embeddings
    assert run.name in (path.stem, f"author-{path.stem}")
    assert run.logging.tracker == "none"  # nothing leaves the machine unless asked


def test_each_name_that_an_option_allows_has_what_it_names():
    """Their modules take seconds to import, so that the configuration has the names itself."""
    assert all(callable(resolve_name(path)) for path in OPTIMIZERS.values())
    assert OPTIONS["model.mixing_backend"].metadata["choices"] == BACKENDS
    for name in ARCHITECTURES:
        options = {"architecture": name, "config": {"model_type": "gpt2"}}
        config = model_config(ModelConfig(**options), vocab_size=500, eos_token_id=0)
        assert config.model_type == ("gpt2" if name == "auto" else name)


def test_every_problem_is_reported_at_once(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(
        "model: {hiden_size: 64, num_mixer_heads: 3}\n"
        "train: {steps: many, batch_size: 1.5}\n"
        "optim: {schedule: cosin}\n"
    )
    given = ["lr=1", "data.packed=maybe", "optim.beta1=1.0", "nonsense", "seed=["]
    with pytest.raises(UserError) as caught:
        load_config(str(path), given)
    message = str(caught.value)
    for expected in (
        "10 problems",
        "unknown key model.hiden_size = 64; did you mean model.hidden_size?",
        "train.steps = 'many'; allowed: a whole number, 1 or more and at most 1000000000",
        "train.batch_size = 1.5; allowed: a whole number, 1 or more",
        "optim.schedule = 'cosin'; allowed: cosine, linear, constant",
        "unknown key lr = 1; did you mean optim.lr?",
        "data.packed = 'maybe'; allowed: true or false",
        "model.num_mixer_heads = 3 and hidden_size = 1024; allowed: heads that divide the size",
        "optim.beta1 = 1.0; allowed: a finite number, 0 or more and below 1",
        "seed: '[' cannot be read as a YAML value: ",
        "'nonsense' on the command line: write overrides as section.key=value",
    ):
        assert expected in message


def test_overrides_win_and_the_resolved_configuration_reads_back_the_same(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "optim: {lr: 5e-4}\nmodel: {intermediate_size: null}\ntrain:\nname: 2024-02-28\n"
    )
    assert load_config(str(path), []).name == "2024-02-28"  # no date
    given = ["optim.lr=1e-3", "--train.steps=7e2", "train.mixed_precision=no", "train.tf32=false"]
    run = load_config(str(path), [*given, "data.path=", "name=42", "train.cuda_graphs=false"])
    assert (run.optim.lr, run.train.steps, run.train.mixed_precision) == (1e-3, 700, "no")
    assert (run.train.tf32, run.train.cuda_graphs) == (False, "false")
    assert (run.data.path, run.name) == ("", "42")
    assert_reads_back(run, tmp_path)
    assert yaml.safe_load((tmp_path / "resolved.yaml").read_text())["train"]["steps"] == 700


def assert_reads_back(run: RunConfig, directory: Path) -> None:
    save_config(used_configuration(run), directory / "resolved.yaml", {})
    assert load_config(str(directory / "resolved.yaml"), []) == run


TEXTS = ["run #3", "1e5", "null", "42", "on", "no", "~", '"q"', "'q'", "a: b", " x ", "0x1F"]
TEXTS += ["[", "!", "2024-02-30", "1:30", "${x}", "é"]


@pytest.mark.parametrize("text", TEXTS)
def test_an_option_that_is_text_takes_its_value_as_it_is_and_reads_back_the_same(tmp_path, text):
    run = load_config(None, [f"name={text}", f"data.directory={text}", "seed=3"])
    assert (run.name, run.data.directory, run.seed) == (text, text, 3)
    assert_reads_back(run, tmp_path)


@pytest.mark.parametrize("name", ["configs/v10.yaml", "demo.yaml"])
def test_a_missing_file_names_those_that_exist(name):
    said = f"no configuration file {name}; there are: configs/attention.yaml, configs/"
    with pytest.raises(UserError, match=said):
        load_config(name, [])


def test_a_configuration_that_is_not_named_as_one_is_pointed_to(monkeypatch):
    with pytest.raises(UserError, match="configs is a folder; there are: configs/attention"):
        load_config("configs", [])
    with pytest.raises(UserError, match="did you mean --config configs/demo.yaml"):
        load_config(None, ["configs/demo.yaml"])
    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(UserError, match="give --config FILE, such as configs/demo.yaml"):
        main()


@pytest.mark.parametrize("key", FLOATS)
def test_a_number_that_is_not_finite_is_refused(key):
    for value in ("nan", "inf", "-inf"):
        with pytest.raises(UserError, match=rf"1 problem.*\n.*{key} (=|is) {value}; (allowed:|it)"):
            load_config(None, [f"{key}=.{value}".replace(".-", "-.")])


# Given values, and what the one line about each says.
UNUSABLE = {
    "train.steps=!!int x": "train.steps: '!!int x' cannot be read as a YAML value",
    "optim.lr=&a [*a]": "optim.lr: '&a [*a]' cannot be read as a YAML value",
    "seed=" + "[" * 3000: "cannot be read as a YAML value",
    "seed=" + "9" * 5000: "cannot be read as a YAML value",
    "optim.lr=1" + "0" * 400: "0; allowed: a finite number, 0 or more",
    "train.steps=1e30": "; allowed: a whole number, 1 or more and at most 1000000000",
    "train.steps=010": "train.steps = '010'; allowed: a whole number, 1 or more",  # PyYAML reads 8
    "train.steps=1:30": "train.steps = '1:30'; allowed: a whole number, 1 or more",  # and 90
    "seed=4294967296": "seed = 4294967296; allowed: a whole number, 0 or more and below 4294967296",
    "name=a\0b": "allowed: text without null characters and lone surrogates",
    "output_dir=\udcff": "allowed: text without null characters and lone surrogates",
    "model.max_position_embeddings=1": "2 or more",  # a single token has nothing to mix
    "logging.wandb=offline": "unknown key logging.wandb = 'offline'",
}


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


@pytest.mark.parametrize("content", ["[]", "''", "0", "false", "[{train: {steps: 4}}]", "steps"])
@pytest.mark.parametrize("section", ["", "train: "])
def test_what_holds_no_keys_is_refused_and_never_stands_for_the_defaults(
    tmp_path, content, section
):
    path = tmp_path / "config.yaml"
    path.write_text(section + content)
    with pytest.raises(UserError, match="allowed: keys with values"):
        load_config(str(path), [])


def test_an_option_without_a_value_is_refused_and_a_file_of_comments_has_the_defaults(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("# train: {steps: 4}\n")
    assert load_config(str(path), []) == RunConfig()
    path.write_text("name: {}\noptim: {lr: {}}\n")
    with pytest.raises(UserError, match=r"(?s)2 problems.*name = \{\}.*optim.lr = \{\}"):
        load_config(str(path), [])
    with pytest.raises(UserError, match="is a folder; there are: "):  # an empty variable of a shell
        load_config("", ["train.steps=4"])


def test_a_section_given_twice_is_refused(tmp_path):
    """PyYAML would drop the first one."""
    path = tmp_path / "config.yaml"
    path.write_text("train: {steps: 700}\nseed: 3\ntrain:\n  batch_size: 2\n")
    with pytest.raises(UserError, match='(?s)is given twice.*config.yaml", line 3'):
        load_config(str(path), [])


def test_a_config_yaml_of_an_earlier_version_is_read():
    """It has every key of its time."""
    before = ROOT / "tests/checkpoints/written_before/runs/small/config.yaml"
    assert load_config(str(before), []).train.steps == 8
