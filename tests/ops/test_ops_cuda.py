"""The CUDA kernels against fp64, on a GPU: `pytest tests/ops/test_ops_cuda.py`.

With MIXER_TEST_PTX=DIRECTORY the kernels are those of a V100, from PTX (see ptx_library.py); what
only others do is left out.
"""

import itertools
import math
import os
from pathlib import Path

import panels
import ptx_library
import pytest
import torch

from mixer.common.errors import UserError
from mixer.models.masked_mixer import plain
from mixer.ops import choice, cuda, triangular_conv

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

TOKENS = [1, 7, 63, 64, 65, 127, 128, 129, 200, 512, 1000, 1024, 2048]
CHANNELS = [8, 40, 64, 96, 256, 520, 1024]
BATCH = [1, 3, 32]
HEADS = [1, 2, 4, 8]
TAPS = [1, 3, 4, 5]
EVERY_DTYPE = [torch.float32, torch.float16, torch.bfloat16]
PTX = os.environ.get("MIXER_TEST_PTX")
DTYPES = [torch.float16] if PTX else EVERY_DTYPE  # fp32 as tf32
not_from_ptx = pytest.mark.skipif(bool(PTX), reason="the PTX holds the kernels of a V100 alone")
NAMES = ("y", "dx", "dweight", "dbias", "dresidual")


