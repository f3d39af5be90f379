"""The triangular convolution as the best dense form that one can write in PyTorch: what our kernels
are measured against.

Only products touch whole activations. The compiler fuses the mask, the cast and the bias into its
own kernels; it must not see the sums over samples and channels, of which it makes slow reductions.
"""

import torch
from torch import Tensor, nn

COLUMNS = 8  # of ones; tensor cores want as many


@torch.library.custom_op("benchmarks::dense_gradients", mutates_args=())
def gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the square weight, (tokens, tokens), and of the bias, (tokens,), both fp32 or
    wider, from dy and x, (batch, tokens, channels).
    """
    batch, tokens, channels = x.shape
    gradient_dtype = torch.promote_types(x.dtype, torch.float32)
    # A sum over channels as a product: a reduction would read dy at a fraction of the bandwidth.
    ones = torch.ones(channels, COLUMNS, dtype=dy.dtype, device=dy.device)
    sums = (dy.reshape(-1, channels) @ ones)[:, 0]  # over channels, (batch * tokens,)
    dbias = sums.view(batch, tokens).sum(0, dtype=gradient_dtype)
    if tokens < 2 * channels:  # a product for each sample moves less than copies of x and dy do
        return torch.bmm(dy, x.mT).sum(0, dtype=gradient_dtype), dbias
    dy_rows = dy.transpose(0, 1).reshape(tokens, -1)
    x_rows = x.transpose(0, 1).reshape(tokens, -1)
    return (dy_rows @ x_rows.t()).to(gradient_dtype), dbias


@gradients.register_fake
def _(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    tokens = x.shape[1]
    gradient_dtype = torch.promote_types(x.dtype, torch.float32)
    dweight = x.new_empty(tokens, tokens, dtype=gradient_dtype)
    return dweight, x.new_empty(tokens, dtype=gradient_dtype)


class DenseMixing(torch.autograd.Function):
    """y = tril(weight) x + bias, of x (batch, tokens, channels) and fp32 parameters, (tokens,
    tokens) and (tokens,). Under autocast x is in the autocast type.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        square = weight.tril().to(x.dtype)
        ctx.save_for_backward(x, square)
        return torch.matmul(square, x) + bias[:, None].to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, square = ctx.saved_tensors
        dweight, dbias = gradients(dy, x)
        return torch.matmul(square.t(), dy), dweight.tril(), dbias


def dense_mixing(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """DenseMixing in the type that autocast asks for."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    return DenseMixing.apply(x, weight, bias)


class MatmulMixing(nn.Module):
    def __init__(self, tokens: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, tokens) / tokens**0.5)
        self.bias = nn.Parameter(torch.zeros(tokens))

    def forward(self, x: Tensor) -> Tensor:
        return dense_mixing(x, self.weight, self.bias)
