"""Every command where its output cannot be written, as on a disk that fills meanwhile: one clear
line, all as it was before, and the same command works when there is space.
"""

import json
import multiprocessing
import random
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from author import LanguageMixer
from checkpoints import save_checkpoint
from runs import file_limit, state_files
from safetensors.torch import save_file

from mixer.checkpoints.pretrained import load_masked_mixer
from mixer.commands import convert, curves, eval, export, inspect, representation
from mixer.common.errors import UserError, run_command
from mixer.common.files import results_locked

LINES = [{"step": step, "loss": 5 - step / 9, "lr": 1e-3} for step in range(1, 20)]
REPRESENTATION = "--tokens 4 --steps 1 --layers 0".split()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    save_checkpoint(directory / "checkpoint", "mixer")
    save_file(LanguageMixer().state_dict(), directory / "reference.safetensors")
    (directory / "book.txt").write_text("the mixer reads each token once " * 9)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return directory


def commands(inputs: Path, output: Path) -> dict[str, tuple[Callable, list, str]]:
    """By name: a command's main, its arguments, and the output that it makes."""
    checkpoint, text = inputs / "checkpoint", ["--text", inputs / "book.txt"]
    reference, metrics = inputs / "reference.safetensors", inputs / "metrics.jsonl"
    tested = ["--checkpoint", checkpoint]
    back, picture = output / "back.safetensors", output / "picture.png"
    return {
        "eval": (eval.main, [*tested, *text, "--output", output], output),
        "convert": (convert.main, [reference, "--output", output], output),
        "convert --back": (
            convert.main,
            [checkpoint, "--output", back, "--back"],
            back,
        ),
        "export": (
            export.main,
            [checkpoint, "--output", output, "--license", "mit"],
            output,
        ),
        "inspect": (inspect.main, [*tested, "--output", output], output),
        "curves": (curves.main, [metrics, "--output", picture], picture),
        "representation": (
            representation.main,
            [*tested, *text, "--output", output, *REPRESENTATION],
            output,
        ),
    }


NAMES = list(commands(Path(), Path()))


@pytest.fixture
def call(monkeypatch, capsys):
    """A function that runs a command. What it prints goes to memory (capsys), not to a file."""

    def run(main, arguments) -> None:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        main()

    return run


@pytest.mark.parametrize("name", NAMES)
def test_where_no_results_can_go_is_said_before_they_are_computed(
    inputs, tmp_path, call, capsys, name
):
    file = tmp_path / "file"
    file.write_text("a file of the user's")
    for place in (file, file / "new"):
        main, arguments, output = commands(inputs, place)[name]
        folder = output.parent if output.suffix else output
        problem = f"nothing can be written to '{folder}': {file} is not a directory"
        if output == file and name in ("convert", "export"):
            problem = f"{file} already exists"
        with pytest.raises(UserError, match=f"^{problem}; choose another --output"):
            call(main, arguments)
    assert capsys.readouterr().out == "" and file.read_text() == "a file of the user's"


@pytest.mark.parametrize("name", NAMES)
def test_a_command_that_cannot_write_leaves_nothing_and_works_afterwards(
    inputs, tmp_path, call, name
):
    main, arguments, output = commands(inputs, tmp_path / "new" / "output")[name]
    with file_limit(random.Random(name).randrange(1500)):
        with pytest.raises(UserError, match=f"^{output} could not be written .*File too large"):
            call(main, arguments)
    assert not list(tmp_path.iterdir())
    call(main, arguments)
    assert output.exists() and not list(tmp_path.rglob(".partial-*"))


@pytest.mark.parametrize("name", ["eval", "curves"])
def test_an_earlier_output_stays_as_it_was(inputs, tmp_path, call, name):
    main, arguments, output = commands(inputs, tmp_path)[name]
    call(main, arguments)
    (tmp_path / "other").write_text("a file of the user's")
    before = state_files(tmp_path)
    with file_limit(9_000), pytest.raises(UserError, match="is unchanged: fix the cause"):
        call(main, arguments)
    assert state_files(tmp_path) == before
    call(main, arguments)
    assert state_files(tmp_path).keys() == before.keys()
    assert (tmp_path / "other").exists() and not list(tmp_path.glob(".partial-*"))


def test_what_a_killed_command_has_left_is_replaced(inputs, tmp_path, call):
    main, arguments, output = commands(inputs, tmp_path / "output")["export"]
    left = output / f".partial-{socket.gethostname()}@output"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    call(main, arguments)
    assert (output / "README.md").exists() and not left.exists()


