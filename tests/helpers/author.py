"""Models as the author's code has them, under the names of his state dicts, and a training loop
that does what transformers' Trainer does with them.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv(context: int, taps: int | None) -> nn.Module:
    """Without taps a Linear layer over the tokens, as torch_compile=True has it."""
    if taps is None:
        return nn.Linear(context, context)
    return nn.Conv1d(context, context, taps, padding="same")


def masked(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer whose channels are the tokens. The upper half of its weight is set to zero before
    each use, though it has gradients.
    """
    lower = torch.ones(layer.weight.shape[:2]).tril()
    if isinstance(layer, nn.Linear):
        layer.weight.data *= lower
        return layer(x.mT).mT
    layer.weight.data *= lower[..., None]
    return layer(x)


class Heads(nn.Module):
    def __init__(self, hidden: int, context: int, taps: int | None, heads: int = 4):
        super().__init__()
        self.proj_head = nn.ModuleList(nn.Linear(hidden, hidden // heads) for _ in range(heads))
        self.convs = nn.ModuleList(conv(context, taps) for _ in range(heads))
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = zip(self.convs, self.proj_head, strict=True)
        return self.out_proj(torch.cat([masked(layer, proj(x)) for layer, proj in heads], dim=2))


class Block(nn.Module):
    def __init__(self, kind: str, taps: int | None, hidden: int, width: int, context: int):
        super().__init__()
        self.seq_layernorm, self.patch_layernorm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.patch_ff = nn.Sequential(nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, hidden))
        self.kind = kind
        if kind == "expanded":
            self.conv = nn.Sequential(conv(context, taps), nn.GELU(), conv(context, taps))
        elif kind == "flat":
            self.conv = conv(context, taps)
        else:
            setattr(self, kind, Heads(hidden, context, taps))

    def mix(self, x: Tensor) -> Tensor:
        if self.kind == "flat":
            return masked(self.conv, x)
        if self.kind == "expanded":
            return masked(self.conv[2], F.gelu(masked(self.conv[0], x)))
        return getattr(self, self.kind)(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.seq_layernorm(x))
        return x + self.patch_ff(self.patch_layernorm(x))


class LanguageMixer(nn.Module):
    """`kind` is flat, expanded, mixerhead or conv."""

    def __init__(
        self, kind="flat", taps=1, width=None, vocabulary=50, hidden=16, blocks=2, context=12
    ):
        super().__init__()
        torch.manual_seed(3)
        sizes = hidden, width or 4 * hidden, context
        self.wte = nn.Embedding(vocabulary, hidden)
        self.mixerblocks = nn.ModuleList(Block(kind, taps, *sizes) for _ in range(blocks))
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        for norm in (part for part in self.modules() if isinstance(part, nn.LayerNorm)):
            nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for block in self.mixerblocks:
            x = block(x)
        return self.lm_head(x)


def losses_of(
    model: nn.Module, batches: Iterable[Tensor], padding: int, steps: int, warmup: int, rate: float
) -> list[float]:
    """Trains a model as the author does: the mean loss of a batch's tokens that are not padding,
    gradients clipped at 1, AdamW without weight decay, and a linear schedule.

    batches: of rows of tokens, (batch, context) int64; the model predicts each but the first.
    """
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0)
    losses = []
    for step, rows in zip(range(steps), batches, strict=False):
        share = step / warmup if step < warmup else (steps - step) / (steps - warmup)
        optimizer.param_groups[0]["lr"] = rate * share
        labels = rows.masked_fill(rows == padding, -100)
        loss = F.cross_entropy(model(rows)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
