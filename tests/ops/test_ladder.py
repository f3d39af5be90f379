"""The ladder of dev/cuda: it compiles for Hopper without spills, its table says what the results
say, and what a rented GPU is asked to do is checked before it is rented. No GPU."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from toolchain import first_and_slow

LADDER = Path(__file__).parents[2] / "dev" / "cuda"
SOURCES = ["triangular_grad_weight.cu", "triangular_forward.cu", "triangular_grad_input.cu"]
needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="no nvcc here: the ladder cannot be compiled"
)


def row(version: int, **fields) -> dict:
    shape = {
        "operation": "forward",
        "batch": 128,
        "tokens": 512,
        "channels": 1024,
        "device": "some GPU",
    }
    return (
        shape
        | {"version": version, "adds": f"step {version}", "configuration": "tile 64x64"}
        | fields
    )


@needs_nvcc
@pytest.mark.parametrize("source", first_and_slow(SOURCES))
def test_compiles_for_hopper_without_spills(source, tmp_path):
    """Every version of every ladder fits its registers, and no wgmma waits for the one before."""
    flags = [
        "-O3",
        "-std=c++17",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-Xptxas",
        "-v",
        "-cubin",
    ]
    command = ["nvcc", *flags, str(LADDER / source), "-o", str(tmp_path / "ladder.cubin")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = result.stdout + result.stderr
    for version in ("naive", "shared", "register", "mma", "pipelined", "hopper"):
        assert re.search(rf"Compiling entry function '_Z\d+{version}_kernel", report), (
            f"{version}_kernel is not there"
        )
    assert not re.search(r"[1-9]\d* bytes spill", report)
    assert "serialized" not in report


def test_table_takes_the_fastest_configuration_and_owns_up_to_failures(tmp_path):
    results = [
        row(0, milliseconds=0.2, useful_tflops=170.0),
        row(1, milliseconds=4.0, useful_tflops=8.5),
        row(1, milliseconds=2.0, useful_tflops=17.0, configuration="tile 128x128"),
        row(2, problem="[0, 3, 5] is nan and should be 1"),
    ]
    (tmp_path / "forward.json").write_text(json.dumps(results))
    other = [
        row(6, milliseconds=0.1, useful_tflops=340.0) | {"operation": "grad_weight", "tokens": 1024}
    ]
    (tmp_path / "weight.json").write_text(json.dumps(other))
    files = [str(tmp_path / "forward.json"), str(tmp_path / "weight.json")]
    command = [sys.executable, str(LADDER / "table.py"), *files, "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "ladder.md").read_text()
    assert "| cuBLAS | step 0 | tile 64x64 | 0.2000 | 170.0 | 100.0 |" in text
    assert "| 1 | step 1 | tile 128x128 | 2.0000 | 17.0 | 10.0 |" in text
    assert "tile 64x64 | 4.0000" not in text
    assert "| 2 | step 2 | failed: [0, 3, 5] is nan and should be 1 | | | |" in text
    # no rival at that size: no percentage
    assert "| 6 | step 6 | tile 64x64 | 0.1000 | 340.0 |  |" in text
    assert text.index("Forward") < text.index("Weight gradient")


# ------------------------------------------------------------------------- a rented GPU


def rent(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(LADDER / "rent.py"), *arguments], capture_output=True, text=True
    )


def test_renting_runs_what_was_asked():
    sizes = ["--tokens", "2048", "--batch", "32", "--minutes", "7"]
    done = rent("triangular_grad_input", "5", "--gpu", "A100", *sizes, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "on one A100, for at most 7 minutes" in done.stdout
    assert "make -C dev/cuda ARCH=80 build/triangular_grad_input\n" in done.stdout
    last = "dev/cuda/build/triangular_grad_input 5 --tokens 2048 --batch 32 --channels 1024"
    assert done.stdout.splitlines()[-1] == last
    script = done.stdout.partition("\n")[2]
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ("triangular 3", "invalid choice: 'triangular'"),
        ("triangular_forward 8", "invalid choice: '8'"),
        ("triangular_forward 3 --gpu V100", "invalid choice: 'V100'"),
        (
            "triangular_forward 6 --gpu A100",
            "version 6 needs a Hopper GPU and --gpu is A100; use H100 or H200",
        ),
        ("triangular_forward 3 --minutes 90", "invalid choice: 90"),
    ],
)
def test_nothing_is_rented_for_what_cannot_run(arguments, problem):
    done = rent(*arguments.split())
    assert done.returncode == 2 and problem in done.stderr


def test_the_rented_machine_gets_what_the_ladder_needs():
    """The CUDA is that of docker/Dockerfile; every file that the script names is there."""
    text = (LADDER / "rent.py").read_text()
    dockerfile = (LADDER.parents[1] / "docker" / "Dockerfile").read_text()
    version = re.search(r"^ARG CUDA=(.*)$", dockerfile, re.MULTILINE)[1]
    assert f"nvidia/cuda:{version}." in text
    programs = re.search(r"^PROGRAMS = (.*)$", text, re.MULTILINE)[1]
    assert sorted(re.findall(r"\w+", programs)) == sorted(
        path.stem for path in LADDER.glob("triangular_*.cu")
    )
    makefile = (LADDER / "Makefile").read_text()
    assert "$(BUILD)/%: %.cu" in makefile and "BUILD ?= build" in makefile


def test_the_rented_machine_is_given_back_when_the_program_fails(monkeypatch, capsys):
    """With a stand-in for Modal: output and exit status come back, and the machine always ends."""
    events = []

    class Sandbox:
        returncode = 3
        stdout = ["one\n", "two\n"]

        def wait(self, raise_on_termination):
            events.append("wait")

        def terminate(self):
            events.append("terminate")

    class Image:
        def __getattr__(self, name):
            return lambda *arguments, **options: self

    sandbox = SimpleNamespace(
        create=lambda *words, **options: events.append(options["gpu"]) or Sandbox()
    )
    lookup = SimpleNamespace(lookup=lambda name, create_if_missing: None)
    monkeypatch.setitem(
        sys.modules, "modal", SimpleNamespace(Image=Image(), App=lookup, Sandbox=sandbox)
    )
    monkeypatch.syspath_prepend(str(LADDER))
    rent_module = importlib.import_module("rent")
    assert rent_module.run(rent_module.parse(["triangular_forward", "all", "--gpu", "H200"])) == 3
    assert events == ["H200", "wait", "terminate"] and capsys.readouterr().out == "one\ntwo\n"
