"""Backend `cuda` of the triangular convolution: `by_kernels`, made of the operators
`mixer::short_conv`, for a few lags, and `mixer::packed_conv`, for all else, with their autograd
formulas; and `row_by_kernel`, which is `mix_row`. They call the CUDA kernels of `csrc` through
ctypes.

Shapes: x, y, residual, dy, dx (batch, tokens, channels); weight (heads, context, context), out
then in, or by lag (heads, window); bias (heads, context), context >= tokens; packed (heads, rows,
columns). x, dy and packed are fp16 or bf16, and sums fp32. `window` is 0 for a full weight.

Kernels run on the current stream of x's device, nothing here waits for the GPU, and the same call
gives the same bits each time. triangular.py has checked shapes, dtypes and devices, and
selftest.py whether the kernels can run.
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mixer.ops.plain import for_positions, seen_by_tap
from mixer.ops.registration import operator, refuse_second_derivatives, without_derivative

STRIP_ROWS = 128  # MIXER_STRIP_ROWS in csrc/params.h
SHORT_WINDOW = 8  # MIXER_SHORT_WINDOW
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum MixerDtype

POINTERS = [
    "x", "weight", "packed", "bias", "residual", "y", "dy", "dx", "dweight", "dbias",
    "workspace", "memory", "positions", "stream",
]  # fmt: skip
STRIDES = [
    "x_batch_stride", "x_token_stride",
    "residual_batch_stride", "residual_token_stride",
    "dy_batch_stride", "dy_token_stride",
    "memory_batch_stride", "memory_head_stride", "positions_stride",
]  # fmt: skip
SIZES = [
    "batch", "tokens", "channels", "context", "heads", "columns", "window", "lag_zero",
    "dtype", "weight_dtype", "device", "capability", "processors",
]  # fmt: skip


class Params(ctypes.Structure):
    """TriangularConvParams of csrc/params.h, field by field. What is not set is null or zero."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in POINTERS]
        + [(name, ctypes.c_int64) for name in STRIDES]
        + [(name, ctypes.c_int32) for name in SIZES]
    )


# ------------------------------------------------------------------------- the operators


