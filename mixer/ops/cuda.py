"""The triangular convolution on CUDA: the kernels of `csrc`, called through ctypes.

Shapes: x, y, residual, dy, dx (batch, tokens, channels); weight (heads, taps, context, context),
out then in; bias (heads, context); packed (heads, taps, tokens, columns), columns = tokens rounded
up to 8. x, dy and packed are fp32, fp16 or bf16, all arithmetic is fp32.

Kernels run on the current stream of x's device, nothing here waits for the GPU, and every result is
the same bit for bit each time. The callers (`mixer.ops`, `mixer.ops.row_operator`) have checked
shapes, dtypes and devices.
"""

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from mixer.ops import timings as tuned

# mixer.ops.build is imported where it is called: `python -m mixer.ops.build` must not find itself
# imported already.

ABI_VERSION = 4  # MIXER_ABI_VERSION in csrc/params.h
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum MixerDtype

POINTERS = "x weight packed bias residual y dy dx dweight dbias workspace schedule memory positions stream".split()
STRIDES = [
    f"{name}_{dimension}_stride"
    for name in ("x", "residual", "dy")
    for dimension in ("batch", "token")
]
STRIDES += ["memory_batch_stride", "memory_head_stride", "positions_stride"]
SIZES = "batch tokens channels context heads taps columns".split()
CODES = (
    "dtype weight_dtype bias_dtype gradient_dtype device capability processors allow_tf32".split()
)


class Params(ctypes.Structure):
    """TriangularConvParams of csrc/params.h, field by field. What is not set is null or zero."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in POINTERS]
        + [(name, ctypes.c_int64) for name in STRIDES]
        + [(name, ctypes.c_int32) for name in SIZES + CODES]
    )


# ------------------------------------------------------------------------------------------------ the four functions


def pack(weight: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """The lower triangle of the weight's top-left (tokens, tokens) corner in `dtype`, exact zeros
    elsewhere.

    Returns (heads, taps, tokens, columns). The strictly upper triangle of `weight` is not read.
    """
    weight = weight.contiguous()
    heads, taps, context, _ = weight.shape
    packed = torch.empty((heads, taps, tokens, round_up(tokens)), dtype=dtype, device=weight.device)
    params = new_params(weight.device.index, dtype, heads, taps, tokens)
    params.weight, params.packed = weight.data_ptr(), packed.data_ptr()
    params.context, params.weight_dtype = context, DTYPES[weight.dtype]
    call("mixer_pack", params)
    return packed


def forward(x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y = bias + residual + W x, contiguous, in x's dtype; bias is fp32 or of x's dtype."""
    x = rows(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    params, _workspace = product_params(x, packed)
    params.x, params.y = x.data_ptr(), y.data_ptr()
    params.x_batch_stride, params.x_token_stride, _ = x.stride()
    if bias is not None:
        bias = bias.contiguous()
        params.bias, params.bias_dtype, params.context = (
            bias.data_ptr(),
            DTYPES[bias.dtype],
            bias.shape[1],
        )
    if residual is not None:
        residual = rows(residual)
        params.residual = residual.data_ptr()
        params.residual_batch_stride, params.residual_token_stride, _ = residual.stride()
    call("mixer_forward", params)
    return y


def grad_input(dy: Tensor, packed: Tensor) -> Tensor:
    """dx = W^T dy, contiguous, in dy's dtype."""
    dy = rows(dy)
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    params, _workspace = product_params(dy, packed)
    params.dy, params.dx = dy.data_ptr(), dx.data_ptr()
    params.dy_batch_stride, params.dy_token_stride, _ = dy.stride()
    call("mixer_grad_input", params)
    return dx


def grad_weight(
    dy: Tensor, x: Tensor, context: int, taps: int, heads: int, dtype: torch.dtype, with_bias: bool
) -> tuple[Tensor, Tensor]:
    """dweight (heads, taps, context, context) and dbias (heads, context), or (0,) without bias,
    both in `dtype`.

    Exact zeros above the diagonal and beyond `tokens`.
    """
    dy, x = rows(dy), rows(x)
    batch, tokens, channels = x.shape
    device = x.device
    dweight = torch.empty((heads, taps, context, context), dtype=dtype, device=device)
    dbias = torch.empty((heads, context) if with_bias else (0,), dtype=dtype, device=device)
    params = new_params(device.index, x.dtype, heads, taps, tokens, batch, channels)
    params.x, params.dy, params.dweight = x.data_ptr(), dy.data_ptr(), dweight.data_ptr()
    params.x_batch_stride, params.x_token_stride, _ = x.stride()
    params.dy_batch_stride, params.dy_token_stride, _ = dy.stride()
    params.context, params.gradient_dtype = context, DTYPES[dtype]
    if with_bias:
        params.dbias = dbias.data_ptr()
    size = kernels(device.index).mixer_grad_weight_workspace(ctypes.byref(params))
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    params.workspace = workspace.data_ptr()
    call("mixer_grad_weight", params)
    return dweight, dbias


# ------------------------------------------------------------------------------------------------ calling


def round_up(tokens: int) -> int:
    return (tokens + 7) // 8 * 8


def rows(x: Tensor) -> Tensor:
    """x itself where its channels lie side by side and rows start on 16 bytes, else a contiguous
    copy.

    Copied are e.g. an expanded gradient, or a slice that starts in the middle of 16 bytes: the fast
    kernels load nothing narrower, and one copy costs less than the slow ones. Rows that no copy
    could align are taken as they are.
    """
    if (
        x.is_contiguous() and x.data_ptr() % 16 == 0
    ):  # the common case, in each call: it must not take long
        return x
    unit = 16 // x.element_size()
    if x.stride(-1) != 1:
        return x.contiguous()
    if x.shape[-1] % unit != 0:
        return x
    strides = [stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True) if size > 1]
    aligned = x.data_ptr() % 16 == 0 and all(
        stride > 0 and stride % unit == 0 for stride in strides
    )
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def product_params(x: Tensor, packed: Tensor) -> tuple[Params, Tensor | None]:
    """Params of a product of `packed` with x (or dy), and its workspace, which the caller holds
    until after the launch.
    """
    heads, taps, tokens, _ = packed.shape
    params = new_params(x.device.index, x.dtype, heads, taps, tokens, x.shape[0], x.shape[2])
    params.packed = packed.data_ptr()
    if taps == 1:
        return params, None
    size = kernels(x.device.index).mixer_product_workspace(ctypes.byref(params))
    workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    params.workspace = workspace.data_ptr()
    return params, workspace


