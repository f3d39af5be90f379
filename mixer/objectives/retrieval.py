"""Which two texts belong together (arXiv 2409.01482): pairs of texts, a text's vector, which is the
hidden state of its last token, the loss of pairs, and how often a text finds its partner.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from transformers import PreTrainedConfig, PreTrainedModel

from mixer.common.errors import Say, UserError
from mixer.common.terminal import counted
from mixer.data.config import DataConfig
from mixer.data.prepare import Data, open_data
from mixer.data.samples import Batch, Indices, Samples, TokenFile, to_device
from mixer.distributed.world import Group, Process
from mixer.models.architecture import body_of
from mixer.objectives.config import CANDIDATES, ObjectiveConfig
from mixer.objectives.objective import Loss, Objective

MOST_PAIRS = max(CANDIDATES)  # that are compared with each other


class PairFile(TokenFile):
    """One split of prepared data as pairs of texts of at most `context` tokens each.

    Prepared with data.pair_field, a document is a pair: query, EOS, target, EOS. Others are cut
    into passages of `context` tokens, of which the first and second are a pair, the third and
    fourth, and so on; the rest at the end of a document is in none.

    Raises UserError for a pair of data prepared by an earlier version, which did not record where a
    query ends, if not only its end has an EOS.
    """

    def needed(self) -> str:
        return f"a pair of passages of {self.context} needs a document of {2 * self.context}"

    def samples_of_documents(self) -> np.ndarray:
        sizes = np.diff(self.document_ends(), prepend=0) - 1  # without EOS
        self.are_rows = "pair_field" in self.manifest.settings
        return np.ones_like(sizes) if self.are_rows else sizes // (2 * self.context)

    def batch(self, indices: Indices) -> Batch:
        """The queries and the targets of the pairs `indices`, each int64 (batch, context), with
        -100 behind the end of a text.
        """
        texts = np.full((2, len(indices), self.context), -100)
        for row, index in enumerate(indices):
            for side, tokens in enumerate(self._pair(int(index))):
                tokens = tokens[: self.context]
                texts[side, row, : len(tokens)] = tokens
        return torch.from_numpy(texts[0]), torch.from_numpy(texts[1])

    def _pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start, end, number = self.document_of(index)
        if self.are_rows:
            tokens = self.read(start, end - 1)
            middles = self.text_ends(index, index + 1)[0, :-1] - start - 1
            if not len(middles):
                middles = np.flatnonzero(tokens == self.manifest.eos_token_id)
            if len(middles) != 1:
                raise UserError(
                    f"a pair in {self.path}.bin has an EOS inside of a text: give another "
                    "data.directory, to prepare it by this version, which records where texts end"
                )
            return tokens[: middles[0]], tokens[middles[0] + 1 :]
        start += 2 * self.context * number
        tokens = self.read(start, start + 2 * self.context)
        return tokens[: self.context], tokens[self.context :]


def text_vectors(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """The hidden states of the last tokens, divided by their norms: (batch, hidden) fp32. A text
    without tokens has zeros, and so is like no other.

    texts: (batch, tokens) int64, with -100 after the end of each, where no token of a causal model
    can see it.
    """
    states = body_of(model)(texts.clamp(min=0), use_cache=False).last_hidden_state
    last = ((texts >= 0).sum(1) - 1).clamp(min=0)
    vectors = F.normalize(states.take_along_dim(last[:, None, None], 1)[:, 0].float(), dim=-1)
    return vectors * (texts[:, :1] >= 0)


@torch.no_grad()
def vector_size(model: PreTrainedModel) -> int:
    """How many numbers a text's vector has. It may not be the configuration's hidden_size: some
    models project the states of their last block.
    """
    text = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    return text_vectors(model, text).shape[1]


def text_keys(texts: Tensor) -> Tensor:
    """A 64-bit hash of each text, (batch,) int64: the same for copies of a text, which a model
    cannot tell apart. texts: as in text_vectors. Waits for nothing, on a GPU.
    """
    position = torch.arange(texts.shape[1], device=texts.device)
    x = texts * 0x1E3779B97F4A7C15 + position * 0x3F58476D1CE4E5B9  # products wrap around
    for factor in (0x14D049BB133111EB, 0x3F51AFD7ED558CCD):
        x = (x ^ (x >> 31)) * factor
    return (x ^ (x >> 29)).sum(1)


def pair_keys(queries: Tensor, targets: Tensor) -> Tensor:
    """The keys of both texts of each pair, (2, batch) int64."""
    return torch.stack([text_keys(queries), text_keys(targets)])


def are_right(query_keys: Tensor, keys: Tensor) -> Tensor:
    """Whether each of all targets is right for each query, (..., queries, targets) bool: its own, a
    copy of that, or a target of a copy of the query.

    query_keys, keys: of the queries' pairs and of all pairs, (2, ..., number); see pair_keys.
    """
    return (query_keys[..., None] == keys[..., None, :]).any(0)


def info_nce(
    queries: Tensor, targets: Tensor, keys: Tensor, first: int, temperature: float
) -> Tensor:
    """-log p in nats of each query's own target, (queries,), with p a softmax of cosines /
    temperature (arXiv 1807.03748) over that target and all that are not right for the query.

    queries, targets: (number, hidden), of norm 1; query i belongs to target first + i. keys: of the
    targets' pairs, see pair_keys.
    """
    with torch.autocast(queries.device.type, enabled=False):  # bf16 has 8 bits for a cosine
        scores = queries @ targets.T / temperature
    partner = torch.arange(first, first + len(queries), device=queries.device)
    # Other targets that are right for a query are no negatives.
    is_right_too = are_right(keys[:, partner], keys).scatter(1, partner[:, None], False)
    scores = scores.masked_fill(is_right_too, -torch.inf)
    return F.cross_entropy(scores, partner, reduction="none")


def top1(queries: Tensor, targets: Tensor, keys: Tensor) -> dict[str, float]:
    """The share of queries, (pairs, hidden), for which the nearest of 32 candidates is right, as
    top1_of_32, and so on up to the number of pairs. Pairs are split into groups of that size. keys:
    of the pairs, see pair_keys.
    """

    def grouped(vectors: Tensor) -> Tensor:
        """(groups, count, hidden). A group has every groups-th pair: neighbours, often of one
        document, are in others.
        """
        return vectors[: count * groups].double().view(count, groups, -1).transpose(0, 1)

    shares = {}
    for count in CANDIDATES:
        groups = len(queries) // count
        if groups == 0:
            continue
        group_keys = keys[:, : count * groups].view(2, count, groups).mT  # (2, groups, count)
        nearest = (grouped(queries) @ grouped(targets).mT).argmax(-1)  # (groups, count)
        nearest_keys = group_keys.gather(2, nearest.expand(2, -1, -1))
        is_right = (nearest_keys == group_keys).any(0)
        shares[f"top1_of_{count}"] = is_right.double().mean().item()
    return shares


class PairLoss(Loss):
    """Queries and targets, (batch, tokens) int64 each with -100 behind the end of a text, -> the
    InfoNCE of each query among the targets of all processes, (batch,) fp32 nats, times the tokens
    of a pair. As a step's loss is divided by its tokens, for metrics to have them, this makes it
    the mean over pairs. In eval mode -> their vectors (2, batch, hidden).
    """

    def __init__(self, model: PreTrainedModel, temperature: float, group: Group = None):
        super().__init__(model)
        self.temperature = temperature
        self.group = group

    def forward(self, queries: Tensor, targets: Tensor) -> Tensor:
        tokens = 2 * queries.shape[1]  # of a pair
        keys = pair_keys(queries, targets)
        queries, targets = text_vectors(self.model, torch.cat([queries, targets])).chunk(2)
        if not self.training:
            return torch.stack([queries, targets])
        first = 0  # target of this process
        if self.group is not None:  # targets get gradients from the losses of all processes
            first = len(queries) * dist.get_rank(self.group)
            targets = torch.cat(all_gather(targets, self.group))
            keys = torch.cat(all_gather(keys, self.group), 1)
        return tokens * info_nce(queries, targets, keys, first, self.temperature)


@dataclass(frozen=True)
class PairScores:
    loss: float  # mean nats of a pair
    pairs: int
    top1: dict[str, float]  # see `top1`


@torch.no_grad()
def score_pairs(
    loss: PairLoss, pairs: Samples, most: int, batch_size: int, process: Process
) -> PairScores:
    """Scores at most `most` pairs, spread evenly over a split; the processes share them.

    loss: in eval mode, on the device of `process`. All processes call it as often, with one shape.
    """
    count = min(len(pairs), most, MOST_PAIRS)
    step = batch_size * process.size  # pairs of all processes in one call
    columns = slice(process.rank * batch_size, (process.rank + 1) * batch_size)  # of this process
    vectors = []  # (2, step, hidden) fp32, with zeros for the pairs of other processes
    keys = []  # (2, step) int64
    for start in range(0, count, step):
        numbers = torch.arange(start, start + step).clamp(max=count - 1)[columns]
        batch = pairs.batch((numbers * len(pairs) // count).tolist())
        queries, targets = to_device(batch, process.device)
        own_vectors = loss(queries, targets)
        step_vectors = own_vectors.new_zeros(2, step, own_vectors.shape[-1])
        step_vectors[:, columns] = own_vectors
        vectors.append(step_vectors)
        step_keys = targets.new_zeros(2, step)
        step_keys[:, columns] = pair_keys(queries, targets)
        keys.append(step_keys)
    queries, targets = process.sum(torch.cat(vectors, 1)[:, :count])
    all_keys = process.sum(torch.cat(keys, 1)[:, :count])
    losses = info_nce(queries, targets, all_keys, 0, loss.temperature)
    return PairScores(losses.mean().item(), count, top1(queries, targets, all_keys))


class Retrieval(Objective):
    """Which two texts belong together: a query has to find its target among those of the batch."""

    reads_logits = False
    writes_text = False

    def __init__(self, train: ObjectiveConfig, data: DataConfig, context: int):
        super().__init__(train, data, context)
        self.sample_tokens = 2 * context

    def open_data(self, say: Say = print) -> Data:
        data = open_data(self.data, self.context, PairFile, say)
        check_pairs(data, self.data.directory)
        return data

    def counts_targets(self, data: Data) -> bool:
        return False

    def loss(self, model: PreTrainedModel, group: Group = None) -> PairLoss:
        output = model.get_output_embeddings()
        assert output is not None
        if output.weight is not model.get_input_embeddings().weight:
            output.requires_grad_(False)  # it gets no gradient, for which DDP would wait
        return PairLoss(model, self.train.temperature, group)

    def validate(
        self, loss: PairLoss, data: Data, process: Process
    ) -> tuple[dict[str, float], str]:
        pairs = data.validation
        most = self.train.eval_samples or MOST_PAIRS
        scores = score_pairs(loss, pairs, most, self.train.batch_size, process)
        line = {"validation_loss": scores.loss, "validation_pairs": scores.pairs} | scores.top1
        listed = [f"{name.replace('_', ' ')} {share:.1%}" for name, share in scores.top1.items()]
        listed.append(f"{scores.pairs:,} of {counted(len(pairs), 'pair')}")
        return line, ", ".join(listed)

    def write_beside(self, directory: Path, config: PreTrainedConfig) -> None:
        # OPT may project the states of its last block to the width of its embeddings.
        size = getattr(config, "word_embed_proj_dim", config.hidden_size)
        write_modules(directory, size)

    def eval_arguments(self) -> list[str]:
        return ["--pairs", self.data.directory]


def check_pairs(data: Data, directory: str) -> None:
    """Raises UserError where training would have nothing to tell apart: all queries or all targets
    of a split, or of many pairs spread over it, are one text.
    """
    for split, pairs in (("train", data.training), ("validation", data.validation)):
        count = min(len(pairs), 1024)
        batch = pairs.batch([number * len(pairs) // count for number in range(count)])
        for side, keys in zip(("query", "target"), pair_keys(*batch), strict=True):
            if (keys == keys[0]).all():
                raise UserError(
                    f"the {split} split of {directory} has one {side} in "
                    f"{counted(count, 'pair')}, and a loss of 0; allowed: two different ones or "
                    "more. Give a text with others, or another data.validation_fraction, and "
                    "another data.directory"
                )


def write_modules(directory: Path, size: int) -> None:
    """Writes what sentence-transformers reads beside a model to make the vectors of `text_vectors`,
    of so many numbers: the state of a text's last token, divided by its norm.
    """
    classes = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{class_name}",
        }
        for index, (path, class_name) in enumerate(classes.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules, indent=1))
    pooling = {
        "pooling_mode_lasttoken": True,
        "pooling_mode_mean_tokens": False,
        "word_embedding_dimension": size,
    }
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling/config.json").write_text(json.dumps(pooling, indent=1))
