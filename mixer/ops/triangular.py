"""The triangular convolution, for whole texts (`triangular_conv`) and for a new token in generation
(`mix_row`): argument checks, and the choice between our kernels and plain PyTorch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mixer.common.errors import UserError
from mixer.ops import cuda, plain, selftest
from mixer.ops.arguments import on_one_device, require, warn_once
from mixer.ops.plain import in_autocast_dtype
from mixer.ops.registration import constant_in_a_graph

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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

    The channels are split into `heads` equal groups; channel c belongs to head h. The shift over
    channels stays inside the head and reads zeros outside it: each head is `nn.Conv1d(context,
    context, K, padding="same")` with a lower-triangular weight. K = 1 and heads = 1 is the paper's
    flat mixer.

    A weight may have one number per distance of two tokens instead of one per pair:
    weight[h, t, i, j] = lags[h, t, i - j], zero for further lags. Pass it as `lags` instead of
    `weight`. Work and memory then grow with the tokens times the lags.

    Args:
        x: (batch, tokens, channels) of any strides, in one of DTYPES: bf16, fp16, fp32 or fp64.
            tokens <= context; a shorter input uses the weight's top-left corner. With lags there
            may be any number of tokens: each mixes the last `window` ones.
        weight: (heads, kernel_size, context, context), output first; x's dtype or fp32. The
            strictly upper triangle is never read, and its gradient is exactly zero.
        lags: (heads, kernel_size, window), x's dtype or fp32; instead of weight.
        bias: (heads, context) in the weight's (or the lags') dtype, or None. With lags, it may have
            any number of tokens, of which later ones repeat the last: (heads, 1) is a bias a head.
        residual: as x, or None.
        backend: "cuda" (our kernels: bf16 and fp16), "dense" (the masked-weight matmul in plain
            PyTorch), or "auto": cuda where it can run, else dense.

    Returns:
        y: (batch, tokens, channels), contiguous, in x's dtype. Under autocast x and residual are
            cast to the autocast dtype first. weight, lags and bias stay in fp32 and are cast once,
            when the weight is packed.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes, devices or the backend's name do not fit.
        mixer.common.errors.UserError: backend="cuda" where the kernels cannot run.
        NotImplementedError: second derivatives where the kernels ran.

    Second derivatives and torch.func's transforms need "dense". In the kernels, a non-finite value
    of x may spread to other tokens of the same block of 64, as it does in a dense product, but
    never to earlier blocks; with lags, also to later tokens than its window reaches.
    """
    _check_types(x, weight, lags, bias, residual)
    x, residual = in_autocast_dtype(x, residual)
    _check(x, weight, lags, bias, residual, backend)
    mixing = weight if lags is None else lags
    assert mixing is not None  # or _check would have raised
    if uses_kernels(backend, x, mixing.shape[0]):
        return cuda.by_kernels(x, mixing, bias, residual)
    return plain.triangular_conv(x, weight, bias, residual, lags=lags)


def _check_types(x, weight, lags, bias, residual) -> None:
    arguments = {"x": x, "weight": weight, "lags": lags, "bias": bias, "residual": residual}
    wrong = [
        f"{name} {type(value).__name__}"
        for name, value in arguments.items()
        if not isinstance(value, Tensor) and (value is not None or name == "x")
    ]
    if wrong:
        raise TypeError(f"triangular_conv got {', '.join(wrong)}; allowed: torch tensors")


def _check(x, weight, lags, bias, residual, backend) -> None:
    allowed = (
        "x (batch, tokens, channels) bfloat16, float16, float32 or float64, channels shared by "
        "heads; either weight (heads, kernel_size, context, context) with context >= tokens, or "
        "lags (heads, kernel_size, window), of x's dtype or float32; bias (heads, context), with "
        "lags (heads, any number), of their dtype or None; residual as x or None"
    )
    tensors = {"x": x, "weight": weight, "lags": lags, "bias": bias, "residual": residual}
    rules = _rules(x, weight, lags, bias, residual)
    require(rules, backend, "triangular_conv", allowed, tensors)


def _rules(x, weight, lags, bias, residual) -> Iterator[tuple[str, bool]]:
    """What the tensors must be, and whether they are. A rule holds only if those before it do."""
    yield "either weight or lags", (weight is None) != (lags is None)
    by_lag = lags is not None
    name = "lags" if by_lag else "weight"
    mixing = lags if by_lag else weight
    dimensions = 3 if by_lag else 4
    yield "x of 3 dimensions", x.dim() == 3
    yield "x in bfloat16, float16, float32 or float64", x.dtype in DTYPES
    yield f"{name} of {dimensions} dimensions", mixing.dim() == dimensions
    heads = mixing.shape[0]
    context = mixing.shape[-1]  # by lag, the window
    sizes = (*x.shape[1:], *mixing.shape)
    yield f"x and {name} with 1 or more in each dimension", all(size > 0 for size in sizes)
    yield "a square weight, (context, context)", by_lag or mixing.shape[2] == context
    yield "a context of all tokens", by_lag or x.shape[1] <= context
    yield "heads that divide the channels", x.shape[2] % heads == 0
    yield f"{name} in x's dtype or float32", mixing.dtype in (x.dtype, torch.float32)
    if bias is not None:
        yield "bias of 2 dimensions", bias.dim() == 2
        fits = bias.shape[0] == heads and bias.shape[1] > 0
        yield "bias (heads, context)", fits and (by_lag or bias.shape[1] == context)
        yield f"bias in the dtype of {name}", bias.dtype == mixing.dtype
    if residual is not None:
        yield "residual of x's shape", residual.shape == x.shape
        yield "residual in x's dtype", residual.dtype == x.dtype


