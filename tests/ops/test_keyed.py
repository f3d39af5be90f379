"""Keyed mixing and its Triton kernels, without a GPU: Triton's interpreter runs them on the CPU,
and its compiler compiles them for GPUs.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import keyed_cases
import pytest
import torch
from toolchain import first_and_slow

from mixer.ops import keyed, keyed_conv, plain
from mixer.ops.plain import weight_by_lag
from mixer.ops.strips import AROUND, LARGEST_TILE, SHIFTS, strips_of

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "mixer" / "ops" / "keyed_kernels.py"
CASES = 15
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton here")


def interpret(*arguments) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, keyed_cases.__file__, *map(str, arguments)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


# ------------------------------------------------------------------------- on the CPU


@needs_triton
def test_kernels_are_right_on_the_cpu_and_one_operator_to_pytorch(tmp_path, monkeypatch):
    """Random shapes, tiles, strides and types, in memory that is not theirs on all sides. Every
    mistake below is seen in these cases. Then autograd, the compiler and autocast.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # not what earlier code left
    result = interpret(KERNELS, 1, CASES)
    assert result.returncode == 0, result.stdout[-500:] + result.stderr[-1500:]


MISTAKES = {
    "what lies beyond the last token is read": ("(at, mask=inside, other=0.0)", "(at)"),
    "a result beyond the last token is written": ("(at, values, mask=inside)", "(at, values)"),
    "the last tile of a row is left out": (
        "sums are\n    for column in range(0, min(start + ROWS, tokens), COLUMNS)",
        "sums are\n    for column in range(0, min(start, tokens), COLUMNS)",
    ),
    "the first tile of a column is left out": (
        "in range(column // ROWS * ROWS, tokens, ROWS)",
        "in range(column // ROWS * ROWS + ROWS, tokens, ROWS)",
    ),
    "the mean's gradient is left out": ("tokens, changes, ROWS", "tokens, 0 * changes, ROWS"),
    "tiles of a strip are shifted": ("(SHIFTED - 1) - r", "SHIFTED - r"),
    "the falling part of a row is left out": (
        "return tl.exp2(tl.minimum(fall * distance, 60.0))",
        "return 0.0 * fall * distance",
    ),
    "lags across tiles are left out": (
        "(diagonal * COLUMNS - (ROWS - COLUMNS)) + c",
        "(diagonal * COLUMNS - (ROWS - COLUMNS)) + c + ROWS * (c > 0)",
    ),
    "sums are of another largest": ("sums * shrink + ", "sums + "),
}


@needs_triton
@pytest.mark.parametrize("mistake", first_and_slow(MISTAKES))
def test_mistakes_are_seen_on_the_cpu(mistake, tmp_path):
    text = KERNELS.read_text()
    old, new = MISTAKES[mistake]
    assert text.count(old) == 1
    wrong = tmp_path / "keyed_kernels.py"
    wrong.write_text(text.replace(old, new))
    result = interpret(wrong, 1, CASES)
    assert "AssertionError: Case(" in result.stderr or result.returncode < 0, result.stderr[-1500:]


# ------------------------------------------------------------------------- for GPUs

