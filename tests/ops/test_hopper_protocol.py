"""The barriers, copies and products of the Hopper kernels, run from their own source on the CPU:
see emulator/hopper.h. A failure's message names the case and what is wrong.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from emulated_cases import run_cases
from emulator import sources
from toolchain import needs_nvcc

from mixer.ops import build

UNITS = ["hopper_product", "hopper_grad_weight"]
JOBS = 2
CASES = 45  # of each plan, each in a process of its own
# This seed shows all mistakes soon, and a run ends at the first failure.
MUTANT_SEED = 1
MUTANT_CASES = 1500
PLANS = {"resident": (1, 256), "resident_alone": (257, 512), "streamed": (513, 2000)}  # tokens

pytestmark = needs_nvcc


PRODUCT = "hopper_product.cu"
TILE = "hopper_tile.cuh"
WAIT = "      wgmma_wait<0>();\n"
RELEASE = "      if (!in_place || step + 1 < end) barriers.ring.release(slot);\n"
RELEASE_ALL = "      barriers.ring.release_for_warpgroup(slot);\n"
# What is wrong, the plan of forward in which it must be seen, and edits (file, old text, new text).
MISTAKES = {
    "a stage is released before its products have ended": (
        "resident_alone",
        [(PRODUCT, WAIT, ""), (PRODUCT, RELEASE, RELEASE + WAIT)],
    ),
    "the last stage is released before the result that lies there has been written out": (
        "streamed",
        [(PRODUCT, RELEASE, "      barriers.ring.release(slot);\n"), (PRODUCT, RELEASE_ALL, "")],
    ),
    "only as many full barriers as stages": (
        "streamed",
        [(PRODUCT, "= (16 + kStages - 1) / kStages * kStages;", "= kStages;")],
    ),
    "the loaders do not arrive at the empty barriers": (
        "streamed",
        [
            (PRODUCT, "          if (!Shape::kResident) barriers.ring.loaded(at.slot);\n", ""),
            (PRODUCT, "        barriers.ring.loaded(at.slot);\n      }\n", "      }\n"),
            (TILE, "kReaders + (loaders - 1) * 2 * kClusterSize", "kReaders"),
        ],
    ),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> list[Path]:
    """The objects of the kernels as they are, the product's first."""
    directory = tmp_path_factory.mktemp("emulator")
    with ThreadPoolExecutor(JOBS) as jobs:
        return list(
            jobs.map(lambda name: sources.hopper_unit(name, build.SOURCES, directory), UNITS)
        )


def test_random_cases_of_every_operation_and_plan(built, tmp_path):
    library = sources.link(built, tmp_path)

    def run(plan: str) -> None:
        run_cases(library, tmp_path / plan, 90, 1, CASES, "any", *PLANS[plan])

    with ThreadPoolExecutor(JOBS) as jobs:
        list(jobs.map(run, PLANS))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake, built, tmp_path):
    """The object with the mistake comes first, so that what it shares with others is its own."""
    plan, edits = MISTAKES[mistake]
    changed = shutil.copytree(build.SOURCES, tmp_path / "csrc")
    for file, old, new in edits:
        text = (changed / file).read_text()
        assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
        (changed / file).write_text(text.replace(old, new))
    product = sources.hopper_unit("hopper_product", changed, tmp_path)
    library = sources.link([product, *built[1:]], tmp_path)
    arguments = (90, MUTANT_SEED, MUTANT_CASES, "forward", *PLANS[plan])
    run_cases(library, tmp_path / "printed", *arguments, status=1)
