"""The triangular convolution on a CPU against the definition, and the operator's promises: as plain
PyTorch, and with plain_kernels.py in place of the kernels.
"""

import re

import plain_kernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mixer.ops import BACKENDS, DTYPES, cuda, triangular_conv
from mixer.ops.plain import diagonal_sums

# Every value of every dimension of interest occurs: tokens, channels, batch, heads, taps, context
# beyond the tokens.
SHAPES = [  # tokens, context, channels, batch, heads, taps
    (1, 1, 8, 1, 1, 1),
    (7, 9, 40, 3, 1, 3),
    (63, 63, 8, 1, 2, 1),
    (64, 80, 64, 3, 4, 4),
    (65, 65, 40, 1, 8, 5),
    (127, 128, 8, 32, 1, 1),
    (128, 128, 96, 1, 4, 3),
    (129, 200, 8, 3, 2, 4),
    (200, 200, 40, 1, 1, 5),
    (300, 320, 16, 3, 2, 3),
    (512, 512, 8, 1, 1, 1),
    (1000, 1000, 8, 1, 1, 1),
]


@pytest.fixture(autouse=True)
def plain_kernels_for_ours():
    """Backend "cuda" takes the way of the kernels, whose place plain_kernels.py has."""
    with plain_kernels.replacing_the_kernels():
        yield


def make(tokens, context, channels, batch, heads, taps, dtype=torch.float64, by_lag=False):
    generator = torch.Generator().manual_seed(tokens * 31 + channels)

    def normal(*shape):
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    x = normal(batch, tokens, channels)
    residual = normal(batch, tokens, channels)
    shape = (heads, taps, context) if by_lag else (heads, taps, context, context)
    return x, normal(*shape), normal(heads, context), residual


def convolve(backend):
    """The operator with a weight of either kind, which its dimensions tell apart."""

    def call(x, weight, bias, residual):
        if weight.dim() == 4:
            return triangular_conv(x, weight, bias, residual, backend)
        return triangular_conv(x, None, bias, residual, backend, lags=weight)

    return call


def definition(x, weight, bias, residual):
    """PyTorch's own Conv1d for each head, its (out, in, taps) weight masked lower-triangular;
    inputs padded to the context. Further lags are zero, further biases the last one.
    """
    tokens = x.shape[1]
    heads, taps, context = weight.shape[:3]
    if weight.dim() == 3:
        context = max(context, tokens)
        weight = nn.functional.pad(weight, (0, context - weight.shape[2]))
        if bias is not None:
            last = bias[:, -1:].expand(-1, max(0, context - bias.shape[1]))
            bias = torch.cat([bias, last], 1)[:, :context]
        lag = torch.arange(context)[:, None] - torch.arange(context)
        weight = weight[..., lag.clamp(min=0)]
    padded = nn.functional.pad(x, (0, 0, 0, context - tokens))
    outputs = []
    for head, channels in enumerate(padded.chunk(heads, dim=-1)):
        masked = weight[head].tril().permute(1, 2, 0)
        head_bias = None if bias is None else bias[head]
        output = nn.functional.conv1d(channels, masked, head_bias, padding="same")
        outputs.append(output[:, :tokens])
    y = torch.cat(outputs, dim=-1)
    return y if residual is None else y + residual


def gradients(function, arguments, dy):
    y = function(*arguments)
    return [y, *torch.autograd.grad(y, arguments, dy)]


