"""What the operators of this package do with a call first: autocast, errors for arguments that do
not fit, and whether our kernels take it. Plain PyTorch does the rest.
"""

import functools
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


def require(fits: bool, operator: str, allowed: str, **given: Tensor | None) -> None:
    """Raises ValueError for tensors that do not fit together or are on several devices: kernels
    would read and write out of bounds.
    """
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    if fits and on_one_device(*tensors.values()):
        return
    described = ", ".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        for name, tensor in tensors.items()
    )
    raise ValueError(f"{operator} got {described}; they must be on one device: {allowed}")


def on_one_device(*tensors: Tensor) -> bool:
    return all(tensor.device == tensors[0].device for tensor in tensors)


@functools.cache
def warn_once(message: str) -> None:
    logger.warning(message)


# ------------------------------------------------------------------------- do the kernels serve?


def kernels_take(backend: str, x: Tensor, heads: int) -> bool:
    """Whether the kernels of `triangular_conv` take x. Where `auto` leaves a GPU tensor to PyTorch,
    the log says why, once.

    Raises UserError for backend="cuda" where the kernels cannot run, with what is missing and how
    to fix it.
    """
    if backend == "dense" or (backend == "auto" and not x.is_cuda):
        return False
    # bool() would keep a symbol of the compiler's
    is_aligned = True if x.shape[2] // heads % 8 == 0 else False
    return _kernels_take(backend, x.device, x.dtype, is_aligned)


@torch.compiler.assume_constant_result  # for one compiled graph these arguments are constants
def _kernels_take(backend: str, device: torch.device, dtype: torch.dtype, is_aligned: bool) -> bool:
    serve = device.type == "cuda" and is_aligned and dtype in (torch.float16, torch.bfloat16)
    if serve and (dtype == torch.float16 or cuda.device_facts(device.index)[0] >= 80):
        reason = device_reason(device.index)
    else:
        heads = "" if is_aligned else ", in heads of other sizes"
        reason = (
            f"x is {dtype} on {device}{heads}; the CUDA kernels take float16, and from compute "
            "capability 8.0 on bfloat16, in heads of a multiple of 8 channels. Use "
            "backend='dense', or convert x (train.mixed_precision=fp16 or bf16)."
        )
    if reason is None:
        return True
    if backend == "cuda":
        raise UserError(f"mixing backend 'cuda' cannot run here: {reason}")
    warn_once(f"mixing backend 'auto' takes 'dense', since 'cuda' cannot run here: {reason}")
    return False


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
        cuda.pack(weight, 2, torch.float16).cpu()
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