def covering_cases() -> list[dict]:
    """78 cases: each context with each dtype twice, all other choices cycling with steps that share
    no factor.
    """
    cases = []
    for index in range(2 * len(TOKENS) * len(EVERY_DTYPE)):
        tokens, channels = TOKENS[index % 13], CHANNELS[index % 7]
        batch = BATCH[index // 2 % 3]
        if batch == 32 and tokens * max(channels, 256) > 512 * 520:
            batch = 3  # keeps the fp64 reference short
        cases.append(
            dict(
                tokens=tokens,
                channels=channels,
                batch=batch,
                heads=HEADS[index // 3 % 4],
                taps=TAPS[index // 5 % 4],
                dtype=EVERY_DTYPE[index // 13 % 3],
                extra=(0, 0, 9, 70)[index // 7 % 4],
                with_bias=index // 2 % 2 == 0,
                with_residual=index // 4 % 2 == 0,
                strided=index // 3 % 2 == 0,
                wide_weight=index // 6 % 2 == 0,
            )
        )
    return cases


def is_served(case: dict) -> bool:
    width = case["channels"] // case["heads"]
    return case["dtype"] in DTYPES and width * case["dtype"].itemsize % 16 == 0


SERVED = [case for case in covering_cases() if is_served(case)]


def describe(case: dict) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """A failed build fails here, with its message, instead of letting other backends pass for the
    kernels.
    """
    reason = choice.device_reason(0)
    assert reason is None, reason
    if not PTX:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        library, processors = (
            ptx_library.load(cuda.kernels(0), Path(PTX), device=0),
            cuda.device_facts(0)[1],
        )
        patch.setattr(cuda, "kernels", lambda index: library)
        patch.setattr(cuda, "device_facts", lambda index: (70, processors))
        cuda.template.cache_clear()
        yield
        assert library.launched, "no kernel of the PTX ran"


@pytest.fixture(autouse=True)
def exact_torch_and_poison():
    """Every fresh output starts as NaN: what a kernel does not write shows."""
    torch.set_float32_matmul_precision("high")  # else the kernels take no fp32
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def make(
    tokens,
    channels,
    batch,
    heads,
    taps,
    dtype,
    extra=0,
    with_bias=True,
    with_residual=True,
    strided=False,
    wide_weight=True,
    integers=False,
    device="cuda",
    seed=0,
):
    """(x, weight, bias, residual, dy); the weight is fp32 if `wide_weight`, scaled so that y stays
    near 1.
    """
    generator = torch.Generator(device).manual_seed(seed)
    context = tokens + extra

    def draw(*shape):
        if integers:
            return torch.randint(-2, 3, shape, device=device, generator=generator).float()
        return torch.randn(shape, device=device, generator=generator)

    def rows(*shape):
        if not strided:
            return draw(*shape).to(dtype)
        # token and batch swapped, rows not side by side
        wide = draw(shape[1], shape[0], shape[2] + 3).to(dtype)
        return wide.transpose(0, 1)[..., 1:-2]

    parameter_dtype = torch.float32 if wide_weight else dtype
    scale = 1.0 if integers else (tokens * taps) ** -0.5
    weight = (draw(heads, taps, context, context) * scale).to(parameter_dtype)
    shape = (batch, tokens, channels)
    bias = draw(heads, context).to(parameter_dtype) if with_bias else None
    return rows(*shape), weight, bias, rows(*shape) if with_residual else None, rows(*shape)


def gradients(function, x, weight, bias, residual, dy):
    """(y, dx, dweight, dbias, dresidual) of `function`, None for what is not there."""
    inputs = [
        None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, residual)
    ]
    y = function(*inputs)
    found = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy))
    return [y.detach(), *(None if t is None else next(found) for t in inputs)]


def exact(x, weight, bias, residual, dy):
    """The same in fp64, from the weight as the kernels see it: rounded to x's dtype."""
    rounded = weight.to(x.dtype).double()
    bias, residual = (None if t is None else t.double() for t in (bias, residual))
    return gradients(plain.dense, x.double(), rounded, bias, residual, dy.double())


def kernel_conv(*inputs):
    return triangular_conv(*inputs, backend="cuda")


def rms(values):
    return values.double().square().mean().sqrt().item()


# ------------------------------------------------------------------------- numbers


def test_cases_cover_every_value():
    cases = covering_cases()
    for name, values in dict(
        tokens=TOKENS, channels=CHANNELS, batch=BATCH, heads=HEADS, taps=TAPS, dtype=EVERY_DTYPE
    ).items():
        assert {case[name] for case in cases} == set(values), name
    for name in ("with_bias", "with_residual", "strided", "wide_weight"):
        assert {case[name] for case in cases} == {True, False}, name
    pairs = {(case["tokens"], case["dtype"]) for case in cases}
    assert pairs == set(itertools.product(TOKENS, EVERY_DTYPE))


@pytest.fixture
def pretend(monkeypatch):
    """Lets the kernels of an older compute capability serve, as they would with so many
    multiprocessors.
    """

    processors_here = cuda.device_facts(0)[1]

    def choose(capability: int, processors: int = processors_here) -> None:
        monkeypatch.setattr(cuda, "device_facts", lambda index: (capability, processors))
        cuda.template.cache_clear()

    yield choose
    monkeypatch.undo()
    cuda.template.cache_clear()


@pytest.mark.parametrize("case", SERVED, ids=describe)
def test_as_near_to_fp64_as_torch(case):
    check_against_fp64(case)


@pytest.mark.parametrize("case", SERVED[::2], ids=describe)
@not_from_ptx
def test_amperes_kernels_as_near_to_fp64_as_torch(case, pretend):
    pretend(80)
    check_against_fp64(case)


FP16 = [case for case in SERVED if case["dtype"] == torch.float16]


@not_from_ptx
@pytest.mark.parametrize("case", FP16, ids=describe)
def test_volta_kernels(case, pretend):
    """All of fp16 on the tensor core kernels of a V100, random values and small integers."""
    pretend(70)
    check_against_fp64(case)
    check_integers(case)


def check_against_fp64(case):
    inputs = make(**case)
    wanted = exact(*inputs)
    ours = gradients(kernel_conv, *inputs)
    dense = gradients(plain.dense, *inputs)
    for name, value, peer, truth in zip(NAMES, ours, dense, wanted, strict=True):
        if truth is None:
            assert value is None
            continue
        assert value.dtype == peer.dtype and value.isfinite().all(), name
        error, rival, size = rms(value - truth), rms(peer - truth), rms(truth)
        if case["dtype"] == torch.float32:
            # Products of factors of 11 bits, rounded to nearest: 2^-12 each and less for a sum.
            assert error <= 2**-11 * size, f"{name}: relative error {error / size:.3e}"
            continue
        # One fp32 rounding: where torch happens to be exact (one token), twice its error would be
        # nothing at all.
        assert error <= 2 * rival + 2**-23 * size, (
            f"{name}: error {error:.3e}, torch {rival:.3e}, of {size:.3e}"
        )
        assert error <= 5e-3 * size, f"{name}: relative error {error / size:.3e}"


@pytest.mark.parametrize("case", SERVED[::3], ids=describe)
def test_small_integers_are_exact(case):
    check_integers(case)


def check_integers(case):
    inputs = make(**case, integers=True)
    for name, value, truth in zip(
        NAMES, gradients(kernel_conv, *inputs), exact(*inputs), strict=True
    ):
        assert truth is None or torch.equal(value, truth.to(value.dtype)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 65, 200])
def test_raw_functions_match_panels(dtype, tokens):
    x, weight, bias, residual, dy = make(
        tokens, 96, 3, 2, 3, dtype, extra=5, integers=True, wide_weight=False
    )
    packed = cuda.pack(weight, tokens, dtype)
    assert torch.equal(packed, panels.pack(weight, tokens, dtype))
    assert packed.shape == (2, 3, tokens, (tokens + 7) // 8 * 8) and packed.is_contiguous()
    doubles = [tensor.double() for tensor in (x, packed, bias, residual, dy)]
    assert torch.equal(
        cuda.forward(x, packed, bias, residual), panels.forward(*doubles[:4]).to(dtype)
    )
    assert torch.equal(
        cuda.forward(x, packed, bias.float(), None), panels.forward(*doubles[:3], None).to(dtype)
    )
    assert torch.equal(
        cuda.grad_input(dy, packed), panels.grad_input(doubles[4], doubles[1]).to(dtype)
    )
    for kind in {torch.float32, dtype}:
        ours = cuda.grad_weight(dy, x, tokens + 5, 3, 2, kind, True)
        truth = panels.grad_weight(doubles[4], doubles[0], tokens + 5, 3, 2, torch.float64, True)
        assert all(
            a.dtype == kind and torch.equal(a, b.to(kind)) for a, b in zip(ours, truth, strict=True)
        )
    assert cuda.grad_weight(dy, x, tokens + 5, 3, 2, dtype, False)[1].shape == (0,)


def test_empty_batch_gives_zero_gradients():
    packed = cuda.pack(torch.ones(2, 1, 6, 6, device="cuda"), 5, torch.float32)
    empty = torch.empty(0, 5, 8, device="cuda")
    assert (
        cuda.forward(empty, packed, None, None).shape
        == cuda.grad_input(empty, packed).shape
        == (0, 5, 8)
    )
    dweight, dbias = cuda.grad_weight(empty, empty, 6, 1, 2, torch.float32, True)
    assert (dweight == 0).all() and (dbias == 0).all()


def test_gradient_of_a_sum():
    """sum() hands back one value expanded over all dimensions: every stride is 0."""
    inputs = make(130, 40, 2, 1, 1, torch.float32, integers=True)[:4]
    one = torch.ones((), device="cuda").expand(2, 130, 40)
    for value, truth in zip(gradients(kernel_conv, *inputs, one), exact(*inputs, one), strict=True):
        assert torch.equal(value, truth.to(value.dtype))


# ------------------------------------------------------------------------- the triangle


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 130, 199])
def test_causal_bit_for_bit(dtype, taps, cut):
    # Tensor cores multiply the zeros above the diagonal inside a block of 64 tokens, so there only
    # what is finite stays apart.
    strangers = (3.0, math.inf, math.nan) if dtype == torch.float32 else (3.0, -6e4)
    check_causal(make(200, 96, 2, 2, taps, dtype), cut, strangers)