@pytest.mark.parametrize("backend", ["dense", "cuda"])
@pytest.mark.parametrize("by_lag", [False, True], ids=["weight", "lags"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_output_and_gradients_are_those_of_a_masked_conv1d(backend, by_lag, shape):
    arguments = make(*shape, by_lag=by_lag)
    dy = torch.randn_like(arguments[0])
    expected = gradients(definition, arguments, dy)
    results = gradients(convolve(backend), arguments, dy)
    for name, ours, theirs in zip(
        ("y", "dx", "dweight", "dbias", "dresidual"), results, expected, strict=True
    ):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )
    tokens = shape[0]  # exactly zero above the diagonal and beyond the tokens
    above = results[2][..., tokens:] if by_lag else results[2].triu(1)
    assert torch.count_nonzero(above) == 0


def hessian_product(backend: str, by_lag: bool) -> torch.Tensor:
    """Of a network whose loss is differentiated twice in its first weight, by torch.autograd.grad,
    which goes round the error of torch's once_differentiable.
    """
    x, weight, bias, residual = make(9, 12, 6, 2, 2, 3, by_lag=by_lag)
    loss = convolve(backend)(x.tanh(), weight, bias, residual).pow(3).sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    return torch.autograd.grad(gradient, weight, torch.ones_like(weight), allow_unused=True)[0]


def penalty(backend: str, by_lag: bool) -> torch.Tensor:
    """A gradient that does not depend on x, but on the weight: torch sees no graph behind it."""
    x, weight, bias, residual = make(9, 12, 6, 2, 2, 3, by_lag=by_lag)
    loss = convolve(backend)(x, weight, bias, residual).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad((weight.sum() + gradient.square().sum()), weight)[0] - 1


def transform(backend: str, by_lag: bool) -> torch.Tensor:
    x, weight, bias, residual = (t.detach() for t in make(9, 12, 6, 2, 2, 3, by_lag=by_lag))

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return convolve(backend)(x, weight, bias, residual).pow(3).sum()

    return torch.func.grad(loss)(weight)


@pytest.mark.parametrize("by_lag", [False, True], ids=["weight", "lags"])
@pytest.mark.parametrize("derivative", [hessian_product, penalty, transform])
def test_derivatives_that_the_kernels_do_not_have_are_refused_and_never_left_out(
    derivative, by_lag
):
    assert derivative("dense", by_lag).abs().max() > 1
    # Of transforms torch itself says that; of second derivatives we do.
    message = "with functorch transforms" if derivative is transform else "'dense': use it"
    with pytest.raises(RuntimeError, match=message):
        derivative("cuda", by_lag)
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match=message):
        derivative("cuda", by_lag)


@pytest.mark.parametrize("by_lag", [False, True], ids=["weight", "lags"])
def test_opcheck_of_the_operators(by_lag):
    x, weight, bias, residual = make(9, 12, 6, 2, 2, 1, torch.float32, by_lag=by_lag)
    weight = weight.detach().squeeze(1).requires_grad_()
    window = 12 * by_lag
    for extra in ((bias, residual), (None, None)):
        torch.library.opcheck(torch.ops.mixer.packed_conv.default, (x, weight, *extra))
    packed = cuda.packed_conv(x, weight, bias, residual)[1].detach()
    dy = torch.randn_like(x)
    torch.library.opcheck(torch.ops.mixer.packed_conv_grad_input.default, (dy, packed, window))
    arguments = (dy, x.detach(), 12, 2, True, window)
    torch.library.opcheck(torch.ops.mixer.packed_conv_grad_weight.default, arguments)


WINDOWS = [  # tokens, window, numbers of a head's bias, taps: short windows and longer ones
    (1, 4, 1, 1),
    (70, 1, 70, 3),
    (70, 4, 1, 1),
    (300, 8, 1, 3),
    (300, 9, 1, 1),
    (300, 17, 1, 1),
    (70, 40, 20, 1),
    (500, 100, 7, 3),
]


