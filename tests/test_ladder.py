"""The ladder of dev/cuda: it compiles for Hopper without spills, and its table says what the results say. No GPU."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LADDER = Path(__file__).parent.parent / "dev" / "cuda"
SOURCES = ["triangular_forward.cu", "triangular_grad_input.cu", "triangular_grad_weight.cu"]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here: the ladder cannot be compiled")


def row(version: int, **fields) -> dict:
    shape = {"operation": "forward", "batch": 128, "tokens": 512, "channels": 1024, "device": "some GPU"}
    return shape | {"version": version, "adds": f"step {version}", "configuration": "tile 64x64"} | fields


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_for_hopper_without_spills(source, tmp_path):
    """Every version of every ladder fits its registers, and no wgmma waits for the one before."""
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin"]
    command = ["nvcc", *flags, str(LADDER / source), "-o", str(tmp_path / "ladder.cubin")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = result.stdout + result.stderr
    for version in ("naive", "shared", "register", "mma", "pipelined", "hopper"):
        assert re.search(rf"Compiling entry function '_Z\d+{version}_kernel", report), f"{version}_kernel is not there"
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
    other = [row(6, milliseconds=0.1, useful_tflops=340.0) | {"operation": "grad_weight", "tokens": 1024}]
    (tmp_path / "weight.json").write_text(json.dumps(other))
    files = [str(tmp_path / "forward.json"), str(tmp_path / "weight.json")]
    command = [sys.executable, str(LADDER / "table.py"), *files, "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "ladder.md").read_text()
    assert "| cuBLAS | step 0 | tile 64x64 | 0.2000 | 170.0 | 100.0 |" in text
    assert "| 1 | step 1 | tile 128x128 | 2.0000 | 17.0 | 10.0 |" in text
    assert "tile 64x64 | 4.0000" not in text
    assert "| 2 | step 2 | failed: [0, 3, 5] is nan and should be 1 | | | |" in text
    assert "| 6 | step 6 | tile 64x64 | 0.1000 | 340.0 |  |" in text  # no rival at that size: no percentage
    assert text.index("Forward") < text.index("Weight gradient")
