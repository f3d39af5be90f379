"""The next token of a text: the cross-entropy, and the scores of tokens, which validation and
`mixer eval` share.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from mixer.common.terminal import counted
from mixer.data.prepare import Data
from mixer.data.samples import Batch, TokenFile, to_device
from mixer.data.tokenizer import TextBytes
from mixer.distributed.world import Group, Process
from mixer.objectives.objective import Loss, Objective, spread_batches


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each target in nats, fp32, or fp64 of logits in fp64; 0 where the target
    is -100.

    logits: (batch, tokens, vocab); targets: (batch, tokens) int64. Returns (batch, tokens).
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return nats.view_as(targets)


class TokenLoss(Loss):
    """Inputs and targets, each (batch, tokens) int64, -> the nats of each target, (batch, tokens)
    fp32; 0 where the target is -100. In eval mode also whether the target is the likeliest token,
    (batch, tokens) bool; False where the target is -100.

    The logits stay inside the module. When it is compiled, they are kept in the autocast type, and
    converted to fp32 where the loss sums over them.
    """

    compiled_methods = ("score",)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.score(self.model(inputs, use_cache=False).logits, targets)

    def score(self, logits: Tensor, targets: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        nats = token_nats(logits, targets)
        return nats if self.training else (nats, logits.argmax(-1) == targets)


@dataclass(frozen=True)
class TokenScores:
    """Sums over the scored tokens, each (context,). Position p of a window is that of the target
    which is predicted from p + 1 tokens.
    """

    nats_by_position: np.ndarray  # float64
    count_by_position: np.ndarray  # int64
    right_by_position: np.ndarray  # int64: targets that are the likeliest token
    bytes: float  # of the text that all of them stand for

    @property
    def nats(self) -> float:
        return float(self.nats_by_position.sum())

    @property
    def tokens(self) -> int:
        return int(self.count_by_position.sum())

    @property
    def accuracy(self) -> float:
        return float(self.right_by_position.sum()) / self.tokens

    def by_position(self, sums: np.ndarray) -> list[float | None]:
        """Means of one of the sums; None where no target was scored."""
        counts = self.count_by_position.tolist()
        return [
            total / count if count else None
            for total, count in zip(sums.tolist(), counts, strict=True)
        ]


@torch.no_grad()
def score_tokens(
    loss: TokenLoss,
    batches: Iterable[Batch],
    context: int,
    process: Process,
    text_bytes: TextBytes | None = None,
) -> TokenScores:
    """Scores the targets of this process's batches, (batch, tokens <= context), except those that
    are -100, and returns the scores of all processes.

    loss: in eval mode, on the device of `process`. text_bytes: of the tokens, where their bytes are
    counted, too.
    """
    device = process.device
    sums = torch.zeros(3, context, dtype=torch.float64, device=device)  # nats, count, right
    size = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, targets in batches:
        if text_bytes is not None:
            scored = targets != -100
            size += text_bytes.count(targets[scored].numpy(), inputs[scored].numpy())
        inputs, targets = to_device((inputs, targets), device)
        nats, right = loss(inputs, targets)
        tokens = targets.shape[1]
        sums[0, :tokens] += nats.double().sum(0)
        sums[1, :tokens] += (targets != -100).sum(0)
        sums[2, :tokens] += right.sum(0)
    nats, counts, right = process.sum(sums).cpu().numpy()
    size = process.sum(size).item()
    return TokenScores(nats, counts.astype(np.int64), right.astype(np.int64), size)


class Language(Objective):
    """The next token of texts."""

    def counts_targets(self, data: Data) -> bool:
        assert isinstance(data.training, TokenFile)
        return not data.training.packed

    def loss(self, model: PreTrainedModel, group: Group = None) -> TokenLoss:
        return TokenLoss(model)

    def validate(
        self, loss: TokenLoss, data: Data, process: Process
    ) -> tuple[dict[str, float], str]:
        """Of samples spread over the split: the mean nats of a target, the bits for each byte of
        their text if they have one, the share of targets that are the likeliest token, and the
        number of targets.
        """
        samples = data.validation
        count = min(len(samples), self.train.eval_samples or len(samples))
        batches = spread_batches(samples, count, self.train.batch_size, process)
        scores = score_tokens(loss, batches, self.context, process, data.text_bytes)
        line = {"validation_loss": scores.nats / scores.tokens}
        if data.text_bytes is not None:
            bits = scores.nats / math.log(2)
            line["validation_bits_per_byte"] = bits / max(scores.bytes, 1)
        line["validation_accuracy"] = scores.accuracy
        line["validation_tokens"] = scores.tokens
        tokens = data.manifest.splits["validation"].tokens
        extent = f"{scores.tokens:,} of {counted(tokens, 'token')}"
        return line, f"{self.in_words(line)} ({extent})"

    def in_words(self, line: dict[str, float]) -> str:
        return f"{line['validation_bits_per_byte']:.4f} bits per byte"