@pytest.mark.parametrize("backend", ["dense", "cuda"])
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_a_window_ends_where_its_lags_end(backend, case):
    tokens, window, biases, taps = case
    x, lags, _, residual = make(tokens, window, 24, 3, 2, taps, by_lag=True)
    bias = torch.randn(2, biases, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    arguments = (x, lags, bias, residual)
    expected = gradients(definition, arguments, dy)
    torch.testing.assert_close(gradients(convolve(backend), arguments, dy), expected)


def test_opcheck_of_the_operators_of_short_windows():
    x, lags, _, residual = make(9, 4, 6, 2, 2, 1, torch.float32, by_lag=True)
    lags = lags.detach().squeeze(1).requires_grad_()
    bias = torch.randn(2, 1, requires_grad=True)
    for extra in ((bias, residual), (None, None)):
        torch.library.opcheck(torch.ops.mixer.short_conv.default, (x, lags, *extra))
    arguments = (torch.randn_like(x), x.detach(), lags.detach(), 1)
    torch.library.opcheck(torch.ops.mixer.short_conv_gradients.default, arguments)


@pytest.mark.parametrize("backend", ["dense", "cuda"])
@pytest.mark.parametrize("by_lag", [False, True], ids=["weight", "lags"])
def test_compiles_without_a_graph_break(backend, by_lag):
    arguments = make(9, 12, 6, 2, 2, 3, torch.float32, by_lag=by_lag)
    function = convolve(backend)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    dy = torch.randn_like(arguments[0])
    for ours, eager in zip(
        gradients(compiled, arguments, dy), gradients(function, arguments, dy), strict=True
    ):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("backend", ["dense", "cuda"])
def test_no_token_sees_a_later_one_to_the_last_bit(backend):
    x, weight, bias, residual = (t.detach() for t in make(200, 200, 24, 2, 2, 3, torch.float32))
    y = triangular_conv(x, weight, bias, residual, backend=backend)
    for t in (1, 64, 65, 199):
        changed = x.clone()
        changed[:, t:] = torch.randn_like(changed[:, t:]) * 1e3
        assert torch.equal(
            triangular_conv(changed, weight, bias, residual, backend=backend)[:, :t], y[:, :t]
        )


@pytest.mark.parametrize("backend", ["dense", "cuda"])
def test_the_upper_half_of_the_weight_is_never_read(backend):
    x, weight, bias, residual = make(70, 80, 16, 2, 2, 3)
    poisoned = (
        weight.detach()
        .masked_fill(torch.ones(80, 80, dtype=torch.bool).triu(1), float("nan"))
        .requires_grad_()
    )
    dy = torch.randn_like(x)
    clean = gradients(
        lambda *a: triangular_conv(*a, backend=backend), (x, weight, bias, residual), dy
    )
    dirty = gradients(
        lambda *a: triangular_conv(*a, backend=backend), (x, poisoned, bias, residual), dy
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("backend", ["dense", "cuda"])
@pytest.mark.parametrize("by_lag", [False, True], ids=["weight", "lags"])
def test_autocast_casts_the_input_and_leaves_fp32_gradients_to_the_parameter(backend, by_lag):
    x, weight, bias, residual = make(65, 65, 16, 3, 2, 1, torch.float32, by_lag=by_lag)
    with torch.autocast("cpu", torch.bfloat16):
        y = convolve(backend)(x, weight, bias, residual)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("weight", "lags"), [(None, None), (torch.ones(1, 1, 9, 9), torch.ones(1, 1, 9))]
)
def test_exactly_one_kind_of_weight_is_given(weight, lags):
    with pytest.raises(ValueError, match="either weight .* or lags"):
        triangular_conv(torch.zeros(2, 7, 6), weight, lags=lags)


def test_what_is_no_tensor_is_named():
    x, weight, bias, residual = make(7, 9, 6, 2, 1, 1, torch.float32)
    for wrong, named in (
        ((x.tolist(), weight), "x list"),
        ((None, weight), "x NoneType"),
        ((x, 3, bias.detach().numpy()), "weight int, bias ndarray"),
    ):
        with pytest.raises(TypeError, match=f"got {named}; allowed: torch tensors"):
            triangular_conv(*wrong)


@pytest.mark.parametrize("context", (1, 2, 7))
def test_lags_are_summed_along_diagonals(context):
    x = torch.randn(2, 3, context, context).double()
    sums = [x.diagonal(-lag, -2, -1).sum(-1) for lag in range(context)]
    torch.testing.assert_close(diagonal_sums(x), torch.stack(sums, -1))


# ------------------------------------------------------------------------- any arguments

TYPES = (*DTYPES, torch.int64, torch.bool, torch.complex64)
ALLOWED_ERROR = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}
SMALL = st.integers(1, 3)


