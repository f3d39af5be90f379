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
from mixer.common.terminal import lasting_output


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
    """As of `mixer generate ... | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", open(writer, "w", buffering=buffering))
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: print("words"))
    sys.stdout.flush()  # as Python does when it exits
    assert ended.value.code == 2
    assert capfd.readouterr().err == "error: [Errno 32] Broken pipe\n"


def test_a_command_whose_output_is_closed_works_and_writes_it_to_no_other_file(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "stdout", None)
    run_command(lambda: print("words"))
    writes = "import os, mixer.common.errors as e; e.run_command(lambda: "
    writes += f"(open({str(tmp_path / 'file')!r}, 'w'), os.write(1, b'x'), os.write(2, b'x')))"
    command = f'{sys.executable} -c "$CODE" >&- 2>&-'
    closed = subprocess.run(command, shell=True, env=os.environ | {"CODE": writes})
    assert closed.returncode == 0 and (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("error", [errno.EIO, errno.EPIPE, errno.EBADF], ids=errno.errorcode.get)
def test_no_reader_that_has_gone_fails_what_prints(monkeypatch, error):
    """EIO: a closed terminal. EPIPE: a pipe. EBADF: a closed descriptor."""

    class Gone(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            raise OSError(error, os.strerror(error))

    for name in ("stdout", "stderr"):
        gone = io.TextIOWrapper(io.BufferedWriter(Gone()), encoding="utf-8")
        monkeypatch.setattr(sys, name, gone)
    with lasting_output():
        print("words", file=sys.stderr)  # waits in a buffer, as the last line of a log may
        for _ in range(3):
            print("words", flush=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # as Python does when it exits
    with pytest.raises(SystemExit) as ended:
        run_command(refuse)
    assert ended.value.code == 2


def test_output_that_is_read_arrives_and_its_stream_is_given_back(capsys):
    before = sys.stdout, sys.stderr
    with lasting_output():
        print("words", end="")
        print("a line", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("words", "a line\n")


def test_the_package_can_be_imported_by_a_program_without_arguments():
    clear = "import sys; sys.argv.clear(); import mixer"
    subprocess.run([sys.executable, "-c", clear], check=True)


WAITS = "import mixer.common.errors as e, time; e.run_command(lambda: time.sleep(print(1) or 60))"


def test_ctrl_c_is_one_line_and_status_130_also_while_a_command_imports():
    at_work = [sys.executable, "-u", "-c", WAITS]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job may ignore it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["preexec_fn"] = heard
    with subprocess.Popen([sys.executable, "-m", "mixer", "doctor"], **pipes) as command:
        with subprocess.Popen(at_work, **pipes) as other:
            while "libtorch_cpu" not in str(psutil.Process(command.pid).memory_maps()):
                time.sleep(0.01)
            command.send_signal(signal.SIGINT)
            assert (*command.communicate(), command.returncode) == ("", "interrupted\n", 130)
            other.stdout.readline()
            other.send_signal(signal.SIGINT)
            assert (*other.communicate(), other.returncode) == ("", "interrupted\n", 130)
