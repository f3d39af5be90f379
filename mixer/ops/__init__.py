"""The triangular convolution: token mixing that does not compute the masked half (arXiv
2409.01482, section 2).
"""

import torch
from torch import Tensor

from mixer.ops import choice, operator, plain
from mixer.ops.keyed import keyed_conv
from mixer.ops.plain import BACKENDS
from mixer.ops.row_operator import mix_row
from mixer.ops.turning import turn

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

__all__ = ["BACKENDS", "DTYPES", "keyed_conv", "mix_row", "triangular_conv", "turn"]


def triangular_conv(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    backend: str = "auto",
    *,
    lags: Tensor | None = None,
) -> Tensor:
    """Learned causal mixing of tokens, the masked mixer's replacement for attention (arXiv
    2409.01482, section 2):

        y[b, i, c] = bias[h, i] + residual[b, i, c]
                     + sum_t sum_{j <= i} weight[h, t, i, j] * x[b, j, c + t - (K - 1) // 2]

    The channels are split into `heads` equal groups and channel c belongs to head h. The shift over
    channels stays inside the head and is zero outside it: each head is `nn.Conv1d(context, context,
    K, padding="same")` with a weight masked lower-triangular. K = 1 and heads = 1 is the paper's
    flat mixer.

    A weight may have one number for each distance of two tokens instead of one for each pair:
    weight[h, t, i, j] = lags[h, t, i - j]. Give it as `lags`, in place of `weight`. Then no tensor
    of context x context numbers is made by our kernels.

    Args:
        x: (batch, tokens, channels) of any strides, in one of DTYPES: bf16, fp16, fp32 or fp64.
            tokens <= context; a shorter input uses the weight's top-left corner.
        weight: (heads, kernel_size, context, context), out then in; x's dtype or fp32. The
            strictly upper triangle is never read, and its gradient is exactly zero.
        lags: (heads, kernel_size, context), x's dtype or fp32, for a weight by lag.
        bias: (heads, context) in the weight's (or the lags') dtype, or None.
        residual: as x, or None.
        backend: "cuda" (our kernels: bf16, fp16, and fp32 as TF32 where torch allows it), "dense"
            (the masked-weight matmul in plain PyTorch), or "auto": cuda where it can run, else
            dense.

    Returns:
        y: (batch, tokens, channels), contiguous, in x's dtype. Under autocast x and residual are
            cast to the autocast dtype first; weight, lags and bias stay in fp32 and are cast once,
            while the weight is packed.

    Raises:
        TypeError: an argument has a dtype that is not allowed.
        ValueError: shapes, devices or the backend's name do not fit.
        mixer.common.errors.UserError: backend="cuda" where the kernels cannot run.
        NotImplementedError: second derivatives where the kernels ran.

    Second derivatives and torch.func's transforms are there with "dense" alone. In the kernels a
    value of x that is not finite may spread to other tokens of the same block of 64, as it does in
    a dense product, but never further.
    """
    x, residual = _autocast(x, residual)
    _check(x, weight, lags, bias, residual, backend)
    given = weight if lags is None else lags
    if choice.kernels_take(backend, x, given.shape[0]):
        return operator.triangular_conv(x, given, bias, residual)
    return plain.triangular_conv(x, weight, bias, residual, lags=lags)


def _autocast(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, residual
    dtype = torch.get_autocast_dtype(device)
    return _cast(x, dtype), None if residual is None else _cast(residual, dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == dtype:
        return x  # to() costs the host a dispatch even where it changes nothing
    return x.to(dtype)


def _check(
    x: Tensor,
    weight: Tensor | None,
    lags: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    backend: str,
) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (batch, tokens, channels)")
    if (weight is None) == (lags is None):
        which = "neither" if weight is None else "both"
        raise ValueError(f"weight or lags must be given, and not {which}")
    name, given = ("weight", weight) if lags is None else ("lags", lags)
    shape = tuple(given.shape)
    if lags is not None and len(shape) != 3:
        raise ValueError(f"lags has shape {shape}; it must be (heads, kernel_size, context)")
    if lags is None and (len(shape) != 4 or shape[2] != shape[3]):
        raise ValueError(
            f"weight has shape {shape}; it must be (heads, kernel_size, context, context), out "
            "then in"
        )
    heads, taps, context = shape[:3]
    _, tokens, channels = x.shape
    if heads == 0 or taps == 0:
        raise ValueError(f"{name} has shape {shape}; it needs at least one head and one tap")
    if not 1 <= tokens <= context:
        raise ValueError(
            f"x has {tokens} tokens but the {name}'s context is {context}; give 1 to {context} "
            "tokens, or a weight of a longer context"
        )
    if channels == 0 or channels % heads:
        raise ValueError(
            f"x has {channels} channels, which {heads} heads cannot share equally; use a multiple "
            f"of {heads}"
        )
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}; allowed: bfloat16, float16, float32, float64")
    if given.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"{name} is {given.dtype} while x is {x.dtype}; cast it to {x.dtype} or float32"
        )
    if bias is not None:
        rule = f"(heads, context), in the {name}'s dtype"
        _expect("bias", bias, (heads, context), given.dtype, rule, x.device)
    if residual is not None:
        _expect("residual", residual, tuple(x.shape), x.dtype, "x's shape and dtype", x.device)
    if given.device != x.device:
        raise ValueError(
            f"{name} is on {given.device} while x is on {x.device}; move one to the other's device"
        )


def _expect(
    name: str, tensor: Tensor, shape: tuple, dtype: torch.dtype, rule: str, device: torch.device
) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}: {rule}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}: {rule}")
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device} while x is on {device}; move one to the other's device"
        )
