"""The barriers, copies and products of the Hopper kernels, run from their own source on the CPU:
see hopper_emulator/emulator.h.

Needs nvcc (for its headers) and a C++ compiler, but no GPU. Everything is random by seed, so a
failure comes again; the message names the case, where each warp waits and the state of all
barriers.
"""

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulated_cases import run_cases
from hopper_emulator import sources

from mixer.common.errors import UserError
from mixer.ops import build, toolchain

EMULATOR = Path(sources.__file__).parent
FLAGS = ["-std=c++17", "-O3", "-w", "-Xcompiler=-Wno-psabi,-fPIC"]
JOBS = 2
CASES = 45  # of each plan, each in a process of its own
# This seed shows all mistakes soon, and a run ends at the first failure.
MUTANT_SEED, MUTANT_CASES = 3, 300
PLANS = {"resident": (1, 256), "resident_alone": (257, 512), "streamed": (513, 2000)}  # tokens


def why_not() -> str | None:
    """What is missing here to build the emulator."""
    if platform.machine() != "x86_64":
        return "the emulator switches stacks in x86-64 assembly"
    if shutil.which("g++") is None:
        return "no g++ here: the emulator cannot be compiled"
    try:
        toolchain.find_compiler()
    except UserError:
        return "no nvcc here: the kernels' headers are missing"
    return None


pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@dataclass(frozen=True)
class Mutation:
    """A mistake, as edits (file, old text, new text), and the plan of forward in which it must be
    seen: among the first cases.
    """

    name: str
    plan: str
    edits: tuple[tuple[str, str, str], ...]


PRODUCT, TILE = "hopper_product.cuh", "hopper_tile.cuh"
WAIT = "      wgmma_wait<0>();\n"
RELEASE = "      if (!in_place || step + 1 < steps) barriers.ring.release(slot);\n"
RELEASE_ALL = "      barriers.ring.release_for_warpgroup(slot);\n"
MUTATIONS = [
    Mutation(
        "a stage is released before its products have ended",
        "resident_alone",
        ((PRODUCT, WAIT, ""), (PRODUCT, RELEASE, RELEASE + WAIT)),
    ),
    Mutation(
        "the last stage is released before the result that lies there has been written out",
        "streamed",
        ((PRODUCT, RELEASE, "      barriers.ring.release(slot);\n"), (PRODUCT, RELEASE_ALL, "")),
    ),
    Mutation(
        "two multipliers write to one output box without taking turns",
        "resident_alone",
        ((PRODUCT, "          wait_for_turn();\n        } else if", "        } else if"),),
    ),
    Mutation(
        "only as many full barriers as stages",
        "streamed",
        (
            (
                PRODUCT,
                "kFullBarriers = (16 + kStages - 1) / kStages * kStages;",
                "kFullBarriers = kStages;",
            ),
        ),
    ),
    Mutation(
        "the loaders do not arrive at the empty barriers",
        "streamed",
        (
            (PRODUCT, "          if (!Shape::kResident) barriers.ring.loaded(at.slot);\n", ""),
            (PRODUCT, "        barriers.ring.loaded(at.slot);\n      }\n", "      }\n"),
            (TILE, "kReaders + (loaders - 1) * 2 * kClusterSize", "kReaders"),
        ),
    ),
    Mutation(
        "a multiplier that passes a tile does not wait for W",
        "resident",
        (
            (
                PRODUCT,
                "    if (Shape::kResident) barrier_wait(&barriers.weight_full[0], "
                "weight_parity);\n    __syncwarp();\n",
                "",
            ),
        ),
    ),
]


# ------------------------------------------------------------------------- building


def command(*arguments) -> None:
    """Runs nvcc, which for C++ is g++ with CUDA's headers."""
    result = subprocess.run(
        [str(toolchain.find_compiler().path), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout


def compile_unit(unit: Path, directory: Path) -> Path:
    """Compiles one file against the emulated sources in `directory`."""
    item = directory / f"{unit.stem}.o"
    command(*FLAGS, "-I", EMULATOR, "-I", directory, "-c", unit, "-o", item)
    return item


def link(objects: list[Path], program: Path) -> Path:
    # nothing calls the CUDA runtime
    command("-shared", "-cudart=none", *objects, "-o", program)
    return program


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The objects of the emulator and of the kernels as they are, by name."""
    directory = tmp_path_factory.mktemp("emulator")
    units = [
        *sources.make(build.SOURCES, directory),
        EMULATOR / "emulator.cpp",
        EMULATOR / "library.cpp",
    ]
    units.sort(key=lambda unit: unit.stem != "hopper_forward")  # the longest first
    with ThreadPoolExecutor(JOBS) as jobs:
        objects = list(jobs.map(lambda unit: compile_unit(unit, directory), units))
    return {item.stem: item for item in objects}


def build_mutant(mutation: Mutation, built: dict[str, Path], directory: Path) -> Path:
    """The program with a mistake in forward; its object comes first, so that what it shares with
    others is its own.
    """
    changed = directory / "csrc"
    shutil.copytree(build.SOURCES, changed)
    for file, old, new in mutation.edits:
        text = (changed / file).read_text()
        assert text.count(old) == 1, f"{mutation.name}: {file} has {text.count(old)} times {old!r}"
        (changed / file).write_text(text.replace(old, new))
    sources.make(changed, directory / "emulated")
    forward = compile_unit(directory / "emulated" / "hopper_forward.cpp", directory / "emulated")
    return link(
        [forward, *(item for name, item in built.items() if name != "hopper_forward")],
        directory / "kernels.so",
    )


# ------------------------------------------------------------------------- tests


def test_random_cases_of_every_operation_and_plan(built, tmp_path):
    library = link(list(built.values()), tmp_path / "kernels.so")

    def run(plan: str) -> subprocess.CompletedProcess:
        return run_cases(library, 90, 1, CASES, "any", *PLANS[plan])

    with ThreadPoolExecutor(JOBS) as jobs:
        for result in jobs.map(run, PLANS):
            assert result.returncode == 0, result.stdout[-500:] + result.stderr[-500:]


@pytest.mark.slow
def test_mistakes_are_caught(built, tmp_path):
    def outcome(index: int) -> str:
        directory = tmp_path / str(index)
        directory.mkdir()
        program = build_mutant(MUTATIONS[index], built, directory)
        tokens = PLANS[MUTATIONS[index].plan]
        result = run_cases(program, 90, MUTANT_SEED, MUTANT_CASES, "forward", *tokens)
        return "caught" if result.returncode == 1 else f"status {result.returncode}"

    with ThreadPoolExecutor(JOBS) as jobs:
        outcomes = dict(
            zip(
                (mutation.name for mutation in MUTATIONS),
                jobs.map(outcome, range(len(MUTATIONS))),
                strict=True,
            )
        )
    assert set(outcomes.values()) == {"caught"}, outcomes


def test_new_instructions_are_refused(tmp_path):
    changed = tmp_path / "csrc"
    shutil.copytree(build.SOURCES, changed)
    text = (changed / "hopper_ptx.cuh").read_text()
    new = '__device__ __forceinline__ void nap() { asm volatile("nanosleep.u32 20;"); }\n'
    (changed / "hopper_ptx.cuh").write_text(
        text.replace("}  // namespace hopper", f"{new}\n}}  // namespace hopper")
    )
    with pytest.raises(sources.EmulatorError, match="nap is new to the emulator"):
        sources.make(changed, tmp_path / "emulated")
