"""Whatever shapes, strides, types and devices the operator is given: the right result, or an error
that describes them.
"""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d

from mixer.common.errors import UserError
from mixer.ops import BACKENDS, DTYPES, triangular_conv

TYPES = (*DTYPES, torch.int64, torch.bool, torch.complex64)
ALLOWED_ERROR = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}
SMALL = st.integers(1, 3)


@st.composite
def tensors(draw, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape with any strides; sometimes of another shape, type or device."""
    if draw(st.integers(0, 19)) == 0:
        place = draw(st.integers(0, len(shape) - 1))
        other = draw(st.sampled_from(((), (0,), (1,), (2,), (5,), (1, 1))))
        shape = (*shape[:place], *other, *shape[place + 1 :])
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
    heads, taps, batch, width = draw(SMALL), draw(SMALL), draw(st.integers(0, 3)), draw(SMALL)
    context = draw(st.integers(1, 9))
    tokens = draw(st.integers(1, context)) if draw(st.integers(0, 9)) else context + 1
    dtype = draw(st.sampled_from(DTYPES))
    weight_type = draw(st.sampled_from((dtype, torch.float32)))
    shape = (batch, tokens, heads * width)
    x = draw(tensors(shape, dtype))
    by_lag = draw(st.booleans())
    square = (heads, taps, context) if by_lag else (heads, taps, context, context)
    weight = draw(tensors(square, weight_type))
    bias = draw(st.none() | tensors((heads, context), weight_type))
    residual = draw(st.none() | tensors(shape, dtype))
    backend = draw(st.sampled_from((*BACKENDS, *BACKENDS, "triton", "")))
    return x, weight, bias, residual, backend, "lags" if by_lag else "weight"


def fits(x, weight, bias, residual, backend, kind) -> bool:
    """Whether the operator's documentation allows these arguments, on a machine without a GPU."""
    dimensions = 3 if kind == "lags" else 4
    if x.dim() != 3 or weight.dim() != dimensions or 0 in weight.shape[:2]:
        return False
    (heads, _, *square), (_, tokens, channels) = weight.shape, x.shape
    given = [tensor for tensor in (x, weight, bias, residual) if tensor is not None]
    return (
        backend in ("auto", "dense")
        and len(set(square)) == 1
        and 1 <= tokens <= square[0]
        and channels > 0
        and channels % heads == 0
        and x.dtype in DTYPES
        and weight.dtype in (x.dtype, torch.float32)
        and (bias is None or (bias.shape, bias.dtype) == ((heads, square[0]), weight.dtype))
        and (residual is None or (residual.shape, residual.dtype) == (x.shape, x.dtype))
        and len({tensor.device for tensor in given}) == 1
    )


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """nn.Conv1d of each head with a masked weight, in fp64."""
    heads, taps, context = weight.shape[:3]
    if weight.dim() == 3:
        lag = torch.arange(context)[:, None] - torch.arange(context)
        weight = weight[..., lag.clamp(min=0)]
    masked = weight.double().tril()
    padded = torch.zeros(x.shape[0], context, x.shape[2], dtype=torch.float64)
    padded[:, : x.shape[1]] = x.double()
    parts = [
        conv1d(part, masked[head].permute(1, 2, 0), padding="same")
        for head, part in enumerate(padded.chunk(heads, dim=-1))
    ]
    if bias is not None:
        parts = [part + bias[head, :, None].double() for head, part in enumerate(parts)]
    y = torch.cat(parts, -1)[:, : x.shape[1]]
    return y if residual is None else y + residual.double()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(max_examples=300, deadline=None, derandomize=True)
@given(arguments())
def test_any_arguments_give_the_right_result_or_an_error_that_describes_them(given):
    x, weight, bias, residual, backend, kind = given
    fit = fits(*given)
    try:
        kinds = {kind: weight}
        y = triangular_conv(x, bias=bias, residual=residual, backend=backend, **kinds)
    except (ValueError, UserError) as error:
        assert not fit, f"refused without reason: {error}"
        shown = rf"triangular_conv got x {re.escape(str(tuple(x.shape)))} .* they must be on one"
        assert re.match(rf"{shown}|backend is|mixing backend 'cuda' cannot run", str(error)), error
        return
    assert fit
    assert y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous()
    if x.device.type == "meta":
        return
    wanted = reference(x, weight, bias, residual)
    allowed = ALLOWED_ERROR.get(x.dtype, 1e-10) * (1 + wanted.abs())
    assert ((y.double() - wanted).abs() <= allowed).all()