def check_causal(inputs, cut, strangers):
    x, weight, bias, residual, dy = inputs
    dtype = x.dtype
    packed = cuda.pack(weight, 200, dtype)
    y, dx = cuda.forward(x, packed, bias, residual), cuda.grad_input(dy, packed)
    for stranger in strangers:
        later, earlier = x.clone(), dy.clone()
        later[:, cut:] = stranger
        earlier[:, :cut] = stranger
        assert torch.equal(cuda.forward(later, packed, bias, residual)[:, :cut], y[:, :cut])
        assert torch.equal(cuda.grad_input(earlier, packed)[:, cut:], dx[:, cut:])
    # A shorter input gives the same bits as the start of a longer one.
    short = cuda.forward(x[:, :cut], cuda.pack(weight, cut, dtype), bias, residual[:, :cut])
    assert torch.equal(short, y[:, :cut])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_upper_half_of_the_weight_is_never_read(dtype):
    x, weight, bias, residual, dy = make(129, 64, 2, 2, 3, dtype, extra=7)
    poisoned = weight.masked_fill(torch.ones_like(weight, dtype=torch.bool).triu(1), float("nan"))
    poisoned[:, :, 129:] = float("nan")  # nor what lies beyond the tokens
    clean = gradients(kernel_conv, x, weight, bias, residual, dy)
    for value, other in zip(
        clean, gradients(kernel_conv, x, poisoned, bias, residual, dy), strict=True
    ):
        assert torch.equal(value, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_of_the_upper_half_is_exactly_zero(dtype):
    x, weight, bias, _, dy = make(129, 64, 2, 2, 3, dtype, extra=70)
    dy[:, :5] = float("nan")  # a row that is NaN stays in its row
    dweight, dbias = cuda.grad_weight(dy, x, 199, 3, 2, torch.float32, True)
    assert (
        (dweight.triu(1) == 0).all()
        and (dweight[:, :, 129:] == 0).all()
        and (dbias[:, 129:] == 0).all()
    )
    assert dweight[:, :, 5:].isfinite().all() and dbias[:, 5:].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [64, 450, 1000])
