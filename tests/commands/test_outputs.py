"""Every command where its output cannot be written, as on a disk that fills meanwhile: one clear
line, all as it was before, and the same command works when there is space.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from runs import file_limit, state_files
from safetensors.torch import save_file
from test_convert import Reference

import mixer.convert
import mixer.eval
import mixer.export
import mixer.inspect
import mixer.report
import mixer.representation
from mixer.common.errors import UserError

LINES = [{"step": step, "loss": 5 - step / 9, "lr": 1e-3} for step in range(1, 20)]
REPRESENTATION = "--tokens 4 --texts 1 --steps 1 --layers 0".split()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    save_checkpoint(directory / "checkpoint", "mixer")
    save_file(Reference().state_dict(), directory / "reference.safetensors")
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
        "eval": (mixer.eval.main, [*tested, *text, "--output", output], output),
        "convert": (mixer.convert.main, [reference, "--output", output], output),
        "convert --back": (mixer.convert.main, [checkpoint, "--output", back, "--back"], back),
        "export": (mixer.export.main, [checkpoint, "--output", output, "--license", "mit"], output),
        "inspect": (mixer.inspect.main, [*tested, "--output", output], output),
        "report": (mixer.report.main, [metrics, "--output", picture], picture),
        "representation": (
            mixer.representation.main,
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
        problem = f"results cannot go to {folder}: of {file}, it is a file"
        if output == file and name in ("convert", "export", "inspect"):
            problem = f"{file} exists already"
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


@pytest.mark.parametrize("name", ["eval", "report"])
def test_an_earlier_output_stays_as_it_was(inputs, tmp_path, call, name):
    main, arguments, output = commands(inputs, tmp_path)[name]
    call(main, arguments)
    (tmp_path / "other").write_text("a file of the user's")
    before = state_files(tmp_path)
    with file_limit(9_000), pytest.raises(UserError, match="as it was before: make space"):
        call(main, arguments)
    assert state_files(tmp_path) == before
    call(main, arguments)
    assert state_files(tmp_path).keys() == before.keys()
    assert (tmp_path / "other").exists() and not (tmp_path / ".partial-other").exists()


@pytest.mark.parametrize("name", ["convert", "convert --back", "export"])
def test_a_disk_that_is_full_is_named_and_with_space_the_command_works(
    inputs, small_disk, call, name
):
    main, arguments, output = commands(inputs, small_disk / "output")[name]
    fill(small_disk, left=random.Random(name).randrange(12_000))
    with pytest.raises(UserError, match=f"{output} could not be written .*No space left"):
        call(main, arguments)
    assert os.listdir(small_disk) == ["filler"]
    (small_disk / "filler").unlink()
    call(main, arguments)
    assert output.exists()


def fill(disk: Path, left: int) -> None:
    size = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(size - left))


@pytest.mark.parametrize("left", [".partial-output", "output/.partial-output"])
def test_what_a_killed_command_has_left_is_replaced(inputs, tmp_path, call, left):
    main, arguments, output = commands(inputs, tmp_path / "output")["export"]
    (tmp_path / left).mkdir(parents=True)
    (tmp_path / left / "model.safetensors").write_text("half")
    call(main, arguments)
    assert (output / "README.md").exists() and not (tmp_path / left).exists()
