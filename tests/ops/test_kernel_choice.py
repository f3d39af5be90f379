"""What the kernels decide on the host, without a GPU: which of them serve, and on Hopper which
block works on which tile.
"""

import ctypes
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toolchain import needs_nvcc

from mixer.common.errors import UserError
from mixer.ops import build, choice, cuda
from mixer.ops.cuda import packed_columns

BLOCK = 64
PROCESSORS = 132


pytestmark = needs_nvcc


@pytest.fixture(scope="module")
def library(kernel_cache):
    return cuda.load(str(build.library((9, 0))))


def tiles_of(
    library, batch: int, tokens: int, channels: int, heads: int = 1
) -> list[list[tuple[int, int, int]]]:
    """For each cluster its tiles (row tile, head, first chunk), as the kernels read them."""
    params = cuda.Params(
        batch=batch,
        tokens=tokens,
        channels=channels,
        context=tokens,
        heads=heads,
        taps=1,
        columns=packed_columns(tokens),
        dtype=2,
        capability=90,
        processors=PROCESSORS,
    )
    flat = np.zeros(library.mixer_schedule_size(ctypes.byref(params)) // 4, np.int32)
    library.mixer_schedule(ctypes.byref(params), flat.ctypes.data)
    clusters = PROCESSORS // 2
    offsets = flat[: clusters + 1]
    tiles = flat[(clusters + 4) // 4 * 4 :].reshape(-1, 4)[:, :3].tolist()
    return [
        [tuple(tile) for tile in tiles[start:end]]
        for start, end in zip(offsets[:-1], offsets[1:], strict=True)
    ]


@pytest.mark.parametrize(
    "batch, tokens, channels, heads",
    [
        (128, 512, 1024, 1),
        (8, 8192, 1024, 1),
        (3, 1000, 520, 1),
        (5, 130, 72, 1),
        (7, 640, 1024, 8),
        (1, 64, 64, 1),
    ],
)
def test_every_tile_is_dealt_once(library, batch, tokens, channels, heads):
    dealt = Counter(
        tile for tiles in tiles_of(library, batch, tokens, channels, heads) for tile in tiles
    )
    rows, chunks = (8, 2) if tokens > 256 else (4, 4)
    row_tiles = -(-tokens // (rows * BLOCK))
    columns = range(0, batch * -(-channels // heads // BLOCK), chunks)
    wanted = {
        (row, head, chunk) for row in range(row_tiles) for head in range(heads) for chunk in columns
    }
    assert set(dealt) == wanted and set(dealt.values()) == {1}


@pytest.mark.parametrize("tokens", [512, 1024, 2048, 4096, 8192])
def test_clusters_have_equal_work(library, tokens):
    """65,536 tokens of 1024 channels: the busiest cluster has at most 5% more to do than if all had
    the same.
    """

    def cost(row_tile):  # blocks of the weight at or below the diagonal
        first = row_tile * 8
        return sum(range(first + 1, min(first + 8, tokens // BLOCK) + 1))

    work = [
        sum(cost(row) for row, _, _ in tiles)
        for tiles in tiles_of(library, 65536 // tokens, tokens, 1024)
    ]
    assert sum(work) == 1024 // 128 * (65536 // tokens) * sum(range(1, tokens // BLOCK + 1))
    assert max(work) <= 1.05 * sum(work) / len(work)


@pytest.mark.parametrize(
    "capability, dtype, channels, heads, taps, serving",
    [
        (90, "bfloat16", 1024, 1, 1, 90),
        (90, "float16", 1024, 8, 1, 90),
        (90, "bfloat16", 1024, 1, 3, 90),
        (90, "bfloat16", 20, 1, 1, 0),  # rows that do not start on 16 bytes
        (90, "float32", 1024, 1, 1, 80),
        (86, "bfloat16", 1024, 1, 1, 80),
        (75, "float16", 1024, 1, 1, 70),
        (70, "float16", 1024, 4, 3, 70),
        (70, "float16", 1020, 1, 1, 0),
        (70, "bfloat16", 1024, 1, 1, 0),
        (70, "float32", 1024, 1, 1, 0),
    ],
)
def test_the_fastest_kernels_that_can_serve(
    library, capability, dtype, channels, heads, taps, serving
):
    params = cuda.Params(
        batch=2,
        tokens=512,
        context=512,
        columns=512,
        channels=channels,
        heads=heads,
        taps=taps,
        dtype=cuda.DTYPE_CODES[getattr(torch, dtype)],
        capability=capability,
        processors=PROCESSORS,
    )
    assert library.mixer_kernels_capability(ctypes.byref(params)) == serving


@pytest.mark.parametrize(
    ("capability", "dtype", "tf32", "is_aligned", "reason"),
    [
        (90, "bfloat16", False, True, None),
        (90, "float32", True, True, None),
        (70, "float16", False, True, None),
        (90, "float32", False, True, "TF32 for float32, which is off here"),
        (90, "bfloat16", False, False, "heads of a multiple of 8 channels"),
        (75, "bfloat16", False, True, "float16 before compute capability 8.0"),
        (90, "float64", False, True, "x is torch.float64"),
    ],
)
def test_auto_takes_the_kernels_for_what_they_serve_and_says_why_not(
    monkeypatch, caplog, capability, dtype, tf32, is_aligned, reason
):
    """A GPU whose kernels are built. What the rule takes is what the library serves: see above."""
    monkeypatch.setattr(cuda, "device_facts", lambda index: (capability, PROCESSORS))
    monkeypatch.setattr(cuda, "allows_tf32", lambda: tf32)
    monkeypatch.setattr(choice, "device_reason", lambda index: None)
    choice.warn_once.cache_clear()
    dtype = getattr(torch, dtype)
    x = SimpleNamespace(
        dtype=dtype,
        shape=(2, 512, 64 if is_aligned else 20),
        device=torch.device("cuda", 0),
        is_cuda=True,
        element_size=lambda: dtype.itemsize,
    )
    assert choice.kernels_take("auto", x, heads=2) == (reason is None)
    assert (reason or "") in caplog.text
    if reason:
        with pytest.raises(UserError, match=f"'cuda' cannot run here: .*{reason}"):
            choice.kernels_take("cuda", x, heads=2)
    assert not choice.kernels_take("dense", x, heads=2)