@st.composite
def tensors(draw, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape with any strides; sometimes of another shape, type or device."""
    if draw(st.integers(0, 19)) == 0:
        axis = draw(st.integers(0, len(shape) - 1))
        sizes = draw(st.sampled_from(((), (0,), (1,), (2,), (5,), (1, 1))))
        shape = (*shape[:axis], *sizes, *shape[axis + 1 :])
    if draw(st.integers(0, 19)) == 0:
        dtype = draw(st.sampled_from(TYPES))
    if draw(st.integers(0, 39)) == 0:
        return torch.empty(shape, dtype=dtype, device="meta")
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.sampled_from((1, 2)))
    sizes = [shape[axis] * step for axis in order]
    stored = torch.randn(sizes, generator=numbers, dtype=torch.float64).to(dtype)
    view = stored[tuple(slice(None, None, step) for _ in sizes)]
    view = view.permute([order.index(axis) for axis in range(len(shape))])
    if draw(st.booleans()) and shape and shape[0]:
        view = view[:1].expand(shape)  # the same memory for all of a batch
    return view


@st.composite
def arguments(draw) -> tuple:
    heads = draw(SMALL)
    taps = draw(SMALL)
    batch = draw(st.integers(0, 3))
    width = draw(SMALL)
    context = draw(st.integers(1, 9))
    tokens = draw(st.integers(1, context)) if draw(st.integers(0, 9)) else context + 1
    dtype = draw(st.sampled_from(DTYPES))
    weight_type = draw(st.sampled_from((dtype, torch.float32)))
    shape = (batch, tokens, heads * width)
    x = draw(tensors(shape, dtype))
    by_lag = draw(st.booleans())
    square = (heads, taps, context) if by_lag else (heads, taps, context, context)
    weight = draw(tensors(square, weight_type))
    biases = draw(st.integers(1, 12)) if by_lag else context
    bias = draw(st.none() | tensors((heads, biases), weight_type))
    residual = draw(st.none() | tensors(shape, dtype))
    backend = draw(st.sampled_from((*BACKENDS, *BACKENDS, "triton")))
    return x, weight, bias, residual, backend, by_lag


def fits(x, weight, bias, residual, backend, by_lag) -> bool:
    """Whether the operator's documentation allows these arguments."""
    dimensions = 3 if by_lag else 4
    if x.dim() != 3 or weight.dim() != dimensions or 0 in weight.shape:
        return False
    heads, _, *square = weight.shape
    _, tokens, channels = x.shape
    tensors = [tensor for tensor in (x, weight, bias, residual) if tensor is not None]
    return (
        backend in BACKENDS
        and len(set(square)) == 1
        and 1 <= tokens
        and (by_lag or tokens <= square[0])
        and channels > 0
        and channels % heads == 0
        and x.dtype in DTYPES
        and weight.dtype in (x.dtype, torch.float32)
        and (bias is None or (bias.dim(), bias.dtype) == (2, weight.dtype))
        and (bias is None or bias.shape[0] == heads and bias.shape[1] > 0)
        and (bias is None or by_lag or bias.shape[1] == square[0])
        and (residual is None or (residual.shape, residual.dtype) == (x.shape, x.dtype))
        and len({tensor.device for tensor in tensors}) == 1
    )


X = torch.ones(2, 6, 8)
WEIGHT = torch.ones(2, 1, 6, 6)
LAGS = torch.ones(2, 1, 6)
ODD = {
    "either weight or lags": {"lags": LAGS},
    "x of 3 dimensions": {"x": X[0]},
    "x in bfloat16, float16, float32 or float64": {"x": X.long()},
    "weight of 4 dimensions": {"weight": WEIGHT[0]},
    "lags of 3 dimensions": {"weight": None, "lags": WEIGHT},
    "x and weight with 1 or more in each dimension": {"x": X[:, :0]},
    "a square weight, (context, context)": {"weight": WEIGHT[..., :5]},
    "a context of all tokens": {"weight": WEIGHT[..., :5, :5]},
    "heads that divide the channels": {"x": X[..., :7]},
    "weight in x's dtype or float32": {"weight": WEIGHT.half()},
    "bias (heads, context)": {"bias": torch.ones(6, 2)},
    "bias in the dtype of weight": {"bias": torch.ones(2, 6).half()},
    "residual of x's shape": {"residual": X[:1]},
    "residual in x's dtype": {"residual": X.half()},
    "all tensors on one device": {"residual": X.to("meta")},
}


@pytest.mark.parametrize(("rule", "odd"), ODD.items(), ids=ODD.keys())
def test_the_rule_that_is_broken_is_said_first(rule, odd):
    with pytest.raises(ValueError, match=f"^triangular_conv needs {re.escape(rule)}; it got x"):
        triangular_conv(**{"x": X, "weight": WEIGHT} | odd)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(max_examples=300, deadline=None, derandomize=True)
@given(arguments())
def test_any_arguments_give_the_right_result_or_an_error_that_describes_them(drawn):
    x, weight, bias, residual, backend, by_lag = drawn
    fit = fits(*drawn)
    try:
        if by_lag:
            y = triangular_conv(x, None, bias, residual, backend, lags=weight)
        else:
            y = triangular_conv(x, weight, bias, residual, backend)
    except ValueError as error:
        assert not fit, f"refused without reason: {error}"
        shown = (
            rf"triangular_conv needs .*; it got x {re.escape(str(tuple(x.shape)))} .*; allowed: "
        )
        assert re.match(f"{shown}|backend is", str(error)), error
        return
    assert fit
    assert y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous()
    if x.device.type == "meta":
        return
    tensors = (x, weight, bias, residual)
    expected = definition(*(None if tensor is None else tensor.double() for tensor in tensors))
    allowed = ALLOWED_ERROR.get(x.dtype, 1e-10) * (1 + expected.abs())
    assert ((y.double() - expected).abs() <= allowed).all()
