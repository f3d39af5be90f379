"""What all operators of this package do with a call first: autocast, errors for arguments that do
not fit, and whether our kernels take it. They take what they can, and plain PyTorch does the rest.
Which of the kernels serve is known to the compiled library (`kernels_for` in csrc/api.cu).
"""

import functools
import importlib.util
import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from mixer.common.errors import UserError, first_line
from mixer.ops import cuda
from mixer.ops.plain import BACKENDS

logger = logging.getLogger("mixer.ops")


# ------------------------------------------------------------------------- arguments


def in_autocast_dtype(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in autocast's dtype where it is on, for all dtypes but fp64."""
    first = tensors[0]
    device = first.device.type
    if first.is_meta or first.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    # to() costs the host a dispatch even where it changes nothing
    return tuple(x if x is None or x.dtype == dtype else x.to(dtype) for x in tensors)


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")


def misfit(operator: str, given: dict[str, Tensor | None], allowed: str) -> ValueError:
    """The error for tensors that do not fit together, for which kernels would read and write out of
    bounds.
    """
    described = ", ".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        for name, tensor in given.items()
        if tensor is not None
    )
    return ValueError(f"{operator} got {described}; they must be on one device: {allowed}")


def on_one_device(*tensors: Tensor | None) -> bool:
    device = tensors[0].device
    return all(tensor is None or tensor.device == device for tensor in tensors)


# ------------------------------------------------------------------------- triangular_conv


@functools.cache
def warn_once(message: str) -> None:
    logger.warning(message)


def kernels_take(backend: str, x: Tensor, heads: int) -> bool:
    """Whether the kernels take x. Where `auto` leaves a GPU tensor to PyTorch, the log says why,
    once.

    Raises UserError for backend="cuda" where the kernels cannot run, with what is missing and how
    to fix it.
    """
    if backend == "dense" or (backend == "auto" and not x.is_cuda):
        return False
    return _kernels_take(backend, x.device, x.dtype, is_aligned(x, heads))


def is_aligned(x: Tensor, heads: int) -> bool:
    """Whether a head's channels fill a multiple of 16 bytes."""
    # bool() would keep a symbol of the compiler's
    return True if x.shape[2] // heads * x.element_size() % 16 == 0 else False


@torch.compiler.assume_constant_result  # for one compiled graph these arguments are constants
def _kernels_take(backend: str, device: torch.device, dtype: torch.dtype, is_aligned: bool) -> bool:
    reason = call_reason(device, dtype, is_aligned)
    if reason is None:
        return True
    if backend == "cuda":
        raise UserError(f"mixing backend 'cuda' cannot run here: {reason}")
    warn_once(f"mixing backend 'auto' takes 'dense', since 'cuda' cannot run here: {reason}")
    return False


def call_reason(device: torch.device, dtype: torch.dtype, is_aligned: bool = True) -> str | None:
    """None if the kernels can take a tensor of this device and type, else what is missing.

    is_aligned: whether a head's channels fill a multiple of 16 bytes.
    """
    if device.type != "cuda":
        need, remedy = f"a CUDA tensor; x is on {device}", "x.to('cuda')"
    elif dtype not in cuda.DTYPE_CODES:
        need, remedy = f"float16, bfloat16 or float32; x is {dtype}", "convert x"
    elif dtype == torch.float32 and not cuda.allows_tf32():
        need = "TF32 for float32, which is off here"
        remedy = "torch.set_float32_matmul_precision('high') (train.tf32=true)"
    elif not is_aligned:
        need, remedy = "heads of a multiple of 8 channels, for float32 of 4", "other sizes"
    elif dtype != torch.float16 and cuda.device_facts(device.index)[0] < 80:
        need = f"float16 before compute capability 8.0; x is {dtype}"
        remedy = "convert x (train.mixed_precision=fp16)"
    else:
        return device_reason(device.index)
    return f"the CUDA kernels need {need}. Use backend='dense', or {remedy}."


# ------------------------------------------------------------------------- can the kernels run?


@functools.cache
def device_reason(index: int) -> str | None:
    """Why the kernels cannot run on a device: the error of the build, of loading or of the first
    launch. The message names the one command that fixes it. None if they can.

    The first call for a device builds the library if the cache has none, runs one small kernel and
    waits for it, so it must not come inside a graph capture. The answer is kept: a failed build is
    not tried again in this process.
    """
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU, which the CUDA kernels need: `python -m mixer.doctor`."
    try:
        weight = torch.ones(1, 2, 2, device=torch.device("cuda", index))
        cuda.pack(weight, 2, torch.float32).cpu()
    except UserError as error:
        return str(error)
    except (RuntimeError, OSError) as error:  # most often nvcc is newer than the driver
        return (
            "the CUDA kernels were built but do not run on "
            f"{torch.cuda.get_device_name(index)}: {first_line(error)}. Update the driver, or "
            "build them anew with a toolkit that it supports: "
            "`CUDA_HOME=/usr/local/cuda-12 python -m mixer.ops.build`"
        )
    return None


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
    fits = (
        x.dtype in cuda.DTYPE_CODES
        and memory.dtype == x.dtype
        and (residual is None or residual.dtype == x.dtype)
        and weight.dtype in (x.dtype, torch.float32)
        and bias.dtype == weight.dtype
        and memory.stride()[2:] == (memory.shape[3], 1)
        and is_aligned(x, memory.shape[1])
    )
    return fits and device_reason(x.device.index) is None


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
    device: torch.device, dtype: torch.dtype, key: int, value: int, context: int
) -> bool:
    """Whether the kernels of `keyed_conv` can take a call; plain PyTorch does otherwise. Where that
    is so for a GPU tensor, the log says why, once.
    """
    reason = keyed_unavailable_reason(device, dtype, key, value, context)
    if reason is not None and device.type == "cuda":
        warn_once(f"keyed mixing goes without kernels, since {reason}")
    return reason is None


@functools.cache
def keyed_unavailable_reason(
    device: torch.device, dtype: torch.dtype, key: int, value: int, context: int
) -> str | None:
    """None if the kernels of `keyed_conv` can take keys of `key` numbers and values of `value` in
    each head, else what is missing.
    """
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return f"its kernels need an NVIDIA GPU, not {device}"
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
    return None


# ------------------------------------------------------------------------- are results right?

MOST_APART = 2e-2  # relative: each backend rounds to the type


def difference(
    results: Iterable[Tensor], wanted: Iterable[Tensor], names: Iterable[str]
) -> str | None:
    """Which result is away from plain PyTorch's by more than rounding; None if none is."""
    for name, ours, theirs in zip(names, results, wanted, strict=True):
        off, size = (tensor.norm(dtype=torch.float32) for tensor in (ours - theirs, theirs))
        if not off <= MOST_APART * size:  # NaN is no result either
            return (
                f"its results are wrong on this GPU: {name} is {(off / size).item():.1e} away from "
                "plain PyTorch's"
            )
    return None
