"""The kernels for Ampere without a GPU: their own source runs on the CPU."""

from pathlib import Path

import pytest
from emulated_cases import run_cases
from tensor_emulator import sources
from toolchain import first_and_slow, needs_nvcc

from mixer.ops import build

PTX = [  # what an asm statement begins with, what stands for it
    (r"cp\.async\.cg", "(void)bytes; emulator::copy_async(shared, global, valid);"),
    (r"cp\.async\.commit_group", "emulator::commit_copies();"),
    (r"cp\.async\.wait_group", "emulator::wait_copies(kPending);"),
    (r"ld\.shared\.b32", "memcpy(&value, emulator::shared + shared, sizeof(value));"),
    (
        r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared",
        "emulator::load_matrices(shared, f.part, false);",
    ),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans", "emulator::load_matrices(shared, f.part, true);"),
    (r"mma\.sync", "emulator::mma<Element>(sum, left.part, right0, right1);"),
    (r"cvt\.rna\.tf32", "rounded = value;"),
]
REPLACEMENTS = [(rf'asm(?: volatile)?\("{start}.*?\);', replacement) for start, replacement in PTX]
REPLACEMENTS += [(r"__cvta_generic_to_shared\(pointer\)", "emulator::shared_address(pointer)")]


def emulator(directory: Path, mistake: tuple[str, str] = ("", "")) -> Path:
    """The library of the kernels, with part of their source replaced."""
    text = sources.emulated(build.SOURCES / "ampere.cu", REPLACEMENTS)
    assert not mistake[0] or text.count(mistake[0]) == 1
    return sources.compiled("ampere", text.replace(*mistake), directory)


@needs_nvcc
def test_kernels_are_right_on_the_cpu(tmp_path):
    """Random shapes, strides, full weights and lags, types of x and gradients, sizes of GPU."""
    result = run_cases(emulator(tmp_path), 80, 1, 45, "any", 0, 450)
    assert result.returncode == 0, result.stdout[-300:] + result.stderr[-500:]


ARRIVED = (
    "      wait_copies<kStages - 2>();\n      __syncthreads();  // every thread's copies for the "
    "next step have arrived\n"
)
WAIT, BARRIER = ARRIVED.splitlines(keepends=True)
MISTAKES = {
    "slices are read before they have arrived": (ARRIVED, BARRIER),
    "a stage is filled while it is read": (ARRIVED, WAIT),
}


@needs_nvcc
@pytest.mark.parametrize("mistake", first_and_slow(MISTAKES))
def test_mistakes_are_seen_on_the_cpu(mistake, tmp_path):
    wrong = emulator(tmp_path, MISTAKES[mistake])
    assert run_cases(wrong, 80, 1, 45, "any", 0, 450).returncode == 1
