"""The ladder of dev/cuda: it compiles for Hopper without spills, and what is wrong is not timed. No
GPU.
"""

import re
import subprocess

import kernel_ladder
import torch
from toolchain import kernels_of, needs_nvcc

from mixer.ops import build


@needs_nvcc
def test_compiles_for_hopper_without_spills(tmp_path):
    """Every version fits its registers, and no wgmma waits for the one before."""
    flags = ["-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]
    nvcc, target = build.find_nvcc(), tmp_path / "ladder.cubin"
    command = [nvcc, *flags, "-cubin", kernel_ladder.SOURCE, "-o", target]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = result.stdout + result.stderr
    kernels = kernels_of(report)
    for version in ("naive", "shared", "register", "mma", "pipelined", "hopper"):
        assert any(f"{version}_kernel" in kernel.name for kernel in kernels), version
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []
    assert "serialized" not in report


def test_a_wrong_kernel_is_not_timed():
    torch.manual_seed(0)
    problem = kernel_ladder.Problem(2, 40, 16, device="cpu")
    exact = problem.exact()

    def failure(*mistakes) -> str | None:
        def call(problem):
            problem.y.copy_(exact)
            for place, value in mistakes:
                problem.y[place] = value
            return problem.y

        one = kernel_ladder.Configuration(1, "", call)
        return kernel_ladder.check(one, [problem], [exact])["failure"]

    first, last = (0, 0, 0), (-1, -1, -1)
    assert failure() is None
    assert "off by nan" in failure((last, torch.nan))
    size = exact[first].abs() + exact.square().mean().sqrt()
    assert re.search(r"off by 0.0[45]", failure((first, exact[first] + 0.05 * size)))