# ------------------------------------------------------------------------- kernels or PyTorch?


def uses_kernels(backend: str, x: Tensor, heads: int) -> bool:
    """Whether `triangular_conv` of x uses the kernels. Where `auto` leaves a GPU tensor to PyTorch,
    the log says why, once. Raises UserError for backend="cuda" where the kernels cannot run.
    """
    if backend == "dense" or (backend == "auto" and not x.is_cuda):
        return False
    # bool() would keep a symbol of the compiler's
    is_aligned = True if x.shape[2] // heads % 8 == 0 else False
    return _uses_kernels(backend, x.device, x.dtype, is_aligned)


@constant_in_a_graph
def _uses_kernels(backend: str, device: torch.device, dtype: torch.dtype, is_aligned: bool) -> bool:
    """`uses_kernels`, for a backend other than dense. What the kernels support is as in
    `kernels_for` of csrc/api.cu.
    """
    supports = device.type == "cuda" and is_aligned and dtype in (torch.float16, torch.bfloat16)
    if supports and (dtype == torch.float16 or cuda.device_facts(device.index)[0] >= 80):
        problem = selftest.fault(device.index)
    else:
        unaligned_heads = "" if is_aligned else ", in heads of an unsupported size"
        problem = (
            f"x is {dtype} on {device}{unaligned_heads}; the CUDA kernels take float16, and "
            "bfloat16 from compute capability 8.0, in heads of a multiple of 8 channels. Use "
            "backend='dense', or convert x (train.mixed_precision=fp16 or bf16)."
        )
    if problem is None:
        return True
    if backend == "cuda":
        raise UserError(f"mixing backend 'cuda' cannot run here: {problem}")
    warn_once(f"mixing backend 'auto' uses 'dense', because 'cuda' cannot run here: {problem}")
    return False


# ------------------------------------------------------------------------- one row


def mix_row(
    memory: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    positions: Tensor,
    backend: str = "auto",
    *,
    lags: Tensor | None = None,
) -> Tensor:
    """Mixes one new token of each sample: writes x into the memory at its position, and mixes it
    with all earlier tokens.

        y[b, c] = bias[h, p] + residual[b, c]
                  + sum_t sum_{j <= p} weight[h, t, p, j] * memory[b, h, j, c + t - (K - 1) // 2]

    A weight by lag has weight[h, t, p, j] = lags[h, t, p - j]. Then the memory is a ring, which has
    token j in column j % length.

    Args:
        memory: (batch, heads, length, channels of a head), a view into preallocated memory; changed
            in place. Values after a sample's position are not used.
        x: (batch, 1, channels) in the memory's dtype.
        weight: (heads, kernel_size, context, context), x's dtype or fp32; context >= length.
        lags: (heads, kernel_size, window), x's dtype or fp32; instead of weight.
        bias: (heads, context), in the weight's (or the lags') dtype, or with lags None. Tokens past
            the context have the last one's.
        residual: as x, or None.
        positions: (batch or 1, 1) int64, 1 if all samples share one; below length, with lags any
            from 0 on. The values are not checked, because that would wait for the GPU. For others,
            the kernel returns NaN and writes nothing.
        backend: "auto" and "cuda" use the kernel where it can take the call; otherwise, and for
            "dense", plain PyTorch does.

    Returns:
        y: (batch, 1, channels), in x's dtype, or in autocast's where it is on.

    The kernel (csrc/mix_row.cu) reads the memory once, finds the positions on the device and needs
    no workspace, so a decoding step can be captured in a CUDA graph. It has no derivative. Plain
    PyTorch serves calls that may need a gradient, autocast, compiled code and kernel_size > 1, and
    shapes that do not fit, with which its own operations fail.
    """
    arguments = (memory, x, weight, bias, residual, positions)
    # The compiler sees through plain PyTorch, but not through a call of the kernel.
    if not torch.compiler.is_compiling() and row_uses_kernel(*arguments, backend, lags):
        return cuda.row_by_kernel(*arguments, lags)
    return plain.mix_row(*arguments, lags=lags)


def row_uses_kernel(memory, x, weight, bias, residual, positions, backend, lags=None) -> bool:
    """Whether `mix_row` of these arguments uses the kernel, which with other shapes would read and
    write out of bounds. The first call on a device builds the kernels, so it must not come inside a
    graph capture.
    """
    batch, heads, length, width = memory.shape
    mixing = weight if lags is None else lags
    context = mixing.shape[-1] if bias is None else bias.shape[-1]
    shape = (heads, 1, context, context) if lags is None else (heads, 1, lags.shape[-1])
    read = [t for t in (memory, x, mixing, bias, residual) if t is not None]
    fits = (
        x.is_cuda
        and backend in ("auto", "cuda")
        and not torch.is_autocast_enabled("cuda")
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read))
        and x.dtype in cuda.DTYPE_CODES
        and memory.dtype == x.dtype
        and mixing.dtype in (x.dtype, torch.float32)
        and (bias is None or (bias.dtype == mixing.dtype and bias.shape == (heads, context)))
        and positions.dtype == torch.int64
        and x.shape == (batch, 1, heads * width)
        and (residual is None or (residual.shape == x.shape and residual.dtype == x.dtype))
        and mixing.shape == shape
        and (lags is not None or length <= context)
        and positions.shape in ((1, 1), (batch, 1))
        and memory.stride()[2:] == (width, 1)
        and memory.data_ptr() % 16 == 0
        and width * x.element_size() % 16 == 0
        and on_one_device(positions, *read)
    )
    return fits and selftest.fault(x.device.index) is None
