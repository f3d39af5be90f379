"""`mixer COMMAND` and `python -m mixer COMMAND` are what `python -m` makes of the command's module,
and import that one alone.
"""

import importlib
import re
import subprocess
import sys

import pytest
from runs import ROOT

from mixer.__main__ import COMMANDS, main


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
    assert listed == list(COMMANDS)
    assert max(map(len, ended.stdout.splitlines())) <= 100
    modules = {command.module for command in COMMANDS.values()}
    assert not imported(ended) & {"torch", "numpy", "yaml", "transformers", *modules}


def test_a_wrong_command_is_a_line_with_the_right_ones():
    ended = run("-m", "mixer", "trian", "--config", "a.yaml")
    assert ended.returncode == 2 and not ended.stdout
    (message,) = messages(ended)
    assert message == f"error: the command is 'trian'; allowed: {', '.join(COMMANDS)}"
    assert "torch" not in imported(ended)


def test_each_command_of_the_package_has_a_name():
    commands = {
        f"mixer.{path.stem}"
        for path in (ROOT / "mixer").glob("*.py")
        if "run_command(main)" in path.read_text()
    }
    assert {command.module for command in COMMANDS.values()} == commands


def help_of(start, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        start()
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_the_options_of_its_module(name, monkeypatch, capsys):
    for attribute in ("excepthook", "stdout", "stderr"):  # which a command sets
        monkeypatch.setattr(sys, attribute, getattr(sys, attribute))
    module = importlib.import_module(COMMANDS[name].module)
    monkeypatch.setattr(sys, "argv", [module.__file__, "--help"])
    expected = help_of(module.main, capsys)
    monkeypatch.setattr(sys, "argv", ["mixer", name, "--help"])
    assert help_of(main, capsys) == expected


def test_a_command_in_a_process_of_its_own_has_the_help_of_its_module():
    assert run("-m", "mixer", "train", "--help").stdout == run("-m", "mixer.train", "--help").stdout
