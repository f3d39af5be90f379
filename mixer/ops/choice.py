"""Which backend and which kernels a call gets. Every such decision in Python is made here.

What a set of kernels supports is known to the compiled library (`kernels_for` in csrc/api.cu). It
is asked here by `kernels_capability`, and it chooses the same way at each launch.
"""

import ctypes
import functools
import hashlib
import importlib.util
import logging
from pathlib import Path

import torch
from torch import Tensor

from mixer.common.errors import UserError
from mixer.ops import cuda, timings
from mixer.ops.toolchain import BuildError

logger = logging.getLogger("mixer.ops")


# ------------------------------------------------------------------------- the backend


def resolve_backend(backend: str, x: Tensor, heads: int, taps: int) -> str:
    """The backend that runs for x: "cuda" or "panels".

    Where `auto` does not take the kernels for a GPU tensor, the log says why, once.

    Raises UserError for backend="cuda" where the kernels cannot run, with what is missing and how
    to fix it.
    """
    if backend == "panels":
        return backend
    reason = unavailable_reason(x)
    if backend == "cuda":
        if reason is not None:
            raise UserError(f"mixing backend 'cuda' cannot run here: {reason}")
        return backend
    if reason is not None:
        reason = f"'cuda' cannot run here: {reason}"
    else:
        reason = slow_reason(x, heads, taps)
    if reason is None:
        return "cuda"
    if x.is_cuda:  # on a CPU nobody expects the kernels
        warn_once(f"mixing backend 'auto' takes 'panels', since {reason}")
    return "panels"


@functools.cache
def warn_once(message: str) -> None:
    logger.warning(message)


# ------------------------------------------------------------------------- can the kernels run?


def unavailable_reason(x: Tensor | None = None) -> str | None:
    """None if the kernels can run on x's device and dtype, else what is missing. Without x: on the
    current device.

    The message names the one command that fixes it. The first call for a device builds the library
    if the cache has none, runs one small kernel and waits for it, so it must not come inside a
    graph capture. The answer is kept: a failed build is not tried again in this process.
    """
    if x is not None and x.is_cuda and x.dtype in cuda.DTYPE_CODES and torch.version.hip is None:
        return device_reason(x.device.index)  # first, because every training step asks
    if x is not None and not x.is_cuda:
        return (
            f"the CUDA kernels need a CUDA tensor; x is on {x.device}. "
            "Use backend='panels', or x.to('cuda')."
        )
    if x is not None and x.dtype not in cuda.DTYPE_CODES:
        return (
            f"the CUDA kernels take float32, float16 and bfloat16; x is {x.dtype}. "
            "Use backend='panels', or convert x."
        )
    if torch.version.hip is not None or not torch.cuda.is_available():
        return (
            "torch sees no CUDA device here, which the CUDA kernels need: "
            "`python -m torch.utils.collect_env` says why."
        )
    return device_reason(torch.cuda.current_device() if x is None else x.device.index)


@functools.cache
def device_reason(index: int) -> str | None:
    """Why the kernels cannot run on a device: the build's error, or that of the first launch."""
    try:
        library = cuda.kernels(index)
    except BuildError as error:
        return str(error)
    status = library.mixer_probe(index)
    if status == 0:
        return None
    return probe_message(library, status, torch.cuda.get_device_name(index))


def probe_message(library: ctypes.CDLL, status: int, device: str) -> str:
    """What a failed probe means. Most often nvcc is newer than the driver."""
    runtime = divmod(library.mixer_runtime_version(), 1000)
    driver = divmod(library.mixer_driver_version(), 1000)
    error = cuda.error_text(library, status)
    text = f"the CUDA kernels were built but do not run on {device}: {error}."
    if runtime[0] > driver[0] > 0:
        return (
            f"{text} They were built with CUDA {runtime[0]}.{runtime[1] // 10}, and the driver "
            f"supports {driver[0]}.{driver[1] // 10}: point CUDA_HOME at a CUDA {driver[0]}.x "
            f"toolkit, e.g. `export CUDA_HOME=/usr/local/cuda-{driver[0]}`, or update the driver."
        )
    return (
        f"{text} Build with the toolkit that matches the driver: "
        "`export CUDA_HOME=/path/to/cuda`, then run again."
    )


# ------------------------------------------------------------------------- are they the fastest?


def slow_reason(x: Tensor, heads: int, taps: int) -> str | None:
    """None if the kernels that would serve are the fastest we know for x, else why they are not."""
    tf32 = x.dtype == torch.float32 and cuda.allows_tf32()
    return slow_reason_for(x.device.index, x.dtype, tf32, x.shape[1], x.shape[2], heads, taps)


@functools.cache
def slow_reason_for(
    index: int, dtype: torch.dtype, tf32: bool, tokens: int, channels: int, heads: int, taps: int
) -> str | None:
    """`slow_reason` for a case: by the times that `python -m mixer.ops.tune` measured on this GPU,
    or else by what we know about GPUs of its kind.

    On an H200 the kernels for Ampere's tensor cores take 1.5 to 2.2 times as long as cuBLAS's dense
    products (dev/cuda/LOG.md), and those without tensor cores longer. Panels use cuBLAS, so they
    win there although they multiply more.
    """
    case = case_of(index, dtype, tf32, tokens, channels, heads, taps)
    if row := tuned(index, case):
        if row.faster == "cuda":
            return None
        return f"it was faster here in the nearest case measured ({row.says()})"
    major, minor = divmod(cuda.device_facts(index)[0], 10)
    if case.kernels == 90 or (case.kernels == 80 and major < 9):
        return None
    gpu = f"compute capability {major}.{minor}"
    if case.kernels == 70:
        return (
            f"nobody has timed our tensor-core kernels for {gpu} yet: "
            "`python -m mixer.ops.tune` does, and 'auto' then takes the faster one"
        )
    return (
        f"for {dtype}, {channels} channels, {heads} heads and kernel size {taps} there are no "
        f"tensor-core kernels made for {gpu} (they want 16-bit types, before 8.0 fp16, and heads "
        "of a multiple of 8 channels)"
    )


