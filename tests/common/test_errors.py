"""How a command ends: with a message where the user or the system is to blame, else a traceback."""

import errno
import io
import sys

import pytest

from mixer import eval, generate
from mixer.common.errors import run_command


def refuse() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "somewhere")


def test_what_the_system_refuses_is_a_message_and_a_bug_is_not(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(refuse)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: 'somewhere'\n"
    with pytest.raises(FileNotFoundError):
        run_command(lambda: open("/no/such/file"))


@pytest.mark.parametrize("command", [eval, generate])
def test_a_path_that_no_file_system_can_have_is_a_message(command, monkeypatch, capsys):
    arguments = ["--checkpoint", "x" * 300]
    arguments += ["--prompt", "a"] if command is generate else []
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_command(command.main)
    assert ended.value.code == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_name_that_the_output_cannot_show_is_printed_nevertheless(monkeypatch):
    ascii_output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_output)
    run_command(lambda: print("n\xe4me \udcff"))
    ascii_output.flush()
    assert ascii_output.buffer.getvalue() == b"n\\xe4me \\udcff\n"
