"""The CUDA kernels against fp64, on a GPU: `pytest tests/ops/test_ops_cuda.py`.

A newer GPU runs the kernels of older ones too, which have the same promises to keep.
"""

import math

import pytest
import torch

from mixer.ops import cuda, plain, selftest, triangular_conv

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

TOKENS = [1, 7, 63, 64, 65, 127, 128, 129, 200, 512, 1000, 1024, 2048]
CHANNELS = [8, 40, 64, 96, 256, 520, 1024]
BATCH = [1, 3, 32]
HEADS = [1, 2, 4, 8]
TAPS = [1, 1, 3]
KINDS = ["weight", "lags"]
WINDOWS = [None, 4, 8, 9, 64, 128, 300]  # None: as many lags as the context has tokens
DTYPES = [torch.float16, torch.bfloat16]
NAMES = ("y", "dx", "dweight", "dbias", "dresidual")
# The compute capabilities that kernels are written for, and the types that they take.
SETS = {70: [torch.float16], 80: DTYPES, 90: DTYPES}


def covering_cases() -> list[dict]:
    """52 cases: each context with each dtype twice, all other choices cycling with steps that share
    no factor.
    """
    cases = []
    for index in range(2 * len(TOKENS) * len(DTYPES)):
        tokens = TOKENS[index % 13]
        channels = CHANNELS[index % 7]
        batch = BATCH[index // 2 % 3]
        if batch == 32 and tokens * max(channels, 256) > 512 * 520:
            batch = 3  # keeps the fp64 reference short
        cases.append(
            dict(
                tokens=tokens,
                channels=channels,
                batch=batch,
                heads=HEADS[index // 3 % 4],
                taps=TAPS[index // 5 % 3],
                dtype=DTYPES[index // 13 % 2],
                extra=(0, 0, 9, 70)[index // 7 % 4],
                with_bias=index // 2 % 2 == 0,
                with_residual=index // 4 % 2 == 0,
                strided=index // 3 % 2 == 0,
                wide_weight=index // 6 % 2 == 0,
                by_lag=index // 5 % 2 == 0,
                window=WINDOWS[index % 7] if index // 5 % 2 == 0 else None,
                bias_a_head=index // 9 % 2 == 0 and index // 5 % 2 == 0,
            )
        )
    return cases


def is_served(case: dict) -> bool:
    width = case["channels"] // case["heads"]
    return width * case["dtype"].itemsize % 16 == 0


SERVED = [case for case in covering_cases() if is_served(case)]
OF_SETS = [(case, kernels) for kernels in SETS for case in SERVED if case["dtype"] in SETS[kernels]]


def describe(value) -> str:
    values = value.values() if isinstance(value, dict) else [value]
    return "-".join(str(value).removeprefix("torch.") for value in values)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """A failed build fails here, with its message, instead of letting other backends pass for the
    kernels.
    """
    reason = selftest.fault(0)
    assert reason is None, reason


@pytest.fixture(autouse=True)
def poison():
    """Every fresh output starts as NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


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
    by_lag=False,
    window=None,
    bias_a_head=False,
    integers=False,
    device="cuda",
    seed=0,
):
    """(x, weight, bias, residual, dy); the weight, or the lags in its place, are fp32 if
    `wide_weight`, scaled so that y stays near 1. `bias_a_head`: by lag, one for all tokens.
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
        buffer = draw(shape[1], shape[0], shape[2] + 3).to(dtype)
        return buffer.transpose(0, 1)[..., 1:-2]

    parameter_dtype = torch.float32 if wide_weight else dtype
    scale = 1.0 if integers else (min(tokens, window or tokens) * taps) ** -0.5
    square = (window or context,) if by_lag else (context, context)
    weight = (draw(heads, taps, *square) * scale).to(parameter_dtype)
    shape = (batch, tokens, channels)
    biases = 1 if bias_a_head else context
    bias = draw(heads, biases).to(parameter_dtype) if with_bias else None
    return rows(*shape), weight, bias, rows(*shape) if with_residual else None, rows(*shape)


def make_one_tap(*arguments, **options):
    """The same for one tap, as the kernels take it: the weight has no dimension of taps."""
    x, weight, bias, residual, dy = make(*arguments[:4], 1, *arguments[4:], **options)
    return x, weight.squeeze(1), bias, residual, dy


def gradients(function, x, weight, bias, residual, dy):
    """(y, dx, dweight, dbias, dresidual) of `function`, None for what is not there."""
    inputs = [
        None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, residual)
    ]
    y = function(*inputs)
    results = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy))
    return [y.detach(), *(None if t is None else next(results) for t in inputs)]


def exact(x, weight, bias, residual, dy):
    """The same in fp64, from factors as the kernels see them: rounded to x's dtype."""
    weight = weight.to(x.dtype)
    tensors = (x, weight, bias, residual, dy)
    return gradients(dense_conv, *(None if t is None else t.double() for t in tensors))


def dense_conv(x, weight, bias, residual):
    if weight.dim() == 4:
        return plain.triangular_conv(x, weight, bias, residual)
    return plain.triangular_conv(x, None, bias, residual, lags=weight)


def kernel_conv(x, weight, bias, residual):
    if weight.dim() == 4:
        return triangular_conv(x, weight, bias, residual, backend="cuda")
    return triangular_conv(x, None, bias, residual, backend="cuda", lags=weight)


def rms(values):
    return values.double().square().mean().sqrt().item()


@pytest.fixture
def pretend(monkeypatch):
    """Lets the kernels of an older compute capability serve, as they would with so many
    multiprocessors.
    """
    facts = cuda.device_facts(0)

    def choose(capability: int, processors: int = facts[1]) -> None:
        if capability > facts[0]:
            pytest.skip(f"this GPU has no kernels for compute capability {capability}")
        monkeypatch.setattr(cuda, "device_facts", lambda index: (capability, processors))

    return choose


# ------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("case, kernels", OF_SETS, ids=describe)
def test_as_near_to_fp64_as_torch(case, kernels, pretend):
    pretend(kernels)
    inputs = make(**case)
    expected = exact(*inputs)
    ours = gradients(kernel_conv, *inputs)
    dense = gradients(dense_conv, *inputs)
    for name, value, peer, truth in zip(NAMES, ours, dense, expected, strict=True):
        if truth is None:
            assert value is None
            continue
        assert value.dtype == peer.dtype and value.isfinite().all(), name
        error = rms(value - truth)
        rival = rms(peer - truth)
        size = rms(truth)
        # One fp32 rounding: where torch happens to be exact (one token), twice its error would be
        # nothing at all.
        assert error <= 2 * rival + 2**-23 * size, (
            f"{name}: error {error:.3e}, torch {rival:.3e}, of {size:.3e}"
        )
        assert error <= 5e-3 * size, f"{name}: relative error {error / size:.3e}"


@pytest.mark.parametrize("case, kernels", OF_SETS[::3], ids=describe)
def test_small_integers_are_exact(case, kernels, pretend):
    pretend(kernels)
    inputs = make(**case | {"taps": 1}, integers=True)
    for name, value, truth in zip(
        NAMES, gradients(kernel_conv, *inputs), exact(*inputs), strict=True
    ):
        assert truth is None or torch.equal(value, truth.to(value.dtype)), name


def test_empty_batch_gives_zero_gradients():
    packed = cuda.pack(torch.ones(2, 6, 6, device="cuda"), 5, torch.float16)
    empty = torch.empty(0, 5, 8, device="cuda", dtype=torch.float16)
    assert (
        cuda.forward(empty, packed, None, None).shape
        == cuda.grad_input(empty, packed).shape
        == (0, 5, 8)
    )
    for window in (0, 6):
        dweight, dbias = cuda.grad_weight(empty, empty, 6, 2, True, window)
        assert (dweight == 0).all() and (dbias == 0).all()


def test_gradient_of_a_sum():
    """sum() hands back one value expanded over all dimensions: every stride is 0."""
    inputs = make(130, 40, 2, 1, 1, torch.float16, integers=True)[:4]
    one = torch.ones((), device="cuda", dtype=torch.float16).expand(2, 130, 40)
    for value, truth in zip(gradients(kernel_conv, *inputs, one), exact(*inputs, one), strict=True):
        assert torch.equal(value, truth.to(value.dtype))


# ------------------------------------------------------------------------- the triangle


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("by_lag", [False, True], ids=KINDS)
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 130, 199])
def test_causal_bit_for_bit(kernels, by_lag, cut, pretend):
    # Tensor cores multiply the zeros above the diagonal inside a block of 64 tokens, so there only
    # what is finite stays apart.
    pretend(kernels)
    x, weight, bias, residual, dy = make_one_tap(200, 96, 2, 2, torch.float16, by_lag=by_lag)
    window = cuda.window_of(weight)
    packed = cuda.pack(weight, 200, x.dtype)
    y = cuda.forward(x, packed, bias, residual, window)
    dx = cuda.grad_input(dy, packed, window)
    for stranger in (3.0, -6e4):
        later = x.clone()
        earlier = dy.clone()
        later[:, cut:] = stranger
        earlier[:, :cut] = stranger
        y_changed = cuda.forward(later, packed, bias, residual, window)
        assert torch.equal(y_changed[:, :cut], y[:, :cut])
        assert torch.equal(cuda.grad_input(earlier, packed, window)[:, cut:], dx[:, cut:])
    # A shorter input gives the same bits as the start of a longer one.
    packed = cuda.pack(weight, cut, x.dtype)
    short = cuda.forward(x[:, :cut], packed, bias, residual[:, :cut], window)
    assert torch.equal(short, y[:, :cut])


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("by_lag", [False, True], ids=KINDS)
def test_what_no_token_needs_is_never_read_and_has_no_gradient(kernels, by_lag, pretend):
    pretend(kernels)
    x, weight, bias, residual, dy = make(129, 64, 2, 2, 1, torch.float16, extra=70, by_lag=by_lag)
    poisoned = weight.clone()
    if by_lag:
        poisoned[..., 129:] = math.nan
    else:
        poisoned.masked_fill_(torch.ones_like(weight, dtype=torch.bool).triu(1), math.nan)
        poisoned[:, :, 129:] = math.nan
    clean = gradients(kernel_conv, x, weight, bias, residual, dy)
    dirty = gradients(kernel_conv, x, poisoned, bias, residual, dy)
    assert all(map(torch.equal, clean, dirty))
    unread = clean[2][..., 129:] if by_lag else clean[2].triu(1)
    assert not unread.any() and not clean[3][:, 129:].any()


