"""Calls the CUDA kernels of `csrc` through ctypes: backend `cuda` of the triangular convolution.

Shapes: x, y, residual, dy, dx (batch, tokens, channels); weight (heads, context, context), out
then in, or by lag (heads, context); bias (heads, context); packed (heads, rows, columns). x, dy and
packed are fp16, bf16, or fp32, which products round to tf32; sums are fp32.

Kernels run on the current stream of x's device, nothing here waits for the GPU, and the same call
gives the same bits each time. The callers (`mixer.ops`, `mixer.ops.row_operator`) have checked
shapes, dtypes and devices, and `mixer.ops.choice` that the kernels can run.
"""

import ctypes
import functools
import os

import torch
from torch import Tensor

from mixer.ops.toolchain import BuildError

# mixer.ops.build is imported inside functions: `python -m mixer.ops.build` must not find its own
# module already imported.

STRIP_ROWS = 128  # MIXER_STRIP_ROWS in csrc/params.h
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum MixerDtype

POINTERS = [
    *("x", "weight", "packed", "bias", "residual", "y", "dy", "dx", "dweight", "dbias"),
    *("workspace", "memory", "positions", "stream"),
]
STRIDES = [
    *("x_batch_stride", "x_token_stride"),
    *("residual_batch_stride", "residual_token_stride"),
    *("dy_batch_stride", "dy_token_stride"),
    *("memory_batch_stride", "memory_head_stride", "positions_stride"),
]
SIZES = ["batch", "tokens", "channels", "context", "heads", "columns", "lag_zero"]
CODES = ["dtype", "weight_dtype", "device", "capability", "processors"]


class Params(ctypes.Structure):
    """TriangularConvParams of csrc/params.h, field by field. What is not set is null or zero."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in POINTERS]
        + [(name, ctypes.c_int64) for name in STRIDES]
        + [(name, ctypes.c_int32) for name in SIZES + CODES]
    )


# ------------------------------------------------------------------------- the four functions


def packed_columns(tokens: int) -> int:
    """Columns of a packed weight: `tokens` rounded up to 8, so that every row of a 16-bit weight
    starts on 16 bytes.
    """
    return (tokens + 7) // 8 * 8


def packed_shape(heads: int, tokens: int, by_lag: bool) -> tuple[int, int, int]:
    """(heads, tokens, columns), or that of the strip of a weight by lag (see csrc/params.h)."""
    if by_lag:
        return heads, STRIP_ROWS, lag_zero(tokens) + STRIP_ROWS
    return heads, tokens, packed_columns(tokens)


def lag_zero(tokens: int) -> int:
    """The strip's column of lag 0 in its first row."""
    return (tokens + STRIP_ROWS - 1) // STRIP_ROWS * STRIP_ROWS