def new_params(
    index: int,
    dtype: torch.dtype,
    heads: int,
    taps: int,
    tokens: int,
    batch: int = 0,
    channels: int = 0,
) -> Params:
    """All that is the same in each call for a shape; the caller adds addresses and strides, and a
    context beyond the tokens.
    """
    tf32 = dtype == torch.float32 and allows_tf32()
    return Params.from_buffer_copy(
        template(index, dtype, tf32, heads, taps, tokens, batch, channels)
    )


# Made once for a shape, since setting each field in each call takes the host several times as long
# as a copy does. Never emptied: a captured graph keeps the address of the schedule, which lives as
# long as its template.
@functools.cache
def template(
    index: int,
    dtype: torch.dtype,
    tf32: bool,
    heads: int,
    taps: int,
    tokens: int,
    batch: int,
    channels: int,
) -> Params:
    params = Params(
        batch=batch, tokens=tokens, channels=channels, context=tokens, heads=heads, taps=taps, columns=round_up(tokens),
        dtype=DTYPES[dtype], allow_tf32=tf32,
    )  # fmt: skip
    add_device(params, index)
    params.tiles = schedule(params)
    params.schedule = None if params.tiles is None else params.tiles.data_ptr()
    return params


def schedule(params: Params) -> Tensor | None:
    """Which block works on which tiles of a product, in the memory of a device; None where the
    kernels need no schedule.

    Raises RuntimeError inside a graph capture, which would record the copy instead of making it.
    """
    library = kernels(params.device)
    size = library.mixer_schedule_size(ctypes.byref(params))
    if size == 0:
        return None
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first triangular_conv of a shape cannot be inside a CUDA graph capture; run it once before"
        )
    host = torch.empty(size, dtype=torch.uint8, device="cpu")
    library.mixer_schedule(ctypes.byref(params), host.data_ptr())
    # In a thread of its own: what this one allocates may go to a memory pool that torch.compile
    # makes for a CUDA graph, and nothing there may outlive the graph's run.
    with ThreadPoolExecutor(1) as other:
        return other.submit(on_device, host, params.device).result()


def on_device(host: Tensor, index: int) -> Tensor:
    """A copy in the memory of a device, complete for all its streams."""
    copy = host.to(torch.device("cuda", index))
    torch.cuda.current_stream(index).synchronize()
    return copy


def add_device(params: Params, index: int) -> None:
    params.device, params.capability, params.processors = index, *device_facts(index)


def allows_tf32() -> bool:
    """Whether torch may round the factors of fp32 products to tf32
    (torch.set_float32_matmul_precision).
    """
    matmul = torch.backends.cuda.matmul
    # torch 2.9 has a new name for it and, once that is set, an error for the old one.
    return (
        matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    )