@pytest.mark.parametrize("kernels", SETS)
def test_a_row_that_is_nan_stays_in_its_row(kernels, pretend):
    pretend(kernels)
    x, *_, dy = make(129, 64, 2, 2, 1, torch.float16)
    dy[:, :5] = math.nan
    dweight, dbias = cuda.grad_weight(dy, x, 199, 2, True)
    assert (dweight.triu(1) == 0).all() and (dweight[:, 129:] == 0).all()
    assert (dbias[:, 129:] == 0).all()
    assert dweight[:, 5:].isfinite().all() and dbias[:, 5:].isfinite().all()


# ------------------------------------------------------------------------- inside torch


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("window", [4, 8, 9, 128])
def test_windows_are_causal_and_end_bit_for_bit(kernels, window, pretend):
    """Blocks of tokens further apart than the window never meet, whatever stands there."""
    pretend(kernels)
    x, lags, bias, residual, dy = make(1100, 96, 2, 2, 1, torch.float16, by_lag=True, window=window)
    y, dx, *_ = gradients(kernel_conv, x, lags, bias, residual, dy)
    for cut in (1, 63, 64, 500, 1099):
        later = x.clone()
        earlier = dy.clone()
        later[:, cut:] = -6e4
        earlier[:, :cut] = -6e4
        y_changed, dx_changed, *_ = gradients(kernel_conv, later, lags, bias, residual, earlier)
        assert torch.equal(y_changed[:, :cut], y[:, :cut])
        assert torch.equal(dx_changed[:, cut:], dx[:, cut:])
        if cut + window - 1 < 1100:
            before = x.clone()
            before[:, :cut] = 3.0
            y_changed = kernel_conv(before, lags, bias, residual)
            assert torch.equal(y_changed[:, cut + window - 1 :], y[:, cut + window - 1 :])


