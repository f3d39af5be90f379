"""What an operator asks of its arguments, and the log's line where kernels cannot take them."""

import functools
import logging
from collections.abc import Iterable

from torch import Tensor

from mixer.ops.plain import BACKENDS

logger = logging.getLogger("mixer.ops")


def require(
    rules: Iterable[tuple[str, bool]],
    backend: str,
    operator: str,
    allowed: str,
    arguments: dict[str, Tensor | None],
) -> None:
    """Raises ValueError for an unknown backend, and for tensors that break a rule, the first of
    which it says first, or are on different devices: kernels would read and write out of bounds.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    tensors = {name: tensor for name, tensor in arguments.items() if tensor is not None}
    broken = ""
    for rule, holds in rules:
        if not holds:
            broken = rule
            break
    if not broken and on_one_device(*tensors.values()):
        return
    described = ", ".join(
        f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        for name, tensor in tensors.items()
    )
    needs = broken or "all tensors on one device"
    raise ValueError(f"{operator} needs {needs}; it got {described}; allowed: {allowed}")


def on_one_device(*tensors: Tensor) -> bool:
    return all(tensor.device == tensors[0].device for tensor in tensors)


@functools.cache
def warn_once(message: str) -> None:
    logger.warning(message)