def by_kernels(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """`triangular_conv` by the kernels, of a weight (heads, taps, context, context) or by lag
    (heads, taps, window). The kernels have one tap; several are a sum of calls. By lag, the bias is
    (heads, any number), of which later tokens have the last.
    """
    heads, taps = weight.shape[:2]
    by_lag = weight.dim() == 3
    is_short = by_lag and weight.shape[-1] <= SHORT_WINDOW
    if by_lag and bias is not None and not (is_short and bias.shape[-1] == 1):
        bias = for_positions(x.shape[1], bias)
    conv = short_conv if is_short else packed_conv_result
    if taps == 1:
        return conv(x, weight.squeeze(1), bias, residual)
    x_by_head = x.unflatten(-1, (heads, -1))  # (batch, tokens, heads, channels of a head)
    y = residual
    for tap, tap_weight in enumerate(weight.unbind(1)):
        shifted = seen_by_tap(x_by_head, tap, taps).flatten(2)
        y = conv(shifted, tap_weight, bias if tap == 0 else None, y)
    assert y is not None  # there is a tap
    return y


def packed_conv_result(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None):
    y, _ = packed_conv(x, weight, bias, residual)
    return y


@operator("mixer::packed_conv")
def packed_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y and the packed weight (masked, cast, padded), which is made once and kept for backward."""
    packed = pack(weight, x.shape[1], x.dtype)
    return forward(x, packed, bias, residual, window_of(weight)), packed


@torch.library.register_fake("mixer::packed_conv")
def _(x, weight, bias, residual):
    packed = x.new_empty(packed_shape(weight.shape[0], x.shape[1], window_of(weight)))
    return torch.empty_like(x, memory_format=torch.contiguous_format), packed


def _setup_context(ctx, inputs, output):
    x, weight, bias, _ = inputs
    _, packed = output
    ctx.mark_non_differentiable(packed)
    ctx.set_materialize_grads(False)
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    # Nothing is kept that no gradient will ask for.
    ctx.save_for_backward(x if needs_weight or needs_bias else None, packed if needs_x else None)
    ctx.heads = weight.shape[0]
    ctx.window = window_of(weight)
    ctx.context = weight.shape[-1] if bias is None else bias.shape[-1]
    ctx.weight_dtype = weight.dtype


def _backward(ctx, dy, _):
    refuse_second_derivatives("triangular_conv")
    if dy is None:
        return None, None, None, None
    x, packed = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad
    dx = grad_input(dy, packed, ctx.window) if needs_x else None
    dweight = dbias = None
    if needs_weight or needs_bias:
        gradients = grad_weight(dy, x, ctx.context, ctx.heads, needs_bias, ctx.window)
        dweight, dbias = (gradient.to(ctx.weight_dtype) for gradient in gradients)
    return (
        dx,
        dweight if needs_weight else None,
        dbias if needs_bias else None,
        dy if needs_residual else None,
    )


torch.library.register_autograd("mixer::packed_conv", _backward, setup_context=_setup_context)


# ------------------------------------------------------------------------- short windows


@operator("mixer::short_conv")
def short_conv(x: Tensor, lags: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y, for lags (heads, window) of at most SHORT_WINDOW. A bias (heads, 1) is of all tokens."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    heads, window = lags.shape
    tensors = {"x": x, "weight": lags, "bias": bias, "residual": residual, "y": y}
    if y.numel():
        call("mixer_short_conv", params_of(x, x.shape, heads, window, tensors))
    return y


@torch.library.register_fake("mixer::short_conv")
def _(x, lags, bias, residual):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("mixer::short_conv_gradients")
def short_conv_gradients(
    dy: Tensor, x: Tensor, lags: Tensor, biases: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, contiguous, in dy's dtype; in fp32 dlags (heads, window) and dbias (heads, biases)."""
    dx, dlags, dbias = empty_short_conv_gradients(dy, x, lags, biases)
    if not x.numel():
        return dx, dlags.zero_(), dbias.zero_()
    heads, window = lags.shape
    tensors = {"dy": dy, "x": x, "dx": dx, "weight": lags, "dweight": dlags}
    tensors["dbias"] = dbias if biases else None
    params = params_of(x, x.shape, heads, window, tensors)
    params.weight_dtype = DTYPE_CODES[lags.dtype]
    workspace_bytes = load_library(params.device).mixer_short_conv_workspace(ctypes.byref(params))
    workspace = x.new_empty(workspace_bytes, dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    call("mixer_short_conv_gradients", params)
    return dx, dlags, dbias


@torch.library.register_fake("mixer::short_conv_gradients")
def empty_short_conv_gradients(dy, x, lags, biases):
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    dlags = x.new_empty(lags.shape, dtype=sum_dtype)
    dbias = x.new_empty((lags.shape[0], biases), dtype=sum_dtype)
    return dx, dlags, dbias


def _setup_short(ctx, inputs, output):
    x, lags, bias, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, lags)
    ctx.biases = bias.shape[-1] if ctx.needs_input_grad[2] else 0


def _backward_short(ctx, dy):
    refuse_second_derivatives("triangular_conv")
    if dy is None:
        return None, None, None, None
    x, lags = ctx.saved_tensors
    dx, dlags, dbias = short_conv_gradients(dy, x, lags, ctx.biases)
    dbias = dbias.to(lags.dtype) if ctx.biases else None
    return dx, dlags.to(lags.dtype), dbias, dy if ctx.needs_input_grad[3] else None


torch.library.register_autograd("mixer::short_conv", _backward_short, setup_context=_setup_short)
without_derivative("short_conv_gradients", "triangular_conv")


# ------------------------------------------------------------------------- the kernels


def window_of(weight: Tensor) -> int:
    """The lags of a weight by lag; 0 for a full weight."""
    return weight.shape[-1] if weight.dim() == 2 else 0


def packed_shape(heads: int, tokens: int, window: int) -> tuple[int, int, int]:
    """(heads, tokens, tokens rounded up to 8), so that every row starts on 16 bytes; by lag the
    shape of a strip (csrc/params.h).
    """
    if window:
        return heads, STRIP_ROWS, lag_zero(tokens, window) + STRIP_ROWS
    return heads, tokens, (tokens + 7) // 8 * 8


def lag_zero(tokens: int, window: int) -> int:
    """The strip's column of lag 0 in its first row. Its tiles reach back over the tokens, or at
    most a tile further than the window.
    """
    reach = min(tokens, window + STRIP_ROWS - 1)
    return (reach + STRIP_ROWS - 1) // STRIP_ROWS * STRIP_ROWS


def pack(weight: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The lower triangle of the weight's top-left (tokens, tokens) corner in `dtype`, exact zeros
    elsewhere; by lag a strip, from which each tile of that triangle can be read.
    """
    heads = len(weight)
    window = window_of(weight)
    packed = weight.new_empty(packed_shape(heads, tokens, window), dtype=dtype)
    tensors = {"weight": weight, "packed": packed}
    call("mixer_pack", params_of(packed, (0, tokens, 0), heads, window, tensors))
    return packed


def forward(
    x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None, window: int = 0
) -> Tensor:
    """y = bias + residual + W x, contiguous, in x's dtype; bias is fp32 or of x's dtype."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    tensors = {"x": x, "packed": packed, "bias": bias, "residual": residual, "y": y}
    if y.numel():
        call("mixer_forward", params_of(x, x.shape, len(packed), window, tensors))
    return y


@operator("mixer::packed_conv_grad_input")
def grad_input(dy: Tensor, packed: Tensor, window: int = 0) -> Tensor:
    """dx = W^T dy, contiguous, in dy's dtype."""
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    tensors = {"dy": dy, "packed": packed, "dx": dx}
    if dx.numel():
        call("mixer_grad_input", params_of(dy, dy.shape, len(packed), window, tensors))
    return dx


@torch.library.register_fake("mixer::packed_conv_grad_input")
def _(dy, packed, window=0):
    return torch.empty_like(dy, memory_format=torch.contiguous_format)


@operator("mixer::packed_conv_grad_weight")
def grad_weight(
    dy: Tensor, x: Tensor, context: int, heads: int, with_bias: bool, window: int = 0
) -> tuple[Tensor, Tensor]:
    """dweight (heads, context, context), by lag (heads, window), and dbias (heads, context), or
    (0,) without bias, in fp32, with exact zeros above the diagonal and beyond the tokens.
    """
    dweight, dbias = empty_gradients(dy, x, context, heads, with_bias, window)
    if not x.numel():
        return dweight.zero_(), dbias.zero_()
    tensors = {"dy": dy, "x": x, "dweight": dweight, "dbias": dbias if with_bias else None}
    params = params_of(x, x.shape, heads, window, tensors)
    workspace_bytes = load_library(params.device).mixer_grad_weight_workspace(ctypes.byref(params))
    workspace = x.new_empty(workspace_bytes, dtype=torch.uint8)
    params.workspace = workspace.data_ptr()
    call("mixer_grad_weight", params)
    return dweight, dbias


@torch.library.register_fake("mixer::packed_conv_grad_weight")
def empty_gradients(dy, x, context, heads, with_bias, window=0):
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    weight_shape = (heads, window) if window else (heads, context, context)
    bias_shape = (heads, context) if with_bias else (0,)
    return x.new_empty(weight_shape, dtype=sum_dtype), x.new_empty(bias_shape, dtype=sum_dtype)


without_derivative("packed_conv_grad_input", "triangular_conv")
without_derivative("packed_conv_grad_weight", "triangular_conv")


# ------------------------------------------------------------------------- one row


def row_by_kernel(memory, x, weight, bias, residual, positions, lags=None) -> Tensor:
    """`mix_row` by the kernel, for arguments that `row_uses_kernel` has accepted."""
    batch, heads, length, width = memory.shape
    window = 0 if lags is None else lags.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    tensors = {
        "memory": memory,
        "x": x,
        "weight": weight if lags is None else lags,
        "bias": bias,
        "residual": residual,
        "positions": positions,
        "y": y,
    }
    params = params_of(x, (batch, length, heads * width), heads, window, tensors)
    params.memory_batch_stride, params.memory_head_stride, _, _ = memory.stride()
    params.positions_stride = positions.stride(0) if len(positions) > 1 else 0
    call("mixer_mix_row", params)
    return y


# ------------------------------------------------------------------------- the arguments


def aligned(x: Tensor) -> Tensor:
    """x itself if its channels are dense and its rows start at multiples of 16 bytes, else a
    contiguous copy, as of an expanded gradient.
    """
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x  # first, because it is the common case and every call comes here
    unit = 16 // x.element_size()
    outer = zip(x.shape[:2], x.stride()[:2], strict=True)
    strides = [stride for size, stride in outer if size > 1]
    fits = all(stride > 0 and stride % unit == 0 for stride in strides)
    if fits and x.stride(-1) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def params_of(
    like: Tensor,
    shape: Sequence[int],
    heads: int,
    window: int,
    tensors: Mapping[str, Tensor | None],
) -> Params:
    """The structure for x of this shape, (batch, tokens, channels), with the type and device of
    `like`, and with the addresses and strides of the tensors, or of copies that kernels can read,
    under their names.
    """
    batch, tokens, channels = shape
    params = Params(batch=batch, tokens=tokens, channels=channels, context=tokens, heads=heads)
    params.columns = packed_shape(heads, tokens, window)[2]
    params.window = window
    params.lag_zero = lag_zero(tokens, window) if window else 0
    params.dtype = DTYPE_CODES[like.dtype]
    params.device = like.get_device()
    params.capability, params.processors = device_facts(params.device)
    params.tensors = []  # copies among them live as long as their addresses
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name in ("x", "residual", "dy"):
            tensor = aligned(tensor)
            setattr(params, f"{name}_batch_stride", tensor.stride(0))
            setattr(params, f"{name}_token_stride", tensor.stride(1))
        elif name in ("weight", "bias", "dweight", "dbias"):
            tensor = tensor.contiguous()
            params.weight_dtype = DTYPE_CODES[tensor.dtype]
            if not window or name.endswith("bias"):
                params.context = tensor.shape[-1]
        setattr(params, name, tensor.data_ptr())
        params.tensors.append(tensor)
    return params


@functools.cache
def device_facts(index: int) -> tuple[int, int]:
    """(10 * major + minor of the compute capability, multiprocessors) of a device."""
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


# ------------------------------------------------------------------------- the library


def call(name: str, params: Params) -> None:
    """Launches on the current stream of params.device. Raises RuntimeError with the CUDA status
    when the launch fails.
    """
    index = params.device
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return call(name, params)
    library = load_library(index)
    # torch.cuda.current_stream(index).cuda_stream takes several times as long.
    params.stream = torch._C._cuda_getCurrentRawStream(index)
    status = getattr(library, name)(ctypes.byref(params))
    if status != 0:
        error = library.mixer_error_string(status).decode()
        raise RuntimeError(f"{name} failed on cuda:{index}: {error} (CUDA error {status})")


@functools.cache
def load_library(index: int) -> ctypes.CDLL:
    """The library for a device, built if there is none; csrc/api.cu says what is in it. Raises
    UserError where it cannot be built, OSError where it cannot be loaded.
    """
    # Not at the top: `python -m mixer.ops.build` must not find its own module already imported.
    from mixer.ops import build

    library = ctypes.CDLL(str(build.library(torch.cuda.get_device_capability(index))))
    library.mixer_grad_weight_workspace.restype = ctypes.c_int64
    library.mixer_short_conv_workspace.restype = ctypes.c_int64
    library.mixer_error_string.restype = ctypes.c_char_p
    return library
