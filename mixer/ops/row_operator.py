"""Generation's product, one row of the weight for each sample's new token: `mix_row`.

The kernel (csrc/mix_row.cu) reads the memory of earlier inputs once. It writes the new input into
it, finds the positions on the device and needs no workspace, so that a decoding step can be
captured in a CUDA graph. Where it cannot serve, the same is done in plain PyTorch.
"""

import torch
from torch import Tensor

from mixer.ops import cuda, plain
from mixer.ops.triangular import on_one_device


def mix_row(
    memory: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    positions: Tensor,
    backend: str = "auto",
) -> Tensor:
    """One new token of each sample: writes x into the memory at its position, and mixes it with all
    before it.

        y[b, c] = bias[h, p] + residual[b, c]
                  + sum_t sum_{j <= p} weight[h, t, p, j] * memory[b, h, j, c + t - (K - 1) // 2]

    Args:
        memory: (batch, heads, length, channels of a head), a view into preallocated memory; changed
            in place. Values after a sample's position are not used.
        x: (batch, 1, channels) in the memory's dtype.
        weight: (heads, kernel_size, context, context), x's dtype or fp32; context >= length.
        bias: (heads, context), in the weight's dtype.
        residual: as x, or None.
        positions: (batch or 1, 1) int64, below length; 1 if all samples have the same. Their
            values are not checked, because that would wait for the GPU; for a position outside the
            memory the kernel returns NaN and writes nothing.
        backend: as in `triangular_conv`; "auto" and "cuda" both use the kernel.

    Returns:
        y: (batch, 1, channels), in x's dtype, under autocast in its dtype.

    The kernel has no derivative: where a gradient may be asked for, under autocast, in compiled
    code and for kernel_size > 1, this is plain PyTorch. So it is for shapes that do not fit, with
    its errors.
    """
    arguments = (memory, x, weight, bias, residual, positions)
    # The compiler sees through plain PyTorch, but not through a call of the kernel.
    if not torch.compiler.is_compiling() and kernel_serves(*arguments, backend):
        return launch(*arguments)
    return plain.mix_row(*arguments)


def kernel_serves(memory, x, weight, bias, residual, positions, backend) -> bool:
    """Whether the kernel can take a call: it would read and write out of bounds where shapes do not
    fit. The first call on a device builds the kernels, so it must not come inside a graph capture.
    """
    batch, heads, length, width = memory.shape
    context, read = weight.shape[-1], (memory, x, weight, bias, x if residual is None else residual)
    fits = (
        x.is_cuda
        and backend in ("auto", "cuda")
        and not torch.is_autocast_enabled("cuda")
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read))
        and x.dtype in cuda.DTYPE_CODES
        and memory.dtype == x.dtype
        and weight.dtype in (x.dtype, torch.float32)
        and bias.dtype == weight.dtype
        and positions.dtype == torch.int64
        and x.shape == (batch, 1, heads * width)
        and (residual is None or residual.shape == x.shape and residual.dtype == x.dtype)
        and weight.shape == (heads, 1, context, context)
        and length <= context
        and bias.shape == (heads, context)
        and positions.shape in ((1, 1), (batch, 1))
        and memory.stride()[2:] == (width, 1)
        and width * x.element_size() % 16 == 0
        and on_one_device(positions, *read)
    )
    return fits and cuda.device_reason(x.device.index) is None


def launch(memory, x, weight, bias, residual, positions) -> Tensor:
    """`mix_row` by the kernel, for arguments that `kernel_serves` has accepted."""
    batch, heads, length, width = memory.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    given = {"memory": memory, "x": cuda.rows(x), "weight": weight.contiguous()}
    given |= {"bias": bias.contiguous(), "positions": positions, "y": y}
    given |= {"residual": residual if residual is None else cuda.rows(residual)}
    params = cuda.params_of(x, (batch, length, heads * width), heads, **given)
    params.memory_batch_stride, params.memory_head_stride, _, _ = memory.stride()
    params.positions_stride = positions.stride(0) if len(positions) > 1 else 0
    cuda.call("mixer_mix_row", params)
    return y
