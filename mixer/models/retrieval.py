"""Text embeddings for retrieval (arXiv 2409.01482): the hidden state of a text's last token, the
loss of pairs of texts, and how often a text finds its partner.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from mixer.models.config import CANDIDATES

MOST_PAIRS = max(CANDIDATES)  # that are compared with each other


def text_vectors(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """The hidden states of the last tokens, divided by their norms: (batch, hidden) fp32.

    texts: (batch, tokens) int64, with -100 after the end of each, where no token of a causal model
    can see it.
    """
    states = model.base_model(texts.clamp(min=0), use_cache=False).last_hidden_state
    last = ((texts >= 0).sum(1) - 1).clamp(min=0)
    return F.normalize(states.take_along_dim(last[:, None, None], 1)[:, 0].float(), dim=-1)


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


@torch.no_grad()
def pair_vectors(
    embed: Callable[[Tensor, Tensor], Tensor],
    pairs: Any,
    count: int,
    batch_size: int,
    process: tuple[torch.device, int, int],
) -> tuple[Tensor, Tensor]:
    """The vectors of `count` pairs, spread evenly over a PairFile, (2, count, hidden) fp32, and the
    `pair_keys`, (2, count); zeros for those of other processes.

    process: its device, its rank, and how many there are. embed: from queries and targets, (batch,
    tokens) each, to vectors (2, batch, hidden); all processes call it as often, with one shape.
    """
    device, rank, world_size = process
    step = batch_size * world_size  # pairs of all processes in one call
    columns = slice(rank * batch_size, (rank + 1) * batch_size)  # of this process in a step
    vectors = []
    keys = []
    for start in range(0, count, step):
        numbers = torch.arange(start, start + step).clamp(max=count - 1)[columns]
        batch = pairs.batch((numbers * len(pairs) // count).tolist())
        queries, targets = (texts.to(device) for texts in batch)
        embedded = embed(queries, targets)
        step_vectors = embedded.new_zeros(2, step, embedded.shape[-1])
        step_vectors[:, columns] = embedded
        vectors.append(step_vectors)
        step_keys = targets.new_zeros(2, step)
        step_keys[:, columns] = pair_keys(queries, targets)
        keys.append(step_keys)
    return torch.cat(vectors, 1)[:, :count], torch.cat(keys, 1)[:, :count]
