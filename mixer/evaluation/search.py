"""Which documents of a collection a model finds for its queries: the nearest by the vectors that
contrastive training makes (mixer/objectives/retrieval.py).

No vector of a document is kept: a batch is compared with all queries, and each query keeps the best
so far. So memory does not grow with the corpus, but for its ids.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mixer.checkpoints.pretrained import check_token
from mixer.common.progress import time_reported
from mixer.data.tokenizer import text_encoder
from mixer.distributed.world import Process
from mixer.evaluation.beir import LENGTH, Collection
from mixer.evaluation.scoring import check_vectors
from mixer.objectives.retrieval import text_vectors, vector_size

CHUNK = 1 << 14  # texts that are sorted by length at a time
NONE = torch.iinfo(torch.int64).min  # the key of no document


@dataclass(frozen=True)
class Hits:
    rankings: dict[str, list[str]]  # by query, the ids of the nearest documents, the best first
    queries_cut: int  # longer than the window
    documents_cut: int


class Embedder:
    """Makes vectors of the texts that are this process's share.

    Attributes:
        cut: how many of them were longer than the window.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        window: int,
        batch_size: int,
        process: Process,
    ):
        self.model = model.eval()
        self.encode = text_encoder(tokenizer)
        self.window = window
        self.batch_size = batch_size
        self.process = process
        self.cut = 0

    def vectors(self, texts: Iterable[str], name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The numbers of texts, (batch,) int64, and their vectors, (batch, hidden) fp32, for each
        batch. name: what the texts are called.
        """
        batches = batches_by_length(texts, self.batch_size)
        for batch in itertools.islice(batches, self.process.rank, None, self.process.size):
            numbers, batch_texts = zip(*batch, strict=True)
            tokens = self.tokens(batch_texts)
            check_token(int(tokens.max()), self.model, name)
            vectors = text_vectors(self.model, tokens.to(self.process.device))
            check_vectors(vectors)
            yield torch.tensor(numbers, device=self.process.device), vectors

    def tokens(self, texts: Iterable[str]) -> Tensor:
        """(batch, longest) int64, cut at the window, with -100 behind the end of a text."""
        rows = []
        for text in texts:
            tokens = self.encode(text)
            self.cut += len(tokens) > self.window
            rows.append(torch.from_numpy(tokens[: self.window].astype(np.int64)))
        rows.append(torch.full((1,), -100))  # so that one column is left where all are empty
        return pad_sequence(rows, batch_first=True, padding_value=-100)[:-1]


def batches_by_length(texts: Iterable[str], size: int) -> Iterator[list[tuple[int, str]]]:
    """The texts with their numbers, in batches of about one length, the longest of a chunk first:
    too little memory is found at once.
    """
    numbered = enumerate(texts)
    while chunk := list(itertools.islice(numbered, CHUNK)):
        chunk.sort(key=lambda item: len(item[1]), reverse=True)
        for start in range(0, len(chunk), size):
            yield chunk[start : start + size]


@torch.no_grad()
def search(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    collection: Collection,
    window: int,
    batch_size: int,
    process: Process,
) -> Hits:
    """The documents nearest to each query, by cosine. As in BEIR, the document with a query's own
    id is left out; and a text without tokens finds nothing and is not found. The processes share
    the texts, and all of them return the same.
    """
    embedder = Embedder(model, tokenizer, window, batch_size, process)
    queries = list(collection.queries)
    query_vectors = torch.zeros(len(queries), vector_size(model), device=process.device)
    for numbers, vectors in embedder.vectors(collection.queries.values(), "a query"):
        query_vectors[numbers] = vectors
    query_vectors = process.sum(query_vectors)
    own_queries_cut = embedder.cut

    ids = collection.document_ids
    by_id = sorted(range(len(ids)), key=ids.__getitem__)  # numbers of documents
    places = torch.empty(len(ids), dtype=torch.int64)  # of documents, in the order of their ids
    places[by_id] = torch.arange(len(ids))
    places = places.to(process.device)
    number_of = {name: number for number, name in enumerate(ids)}
    own_number = torch.tensor([number_of.get(name, -1) for name in queries], device=process.device)
    best = torch.full((len(queries), LENGTH), NONE, device=process.device)
    count = 0  # of documents that this process has read
    with time_reported(
        "reading documents", amount=lambda: f"{count:,} of {len(ids) // process.size:,}, "
    ):
        for numbers, vectors in embedder.vectors(collection.documents(), "a document"):
            with torch.autocast(process.device.type, enabled=False):  # bf16 has 8 bits for a cosine
                scores = query_vectors @ vectors.T
            keys = sort_keys(scores, places[numbers])
            keys = keys.masked_fill(own_number[:, None] == numbers, NONE)
            keys = keys.masked_fill(~(query_vectors.any(1)[:, None] & vectors.any(1)), NONE)
            best = torch.cat([best, keys], 1).topk(LENGTH).values
            count += len(numbers)

    of_processes = best.new_zeros(process.size, *best.shape)
    of_processes[process.rank] = best
    of_processes = process.sum(of_processes)
    best = torch.cat(list(of_processes), 1).topk(LENGTH).values.tolist()
    cut = torch.tensor([own_queries_cut, embedder.cut - own_queries_cut], device=process.device)
    queries_cut, documents_cut = process.sum(cut).tolist()
    rankings = {
        query: [ids[by_id[key & 0xFFFFFFFF]] for key in keys if key != NONE]
        for query, keys in zip(queries, best, strict=True)
    }
    return Hits(rankings, queries_cut, documents_cut)


def sort_keys(scores: Tensor, places: Tensor) -> Tensor:
    """A number for each score, (queries, documents) int64, all different for a query: the larger
    the score, and of equal scores the larger the place. So the best are the same in whichever order
    and process documents come.

    scores: (queries, documents) fp32. places: (documents,) int64, 0 to 2**32 - 1, the low 32 bits
    of the keys.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of the scores, also of negative ones
    return bits.long() * 2**32 + places
