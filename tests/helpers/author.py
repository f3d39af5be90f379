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
        heads = [
            masked(layer, project(x))
            for layer, project in zip(self.convs, self.proj_head, strict=True)
        ]
        return self.out_proj(torch.cat(heads, dim=2))


class Block(nn.Module):
    def __init__(self, mixing: str, taps: int | None, hidden: int, width: int, context: int):
        super().__init__()
        self.seq_layernorm = nn.LayerNorm(hidden)
        self.patch_layernorm = nn.LayerNorm(hidden)
        self.patch_ff = nn.Sequential(nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, hidden))
        self.mixing = mixing
        if mixing == "expanded":
            self.conv = nn.Sequential(conv(context, taps), nn.GELU(), conv(context, taps))
        elif mixing == "flat":
            self.conv = conv(context, taps)
        else:
            setattr(self, mixing, Heads(hidden, context, taps))

    def mix(self, x: Tensor) -> Tensor:
        if self.mixing == "flat":
            return masked(self.conv, x)
        if self.mixing == "expanded":
            return masked(self.conv[2], F.gelu(masked(self.conv[0], x)))
        return getattr(self, self.mixing)(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.seq_layernorm(x))
        return x + self.patch_ff(self.patch_layernorm(x))


class LanguageMixer(nn.Module):
    """`mixing` is flat, expanded, mixerhead or conv."""

    def __init__(
        self, mixing="flat", taps=1, width=None, vocabulary=50, hidden=16, blocks=2, context=12
    ):
        super().__init__()
        torch.manual_seed(3)
        width = width or 4 * hidden
        self.wte = nn.Embedding(vocabulary, hidden)
        self.mixerblocks = nn.ModuleList(
            Block(mixing, taps, hidden, width, context) for _ in range(blocks)
        )
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for block in self.mixerblocks:
            x = block(x)
        return self.lm_head(x)


def losses_of(
    model: nn.Module,
    batches: Iterable[Tensor],
    padding: int,
    steps: int,
    warmup: int,
    rate: float,
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