@functools.cache
def device_facts(index: int) -> tuple[int, int]:
    """(10 * major + minor of the compute capability, multiprocessors) of a device."""
    properties = torch.cuda.get_device_properties(index)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def call(name: str, params: Params) -> None:
    """Launches on the current stream of params.device. Raises RuntimeError with the CUDA status
    when the launch fails.

    Under MIXER_DEBUG=1 it waits for the GPU too, so that a kernel's failure is met here and not in
    some later operation.
    """
    index = params.device
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return call(name, params)
    library, debug = kernels(index), debugging()
    params.stream = current_stream(index)
    if debug:
        wait(f"an operation before {name}", params)  # or its failure would be taken for ours
    status = getattr(library, name)(ctypes.byref(params))
    if status != 0:
        error = f"{library.mixer_error_string(status).decode()} (CUDA error {status})"
        raise RuntimeError(f"{name} failed on cuda:{index}: {error}; {sizes(params)}")
    if debug:
        wait(name, params)


def current_stream(index: int) -> int:
    """torch.cuda.current_stream(index).cuda_stream, without the object, which takes several times
    as long to make.
    """
    return torch._C._cuda_getCurrentRawStream(index)


@functools.cache
def debugging() -> bool:
    """Whether MIXER_DEBUG is set, to anything but 0; read once, since each launch asks."""
    return os.environ.get("MIXER_DEBUG", "0") not in ("", "0")


def wait(name: str, params: Params) -> None:
    """Waits for the GPU. Raises RuntimeError that names the operator and its shapes when something
    failed on it.
    """
    try:
        if (
            not torch.cuda.is_current_stream_capturing()
        ):  # there nothing runs yet, and waiting would end the capture
            torch.cuda.synchronize(params.device)
    except RuntimeError as error:
        raise RuntimeError(
            f"{name} failed on cuda:{params.device}: {error}; {sizes(params)}"
        ) from error


def sizes(params: Params) -> str:
    """What the caller gave, for an error."""
    numbers = ", ".join(f"{name}={getattr(params, name)}" for name in SIZES)
    dtype = next(dtype for dtype, code in DTYPES.items() if code == params.dtype)
    return f"{numbers}, {str(dtype).removeprefix('torch.')}"


@functools.cache
def kernels(index: int) -> ctypes.CDLL:
    """The library for a device, built if need be. Raises BuildError."""
    from mixer.ops import build

    return load(str(build.library(torch.cuda.get_device_capability(index))))


@functools.cache
def load(path: str) -> ctypes.CDLL:
    """Loads a library and declares its functions. Raises BuildError when it is not one of ours."""
    from mixer.ops import build

    try:
        library = ctypes.CDLL(path)
        for name in (
            "mixer_pack",
            "mixer_forward",
            "mixer_grad_input",
            "mixer_grad_weight",
            "mixer_mix_row",
            "mixer_product_workspace",
            "mixer_grad_weight_workspace",
            "mixer_schedule_size",
            "mixer_kernels_capability",
        ):
            getattr(library, name).argtypes = [ctypes.POINTER(Params)]
        for name in (
            "mixer_product_workspace",
            "mixer_grad_weight_workspace",
            "mixer_schedule_size",
        ):
            getattr(library, name).restype = ctypes.c_int64
        library.mixer_schedule.argtypes, library.mixer_schedule.restype = (
            [ctypes.POINTER(Params), ctypes.c_void_p],
            None,
        )
        library.mixer_error_string.restype = ctypes.c_char_p
        version, size = library.mixer_abi_version(), library.mixer_params_size()
    except (OSError, AttributeError) as error:
        raise build.BuildError(
            f"cannot load the CUDA kernels ({error}). Build them anew: `rm -r {os.path.dirname(path)}`, then run again."
        ) from error
    if (version, size) != (ABI_VERSION, ctypes.sizeof(Params)):
        raise build.BuildError(
            f"{path} has interface {version} of {size} bytes; this code calls {ABI_VERSION} of "
            f"{ctypes.sizeof(Params)} bytes: csrc/params.h and mixer/ops/cuda.py must change together."
        )
    return library


# ------------------------------------------------------------------------------------------------ availability