def test_two_runs_agree_bit_for_bit(dtype, tokens):
    inputs = make(tokens, 256, 8, 2, 1, dtype)
    first, second = gradients(kernel_conv, *inputs), gradients(kernel_conv, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@not_from_ptx
@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 130, 199])
def test_volta_kernels_are_causal(taps, cut, pretend):
    pretend(70)
    test_causal_bit_for_bit(torch.float16, taps, cut)


@not_from_ptx
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("processors", [1, 1000])  # few: blocks have two tiles each; many: one
@pytest.mark.parametrize("cut", [1, 63, 65, 130, 199])
def test_ampere_kernels_are_causal_whatever_comes_later(dtype, taps, processors, cut, pretend):
    """Infinities and NaN, too, stay with their own and the later tokens."""
    pretend(80, processors)
    torch.set_float32_matmul_precision("high")
    check_causal(make(200, 96, 16, 2, taps, dtype), cut, (3.0, math.inf, -math.inf, math.nan))


@not_from_ptx
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [128, 129, 300, 600])
def test_ampere_tiles_in_pairs_are_right(dtype, tokens, pretend):
    """One block makes two tiles only where there are many, so the smaller tests have none; the bits
    are those of single tiles.
    """
    torch.set_float32_matmul_precision("high")
    inputs = make(tokens, 256, 8, 2, 1, dtype, integers=True)
    pretend(80, processors=1)
    pairs = gradients(kernel_conv, *inputs)
    for name, value, truth in zip(NAMES, pairs, exact(*inputs), strict=True):
        assert torch.equal(value, truth.to(value.dtype)), name
    x, weight, bias, residual, dy = make(tokens, 256, 8, 2, 1, dtype)
    packed = cuda.pack(weight, tokens, dtype)
    pairs = cuda.forward(x, packed, bias, residual), cuda.grad_input(dy, packed)
    pretend(80, processors=1000)
    assert torch.equal(pairs[0], cuda.forward(x, packed, bias, residual))
    assert torch.equal(pairs[1], cuda.grad_input(dy, packed))


@not_from_ptx
def test_volta_kernels_keep_to_the_triangle(pretend):
    pretend(70)
    test_upper_half_of_the_weight_is_never_read(torch.float16)
    test_gradient_of_the_upper_half_is_exactly_zero(torch.float16)
    test_two_runs_agree_bit_for_bit(torch.float16, 1000)


# ------------------------------------------------------------------------- inside torch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    x, weight, bias, residual, _ = make(65, 48, 2, 2, 3, dtype, extra=3)
    for optional in ((bias, residual), (None, None)):
        inputs = [
            None if t is None else t.detach().requires_grad_() for t in (x, weight, *optional)
        ]
        torch.library.opcheck(torch.ops.mixer.triangular_conv.default, tuple(inputs))


def test_compiles_without_graph_breaks():
    inputs = make(200, 96, 2, 2, 3, torch.bfloat16)

    def block(x, weight, bias, residual):
        return torch.nn.functional.gelu(kernel_conv(x * 2, weight, bias, residual))

    eager, compiled = (
        gradients(block, *inputs),
        gradients(torch.compile(block, fullgraph=True), *inputs),
    )
    for value, other in zip(eager, compiled, strict=True):
        # gelu's own rounding differs under the compiler, so the bits may
        assert rms(value.double() - other.double()) <= 1e-2 * rms(value)


