"""Which block works on which tile: the assignment of forward and grad-input on Hopper, computed here without a GPU."""

import ctypes
from collections import Counter

import numpy as np
import pytest

from mixer.errors import UserError
from mixer.ops import build, cuda

BLOCK = 64
PROCESSORS = 132


def has_nvcc() -> bool:
    try:
        return build.find_compiler() is not None
    except UserError:
        return False


pytestmark = pytest.mark.skipif(not has_nvcc(), reason="no nvcc here: the kernels cannot be compiled")


@pytest.fixture(scope="module")
def library():
    return cuda.load(str(build.library((9, 0))))


def tiles_of(library, batch: int, tokens: int, channels: int, heads: int = 1) -> list[list[tuple[int, int, int]]]:
    """For each cluster its tiles (row tile, head, first chunk), as the kernels read them."""
    params = cuda.Params(
        batch=batch, tokens=tokens, channels=channels, context=tokens, heads=heads, taps=1, columns=cuda.round_up(tokens),
        dtype=2, capability=90, processors=PROCESSORS,
    )  # fmt: skip
    flat = np.zeros(library.mixer_schedule_size(ctypes.byref(params)) // 4, np.int32)
    library.mixer_schedule(ctypes.byref(params), flat.ctypes.data)
    clusters = PROCESSORS // 2
    offsets = flat[: clusters + 1]
    tiles = flat[(clusters + 4) // 4 * 4 :].reshape(-1, 4)[:, :3].tolist()
    return [[tuple(tile) for tile in tiles[start:end]] for start, end in zip(offsets[:-1], offsets[1:], strict=True)]


@pytest.mark.parametrize(
    "batch, tokens, channels, heads",
    [(128, 512, 1024, 1), (8, 8192, 1024, 1), (3, 1000, 520, 1), (5, 130, 72, 1), (7, 640, 1024, 8), (1, 64, 64, 1)],
)
def test_every_tile_is_dealt_once(library, batch, tokens, channels, heads):
    dealt = Counter(tile for tiles in tiles_of(library, batch, tokens, channels, heads) for tile in tiles)
    rows, chunks = (8, 2) if tokens > 256 else (4, 4)
    row_tiles = -(-tokens // (rows * BLOCK))
    columns = range(0, batch * -(-channels // heads // BLOCK), chunks)
    wanted = {(row, head, chunk) for row in range(row_tiles) for head in range(heads) for chunk in columns}
    assert set(dealt) == wanted and set(dealt.values()) == {1}


@pytest.mark.parametrize("tokens", [512, 1024, 2048, 4096, 8192])
def test_clusters_have_equal_work(library, tokens):
    """65,536 tokens of 1024 channels: the busiest cluster has at most 5% more to do than if all had the same."""

    def cost(row_tile):  # blocks of the weight at or below the diagonal
        first = row_tile * 8
        return sum(range(first + 1, min(first + 8, tokens // BLOCK) + 1))

    work = [sum(cost(row) for row, _, _ in tiles) for tiles in tiles_of(library, 65536 // tokens, tokens, 1024)]
    assert sum(work) == 1024 // 128 * (65536 // tokens) * sum(range(1, tokens // BLOCK + 1))
    assert max(work) <= 1.05 * sum(work) / len(work)
