"""What the operators of this package do with their arguments before anything else."""

import torch
from torch import Tensor

from mixer.ops.plain import BACKENDS


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
