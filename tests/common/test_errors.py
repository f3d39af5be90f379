"""How a command ends: with a message where the user or the system is to blame, else a traceback."""

import errno
import io
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from mixer.common.errors import run_command


def refuse() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "somewhere")


def test_what_the_system_refuses_is_a_message_and_a_bug_is_not(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(refuse)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: 'somewhere'\n"
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 / 0)


def test_a_name_that_the_output_cannot_show_is_printed_nevertheless(monkeypatch):
    ascii_output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_output)
    run_command(lambda: print("n\xe4me \udcff"))
    ascii_output.flush()
    assert ascii_output.buffer.getvalue() == b"n\\xe4me \\udcff\n"


@pytest.mark.parametrize("buffering", [-1, 1], ids=["at the end", "at once"])
def test_output_that_nobody_reads_any_more_is_one_line(monkeypatch, capfd, buffering):
    """As of `python -m mixer.generate ... | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", open(writer, "w", buffering=buffering))
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: print("words"))
    sys.stdout.flush()  # as Python does when it exits
    assert ended.value.code == 2
    assert capfd.readouterr().err == "error: [Errno 32] Broken pipe\n"


def test_a_command_whose_output_is_closed_works(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    run_command(lambda: print("words"))


WAITS = "import mixer.common.errors as e, time; e.run_command(lambda: time.sleep(print(1) or 60))"


def test_ctrl_c_is_one_line_and_status_130_also_while_a_command_imports():
    at_work = [sys.executable, "-u", "-c", WAITS]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job may ignore it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["preexec_fn"] = heard
    with subprocess.Popen([sys.executable, "-m", "mixer.doctor"], **pipes) as command:
        with subprocess.Popen(at_work, **pipes) as other:
            while "libtorch_cpu" not in str(psutil.Process(command.pid).memory_maps()):
                time.sleep(0.01)
            command.send_signal(signal.SIGINT)
            assert (*command.communicate(), command.returncode) == ("", "interrupted\n", 130)
            other.stdout.readline()
            other.send_signal(signal.SIGINT)
            assert (*other.communicate(), other.returncode) == ("", "interrupted\n", 130)