def pack(weight: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The lower triangle of the weight's top-left (tokens, tokens) corner in `dtype`, exact zeros
    elsewhere; by lag a strip, from which each tile of that triangle can be read.

    The strictly upper triangle of `weight` is not read.
    """
    weight = weight.contiguous()
    heads, context = weight.shape[:2]
    by_lag = weight.dim() == 2
    shape = packed_shape(heads, tokens, by_lag)
    packed = torch.empty(shape, dtype=dtype, device=weight.device)
    params = new_params(weight.device.index, dtype, heads, tokens, by_lag)
    params.weight, params.packed = weight.data_ptr(), packed.data_ptr()
    params.context, params.weight_dtype = context, DTYPE_CODES[weight.dtype]
    call("mixer_pack", params)
    return packed


def probe(index: int) -> None:
    """Builds the library if the cache has none, runs one small kernel and waits for it. Raises
    BuildError, or RuntimeError where the build, the driver and the device do not work together.
    """
    weight = torch.ones(1, 2, 2, device=torch.device("cuda", index))
    pack(weight, 2, torch.float32).cpu()


def forward(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    by_lag: bool = False,
) -> Tensor:
    """y = bias + residual + W x, contiguous, in x's dtype; bias is fp32 or of x's dtype."""
    x = rows(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    params = product_params(x, packed, by_lag)
    params.x, params.y = x.data_ptr(), y.data_ptr()
    params.x_batch_stride, params.x_token_stride, _ = x.stride()
    if bias is not None:
        bias = bias.contiguous()
        params.bias, params.weight_dtype = bias.data_ptr(), DTYPE_CODES[bias.dtype]
        params.context = bias.shape[1]
    if residual is not None:
        residual = rows(residual)
        params.residual = residual.data_ptr()
        params.residual_batch_stride, params.residual_token_stride, _ = residual.stride()
    if y.numel():
        call("mixer_forward", params)
    return y


def grad_input(dy: Tensor, packed: Tensor, by_lag: bool = False) -> Tensor:
    """dx = W^T dy, contiguous, in dy's dtype."""
    dy = rows(dy)
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    params = product_params(dy, packed, by_lag)
    params.dy, params.dx = dy.data_ptr(), dx.data_ptr()
    params.dy_batch_stride, params.dy_token_stride, _ = dy.stride()
    if dx.numel():
        call("mixer_grad_input", params)
    return dx


def grad_weight(
    dy: Tensor,
    x: Tensor,
    context: int,
    heads: int,
    dtype: torch.dtype,
    with_bias: bool,
    by_lag: bool = False,
) -> tuple[Tensor, Tensor]:
    """dweight (heads, context, context), by lag (heads, context), and dbias (heads, context), or
    (0,) without bias, all in `dtype`.

    Exact zeros above the diagonal and beyond `tokens`.
    """
    dy, x = rows(dy), rows(x)
    batch, tokens, channels = x.shape
    device = x.device
    shape = (heads, context) if by_lag else (heads, context, context)
    dweight = torch.empty(shape, dtype=dtype, device=device)
    dbias = torch.empty((heads, context) if with_bias else (0,), dtype=dtype, device=device)
    if not x.numel():
        return dweight.zero_(), dbias.zero_()
    params = new_params(device.index, x.dtype, heads, tokens, by_lag, batch, channels)
    params.x, params.dy, params.dweight = x.data_ptr(), dy.data_ptr(), dweight.data_ptr()
    params.x_batch_stride, params.x_token_stride, _ = x.stride()
    params.dy_batch_stride, params.dy_token_stride, _ = dy.stride()
    params.context, params.weight_dtype = context, DTYPE_CODES[dtype]
    if with_bias:
        params.dbias = dbias.data_ptr()
    size = kernels(device.index).mixer_grad_weight_workspace(ctypes.byref(params))
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    params.workspace = workspace.data_ptr()
    call("mixer_grad_weight", params)
    return dweight, dbias


# ------------------------------------------------------------------------- the arguments


def rows(x: Tensor) -> Tensor:
    """x itself if its channels are dense and its rows start at multiples of 16 bytes, else a
    contiguous copy: e.g. of an expanded gradient, or of a slice that starts in the middle of 16
    bytes.
    """
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x  # first, because it is the common case and every call comes here
    unit = 16 // x.element_size()
    outer = zip(x.shape[:2], x.stride()[:2], strict=True)
    strides = [stride for size, stride in outer if size > 1]
    aligned = all(stride > 0 and stride % unit == 0 for stride in strides)
    if aligned and x.stride(-1) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def product_params(x: Tensor, packed: Tensor, by_lag: bool) -> Params:
    """Params of a product of `packed` with x (or dy)."""
    batch, tokens, channels = x.shape
    params = new_params(x.device.index, x.dtype, packed.shape[0], tokens, by_lag, batch, channels)
    params.packed = packed.data_ptr()
    return params


def new_params(
    index: int,
    dtype: torch.dtype,
    heads: int,
    tokens: int,
    by_lag: bool,
    batch: int = 0,
    channels: int = 0,
) -> Params:
    """What all calls of one shape have in common; the caller adds addresses, strides, the weight's
    dtype, and the context if it is longer than the tokens.
    """
    common = template(index, dtype, heads, tokens, by_lag, batch, channels)
    return Params.from_buffer_copy(common)


# Made once for a shape, because setting each field takes the host several times as long as a copy.
@functools.cache
def template(
    index: int,
    dtype: torch.dtype,
    heads: int,
    tokens: int,
    by_lag: bool,
    batch: int,
    channels: int,
) -> Params:
    params = Params(
        batch=batch,
        tokens=tokens,
        channels=channels,
        context=tokens,
        heads=heads,
        columns=packed_shape(heads, tokens, by_lag)[2],
        lag_zero=lag_zero(tokens) if by_lag else 0,
        dtype=DTYPE_CODES[dtype],
    )
    add_device(params, index)
    return params


def add_device(params: Params, index: int) -> None:
    params.device, params.capability, params.processors = index, *device_facts(index)


@functools.cache
def device_facts(index: int) -> tuple[int, int]:
    """(10 * major + minor of the compute capability, multiprocessors) of a device."""
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def allows_tf32() -> bool:
    """Whether torch may round the factors of fp32 products to tf32
    (torch.set_float32_matmul_precision).
    """
    matmul = torch.backends.cuda.matmul
    # torch 2.9 has a new name for it and, once that is set, an error for the old one.
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32"
    return matmul.allow_tf32


# ------------------------------------------------------------------------- the launch


def call(name: str, params: Params) -> None:
    """Launches on the current stream of params.device. Raises RuntimeError with the CUDA status
    when the launch fails.
    """
    index = params.device
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return call(name, params)
    library = kernels(index)
    params.stream = current_stream(index)
    status = getattr(library, name)(ctypes.byref(params))
    if status != 0:
        error = f"{library.mixer_error_string(status).decode()} (CUDA error {status})"
        raise RuntimeError(f"{name} failed on cuda:{index}: {error}; {sizes(params)}")


def current_stream(index: int) -> int:
    """torch.cuda.current_stream(index).cuda_stream, without the object, which takes several times
    as long to make.
    """
    return torch._C._cuda_getCurrentRawStream(index)


def sizes(params: Params) -> str:
    """What the caller gave, for an error."""
    numbers = ", ".join(f"{name}={getattr(params, name)}" for name in SIZES)
    dtype = next(dtype for dtype, code in DTYPE_CODES.items() if code == params.dtype)
    return f"{numbers}, {str(dtype).removeprefix('torch.')}"


# ------------------------------------------------------------------------- the library


@functools.cache
def kernels(index: int) -> ctypes.CDLL:
    """The library for a device, built if the cache has none. Raises BuildError."""
    from mixer.ops import build

    return load(str(build.library(torch.cuda.get_device_capability(index))))


@functools.cache
def load(path: str) -> ctypes.CDLL:
    """Loads a library; its functions are in csrc/api.cu. Raises BuildError if it is damaged, or of
    another machine.
    """
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise BuildError(
            f"cannot load the CUDA kernels ({error}). "
            f"Build them anew: `rm -r {os.path.dirname(path)}`, then run again."
        ) from error
    library.mixer_grad_weight_workspace.restype = ctypes.c_int64
    library.mixer_error_string.restype = ctypes.c_char_p
    return library
