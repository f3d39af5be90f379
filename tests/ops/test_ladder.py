"""The ladder of dev/cuda: it compiles for Hopper without spills, and its table says what the
results say. No GPU.
"""

import re
import shutil
import subprocess
from pathlib import Path

import kernel_ladder
import pytest
import torch
from toolchain import first_and_slow

LADDER = Path(__file__).parents[2] / "dev" / "cuda"
needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="no nvcc here: the ladder cannot be compiled"
)


@needs_nvcc
@pytest.mark.parametrize("operation", first_and_slow(["grad_weight", "forward", "grad_input"]))
def test_compiles_for_hopper_without_spills(operation, tmp_path):
    """Every version fits its registers, and no wgmma waits for the one before."""
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]
    source, target = LADDER / f"{operation}.cu", tmp_path / "ladder.cubin"
    command = ["nvcc", *flags, "-cubin", str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = result.stdout + result.stderr
    for version in ("naive", "shared", "register", "mma", "pipelined", "hopper"):
        assert re.search(rf"Compiling entry function '_Z\d+{version}_kernel", report), version
    assert not re.search(r"[1-9]\d* bytes spill", report)
    assert "serialized" not in report


def row(version: int, configuration: str = "tile 64x64", failure: str | None = None, **fields):
    shape = {"operation": "forward", "batch": 128, "tokens": 512, "channels": 1024}
    return shape | {"version": version, "configuration": configuration, "failure": failure} | fields


def test_table_takes_the_fastest_configuration_and_owns_up_to_failures():
    rows = [
        row(0, ms=0.2),
        row(1, ms=4.0),
        row(1, "tile 128x128", ms=2.0),
        row(1, "tile 32x32", "wrong"),
        row(2, failure="not zero above the diagonal"),
        row(6, ms=0.1, operation="grad_weight", tokens=1024),
    ]
    text = kernel_ladder.table({"rows": rows, "hardware": {}, "commit": "abc", "command": "x"})
    lines = [re.sub(r"^(\| \w+ \|) [^|]*", r"\1 ", line) for line in text.splitlines()]
    assert "| cuBLAS | | tile 64x64 | 0.2000 | 172.1 | 100.0 |" in lines
    assert "| 1 | | tile 128x128 | 2.0000 | 17.2 | 10.0 |" in lines
    assert "4.0000" not in text and "wrong" not in text
    assert "| 2 | | failed: not zero above the diagonal | - | - | - |" in lines
    # no rival at that size: no percentage
    assert any(
        re.fullmatch(r"\| 6 \| \| tile 64x64 \| 0.1000 \| .* \| - \|", line) for line in lines
    )
    assert text.index("Forward") < text.index("Weight gradient")


@pytest.mark.parametrize("operation", kernel_ladder.OPERATIONS)
def test_a_wrong_kernel_is_not_timed(operation):
    torch.manual_seed(0)
    problem = kernel_ladder.Problem(operation, 2, 40, 16, fused=True, device="cpu")
    exact = problem.exact()

    def failure(*mistakes) -> str | None:
        def call(problem):
            problem.output.copy_(exact)
            for place, value in mistakes:
                problem.output[place] = value
            return problem.output

        one = kernel_ladder.Configuration(1, "", call)
        return kernel_ladder.check(one, [problem], [exact])["failure"]

    first, last = (0,) * exact.dim(), (-1,) * exact.dim()
    assert failure() is None
    assert "off by nan" in failure((last, torch.nan))
    size = exact[first].abs() + exact.square().mean().sqrt()
    assert re.search(r"off by 0.0[45]", failure((first, exact[first] + 0.05 * size)))
    above = failure(((0, -1), 1e-30))
    assert above == "not zero above the diagonal" if operation == "grad_weight" else "off" in above
