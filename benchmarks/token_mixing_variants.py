"""Token mixing in every way a user could write it, operation by operation, each as a call on a
buffer slot.

The alternatives start from the masked weight in the right type, so that only their products are
timed; masking and casting count under `autograd`, where a user pays for them. Where a library wants
another layout, its copies count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import panels
import torch
import torch.nn.functional as F
from dense_mixing import dense_mixing
from panels import head_slices, multiply_into
from token_mixing_work import Shape
from torch import Tensor, nn

from mixer.ops import cuda, triangular_conv
from mixer.ops.plain import shift_channels, tap_shift

PANELS = (2, 4, 8, 16)
MIN_PANEL_ROWS = 16


@dataclass
class Variant:
    """`standard` brings what `call` returns into the operator's shapes, for the check alone."""

    name: str
    family: str  # "ours", or a kind of alternative
    call: Callable[[int], object]
    standard: Callable = lambda result: result
    compiled: bool = False


class Data:
    """A shape's tensors, `slots` times: together more than three times the L2 cache."""

    def __init__(self, shape: Shape, device: str, ours: str):
        self.shape, self.device = shape, device
        self.ours = ours  # what is measured: "cuda", or "panels" where the kernels do not run
        self.module = cuda if ours == "cuda" else panels
        cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
        columns = panels.packed_columns(shape.tokens)
        size = shape.heads * shape.taps * shape.tokens * columns * shape.torch_dtype.itemsize
        count = max(2, 3 * cache // (shape.activation_bytes + size) + 1)
        self.slots = [self.slot() for _ in range(count)]
        self.single = shape.heads == shape.taps == 1

    def slot(self) -> SimpleNamespace:
        shape, dtype, on = self.shape, self.shape.torch_dtype, self.device
        size = (shape.batch, shape.tokens, shape.channels)
        x, dy, residual = (torch.randn(size, device=on, dtype=dtype) for _ in range(3))
        weight = torch.randn(shape.heads, shape.taps, shape.tokens, shape.tokens, device=on)
        weight *= (shape.tokens * shape.taps) ** -0.5
        bias = torch.randn(shape.heads, shape.tokens, device=on)
        # A row of the masked weight starts on 16 bytes for the alternatives too.
        masked = panels.pack(weight, shape.tokens, dtype)[..., : shape.tokens]
        return SimpleNamespace(
            x=x,
            dy=dy,
            residual=residual,
            weight=weight,
            bias=bias,
            masked=masked,
            conv_weight=to_conv(masked),
            packed=self.module.pack(weight, shape.tokens, dtype),
            narrow_bias=bias.to(dtype),
            y=torch.empty_like(x),
            dweight=torch.zeros_like(weight),
        )

    def variant(self, name: str, family: str, function: Callable, *standard: Callable) -> Variant:
        """The variant whose call gives a slot's tensors to `function`."""
        return Variant(name, family, lambda slot: function(self.slots[slot]), *standard)

    def mine(self, function: Callable, *standard: Callable) -> Variant:
        return self.variant(self.ours, "ours", function, *standard)

    def in_panels(self, function: Callable, ending: str = "") -> list[Variant]:
        """`function`, which takes a slot and a number of panels; one panel is the dense product."""
        counts = [p for p in PANELS if self.shape.tokens // p >= MIN_PANEL_ROWS]
        name, found = f"bmm into out{ending}", []
        found.append(self.variant(name, "dense", lambda s: function(s, 1)))
        for p in counts:
            found.append(self.variant(f"p={p}{ending}", "panels", lambda s, p=p: function(s, p)))
        return found


# ------------------------------------------------------------------------- layouts


def to_conv(weight: Tensor) -> Tensor:
    """(heads, taps, out, in) -> (heads * out, in, taps), as a grouped nn.Conv1d keeps it."""
    return weight.permute(0, 2, 3, 1).flatten(0, 1).contiguous()


def from_conv(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(0, (heads, -1)).permute(0, 3, 1, 2)


def grouped(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, channels) -> (batch, heads * tokens, channels of a head): heads as the groups
    of a convolution.
    """
    return x if heads == 1 else x.unflatten(-1, (heads, -1)).permute(0, 2, 1, 3).flatten(1, 2)


def ungrouped(y: Tensor, heads: int) -> Tensor:
    return y if heads == 1 else y.unflatten(1, (heads, -1)).permute(0, 2, 1, 3).flatten(2)


def as_square(dweight: Tensor) -> Tensor:
    return dweight[None, None]


# ------------------------------------------------------------------------- products in panels


def bounds(tokens: int, panels: int) -> list[tuple[int, int]]:
    rows = (-(-tokens // panels) + 7) // 8 * 8  # keeps the panels of odd contexts on 16 bytes
    return [(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def panels_forward(slot: SimpleNamespace, panels: int) -> Tensor:
    """Pure cuBLAS calls into an out buffer."""
    heads, taps, tokens, _ = slot.masked.shape
    for head, columns in enumerate(head_slices(slot.x.shape[-1], heads)):
        for tap in range(taps):
            x = shift_channels(slot.x[..., columns], tap_shift(tap, taps))
            for start, end in bounds(tokens, panels):
                weight = slot.masked[head, tap, start:end, :end]
                multiply_into(slot.y[:, start:end, columns], weight, x[:, :end], tap > 0)
    return slot.y


def panels_grad_input(slot: SimpleNamespace, panels: int) -> Tensor:
    heads, taps, tokens, _ = slot.masked.shape
    for head, columns in enumerate(head_slices(slot.dy.shape[-1], heads)):
        for tap in range(taps):
            dy = shift_channels(slot.dy[..., columns], -tap_shift(tap, taps))
            for start, end in bounds(tokens, panels):
                weight = slot.masked[head, tap, start:, start:end].t()
                multiply_into(slot.y[:, start:end, columns], weight, dy[:, start:], tap > 0)
    return slot.y


def panels_grad_weight(slot: SimpleNamespace, panels: int) -> Tensor:
    """Products of each sample, summed over the batch. The zero upper half is left as it was."""
    heads, taps, tokens, _ = slot.dweight.shape
    for head, columns in enumerate(head_slices(slot.dy.shape[-1], heads)):
        for tap in range(taps):
            x = shift_channels(slot.x[..., columns], tap_shift(tap, taps))
            for start, end in bounds(tokens, panels):
                rows = torch.bmm(slot.dy[:, start:end, columns], x[:, :end].transpose(1, 2)).sum(0)
                slot.dweight[head, tap, start:end, :end] = rows
    return slot.dweight


# ------------------------------------------------------------------------- products


def forward(data: Data, _compiled: bool) -> list[Variant]:
    heads, pad = data.shape.heads, (data.shape.taps - 1) // 2

    def conv(s):
        y = F.conv1d(grouped(s.x, heads), s.conv_weight, padding=pad, groups=heads)
        return ungrouped(y, heads)

    found = [data.mine(lambda s: data.module.forward(s.x, s.packed, None, None))]
    found += [*data.in_panels(panels_forward), data.variant("Conv1d", "Conv1d", conv)]
    if data.single:
        found.append(data.variant("matmul", "dense", lambda s: torch.matmul(s.masked[0, 0], s.x)))
    return found


def conv_backward(s: SimpleNamespace, x: Tensor, shape: Shape, wanted: tuple) -> tuple:
    pad, groups = (shape.taps - 1) // 2, shape.heads
    options = [1], [pad], [1], False, [0], groups, wanted
    dy, x = grouped(s.dy, groups), grouped(x, groups)
    return torch.ops.aten.convolution_backward(dy, x, s.conv_weight, None, *options)


def grad_input(data: Data, _compiled: bool) -> list[Variant]:
    def conv(s):  # dy stands for the input as well, of which only the shape is asked
        dx = conv_backward(s, s.dy, data.shape, (True, False, False))[0]
        return ungrouped(dx, data.shape.heads)

    def matmul(s):
        return torch.matmul(s.masked[0, 0].t(), s.dy)

    found = [data.mine(lambda s: data.module.grad_input(s.dy, s.packed))]
    found += [*data.in_panels(panels_grad_input), data.variant("Conv1d", "Conv1d", conv)]
    return found + ([data.variant("matmul", "dense", matmul)] if data.single else [])


def grad_weight(data: Data, _compiled: bool) -> list[Variant]:
    """Ours returns fp32 and the zero upper half; alternatives may return 16 bits and leave the
    upper half unmasked.
    """
    shape = data.shape
    sizes = (shape.tokens, shape.taps, shape.heads, torch.float32)

    def conv(s):
        return conv_backward(s, s.x, shape, (False, True, False))[1]

    def wide(x):  # (batch, tokens, channels) -> copy (tokens, batch * channels)
        return x.transpose(0, 1).flatten(1)

    found = [data.mine(lambda s: data.module.grad_weight(s.dy, s.x, *sizes, False)[0])]
    found += data.in_panels(panels_grad_weight)
    found += [data.variant("Conv1d", "Conv1d", conv, lambda dw: from_conv(dw, shape.heads))]
    if data.single:
        summed = data.variant("bmm+sum", "dense", lambda s: (s.dy @ s.x.mT).sum(0), as_square)
        copied = lambda s: wide(s.dy) @ wide(s.x).t()  # noqa: E731
        found += [summed, data.variant("copies+GEMM", "dense", copied, as_square)]
    return found


def grad_weight_bias(data: Data, _compiled: bool) -> list[Variant]:
    sizes = (data.shape.tokens, data.shape.taps, data.shape.heads, torch.float32)

    def in_panels(s, p):
        return panels_grad_weight(s, p), s.dy.sum((0, 2))[None]

    found = [data.mine(lambda s: data.module.grad_weight(s.dy, s.x, *sizes, True))]
    return found + data.in_panels(in_panels, ", sum")


def fused(data: Data, compiled: bool) -> list[Variant]:
    def separate(weight, x, bias, residual):
        return torch.matmul(weight, x) + bias + residual

    def accumulating(s):
        weight = s.masked[0, 0].expand(s.x.shape[0], -1, -1)
        return torch.baddbmm(s.residual, weight, s.x).add_(s.narrow_bias[0, :, None])

    def in_panels(s, p):
        return panels_forward(s, p).add_(s.narrow_bias[0, :, None]).add_(s.residual)

    def with_tensors(function):
        return lambda s: function(s.masked[0, 0], s.x, s.narrow_bias[0, :, None], s.residual)

    module = data.module
    found = [data.mine(lambda s: module.forward(s.x, s.packed, s.narrow_bias, s.residual))]
    found += data.in_panels(in_panels, ", adds")
    found += [
        data.variant("matmul + bias + residual", "dense", with_tensors(separate)),
        data.variant("baddbmm + bias", "dense", accumulating),
    ]
    if compiled:
        call = with_tensors(torch.compile(separate, dynamic=False))
        found.append(data.variant("compiled", "compiled", call))
        found[-1].compiled = True
    return found


def pack(data: Data, _compiled: bool) -> list[Variant]:
    tokens, dtype = data.shape.tokens, data.shape.torch_dtype
    ours = data.mine(lambda s: data.module.pack(s.weight, tokens, dtype), lambda w: w[..., :tokens])
    return [ours, data.variant("tril, cast", "dense", lambda s: s.weight.tril().to(dtype))]


# ------------------------------------------------------------------------- autograd


def autograd(data: Data, compiled: bool) -> list[Variant]:
    """Forward and backward as in training: fp32 weight and bias under autocast, gradients of both
    and of x.
    """
    heads = data.shape.heads
    ours = data.ours if data.ours == "cuda" else "auto"
    found = []
    for name, family, backend in [(ours, "ours", ours), ("mixer dense", "dense", "dense")]:
        layer = through_door(backend)
        call = step(data, layer, lambda s: s.weight, lambda s: s.bias)
        found.append(Variant(name, family, call, unpack(heads)))
    layers = [("Conv1d", masked_conv(data), conv_variant)]
    layers += [("matmul", dense_mixing, square_variant)] if data.single else []
    for name, layer, variant in layers:
        found.append(variant(data, name, "dense" if name == "matmul" else name, layer))
        if compiled:
            faster = torch.compile(layer, dynamic=False)
            found.append(variant(data, f"{name}, compiled", "compiled", faster))
            found[-1].compiled = True
    return found


def masked_conv(data: Data) -> Callable:
    shape, pad = data.shape, (data.shape.taps - 1) // 2
    ones = torch.ones(shape.tokens, shape.tokens, device=data.device)
    mask = ones.tril().repeat(shape.heads, 1)[..., None]

    def layer(x, weight, bias):
        parts = grouped(x, shape.heads)
        y = F.conv1d(parts, weight * mask, bias, padding=pad, groups=shape.heads)
        return ungrouped(y, shape.heads)

    return layer


def through_door(backend: str) -> Callable:
    return lambda x, weight, bias: triangular_conv(x, weight, bias, backend=backend)


def step(data: Data, layer: Callable, weight_of: Callable, bias_of: Callable) -> Callable:
    """The call that runs `layer` and its backward on a slot: gradients of weight, x and bias, and
    y.
    """
    leaves = [
        (nn.Parameter(weight_of(s)), s.x.detach().requires_grad_(), nn.Parameter(bias_of(s)))
        for s in data.slots
    ]
    dtype = data.shape.torch_dtype

    def call(slot):
        weight, x, bias = leaves[slot]
        with torch.autocast(data.device, dtype, enabled=dtype != torch.float32):
            y = layer(x, weight, bias)
        return *torch.autograd.grad(y, (weight, x, bias), data.slots[slot].dy), y.detach()

    return call


def unpack(heads: int, weight: Callable = lambda dweight: dweight) -> Callable:
    """Results of a step into the operator's shapes."""
    return lambda results: (weight(results[0]), results[1], results[2].view(heads, -1), results[3])


def square_variant(data: Data, name: str, family: str, layer: Callable) -> Variant:
    call = step(data, layer, lambda s: s.weight[0, 0], lambda s: s.bias[0])
    return Variant(name, family, call, unpack(1, as_square))


def conv_variant(data: Data, name: str, family: str, layer: Callable) -> Variant:
    heads = data.shape.heads
    call = step(data, layer, lambda s: to_conv(s.weight), lambda s: s.bias.flatten())
    return Variant(name, family, call, unpack(heads, lambda dweight: from_conv(dweight, heads)))


OF_OPERATION = (forward, grad_input, grad_weight, grad_weight_bias, fused, pack, autograd)
VARIANTS = {function.__name__: function for function in OF_OPERATION}