@pytest.mark.parametrize("by_lag", [False, True], ids=KINDS)
def test_cuda_graphs_of_compiled_code_have_the_same_bits(by_lag):
    inputs = make(208, 96, 2, 2, 1, torch.float16, by_lag=by_lag)
    compiled = torch.compile(kernel_conv, fullgraph=True, mode="reduce-overhead")
    runs = []
    for _ in range(3):  # run, recorded, replayed
        torch.compiler.cudagraph_mark_step_begin()
        runs.append([value.clone() for value in gradients(compiled, *inputs)])
    assert all(
        torch.equal(a, b) for a, b in zip(runs[0], gradients(kernel_conv, *inputs), strict=True)
    )
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("by_lag", [False, True], ids=KINDS)
def test_graph_replay_computes_anew(kernels, by_lag, pretend):
    pretend(kernels)
    x, weight, bias, residual, dy = make_one_tap(1000, 96, 2, 2, torch.float16, by_lag=by_lag)
    window = cuda.window_of(weight)

    def step():
        packed = cuda.pack(weight, 1000, torch.float16)
        return (
            cuda.forward(x, packed, bias, residual, window),
            cuda.grad_input(dy, packed, window),
            *cuda.grad_weight(dy, x, 1000, 2, True, window),
        )

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
    x, weight, bias, residual, dy = make(512, 256, 4, 1, 1, torch.float16, integers=True)
    expected = kernel_conv(x, weight, bias, residual)
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
    assert torch.equal(y, expected)


def test_auto_takes_the_kernels():
    x, weight, bias, residual, _ = make(65, 64, 1, 1, 1, torch.bfloat16)
    assert torch.equal(
        triangular_conv(x, weight, bias, residual), kernel_conv(x, weight, bias, residual)
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_second_device():
    inputs = make(129, 96, 2, 2, 1, torch.float16, integers=True, device="cuda:1")
    assert torch.cuda.current_device() == 0
    for value, truth in zip(gradients(kernel_conv, *inputs), exact(*inputs), strict=True):
        assert value.device.index == 1 and torch.equal(value, truth.to(value.dtype))
    assert torch.cuda.current_device() == 0