def unavailable_reason(x: Tensor | None = None) -> str | None:
    """None if the kernels can run on x's device and dtype (without x: on the current device), else
    what is missing.

    The message names the one command that mends it. The first call for a device builds the library
    where the cache has none, runs one small kernel and waits for it; the answer is kept, so that a
    failed build is not tried again in this process. That first call must not come inside a graph
    capture.
    """
    if x is not None and x.is_cuda and x.dtype in DTYPES and torch.version.hip is None:
        return device_reason(x.device.index)  # the common case, in each step: it must not take long
    if x is not None and not x.is_cuda:
        return f"the CUDA kernels need a CUDA tensor; x is on {x.device}. Use backend='panels', or x.to('cuda')."
    if x is not None and x.dtype not in DTYPES:
        return f"the CUDA kernels take float32, float16 and bfloat16; x is {x.dtype}. Use backend='panels', or convert x."
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "torch sees no CUDA device here, which the CUDA kernels need: `python -m torch.utils.collect_env` says why."
    return device_reason(torch.cuda.current_device() if x is None else x.device.index)


def slow_reason(x: Tensor, heads: int, taps: int) -> str | None:
    """None where the kernels that would serve are the fastest we know for x's device, else why they
    are not.
    """
    tf32 = x.dtype == torch.float32 and allows_tf32()
    return slow_reason_for(x.device.index, x.dtype, tf32, x.shape[1], x.shape[2], heads, taps)


@functools.cache
def slow_reason_for(
    index: int, dtype: torch.dtype, tf32: bool, tokens: int, channels: int, heads: int, taps: int
) -> str | None:
    """By the times that `python -m mixer.ops.tune` has taken on this GPU, or else by what we know
    of its kind.

    On an H200 the kernels for Ampere's tensor cores take 1.5 to 2.2 times as long as cuBLAS's dense
    products (dev/cuda/LOG.md), and those without tensor cores longer; panels, which are cuBLAS,
    then win although they multiply more.
    """
    serving = kernels_capability(index, channels, heads, taps, DTYPES[dtype], tf32)
    name = str(dtype).removeprefix("torch.")
    case = tuned.Case(name, tf32, serving, tokens, channels, heads, taps)
    if row := tuned.nearest(tuned.read(table_path(index)), case):
        return (
            None
            if row.faster == "cuda"
            else f"it was faster here in the nearest case measured ({row.describe()})"
        )
    major, minor = divmod(device_facts(index)[0], 10)
    if serving == 90 or (serving == 80 and major < 9):
        return None
    if serving == 70:
        return (
            f"nobody has timed our tensor-core kernels for compute capability {major}.{minor} yet: "
            "`python -m mixer.ops.tune` does, and 'auto' then takes the faster one"
        )
    return (
        f"for {dtype}, {channels} channels, {heads} heads and kernel size {taps} there are no tensor-core kernels made for "
        f"compute capability {major}.{minor} (they want 16-bit types, before 8.0 fp16, and heads of a multiple of 8 channels)"
    )


def table_path(index: int) -> Path:
    """Where the times measured with these kernels on this device lie."""
    return tuned.table_path(
        torch.cuda.get_device_name(index), Path(kernels(index)._name).parent.name
    )


def kernels_capability(
    index: int, channels: int, heads: int, taps: int, dtype: int, tf32: bool
) -> int:
    """Compute capability (70, 80, 90) of the GPUs whose tensor cores the kernels that serve use; 0:
    none.
    """
    params = Params(
        batch=1, tokens=1, context=1, columns=8, channels=channels, heads=heads, taps=taps, dtype=dtype,
        allow_tf32=tf32,
    )  # fmt: skip
    add_device(params, index)
    return kernels(index).mixer_kernels_capability(ctypes.byref(params))


@functools.cache
def device_reason(index: int) -> str | None:
    """Why the kernels cannot run on a device: the build's message, or what the probe met."""
    from mixer.ops import build

    try:
        library = kernels(index)
    except build.BuildError as error:
        return str(error)
    status = library.mixer_probe(index)
    return (
        None if status == 0 else probe_message(library, status, torch.cuda.get_device_name(index))
    )


def probe_message(library: ctypes.CDLL, status: int, device: str) -> str:
    """What a failed probe means. Most often nvcc is newer than the driver."""
    runtime, driver = (
        divmod(version, 1000)
        for version in (library.mixer_runtime_version(), library.mixer_driver_version())
    )
    error = f"{library.mixer_error_string(status).decode()} (CUDA error {status})"
    text = f"the CUDA kernels were built but do not run on {device}: {error}."
    if runtime[0] > driver[0] > 0:
        return (
            f"{text} They were built with CUDA {runtime[0]}.{runtime[1] // 10}, and the driver supports "
            f"{driver[0]}.{driver[1] // 10}: point CUDA_HOME at a CUDA {driver[0]}.x toolkit, "
            f"e.g. `export CUDA_HOME=/usr/local/cuda-{driver[0]}`, or update the driver."
        )
    return f"{text} Build with the toolkit that matches the driver: `export CUDA_HOME=/path/to/cuda`, then run again."
