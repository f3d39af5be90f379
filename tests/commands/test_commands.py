"""`mixer COMMAND` and `python -m mixer COMMAND` are one command, which has its names of earlier
versions, too; and mistakes are named before anything is imported that takes time.
"""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from models import small_model
from runs import ROOT

from mixer.__main__ import SUMMARIES, main


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-X", "importtime", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def imported(ended: subprocess.CompletedProcess) -> set[str]:
    return set(re.findall(r"(?m)^import time: .* \| +([\w.]+)$", ended.stderr))


def messages(ended: subprocess.CompletedProcess) -> list[str]:
    return [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]


@pytest.mark.parametrize("option", ["--help", "-h", None])
def test_the_help_names_each_command_and_imports_none(option):
    ended = run("-m", "mixer", *([option] if option else []))
    assert ended.returncode == 0 and not messages(ended)
    listed = re.findall(r"(?m)^  (\w+) +\w.*$", ended.stdout)
    assert listed == list(SUMMARIES)
    assert max(map(len, ended.stdout.splitlines())) <= 100
    heavy = {"torch", "numpy", "yaml", "transformers"}
    assert not [name for name in imported(ended) if name in heavy or "mixer.commands" in name]


def test_a_wrong_command_is_a_line_with_the_right_ones():
    ended = run("-m", "mixer", "trian", "--config", "a.yaml")
    assert ended.returncode == 2 and not ended.stdout
    (message,) = messages(ended)
    assert message == f"error: the command is 'trian'; allowed: {', '.join(SUMMARIES)}"
    assert "torch" not in imported(ended)


def test_each_command_of_the_package_has_a_name():
    modules = {path.stem for path in (ROOT / "mixer/commands").glob("*.py")}
    assert modules == {"__init__", "report", *SUMMARIES}


def help_of(start, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        start()
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", SUMMARIES)
def test_each_command_has_the_options_of_its_module(name, monkeypatch, capsys):
    for attribute in ("excepthook", "stdout", "stderr"):  # which a command sets
        monkeypatch.setattr(sys, attribute, getattr(sys, attribute))
    module = importlib.import_module(f"mixer.commands.{name}")
    monkeypatch.setattr(sys, "argv", [module.__file__, "--help"])
    expected = help_of(module.main, capsys)
    monkeypatch.setattr(sys, "argv", ["mixer", name, "--help"])
    assert help_of(main, capsys) == expected


@pytest.mark.parametrize("name, now", {"train": "train", "report": "curves"}.items())
def test_a_command_has_its_name_of_earlier_versions(name, now):
    """As scripts have them: python -m mixer.report runs/demo"""
    earlier = run("-m", f"mixer.{name}", "--help")
    assert earlier.returncode == 0 and not messages(earlier)
    assert earlier.stdout == run("-m", "mixer", now, "--help").stdout


# Arguments with a mistake, and what is said of it.
MISTAKES = [
    ("train train.stepz=1", "unknown key train.stepz"),
    ("train --config configs/none.yaml", "no configuration file configs/none.yaml"),
    ("train data.source=text data.path=none data.directory=none", "'none' does not exist"),
    ("train train.objective=contrastive data.source=copy", "which does not learn from it; allowed"),
    ("train train.init_from=none", "checkpoint none: there is no such directory"),
    ("train output_dir=README.md", "README.md is not a directory"),
    ("eval --checkpoint none", "checkpoint none: there is no such directory"),
    ("eval --checkpoint {model} --text none", "'none' does not exist"),
    ("eval --checkpoint {model} --data docs", "docs has no manifest.json"),
    ("eval --checkpoint {model} --retrieval docs", "corpus.jsonl is missing: a folder in BEIR"),
    ("export {model} --output new --license=", "--license ''; allowed: a name without spaces"),
    ("eval --checkpoint {model} --retrieval README.md", "README.md is a file: a folder in BEIR"),
    ("eval --checkpoint {model} --text README.md --split test2", "--split is given, which"),
    ("eval --checkpoint {model} --text README.md --output README.md", "is not a directory"),
    ("generate --checkpoint none --prompt a", "checkpoint none: there is no such directory"),
    ("generate --checkpoint {model} --prompt a --seed -1", "--seed -1; allowed"),
    ("compare --config configs/demo.yaml --backends none", "--backends none; allowed"),
    ("compare --config configs/demo.yaml --backends dense a.b=1", "unknown key a.b"),
    ("curves none", "none does not exist"),
    ("inspect --checkpoint none", "checkpoint none: there is no such directory"),
    ("representation --checkpoint {model} --text none", "'none' does not exist"),
    ("convert none --output new", "none cannot be read"),
    ("convert {model} --output new --back", "--output is new; with --back give"),
    ("export {model} --output docs --license mit", "docs already exists"),
    ("doctor --here", "unrecognized arguments: --here"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("arguments, said", MISTAKES)
def test_a_mistake_is_named_before_anything_is_imported_that_takes_time(model, arguments, said):
    ended = run("-m", "mixer", *arguments.format(model=model).split())
    assert ended.returncode == 2 and said in "\n".join(messages(ended))
    heavy = {"torch", "transformers", "accelerate", "datasets", "pandas", "matplotlib"}
    assert not imported(ended) & heavy


@pytest.mark.parametrize("command", ["train.py", "-m mixer.train", "-mmixer.train"])
def test_so_it_is_for_each_way_to_call_a_command(command):
    ended = run(*command.split(), "train.stepz=1")
    assert ended.returncode == 2 and "unknown key train.stepz" in ended.stderr
    assert "yaml" in imported(ended) and not imported(ended) & {"torch", "transformers"}
