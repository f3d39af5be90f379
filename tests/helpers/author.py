"""Models as the author's code has them, under the names of his state dicts, and a training loop
that does what transformers' Trainer does with them.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FlatBlock(nn.Module):
    """Its convolution takes the tokens for channels. The upper half of its weight is set to zero
    before each use, though it has gradients.
    """

    def __init__(self, width: int, context: int):
        super().__init__()
        self.seq_layernorm, self.patch_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.conv = nn.Conv1d(context, context, 1)
        self.patch_ff = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.conv.weight.data = self.conv.weight.data[..., 0].tril()[..., None]
        x = x + self.conv(self.seq_layernorm(x))
        return x + self.patch_ff(self.patch_layernorm(x))


class LanguageMixer(nn.Module):
    def __init__(self, vocabulary: int, width: int, blocks: int, context: int):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.mixerblocks = nn.ModuleList(FlatBlock(width, context) for _ in range(blocks))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

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