def at_the_same_time(jobs: list[tuple[Callable, list]], directory: Path) -> list[tuple[int, str]]:
    """Runs commands, each in a process of its own; returns their statuses and what they printed."""
    fork, begin = multiprocessing.get_context("fork"), multiprocessing.Barrier(len(jobs))

    def work(main: Callable, arguments: list, printed: Path) -> None:
        with open(printed, "w") as sys.stdout:
            sys.stderr, sys.argv = sys.stdout, ["command", *map(str, arguments)]
            begin.wait()
            run_command(main)

    files = [directory / f"printed-{number}" for number in range(len(jobs))]
    given = zip(jobs, files, strict=True)
    started = [fork.Process(target=work, args=(*job, file)) for job, file in given]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return [(p.exitcode, f.read_text()) for p, f in zip(started, files, strict=True)]


def text_in(report: Path) -> tuple[str, int]:
    (result,) = json.loads(report.read_text())
    return result["text"], result["bytes"]


@pytest.mark.parametrize("name", ["eval", "inspect", "curves", "representation"])
def test_results_that_another_command_writes_are_refused_and_work_afterwards(
    inputs, tmp_path, call, name
):
    """Without that, the results of the command that ends first would be gone."""
    for place in (tmp_path / "new", tmp_path):
        main, arguments, output = commands(inputs, place)[name]
        before = state_files(tmp_path)
        with results_locked(output):
            with pytest.raises(UserError, match=f"^{output} is being written by another command"):
                call(main, arguments)
        assert state_files(tmp_path) == before
        call(main, arguments)
        assert output.exists() and not list(tmp_path.rglob(".partial-*"))


def test_evaluations_at_the_same_time_have_a_report_each(inputs, tmp_path):
    """Of texts of other names, and of texts of one name."""
    runs = tmp_path / "runs"
    shutil.copytree(inputs / "checkpoint", runs / "step-1")
    books = [tmp_path / place for place in ("a/book.txt", "b/book.txt", "c/book.txt", "a/other")]
    for number, book in enumerate(books):
        book.parent.mkdir(exist_ok=True)
        book.write_text("the mixer reads each token once " * (3 + number))
    tested = ["--checkpoint", runs / "step-1", "--device", "cpu", "--text"]
    ended = at_the_same_time([(eval.main, [*tested, book]) for book in books], tmp_path)
    for book, (status, printed) in zip(books, ended, strict=True):
        assert status == 0, printed
        (place,) = re.findall(r"the report is in (.*)", printed)
        assert text_in(Path(place) / "report.json") == (book.name, book.stat().st_size)
        assert Path(place).name.startswith(f"eval-step-1-{book.name}")
    assert len(list(runs.glob("eval-*"))) == 4
    assert not [path for path in runs.rglob(".*") if path.is_file()]


@pytest.mark.parametrize("exists", [False, True])
def test_of_commands_that_write_to_one_place_at_the_same_time_one_does(inputs, tmp_path, exists):
    exported, evaluated, back = tmp_path / "export", tmp_path / "eval", tmp_path / "converted"
    if exists:
        exported.mkdir()
        evaluated.mkdir()
        (evaluated / "notes").write_text("a file of the user's")
    exporting = commands(inputs, exported)["export"][:2]
    converting = commands(inputs, back)["convert --back"][:2]
    main, arguments, _ = commands(inputs, evaluated)["eval"]
    other = tmp_path / "other.txt"
    other.write_text("never looks ahead " * 9)
    evals = [(main, arguments), (main, [*arguments, "--text", other])]
    ended = at_the_same_time([exporting] * 3 + [converting] * 2 + evals, tmp_path)
    for same, refusal in (
        (ended[:3], f"error: {exported} already exists; choose another --output, or delete it"),
        (ended[3:5], "give a .safetensors file that does not exist yet"),
        (ended[5:], f"error: {evaluated} is being written by another command: wait for it"),
    ):
        # An evaluation that begins when the other has ended replaces its report.
        assert sorted(status for status, _ in same) in ([0, 2, 2], [0, 2], [0, 0])
        assert all((refusal in printed) == (status == 2) for status, printed in same)
    load_masked_mixer(exported)
    text, _ = text_in(evaluated / "report.json")
    assert f"text: {text};" in " ".join((evaluated / "report.md").read_text().split())
    assert not list(tmp_path.rglob(".partial-*"))
