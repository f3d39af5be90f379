"""Token mixing in every way a user could write it, operation by operation, each as a call on a
buffer slot.

The alternatives start from the masked weight in the right type, so that only their products are
timed; masking and casting count under `autograd`, where a user pays for them. Where a library wants
another layout, its copies count.

Shapes: x, y, residual, dy (batch, tokens, channels); weight (heads, tokens, tokens), out then in;
lags and bias (heads, tokens).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import plain_kernels
import torch
import torch.nn.functional as F
from dense_mixing import dense_mixing
from torch import Tensor, nn

from mixer.ops import cuda, triangular_conv

PANELS = (2, 4, 8, 16)
MIN_PANEL_ROWS = 16


@dataclass(frozen=True)
class Shape:
    """One case. `factor` names what was changed from the base case, for the tables of a sweep."""

    tokens: int
    channels: int = 1024
    batch_tokens: int = 65536
    heads: int = 1
    dtype: str = "bfloat16"
    factor: str = "tokens"

    @property
    def batch(self) -> int:
        return max(1, self.batch_tokens // self.tokens)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def arithmetic(self) -> str:
        """Key of the ceiling that holds for this case."""
        return "tf32" if self.dtype == "float32" else self.dtype

    @property
    def activation_bytes(self) -> int:
        return self.batch * self.tokens * self.channels * self.torch_dtype.itemsize


@dataclass
class Variant:
    """`standard` brings what `call` returns into the operator's shapes, for the check alone."""

    name: str
    family: str  # "ours", "by lag" (ours too), or a kind of alternative
    call: Callable[[int], object]
    standard: Callable = lambda result: result
    compiled: bool = False