SHARED_MEMORY = 99 << 10  # bytes a block: that of compute capability 8.6 and 8.9, the least


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "kernel", ["forward", "grad_query", "grad_key_value", "grad_weight", "grad_lags"]
)
@pytest.mark.parametrize(
    ("dtype", "size", "mma"),
    [
        (torch.bfloat16, 64, True),
        pytest.param(torch.float16, 16, True, marks=pytest.mark.slow),
        pytest.param(torch.float32, 16, False, marks=pytest.mark.slow),
        pytest.param(torch.float32, 32, False, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 128, True, marks=pytest.mark.slow),
        pytest.param(torch.float32, 128, False, marks=pytest.mark.slow),
    ],
)
def test_every_kernel_compiles_for_gpus(
    capability, kernel, dtype, size, mma, tmp_path, monkeypatch
):
    """In the shared memory of all of them; in 16 bits with tensor cores, and with large tiles
    without spills.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_for(capability, kernel, dtype, size)
    assert compiled.metadata.shared <= SHARED_MEMORY
    if mma:
        assert re.search(r"wgmma\.mma_async|mma\.sync", compiled.asm["ptx"])
        assert spilled_bytes(compiled, capability, tmp_path) == 0


def compile_for(capability: int, kernel: str, dtype: torch.dtype, size: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mixer.ops import keyed_kernels

    heads = 8
    x = torch.empty(1, 1, heads * size, dtype=dtype)
    function = getattr(keyed_kernels, f"{kernel}_kernel")
    # One token: no tile is whole, and every load is masked.
    options = keyed_kernels.options_for(kernel, x, x, heads) | {"BY_LAG": True}
    constants = {name: value for name, value in options.items() if name in function.arg_names}
    pointer = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    types = dict.fromkeys(["q", "k", "v", "w", "y", "dy", "dqkv"], pointer)
    floats = ["rest", "falls", "bias", "level", "change", "sums", "dw", "partial"]
    types |= dict.fromkeys(floats, "*fp32") | {"scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    # As pointers of tensors and their strides are.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if name not in constants and name not in ("scale", "batch")
    }
    source = ASTSource(function, signature, constants, aligned)
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={name: options[name] for name in ("num_warps", "num_stages", "maxnreg")},
    )


def spilled_bytes(compiled, capability: int, directory: Path) -> int:
    import triton

    file = directory / "kernel.ptx"
    file.write_text(compiled.asm["ptx"])
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    gpu = f"--gpu-name=sm_{capability}{'a' if capability == 90 else ''}"
    command = [str(assembler), "-v", gpu, str(file), "-o", str(directory / "kernel.cubin")]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", log)[1])


# ------------------------------------------------------------------------- weights by lag


def by_a_loop(query, key, value, lags, bias, decay) -> torch.Tensor:
    """The definition of keyed mixing by lag, one number at a time."""
    heads, _, context = lags.shape
    batch, tokens, _ = query.shape
    query, key, value = (x.unflatten(-1, (heads, -1)) for x in (query, key, value))
    rows = []
    for b in range(batch):
        for i in range(tokens):
            for h in range(heads):
                scores = key[b, : i + 1, h] @ query[b, i, h] / query.shape[-1] ** 0.5
                matches = scores.exp() / scores.exp().mean()
                lag = i - torch.arange(i + 1)
                weight = lags[h, 0, lag]
                if decay is not None:
                    falling = (-lag * decay[h]).exp()
                    weight = weight + falling / falling.sum()
                rows.append(bias[h, i] + (weight * matches) @ value[b, : i + 1, h])
    return torch.stack(rows).view(batch, tokens, -1)


@pytest.mark.parametrize("decay", [None, (0.0, 0.3)])
def test_lags_are_a_weight_by_lag(decay):
    """Plain PyTorch and the definition agree in fp64, gradients too. Those of lags that no two
    tokens have are zero.
    """
    shapes = [(2, 9, 6), (2, 9, 6), (2, 9, 4), (2, 1, 12), (2, 12)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    query, key, value, lags, bias = leaves
    decay = decay and torch.tensor(decay, dtype=torch.float64)
    ours = keyed_conv(query, key, value, bias=bias, lags=lags, decay=decay)
    expected = by_a_loop(*leaves, decay)
    dy = torch.randn_like(expected)
    gradients = torch.autograd.grad(ours, leaves, dy)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, leaves, dy))
    assert not gradients[3][..., 9:].any()


@pytest.mark.parametrize("tokens", [1, 100, 128, 400])
@pytest.mark.parametrize("decay", [None, 0.0, 1 / 64, 0.3, 2.0, 40.0])
def test_strips_are_the_weight(tokens, decay):
    """Read as the kernels read them, whatever the decay: the number of a strip, and the product of
    one for the query and one for the key.
    """
    lags = torch.randn(1, 1, 512)
    decay = None if decay is None else torch.tensor([decay])
    strips, rest, falls = strips_of(lags, decay, tokens, torch.float32)
    i = torch.arange(tokens)[:, None]
    j = torch.arange(tokens)
    start = i // LARGEST_TILE * LARGEST_TILE
    origin = strips.shape[-1] - AROUND
    at = (origin + j - i // SHIFTS * SHIFTS).clamp(max=strips.shape[-1] - 1)
    near = strips[0, 0, SHIFTS - 1 - i % SHIFTS, at]
    at = (AROUND + i - j // SHIFTS * SHIFTS).clamp(min=0)
    turned = strips[0, 1, SHIFTS - 1 - j % SHIFTS, at]
    assert torch.equal(turned.tril(), near.tril())
    risen = (falls * (j - start)).clamp(max=60).exp2()
    weight = (near + rest[0, :, None] * risen).tril()
    exact = weight_by_lag(lags.double(), None if decay is None else decay.double(), tokens)
    torch.testing.assert_close(weight, exact[0, 0].float(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------- which calls get them


def arguments_of(changes: dict[str, tuple] | None = None) -> dict[str, torch.Tensor]:
    """Of keyed_conv, of two texts, 12 tokens and two heads; changes: other shapes."""
    shapes = {
        "query": (2, 12, 32),
        "key": (2, 12, 32),
        "value": (2, 12, 8),
        "weight": (2, 1, 16, 16),
        "bias": (2, 16),
    }
    shapes |= changes or {}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("backend", ["auto", "cuda", "dense"])
def test_every_backend_is_plain_pytorch_without_a_gpu(backend):
    inputs = arguments_of()
    expected = plain.keyed_conv(**inputs)
    torch.testing.assert_close(keyed_conv(**inputs, backend=backend), expected)
    without = plain.keyed_conv(**inputs | {"bias": torch.zeros(2, 16)})
    torch.testing.assert_close(keyed_conv(**inputs | {"bias": None}, backend=backend), without)
    meta = {name: tensor.to("meta") for name, tensor in inputs.items()}
    assert keyed_conv(**meta, backend=backend).shape == (2, 12, 8)
    meta["lags"] = meta.pop("weight")[..., 0]
    assert keyed_conv(**meta, backend=backend).shape == (2, 12, 8)


def test_kernels_get_texts_up_to_the_context_and_plain_pytorch_longer_ones(monkeypatch):
    by_kernels = []
    monkeypatch.setattr(keyed, "uses_kernels", lambda *asked: asked[-1])  # by lag
    monkeypatch.setattr(keyed, "by_kernels", lambda query, *_: by_kernels.append(query.shape[1]))
    for tokens in (12, 16, 17):
        texts = {name: (2, tokens, 32) for name in ("query", "key", "value")}
        inputs = arguments_of(texts | {"lags": (2, 1, 16)})
        del inputs["weight"]
        y = keyed_conv(**inputs)
    assert by_kernels == [12, 16]
    torch.testing.assert_close(y, plain.keyed_conv(**inputs, weight=None))


@pytest.mark.parametrize(
    "changes",
    [
        {"query": (2, 12, 16)},  # not the key's
        {"value": (2, 11, 8)},  # other tokens
        {"value": (2, 12, 9)},  # which the heads cannot share
        {"weight": (2, 1, 8, 8)},  # a context shorter than the text
        {"weight": (2, 3, 16, 16)},  # more than one tap
        {"bias": (16,)},
        {"lags": (2, 1, 16)},  # beside a weight
        {"decay": (2,)},  # without lags
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused_with_their_shapes(changes):
    ((name, shape),) = changes.items()
    with pytest.raises(
        ValueError, match=rf"keyed_conv needs .*; it got .*{name} {re.escape(str(shape))}"
    ):
        keyed_conv(**arguments_of(changes))


def test_other_types_are_refused():
    inputs = arguments_of()
    inputs["key"] = inputs["key"].half()
    with pytest.raises(ValueError, match=r"key \(2, 12, 32\) torch.float16 on cpu"):
        keyed_conv(**inputs)
