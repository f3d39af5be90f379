"""Scores of token streams, window by window.

A window is at most `context` tokens long; windows are `stride` tokens apart. Of each window only
the targets that no earlier window scored are counted, so every token but the first of a stream is
scored exactly once. With stride = context (the default) windows are disjoint; a smaller stride
gives every target after the first window at least `context - stride + 1` tokens to look back on, at
the price of context / stride times the work. A stream's last window may be shorter than the others
("short"), or begin earlier so that it is as long ("full", the convention of lm-evaluation-harness);
it counts the same targets either way.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from mixer.common.errors import UserError
from mixer.data.batches import Samples

# The names of --dtype; None is fp32, without autocast.
AUTOCAST_TYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
# As a share of the largest logit. A causal model's logits do not move at all, except with libraries
# whose matmuls choose the order of a sum by the data.
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}


@dataclass
class TokenScores:
    """Sums over the scored tokens, in fp64.

    Position p of a window is that of the target which is predicted from p + 1 tokens. `right` are
    the targets that are the likeliest token, `repeats` those that a copy from the window would
    predict, see `find_repeats`.
    """

    nats_by_position: np.ndarray  # (context,) float64
    count_by_position: np.ndarray  # (context,) int64
    right_by_position: np.ndarray  # (context,) int64
    windows: int = 0
    repeats: int = 0
    repeats_nats: float = 0.0

    @classmethod
    def total(cls, parts: Sequence["TokenScores"]) -> "TokenScores":
        """The sum of scores of parts of a text."""
        return cls(*(sum(getattr(part, name.name) for part in parts) for name in fields(cls)))

    @property
    def nats(self) -> float:
        return float(self.nats_by_position.sum())

    @property
    def tokens(self) -> int:
        return int(self.count_by_position.sum())

    @property
    def loss(self) -> float:
        """Mean nats per scored token."""
        return self.nats / self.tokens

    @property
    def accuracy(self) -> float:
        """The share of the scored tokens that are the likeliest."""
        return float(self.right_by_position.sum()) / self.tokens

    @property
    def by_kind(self) -> dict[str, float | None]:
        """The loss of repeats, and of all others; None where there are none."""
        others, nats = self.tokens - self.repeats, self.nats - self.repeats_nats
        return {
            "repeats_share": self.repeats / self.tokens,
            "repeats_loss": self.repeats_nats / self.repeats if self.repeats else None,
            "others_loss": nats / others if others else None,
        }

    @property
    def by_position(self) -> dict[str, list]:
        """The loss, accuracy and number of targets by position; None where no target was scored."""
        counts = self.count_by_position.tolist()

        def means(sums: np.ndarray) -> list[float | None]:
            return [n / c if c else None for n, c in zip(sums.tolist(), counts, strict=True)]

        return {
            "loss_by_position": means(self.nats_by_position),
            "accuracy_by_position": means(self.right_by_position),
            "count_by_position": counts,
        }


def plan_windows(
    length: int, context: int, stride: int, last_window: str = "short"
) -> Iterator[tuple[int, int, int]]:
    """Windows over a stream of `length` tokens, as (begin, end, first counted position).

    A window reads tokens[begin:end] and predicts tokens[begin + 1 : end + 1]; the targets from
    `first counted position` on are those no earlier window scored.
    """
    begin, scored, targets = 0, 0, length - 1
    while scored < targets:
        end = min(begin + context, targets)
        start = max(0, end - context) if last_window == "full" else begin
        yield start, end, scored - start
        scored = end
        begin += stride


def window_batches(
    streams: Sequence[np.ndarray],
    context: int,
    stride: int,
    batch_size: int,
    last_window: str = "short",
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of windows: inputs and targets, (batch, longest window) int64, targets -100 where not
    counted.

    Short windows are padded on the right: the model is causal, so padding there changes no earlier
    logit.
    """
    windows = (
        (tokens[begin : end + 1], first)
        for tokens in streams
        for begin, end, first in plan_windows(len(tokens), context, stride, last_window)
    )
    while batch := list(itertools.islice(windows, batch_size)):
        yield collate(batch)