class Data:
    """A shape's tensors, `slots` times: together more than three times the L2 cache."""

    def __init__(self, shape: Shape, device: str):
        self.shape = shape
        self.device = device
        self.kernels = cuda if device == "cuda" else plain_kernels
        cache_bytes = 0
        if device == "cuda":
            cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        weight_bytes = shape.heads * shape.tokens**2 * shape.torch_dtype.itemsize
        count = max(2, 3 * cache_bytes // (shape.activation_bytes + weight_bytes) + 1)
        self.slots = [self.slot() for _ in range(count)]

    def slot(self) -> SimpleNamespace:
        heads = self.shape.heads
        tokens = self.shape.tokens
        dtype = self.shape.torch_dtype
        normal = partial(torch.randn, device=self.device)
        activations = (self.shape.batch, tokens, self.shape.channels)
        x = normal(activations, dtype=dtype)
        dy = normal(activations, dtype=dtype)
        residual = normal(activations, dtype=dtype)
        weight = normal(heads, tokens, tokens) * tokens**-0.5
        lags = normal(heads, tokens) * tokens**-0.5
        bias = normal(heads, tokens)
        # A row of the masked weight starts on 16 bytes for the alternatives too.
        masked = F.pad(weight.tril().to(dtype), (0, -tokens % 8))[..., :tokens]
        return SimpleNamespace(
            x=x,
            dy=dy,
            residual=residual,
            weight=weight,
            lags=lags,
            bias=bias,
            masked=masked,
            conv_weight=to_conv(masked),
            packed=self.kernels.pack(weight, tokens, dtype),
            narrow_bias=bias.to(dtype),
            y=torch.empty_like(x),
            dweight=torch.zeros_like(weight),
        )

    def variant(self, name: str, family: str, function: Callable, *standard: Callable) -> Variant:
        """The variant whose call gives a slot's tensors to `function`."""
        return Variant(name, family, lambda slot: function(self.slots[slot]), *standard)

    def ours(self, function: Callable, *standard: Callable) -> Variant:
        return self.variant("ours", "ours", function, *standard)

    def in_panels(self, function: Callable, ending: str = "", *standard: Callable) -> list[Variant]:
        """`function`, which takes a slot and a number of panels; one panel is the dense product."""
        dense = partial(function, panels=1)
        variants = [self.variant(f"bmm into out{ending}", "dense", dense, *standard)]
        for count in PANELS:
            if self.shape.tokens // count >= MIN_PANEL_ROWS:
                name = f"p={count}{ending}"
                in_panels = partial(function, panels=count)
                variants.append(self.variant(name, "panels", in_panels, *standard))
        return variants


# ------------------------------------------------------------------------- layouts


def to_conv(weight: Tensor) -> Tensor:
    """(heads, out, in) -> (heads * out, in, 1), as a grouped nn.Conv1d keeps it."""
    return weight.flatten(0, 1)[..., None].contiguous()


def from_conv(weight: Tensor, heads: int) -> Tensor:
    return weight.squeeze(-1).unflatten(0, (heads, -1))


def grouped(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, channels) -> (batch, heads * tokens, channels of a head): heads as the groups
    of a convolution.
    """
    return x if heads == 1 else x.unflatten(-1, (heads, -1)).permute(0, 2, 1, 3).flatten(1, 2)


def ungrouped(y: Tensor, heads: int) -> Tensor:
    return y if heads == 1 else y.unflatten(1, (heads, -1)).permute(0, 2, 1, 3).flatten(2)


def masked_square(dweight: Tensor) -> Tensor:
    return dweight.tril()[None]


# ------------------------------------------------------------------------- products in panels


def head_slices(channels: int, heads: int) -> list[slice]:
    """The channels of each head."""
    width = channels // heads
    return [slice(head * width, (head + 1) * width) for head in range(heads)]


def bounds(tokens: int, panels: int) -> list[tuple[int, int]]:
    rows = (-(-tokens // panels) + 7) // 8 * 8  # keeps the panels of odd contexts on 16 bytes
    return [(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def multiply_into(out: Tensor, weight: Tensor, x: Tensor) -> None:
    """out (batch, rows, channels) = weight (rows, depth) @ x (batch, depth, channels), by a pure
    cuBLAS call.
    """
    torch.bmm(weight.expand(x.shape[0], -1, -1), x, out=out)


def panels_forward(slot: SimpleNamespace, panels: int) -> Tensor:
    """Panel [start:end] of rows reads x[:end] alone."""
    heads, tokens, _ = slot.masked.shape
    for weight, columns in zip(slot.masked, head_slices(slot.x.shape[-1], heads), strict=True):
        for start, end in bounds(tokens, panels):
            y = slot.y[:, start:end, columns]
            multiply_into(y, weight[start:end, :end], slot.x[:, :end, columns])
    return slot.y


def panels_grad_input(slot: SimpleNamespace, panels: int) -> Tensor:
    """Panel [start:end] of rows reads dy[start:] alone."""
    heads, tokens, _ = slot.masked.shape
    for weight, columns in zip(slot.masked, head_slices(slot.dy.shape[-1], heads), strict=True):
        for start, end in bounds(tokens, panels):
            dx = slot.y[:, start:end, columns]
            multiply_into(dx, weight[start:, start:end].t(), slot.dy[:, start:, columns])
    return slot.y


def panels_grad_weight(slot: SimpleNamespace, panels: int) -> Tensor:
    """Products of each sample, summed over the batch. The zero upper half is left as it was."""
    heads, tokens, _ = slot.dweight.shape
    for dweight, columns in zip(slot.dweight, head_slices(slot.x.shape[-1], heads), strict=True):
        for start, end in bounds(tokens, panels):
            products = torch.bmm(slot.dy[:, start:end, columns], slot.x[:, :end, columns].mT)
            dweight[start:end, :end] = products.sum(0)
    return slot.dweight


# ------------------------------------------------------------------------- products


def forward(data: Data, _compiled: bool) -> list[Variant]:
    heads = data.shape.heads

    def conv(s):
        return ungrouped(F.conv1d(grouped(s.x, heads), s.conv_weight, groups=heads), heads)

    def matmul(s):
        return torch.matmul(s.masked[0], s.x)

    variants = [data.ours(lambda s: data.kernels.forward(s.x, s.packed, None, None))]
    variants += data.in_panels(panels_forward)
    variants.append(data.variant("Conv1d", "Conv1d", conv))
    if heads == 1:
        variants.append(data.variant("matmul", "dense", matmul))
    return variants


def conv_backward(
    s: SimpleNamespace, x: Tensor, heads: int, output_mask: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias, those that `output_mask` asks for."""
    return torch.ops.aten.convolution_backward(
        grouped(s.dy, heads),
        grouped(x, heads),
        s.conv_weight,
        bias_sizes=None,
        stride=[1],
        padding=[0],
        dilation=[1],
        transposed=False,
        output_padding=[0],
        groups=heads,
        output_mask=output_mask,
    )


def grad_input(data: Data, _compiled: bool) -> list[Variant]:
    heads = data.shape.heads

    def conv(s):  # dy stands for the input as well, of which only the shape is asked
        return ungrouped(conv_backward(s, s.dy, heads, (True, False, False))[0], heads)

    def matmul(s):
        return torch.matmul(s.masked[0].t(), s.dy)

    variants = [data.ours(lambda s: data.kernels.grad_input(s.dy, s.packed))]
    variants += data.in_panels(panels_grad_input)
    variants.append(data.variant("Conv1d", "Conv1d", conv))
    if heads == 1:
        variants.append(data.variant("matmul", "dense", matmul))
    return variants


def grad_weight(data: Data, _compiled: bool) -> list[Variant]:
    """Ours returns fp32 and the zero upper half; alternatives may return 16 bits and leave the
    upper half unmasked.
    """
    heads = data.shape.heads

    def ours(s):
        return data.kernels.grad_weight(s.dy, s.x, s.x.shape[1], heads, False)[0]

    def conv(s):
        return conv_backward(s, s.x, heads, (False, True, False))[1]

    def conv_standard(dweight):
        return from_conv(dweight, heads).tril()

    def summed(s):
        return (s.dy @ s.x.mT).sum(0)

    def copied(s):
        dy = s.dy.transpose(0, 1).flatten(1)  # (tokens, batch * channels)
        return dy @ s.x.transpose(0, 1).flatten(1).t()

    variants = [data.ours(ours), *data.in_panels(panels_grad_weight, "", Tensor.tril)]
    variants.append(data.variant("Conv1d", "Conv1d", conv, conv_standard))
    if heads == 1:
        variants.append(data.variant("bmm+sum", "dense", summed, masked_square))
        variants.append(data.variant("copies+GEMM", "dense", copied, masked_square))
    return variants


def fused(data: Data, compiled: bool) -> list[Variant]:
    def separate(weight, x, bias, residual):
        return torch.matmul(weight, x) + bias + residual

    def accumulating(s):
        weight = s.masked.expand(s.x.shape[0], -1, -1)
        return torch.baddbmm(s.residual, weight, s.x).add_(s.narrow_bias[0, :, None])

    def in_panels(s, panels):
        return panels_forward(s, panels).add_(s.narrow_bias[0, :, None]).add_(s.residual)

    def with_tensors(function):
        return lambda s: function(s.masked[0], s.x, s.narrow_bias[0, :, None], s.residual)

    def ours(s):
        return data.kernels.forward(s.x, s.packed, s.narrow_bias, s.residual)

    variants = [data.ours(ours), *data.in_panels(in_panels, ", adds")]
    variants += [
        data.variant("matmul + bias + residual", "dense", with_tensors(separate)),
        data.variant("baddbmm + bias", "dense", accumulating),
    ]
    if compiled:
        call = with_tensors(faster(separate, data.device))
        variants.append(data.variant("compiled", "compiled", call))
        variants[-1].compiled = True
    return variants


def pack(data: Data, _compiled: bool) -> list[Variant]:
    tokens = data.shape.tokens
    dtype = data.shape.torch_dtype

    def ours(s):
        return data.kernels.pack(s.weight, tokens, dtype)

    def without_padding(packed):
        return packed[..., :tokens]

    def tril_and_cast(s):
        return s.weight.tril().to(dtype)

    return [
        data.ours(ours, without_padding),
        data.variant("tril, cast", "dense", tril_and_cast),
    ]


# ------------------------------------------------------------------------- autograd


def autograd(data: Data, compiled: bool) -> list[Variant]:
    """Forward and backward as in training: fp32 weight and bias under autocast, gradients of both
    and of x.
    """
    heads = data.shape.heads

    def full(x, weight, bias, backend="cuda"):
        return triangular_conv(x, weight[:, None], bias, backend=backend)

    def by_lag(x, lags, bias):
        return triangular_conv(x, bias=bias, backend="cuda", lags=lags[:, None])

    def dense(x, weight, bias):
        return full(x, weight, bias, "dense")

    def from_square(dweight, _heads):
        return dweight[None]

    variants = [
        Variant("ours", "ours", step(data, full, lambda s: (s.weight, s.bias))),
        Variant("ours, by lag", "by lag", step(data, by_lag, lambda s: (s.lags, s.bias))),
        Variant("mixer dense", "dense", step(data, dense, lambda s: (s.weight, s.bias))),
    ]
    rivals = [("Conv1d", "Conv1d", masked_conv(data), conv_parameters, from_conv)]
    if heads == 1:
        rivals.append(("matmul", "dense", dense_mixing, square_parameters, from_square))
    for name, family, layer, parameters, standard in rivals:

        def in_our_shapes(results, standard=standard):
            dweight, dx, dbias, y = results
            return standard(dweight, heads), dx, dbias.view(heads, -1), y

        variants.append(Variant(name, family, step(data, layer, parameters), in_our_shapes))
        if compiled:
            call = step(data, faster(layer, data.device), parameters)
            variants.append(Variant(f"{name}, compiled", "compiled", call, in_our_shapes, True))
    return variants


def faster(function: Callable, device: str) -> Callable:
    """`function` compiled. On a CPU it is traced alone, which tells whether it could be."""
    backend = "inductor" if device == "cuda" else "aot_eager"
    return torch.compile(function, dynamic=False, backend=backend)


def masked_conv(data: Data) -> Callable:
    heads = data.shape.heads
    tokens = data.shape.tokens
    mask = torch.ones(tokens, tokens, device=data.device).tril().repeat(heads, 1)[..., None]

    def layer(x, weight, bias):
        return ungrouped(F.conv1d(grouped(x, heads), weight * mask, bias, groups=heads), heads)

    return layer


def conv_parameters(s: SimpleNamespace) -> tuple[Tensor, Tensor]:
    return to_conv(s.weight), s.bias.flatten()


def square_parameters(s: SimpleNamespace) -> tuple[Tensor, Tensor]:
    return s.weight[0], s.bias[0]


def step(data: Data, layer: Callable, parameters: Callable) -> Callable:
    """The call that runs `layer` and its backward on a slot: gradients of weight, x and bias, and
    y. `parameters` makes weight and bias of a slot's tensors.
    """
    leaves = []
    for slot in data.slots:
        weight, bias = map(nn.Parameter, parameters(slot))
        leaves.append((weight, slot.x.detach().requires_grad_(), bias))
    dtype = data.shape.torch_dtype

    def call(slot):
        weight, x, bias = leaves[slot]
        with torch.autocast(data.device, dtype, enabled=dtype != torch.float32):
            y = layer(x, weight, bias)
        return *torch.autograd.grad(y, (weight, x, bias), data.slots[slot].dy), y.detach()

    return call


OF_OPERATION = (forward, grad_input, grad_weight, fused, pack, autograd)
VARIANTS = {function.__name__: function for function in OF_OPERATION}
