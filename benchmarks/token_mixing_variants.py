"""Token mixing in every way a user could write it, operation by operation, each as a call on a
buffer slot.

The alternatives start from the masked weight in the right type, so that only their products are
timed; masking and casting count under `autograd`, where a user pays for them. Where a library wants
another layout, its copies count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import panels
import torch
import torch.nn.functional as F
from panels import head_slices, multiply_into
from token_mixing_work import Shape
from torch import Tensor, nn

from mixer.models.masked_mixer.plain import shift_channels, tap_shift
from mixer.ops import cuda, triangular_conv

PANELS = (2, 4, 8, 16)
MIN_PANEL_ROWS = 16


@dataclass
class Variant:
    """`standard` brings what `call` returns into the operator's shapes, for the check alone."""

    name: str
    family: str  # "ours", "auto", or a kind of alternative
    call: Callable[[int], object]
    standard: Callable = lambda result: result
    compiled: bool = False


class Data:
    """A shape's tensors, `slots` times: together more than three times the L2 cache."""

    def __init__(self, shape: Shape, device: str, ours: str):
        self.shape, self.device = shape, device
        self.ours = ours  # what is measured: "cuda", or "panels" where the kernels do not run
        self.module: ModuleType = cuda if ours == "cuda" else panels
        columns = panels.packed_columns(shape.tokens)
        weight_bytes = (
            shape.heads * shape.taps * shape.tokens * columns * shape.torch_dtype.itemsize
        )
        cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
        self.slots = [
            self.slot()
            for _ in range(max(2, 3 * cache // (shape.activation_bytes + weight_bytes) + 1))
        ]

    def slot(self) -> SimpleNamespace:
        shape, dtype = self.shape, self.shape.torch_dtype
        size = (shape.batch, shape.tokens, shape.channels)
        x, dy, residual = (torch.randn(size, device=self.device, dtype=dtype) for _ in range(3))
        weight = torch.randn(
            shape.heads, shape.taps, shape.tokens, shape.tokens, device=self.device
        )
        weight *= (shape.tokens * shape.taps) ** -0.5
        bias = torch.randn(shape.heads, shape.tokens, device=self.device)
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

    def on(self, function: Callable) -> Callable[[int], object]:
        """The call that gives a slot's tensors to `function`."""
        return lambda slot: function(self.slots[slot])

    @property
    def single(self) -> bool:
        return self.shape.heads == self.shape.taps == 1


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


def panel_counts(tokens: int) -> list[int]:
    return [count for count in PANELS if tokens // count >= MIN_PANEL_ROWS]


def bounds(tokens: int, panels: int) -> list[tuple[int, int]]:
    rows = -(-tokens // panels)
    rows = (rows + 7) // 8 * 8  # keeps the panels of odd contexts on 16 bytes
    return [(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def panels_forward(slot: SimpleNamespace, panels: int) -> Tensor:
    """Pure cuBLAS calls into an out buffer; one panel is the dense product."""
    heads, taps, tokens, _ = slot.masked.shape
    for head, columns in enumerate(head_slices(slot.x.shape[-1], heads)):
        for tap in range(taps):
            x = shift_channels(slot.x[..., columns], tap_shift(tap, taps))
            for start, end in bounds(tokens, panels):
                multiply_into(
                    slot.y[:, start:end, columns],
                    slot.masked[head, tap, start:end, :end],
                    x[:, :end],
                    tap > 0,
                )
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


def in_panels(data: Data, function: Callable) -> list[Variant]:
    counts = panel_counts(data.shape.tokens)
    found = [Variant("bmm into out", "dense", data.on(lambda s: function(s, 1)))]
    return found + [
        Variant(f"p={p}", "panels", data.on(lambda s, p=p: function(s, p))) for p in counts
    ]


def our_panels(data: Data, function: Callable) -> list[Variant]:
    """panels.py as a rival of the kernels; where there are no kernels it is what is measured."""
    return [Variant("mixer panels", "panels", data.on(function))] if data.ours == "cuda" else []


# ------------------------------------------------------------------------- products


def forward(data: Data, _compiled: bool) -> list[Variant]:
    heads, pad = data.shape.heads, (data.shape.taps - 1) // 2
    found = [
        Variant(
            data.ours, "ours", data.on(lambda s: data.module.forward(s.x, s.packed, None, None))
        )
    ]
    found += our_panels(data, lambda s: panels.forward(s.x, s.masked, None, None))
    found += in_panels(data, panels_forward)

    def conv(s):
        return ungrouped(
            F.conv1d(grouped(s.x, heads), s.conv_weight, padding=pad, groups=heads), heads
        )

    found += [Variant("Conv1d", "Conv1d", data.on(conv))]
    if data.single:
        found += [
            Variant("matmul", "dense", data.on(lambda s: torch.matmul(s.masked[0, 0], s.x))),
            Variant("Linear", "Linear", data.on(lambda s: F.linear(s.x.mT, s.masked[0, 0]).mT)),
        ]
    return found


def grad_input(data: Data, _compiled: bool) -> list[Variant]:
    heads, pad = data.shape.heads, (data.shape.taps - 1) // 2
    found = [Variant(data.ours, "ours", data.on(lambda s: data.module.grad_input(s.dy, s.packed)))]
    found += our_panels(data, lambda s: panels.grad_input(s.dy, s.masked))
    found += in_panels(data, panels_grad_input)

    def conv(s):
        dy = grouped(s.dy, heads)  # stands for the input as well, of which only the shape is asked
        return ungrouped(
            conv_backward(dy, dy, s.conv_weight, pad, heads, (True, False, False))[0], heads
        )

    found += [Variant("Conv1d", "Conv1d", data.on(conv))]
    if data.single:
        found += [
            Variant("matmul", "dense", data.on(lambda s: torch.matmul(s.masked[0, 0].t(), s.dy))),
            Variant(
                "Linear", "Linear", data.on(lambda s: F.linear(s.dy.mT, s.masked[0, 0].t()).mT)
            ),
        ]
    return found


def conv_backward(
    dy: Tensor, x: Tensor, weight: Tensor, pad: int, groups: int, wanted: tuple
) -> tuple:
    return torch.ops.aten.convolution_backward(
        dy, x, weight, None, [1], [pad], [1], False, [0], groups, wanted
    )


def grad_weight(data: Data, _compiled: bool) -> list[Variant]:
    """Ours returns fp32 and the zero upper half; alternatives may return 16 bits and leave the
    upper half unmasked.
    """
    shape = data.shape
    heads, pad = shape.heads, (shape.taps - 1) // 2
    sizes = (shape.tokens, shape.taps, heads, torch.float32)

    def conv(s):
        return conv_backward(
            grouped(s.dy, heads),
            grouped(s.x, heads),
            s.conv_weight,
            pad,
            heads,
            (False, True, False),
        )[1]

    found = [
        Variant(
            data.ours,
            "ours",
            data.on(lambda s: data.module.grad_weight(s.dy, s.x, *sizes, False)[0]),
        )
    ]
    found += our_panels(data, lambda s: panels.grad_weight(s.dy, s.x, *sizes, False)[0])
    found += in_panels(data, panels_grad_weight)
    found += [Variant("Conv1d", "Conv1d", data.on(conv), lambda result: from_conv(result, heads))]
    if data.single:
        found += [
            Variant(
                "bmm+sum", "dense", data.on(lambda s: torch.bmm(s.dy, s.x.mT).sum(0)), as_square
            ),
            Variant(
                "einsum",
                "dense",
                data.on(lambda s: torch.einsum("bid,bjd->ij", s.dy, s.x)),
                as_square,
            ),
            Variant(
                "copies+GEMM", "dense", data.on(lambda s: wide(s.dy) @ wide(s.x).t()), as_square
            ),
        ]
    return found


def wide(x: Tensor) -> Tensor:
    """(batch, tokens, channels) -> copy (tokens, batch * channels)."""
    return x.transpose(0, 1).flatten(1)


def grad_weight_bias(data: Data, _compiled: bool) -> list[Variant]:
    sizes = (data.shape.tokens, data.shape.taps, data.shape.heads, torch.float32)

    def separate(s):
        return as_square(torch.bmm(s.dy, s.x.mT).sum(0)), s.dy.sum((0, 2))[None]

    found = [
        Variant(
            data.ours, "ours", data.on(lambda s: data.module.grad_weight(s.dy, s.x, *sizes, True))
        )
    ]
    found += our_panels(data, lambda s: panels.grad_weight(s.dy, s.x, *sizes, True))
    for p in panel_counts(data.shape.tokens):
        call = data.on(lambda s, p=p: (panels_grad_weight(s, p), s.dy.sum((0, 2))[None]))
        found.append(Variant(f"p={p}, sum", "panels", call))
    return found + [Variant("bmm+sum, sum", "dense", data.on(separate))]


def fused(data: Data, compiled: bool) -> list[Variant]:
    def separate(s):
        return torch.matmul(s.masked[0, 0], s.x) + s.narrow_bias[0, :, None] + s.residual

    def in_place(s):
        return torch.matmul(s.masked[0, 0], s.x).add_(s.narrow_bias[0, :, None]).add_(s.residual)

    def accumulating(s):
        weight = s.masked[0, 0].expand(s.x.shape[0], -1, -1)
        return torch.baddbmm(s.residual, weight, s.x).add_(s.narrow_bias[0, :, None])

    def panels_and_adds(s, p):
        return panels_forward(s, p).add_(s.narrow_bias[0, :, None]).add_(s.residual)

    found = [
        Variant(
            data.ours,
            "ours",
            data.on(lambda s: data.module.forward(s.x, s.packed, s.narrow_bias, s.residual)),
        )
    ]
    found += our_panels(data, lambda s: panels.forward(s.x, s.masked, s.narrow_bias, s.residual))
    for p in panel_counts(data.shape.tokens):
        found.append(
            Variant(f"p={p}, adds", "panels", data.on(lambda s, p=p: panels_and_adds(s, p)))
        )
    found += [
        Variant("matmul + bias + residual", "dense", data.on(separate)),
        Variant("in place", "dense", data.on(in_place)),
        Variant("baddbmm + bias", "dense", data.on(accumulating)),
    ]
    if compiled:
        call = torch.compile(lambda w, x, b, r: torch.matmul(w, x) + b + r, dynamic=False)
        run = data.on(lambda s: call(s.masked[0, 0], s.x, s.narrow_bias[0, :, None], s.residual))
        found.append(Variant("compiled", "compiled", run, compiled=True))
    return found


def pack(data: Data, _compiled: bool) -> list[Variant]:
    tokens, dtype = data.shape.tokens, data.shape.torch_dtype
    ours = data.on(lambda s: data.module.pack(s.weight, tokens, dtype))
    return [
        Variant(data.ours, "ours", ours, lambda packed: packed[..., :tokens]),
        Variant("tril, cast", "dense", data.on(lambda s: s.weight.tril().to(dtype))),
    ]


# ------------------------------------------------------------------------- autograd


def autograd(data: Data, compiled: bool) -> list[Variant]:
    """Forward and backward as in training: fp32 weight and bias under autocast, gradients of both
    and of x.
    """
    heads = data.shape.heads
    ours = data.ours if data.ours == "cuda" else "auto"
    doors = [("ours", ours), ("auto", "auto"), ("dense", "dense")]
    found = []
    for family, backend in doors:
        name = backend if family in ("ours", "auto") else f"mixer {backend}"
        layer = through_door(backend)
        found.append(
            Variant(
                name, family, step(data, layer, lambda s: s.weight, lambda s: s.bias), unpack(heads)
            )
        )
    found.append(conv_variant(data, "Conv1d", "Conv1d", masked_conv(data)))
    if heads == 1:
        found.append(
            conv_variant(data, "Conv1d, weight.data masked", "Conv1d", upstream_conv(data))
        )
    if data.single:
        found += [
            square_variant(data, "matmul", "dense", masked_matmul),
            square_variant(data, "Linear", "Linear", masked_linear),
        ]
    if compiled:
        found.append(
            square_variant(
                data,
                "matmul, compiled",
                "compiled",
                torch.compile(masked_matmul, dynamic=False),
                True,
            )
        )
        conv = torch.compile(masked_conv(data), dynamic=False)
        found.append(conv_variant(data, "Conv1d, compiled", "compiled", conv, True))
    return found


def masked_matmul(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(weight.tril(), x) + bias[:, None].to(x.dtype)


def masked_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.mT, weight.tril(), bias).mT


def masked_conv(data: Data) -> Callable:
    heads, pad = data.shape.heads, (data.shape.taps - 1) // 2
    mask = (
        torch.ones(data.shape.tokens, data.shape.tokens, device=data.device)
        .tril()
        .repeat(heads, 1)[..., None]
    )

    def layer(x, weight, bias):
        return ungrouped(
            F.conv1d(grouped(x, heads), weight * mask, bias, padding=pad, groups=heads), heads
        )

    return layer


def upstream_conv(data: Data) -> Callable:
    """nn.Conv1d whose weight.data is masked anew in each forward, as the reference implementation
    has it.

    The masked data is made from the weight it was first given, not from what the last forward left:
    the same work, and a captured graph then reads memory that stays.
    """
    tokens, taps = data.shape.tokens, data.shape.taps
    layers = {}

    def layer(x, weight, bias):
        if id(weight) not in layers:
            conv = nn.Conv1d(tokens, tokens, taps, padding=(taps - 1) // 2, device="meta")
            conv.weight, conv.bias = weight, bias
            layers[id(weight)] = conv, weight.data
        conv, first = layers[id(weight)]
        conv.weight.data = torch.tril(first.permute(2, 0, 1)).permute(1, 2, 0).contiguous()
        return conv(x)

    return layer


def through_door(backend: str) -> Callable:
    return lambda x, weight, bias: triangular_conv(x, weight, bias, backend=backend)


def step(
    data: Data, layer: Callable, weight_of: Callable, bias_of: Callable
) -> Callable[[int], tuple]:
    """The call that runs `layer` and its backward on a slot: gradients of weight, x and bias, and
    y.
    """
    leaves = [
        (
            nn.Parameter(weight_of(s).detach()),
            s.x.detach().requires_grad_(),
            nn.Parameter(bias_of(s).detach()),
        )
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


def square_variant(
    data: Data, name: str, family: str, layer: Callable, compiled: bool = False
) -> Variant:
    call = step(data, layer, lambda s: s.weight[0, 0], lambda s: s.bias[0])
    return Variant(name, family, call, unpack(1, as_square), compiled)


def conv_variant(
    data: Data, name: str, family: str, layer: Callable, compiled: bool = False
) -> Variant:
    heads = data.shape.heads
    call = step(data, layer, lambda s: to_conv(s.weight), lambda s: s.bias.flatten())
    return Variant(
        name, family, call, unpack(heads, lambda dweight: from_conv(dweight, heads)), compiled
    )


VARIANTS = {
    "forward": forward,
    "grad_input": grad_input,
    "grad_weight": grad_weight,
    "grad_weight_bias": grad_weight_bias,
    "fused": fused,
    "pack": pack,
    "autograd": autograd,
}