def tuned(index: int, case: timings.Case) -> timings.Row | None:
    """The nearest case that `python -m mixer.ops.tune` has measured on this GPU, if any."""
    return timings.nearest(timings.read(table_path(index)), case)


def case_of(
    index: int, dtype: torch.dtype, tf32: bool, tokens: int, channels: int, heads: int, taps: int
) -> timings.Case:
    """A call as the table of measured times describes it."""
    name = str(dtype).removeprefix("torch.")
    serving = kernels_capability(index, dtype, tf32, channels, heads, taps)
    return timings.Case(name, tf32, serving, tokens, channels, heads, taps)


def kernels_capability(
    index: int, dtype: torch.dtype, tf32: bool, channels: int, heads: int, taps: int
) -> int:
    """Which set of kernels serves, as the library says: 70, 80 or 90 for the compute capability
    whose tensor cores it uses, 0 for the portable set, which uses none.
    """
    params = cuda.Params(
        batch=1,
        tokens=1,
        context=1,
        columns=8,
        channels=channels,
        heads=heads,
        taps=taps,
        dtype=cuda.DTYPE_CODES[dtype],
        allow_tf32=tf32,
    )
    cuda.add_device(params, index)
    return cuda.kernels(index).mixer_kernels_capability(ctypes.byref(params))


def table_path(index: int) -> Path:
    """The file for the table of times measured with these kernels on this device."""
    return timings.table_path(torch.cuda.get_device_name(index), cuda.build_name(index))


# ------------------------------------------------------------------------- generation's kernel


def row_kernel_serves(
    memory: Tensor, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, backend: str
) -> bool:
    """Whether the kernel of `mix_row` can take this call; plain PyTorch does otherwise.

    The first call on a device builds the kernels, so it must not come inside a graph capture.
    """
    if not x.is_cuda or backend not in ("auto", "cuda") or weight.shape[1] != 1:
        return False
    if row_needs_pytorch(memory, x, weight, bias, residual):
        return False
    same_dtype = memory.dtype == x.dtype and (residual is None or residual.dtype == x.dtype)
    known_weight = weight.dtype in (x.dtype, torch.float32)
    return same_dtype and known_weight and unavailable_reason(x) is None


def row_needs_pytorch(*tensors: Tensor | None) -> bool:
    """Whether a call of `mix_row` needs what its kernel does not have: a gradient of one of these
    tensors, or autocast.
    """
    if torch.is_autocast_enabled(tensors[0].device.type):
        return True
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


# ------------------------------------------------------------------------- keyed mixing's kernels

KEYED_SIZES = (16, 32, 64, 128)  # of a key, and of a value: numbers of each in a head
KEYED_CONTEXT = 1 << 15  # the kernels count places in one head's weights in 32 bits


@torch.compiler.assume_constant_result  # for one compiled graph these arguments are constants
def keyed_kernels_serve(
    device: torch.device, dtype: torch.dtype, heads: int, key: int, value: int, context: int
) -> bool:
    """Whether the kernels of `keyed_conv` can take a call; plain PyTorch does otherwise. Where that
    is so for a GPU tensor, the log says why, once.
    """
    reason = keyed_unavailable_reason(device, dtype, heads, key, value, context)
    if reason is not None and device.type == "cuda":
        warn_once(f"keyed mixing goes without kernels, since {reason}")
    return reason is None


@functools.cache
def keyed_unavailable_reason(
    device: torch.device, dtype: torch.dtype, heads: int, key: int, value: int, context: int
) -> str | None:
    """None if the kernels of `keyed_conv` can take keys of `key` numbers and values of `value` in
    each head, else what is missing.

    The first call for these sizes compiles the kernels, runs them on a small case and compares the
    results with plain PyTorch's, so it must not come inside a graph capture.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its kernels need an NVIDIA GPU, not {device}"
    if not torch.cuda.is_available():
        return "its kernels need an NVIDIA GPU, and torch sees none here"
    if dtype not in cuda.DTYPE_CODES:
        return f"its kernels take float32, float16 and bfloat16, not {dtype}"
    if key not in KEYED_SIZES or value not in KEYED_SIZES or context > KEYED_CONTEXT:
        return (
            f"its kernels take keys and values of {', '.join(map(str, KEYED_SIZES))} numbers in a "
            f"head and a context up to {KEYED_CONTEXT}, not {key}, {value} and {context}"
        )
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its kernels need compute capability 8.0"
    if importlib.util.find_spec("triton") is None:
        return "Triton, which its kernels need, is not installed: `pip install triton`"
    from mixer.ops.measure import keyed_failure

    return keyed_failure(device, dtype, heads, key, value)


@functools.cache
def keyed_build_name() -> str:
    """A name for these kernels in this Triton, under which their times are kept."""
    import triton

    source = Path(__file__).with_name("keyed_kernels.py").read_bytes()
    return f"keyed-{hashlib.sha256(source + triton.__version__.encode()).hexdigest()[:16]}"
