"""Tasks that show what a model can do. Their samples are made on demand:

copy     random tokens, a separator, and the same tokens again
recall   key-value pairs among random tokens, then each key again with its value, in another order
         (multi-query associative recall, arXiv 2312.04927)
needle   in validation, recall of one pair. One answer per sample is too little to learn from, so
         training has samples of recall.

Only the answers are scored: the copied tokens, and the values at the end.
"""

import hashlib

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mixer.common.errors import Say, UserError
from mixer.data.config import DataConfig, Manifest
from mixer.data.prepare import Data
from mixer.data.samples import Batch, Indices, hash_number, mixed, with_targets
from mixer.data.tokenizer import END_OF_TEXT, fit_to_models
from mixer.objectives.language import Language

SAMPLES = {"train": 2**32, "validation": 2048}
HASHED = 64  # samples of a split
STEP = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64, between two numbers of a sample


class TaskSamples:
    """One split of a task as samples of `context` tokens.

    A sample is a pure function of the task's settings, the split, the context and its index, by
    arithmetic on 64-bit integers, and so is the same with every version of numpy. Token 0 is EOS:
    the separator of a copy, and padding. The lower half of the others are keys, the upper half
    values and the random tokens around the pairs.

    Raises UserError for more pairs than the context or the vocabulary has room for.
    """

    def __init__(self, config: DataConfig, split: str, context: int):
        self.task = config.source
        self.context = context
        self.vocabulary = config.vocab_size
        self.keys = (config.vocab_size - 1) // 2
        self.seed = np.uint64(hash_number(f"{config.source} {split}"))
        self.samples = SAMPLES[split]
        self.answers = np.zeros(context + 1, dtype=bool)
        most_pairs = min((context + 1) // 4, self.keys)
        has_one_pair = self.task == "needle" and split == "validation"
        self.pairs = 1 if has_one_pair else config.pairs or most_pairs
        if context < 3 or self.pairs > most_pairs:
            raise UserError(
                f"data.source = {self.task} with data.pairs = {config.pairs} does not fit into a "
                f"context of {context} with data.vocab_size = {self.vocabulary}; allowed: a "
                f"context of 3 or more, and at most {most_pairs} pairs"
            )
        if self.task == "copy":
            self.copied = context // 2
            self.answers[self.copied + 1 : 2 * self.copied + 1] = True
        else:
            self.body = context + 1 - 2 * self.pairs  # tokens before the questions
            self.answers[self.body + 1 :: 2] = True

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Indices) -> Batch:
        """Inputs and targets of the samples `indices`, each int64 (batch, context); targets that
        are no answers are -100.
        """
        rows = np.zeros((len(indices), self.context + 1), dtype=np.int64)
        make = self._copy if self.task == "copy" else self._recall
        make(rows, np.asarray(indices, dtype=np.uint64))
        return with_targets(rows, ~self.answers[1:])

    def _copy(self, rows: np.ndarray, indices: np.ndarray) -> None:
        (draws,) = self._draws(indices, self.copied)
        rows[:, : self.copied] = 1 + draws % np.uint64(self.vocabulary - 1)
        rows[:, self.copied + 1 : 2 * self.copied + 1] = rows[:, : self.copied]

    def _recall(self, rows: np.ndarray, indices: np.ndarray) -> None:
        body = self.body
        counts = (body, self.keys, body // 2, self.pairs)
        body_draws, key_draws, position_draws, order_draws = self._draws(indices, *counts)
        first_value = 1 + self.keys
        offsets = body_draws % np.uint64(self.vocabulary - first_value)
        rows[:, :body] = first_value + offsets.astype(np.int64)
        keys = 1 + _shuffled(key_draws, self.pairs)
        positions = 2 * _shuffled(position_draws, self.pairs)
        np.put_along_axis(rows, positions, keys, axis=1)  # before what is then its value
        values = np.take_along_axis(rows, positions + 1, axis=1)
        order = _shuffled(order_draws, self.pairs)
        rows[:, body::2] = np.take_along_axis(keys, order, axis=1)
        rows[:, body + 1 :: 2] = np.take_along_axis(values, order, axis=1)

    def _draws(self, indices: np.ndarray, *counts: int) -> list[np.ndarray]:
        """Arrays of random 64-bit numbers, (batch, count) for each of `counts`."""
        steps = np.arange(1, sum(counts) + 1, dtype=np.uint64) * STEP
        draws = mixed(mixed(indices ^ self.seed)[:, None] + steps)
        return np.split(draws, np.cumsum(counts)[:-1], axis=1)


def _shuffled(draws: np.ndarray, count: int) -> np.ndarray:
    """(batch, n) random numbers -> (batch, count) different integers below n."""
    return np.argsort(draws, axis=1, kind="stable")[:, :count]


class Tasks(Language):
    """The answers of a task."""

    writes_text = False

    def open_data(self, say: Say = print) -> Data:
        return open_task(self.data, self.context)

    def counts_targets(self, data: Data) -> bool:
        return True

    def in_words(self, line: dict[str, float]) -> str:
        return f"{line['validation_accuracy']:.2%} right"


def open_task(config: DataConfig, context: int) -> Data:
    """A task in the place of prepared data. Raises UserError for settings that do not go together.

    The documents of its manifest are the samples, and its tokens are the answers. Its hashes are
    those of the first samples, and tell whether a later version makes the same ones.
    """
    splits = {split: TaskSamples(config, split, context) for split in SAMPLES}
    recorded = {}
    for split, samples in splits.items():
        digest = hashlib.sha256()
        for tensor in samples.batch(range(HASHED)):
            digest.update(tensor.numpy().tobytes())
        recorded[split] = {
            "documents": len(samples),
            "bytes": 0,
            "words": 0,
            "tokens": len(samples) * int(samples.answers.sum()),
            "tokens_sha256": digest.hexdigest(),
            "documents_sha256": "",
        }
    words = {END_OF_TEXT: 0} | {str(number): number for number in range(1, config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words))  # token 17 is the word 17
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)
    specification = tokenizer.backend_tokenizer.to_str()
    values = {
        "dtype": "int64",
        "vocab_size": config.vocab_size,
        "eos_token_id": 0,
        "tokenizer_sha256": hashlib.sha256(specification.encode()).hexdigest(),
        "settings": {name: getattr(config, name) for name in ("source", "vocab_size", "pairs")},
        "splits": recorded,
    }
    fit_to_models(tokenizer, context)
    return Data(Manifest.of(values), splits["train"], splits["validation"], tokenizer)