def collate(batch: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of n + 1 tokens, each with its first counted position -> inputs and targets (batch,
    longest n).
    """
    windows = [torch.from_numpy(tokens.astype(np.int64)) for tokens, _ in batch]
    inputs = pad_sequence([tokens[:-1] for tokens in windows], batch_first=True)
    targets = pad_sequence([x[1:] for x in windows], batch_first=True, padding_value=-100)
    first = torch.tensor([first for _, first in batch])[:, None]
    return inputs, targets.masked_fill(torch.arange(targets.shape[1]) < first, -100)


def sample_batches(
    data: Samples, samples: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of `samples` samples spread evenly over a split, 0 for all, as `window_batches`."""
    samples = min(len(data), samples or len(data))
    for start in range(0, samples, batch_size):
        batch = np.arange(start, min(start + batch_size, samples))
        yield data.batch(batch * len(data) // samples)


def find_repeats(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Which targets the window itself would tell: the two tokens before them stood somewhere
    earlier in the window, followed by the same token (an induction head's copy, arXiv 2209.11895).

    Args:
        inputs, targets: (batch, tokens) int64, below 2^21 - 1; targets -100 where not counted.

    Returns: (batch, tokens) bool, False where the target is not counted.
    """
    following = torch.where(targets == -100, F.pad(inputs[:, 1:], (0, 1)), targets)
    # Three tokens as one number. The first target of a window has only one token before it; in
    # place of the other stands a number that is no token.
    before = F.pad(inputs[:, :-1], (1, 0), value=(1 << 21) - 1)
    triples = (before << 42) + (inputs << 21) + following
    ordered, places = triples.sort(dim=1, stable=True)
    again = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return torch.zeros_like(again).scatter(1, places, again) & (targets != -100)


def logits_of(model: nn.Module, inputs: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """(batch, tokens) -> (batch, tokens, vocab), computed under autocast to `dtype` if there is
    one; fp32 or fp64, as the softmax over the vocabulary is never taken in half precision.
    """
    with torch.autocast(inputs.device.type, dtype=dtype, enabled=dtype is not None):
        logits = model(input_ids=inputs).logits
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.no_grad()
def evaluate_batches(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    context: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    share: tuple[int, int] = (0, 1),
) -> TokenScores:
    """Score the targets of batches, each of inputs and targets (batch, tokens <= context) int64;
    targets of -100 are not scored.

    model: maps input_ids to `.logits` (batch, tokens, vocab), on `device`. dtype: autocast's, or
    None. Sums are fp64.

    share: (index, count): score every count-th batch from the index-th on, so that the scores of
    all indices add up to the whole; see `TokenScores.total`.
    """
    scores = TokenScores(np.zeros(context), *np.zeros((2, context), dtype=np.int64))
    model.eval()
    for inputs, targets in itertools.islice(batches, share[0], None, share[1]):
        inputs, targets = inputs.to(device), targets.to(device)
        logits = logits_of(model, inputs, dtype)
        # -log p of each target in nats, (batch, tokens); zero where it is not counted
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        each, right = each.view_as(targets).double(), logits.argmax(-1) == targets
        nats, repeats = each.sum(0).cpu().numpy(), find_repeats(inputs, targets)
        scores.repeats += int(repeats.sum())
        scores.repeats_nats += float(each[repeats].sum())
        scores.nats_by_position[: len(nats)] += nats
        scores.count_by_position[: len(nats)] += (targets != -100).sum(0).cpu().numpy()
        scores.right_by_position[: len(nats)] += right.sum(0).cpu().numpy()
        scores.windows += len(inputs)
    return scores


@torch.no_grad()
def check_causality(model: nn.Module, tokens: np.ndarray, dtype: str) -> None:
    """Raises UserError where logits move before the first of several changed tokens: such a model
    sees what it should predict, and its perplexity means nothing.

    tokens: (tokens,) integers, 2 or more, no longer than the model reads. dtype: in AUTOCAST_TYPES.
    """
    inputs = torch.from_numpy(tokens.astype(np.int64))[None].to(model.device)
    # Odd where it can be, so that blocks of two tokens that see each other are found.
    first, changed = len(tokens) // 4 * 2 + 1, inputs.clone()
    changed[:, first:] = (changed[:, first:] + 1) % model.config.get_text_config().vocab_size
    before, after = (
        logits_of(model, each, AUTOCAST_TYPES[dtype])[:, :first] for each in (inputs, changed)
    )
    moved = (after - before).abs().max().item()
    if moved > TOLERANCE[dtype] * before.abs().max().item():
        raise UserError(
            f"the model is not causal: with the tokens from {first} on changed, logits before "
            f"moved by {moved:.3g}; allowed: not at all. It sees what it should predict, so its "
            "perplexity means nothing: give a causal model"
        )