def test_the_first_call_of_a_shape_may_be_in_a_cuda_graph_of_the_compiler():
    # a shape that no other test has: what is kept for a shape is made here
    inputs = make(208, 96, 2, 2, 3, torch.float16)
    compiled = torch.compile(kernel_conv, fullgraph=True, mode="reduce-overhead")
    runs = []
    for _ in range(3):  # run, recorded, replayed
        torch.compiler.cudagraph_mark_step_begin()
        runs.append([value.clone() for value in gradients(compiled, *inputs)])
    assert all(
        torch.equal(a, b) for a, b in zip(runs[0], gradients(kernel_conv, *inputs), strict=True)
    )
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_a_default_device_changes_nothing():
    inputs = make(216, 96, 2, 2, 3, torch.float16)  # again a shape of its own
    with torch.device("cuda"):
        found = gradients(kernel_conv, *inputs)
    assert all(
        torch.equal(a, b) for a, b in zip(found, gradients(kernel_conv, *inputs), strict=True)
    )


def test_graph_replay_computes_anew():
    x, weight, bias, residual, dy = make(200, 96, 2, 2, 3, torch.float16)

    def step():
        packed = cuda.pack(weight, 200, torch.float16)
        y = cuda.forward(x, packed, bias, residual)
        return (
            y,
            cuda.grad_input(dy, packed),
            *cuda.grad_weight(dy, x, 200, 3, 2, torch.float32, True),
        )

    step()  # builds, loads and probes outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn_like(x))
    weight.copy_(torch.randn_like(weight))
    dy.copy_(torch.randn_like(dy))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_runs_on_the_current_stream():
    """Work queued on a side stream is seen by the kernels there: on any other stream they would
    read x too early.
    """
    x, weight, bias, residual, dy = make(512, 256, 4, 1, 1, torch.float32, integers=True)
    wanted = kernel_conv(x, weight, bias, residual)
    late = torch.zeros_like(x)
    busy = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        late.copy_(x)
        y = kernel_conv(late, weight, bias, residual)
    stream.synchronize()
    assert torch.equal(y, wanted)


def test_autocast_keeps_fp32_parameters():
    x, weight, bias, residual, _ = make(129, 96, 2, 2, 1, torch.float32)
    parameters = [tensor.detach().requires_grad_() for tensor in (weight, bias)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = kernel_conv(x, *parameters, residual)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, kernel_conv(x.bfloat16(), weight, bias, residual.bfloat16()))
    y.float().square().mean().backward()
    assert all(
        parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()
        for parameter in parameters
    )


@not_from_ptx
def test_auto_takes_the_kernels():
    x, weight, bias, residual, _ = make(65, 64, 1, 1, 1, torch.bfloat16)
    assert torch.equal(
        triangular_conv(x, weight, bias, residual), kernel_conv(x, weight, bias, residual)
    )
    assert "float64" in choice.call_reason(x.device, torch.float64)


@not_from_ptx
@pytest.mark.parametrize(
    ("precision", "channels", "dtype", "reason"),
    [
        ("highest", 64, torch.float32, "float32 as TF32 alone, which is off here"),
        ("high", 20, torch.bfloat16, "heads of a multiple of 8 channels"),
    ],
)
def test_auto_leaves_to_dense_what_the_kernels_do_not_take(precision, channels, dtype, reason):
    torch.set_float32_matmul_precision(precision)
    inputs = make(65, channels, 1, 1, 1, dtype)[:4]
    assert torch.equal(triangular_conv(*inputs), triangular_conv(*inputs, backend="dense"))
    with pytest.raises(UserError, match=f"'cuda' cannot run here: .*{reason}"):
        kernel_conv(*inputs)


@not_from_ptx
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_second_device():
    inputs = make(129, 96, 2, 2, 3, torch.float32, integers=True, device="cuda:1")
    assert torch.cuda.current_device() == 0
    for value, truth in zip(gradients(kernel_conv, *inputs), exact(*inputs), strict=True):
        assert value.device.index == 1 and torch.equal(value, truth.to(value.dtype))
    assert torch.cuda.current_device() == 0
