"""What a terminal shows."""

import os
import pty
import subprocess
import sys

import pytest
from runs import ROOT

RED_ERROR = "\x1b[31merror:\x1b[0m no configuration file absent.yaml"


def printed_by_a_mistake(stderr: int, **environment: str) -> None:
    command = [sys.executable, ROOT / "train.py", "--config", "absent.yaml"]
    env = {"TERM": "xterm"} | {k: v for k, v in os.environ.items() if k != "TERM"} | environment
    assert subprocess.run(command, env=env, stderr=stderr, cwd=ROOT).returncode == 2


@pytest.mark.parametrize(
    ("environment", "is_red"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
    ids=["terminal", "NO_COLOR", "dumb"],
)
def test_an_error_is_red_in_a_terminal_that_shows_it(environment, is_red, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader, terminal = pty.openpty()
    printed_by_a_mistake(terminal, **environment)
    os.close(terminal)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    assert said.startswith(RED_ERROR if is_red else "error: no configuration file absent.yaml")


def test_a_pipe_gets_no_colours(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader, writer = os.pipe()
    printed_by_a_mistake(writer)
    os.close(writer)
    assert os.read(reader, 4096).startswith(b"error: no configuration file absent.yaml")
    os.close(reader)
