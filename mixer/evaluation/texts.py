"""What is scored: token streams from files, rows, hub datasets, prepared data or a task, and the
size of their text.

Each document is a stream of its own, tokenised exactly as the preparation of training data does it,
with nothing added. Packed prepared data is one stream with an EOS after each document.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from mixer.common.errors import UserError
from mixer.data.config import DataConfig
from mixer.data.corpus import documents
from mixer.data.prepared import TokenFile
from mixer.data.sources import SUFFIXES, Part, local_files, source_parts
from mixer.data.tasks import TaskSamples
from mixer.data.tokenizer import load_tokenizer, loss_of_text, pieces, raw_encoder, token_bytes

SAMPLE = 100  # documents that tell whether the tokenizer loses text


@dataclass
class Text:
    """Token streams to score, and the size of the text they stand for."""

    name: str
    streams: list[np.ndarray]  # each (tokens,)
    bytes: int = 0  # of the UTF-8 encoding
    words: int = 0  # what str.split() counts
    loses: str = ""  # what the tokenizer loses of it, see tokenizer.loss_of_text
    task: TaskSamples | None = None  # the streams are its samples, of which the answers are scored


def text_of(
    name: str,
    sources: Iterable[DataConfig],
    tokenizer: PreTrainedTokenizerFast,
    blank: bool,
    max_tokens: int,
) -> Text:
    """The documents of hub datasets (source "hub"), or of files, folders and globs (source "text").

    blank: whether documents of white space alone count. max_tokens: as many documents as have so
    many targets; 0: all. Raises UserError for a path without files, and text that is not UTF-8, or
    none.
    """
    encode, sample, targets, text = raw_encoder(tokenizer), [], 0, Text(name, [])
    found = (documents(parts_of(source), source, blank) for source in sources)
    for document in itertools.chain.from_iterable(found):
        ids = itertools.chain(*encode(list(pieces(document))))
        text.streams.append(np.fromiter(ids, dtype=np.int64))
        text.bytes += len(document.encode())
        text.words += len(document.split())
        if len(sample) < SAMPLE:
            sample.append(document)
        targets += len(text.streams[-1]) - 1
        if targets > max_tokens > 0:
            break
    text.loses = loss_of_text(tokenizer, sample)
    return text


def parts_of(source: DataConfig) -> list[Part]:
    """A hub dataset, or files: .jsonl, .json and .parquet have rows, others are one document."""
    if source.source == "hub":
        return source_parts(source)
    parts = []
    for file in local_files(source):
        kinds = (kind for kind, ends in SUFFIXES.items() if file.name.lower().endswith(ends))
        parts.append(Part(replace(source, source=next(kinds, "text")), file))
    return parts


def validation_text(directory: Path, context: int, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The validation split of prepared data: packed, one stream with an EOS after each document;
    otherwise one stream per document.

    Raises UserError for data that is missing, damaged or of another tokenizer.
    """
    split = TokenFile(directory, "validation", context)
    if load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{directory} was prepared with another tokenizer than the checkpoint's: "
            "give data of its run, or --text"
        )
    streams = [split.tokens]
    if not split.packed:
        streams = np.split(split.tokens, split.document_ends()[:-1])
    counts, name = split.manifest.splits["validation"], directory.resolve().name
    sizes = counts.bytes, counts.words, split.manifest.tokenizer_loses
    text = Text(f"validation split of {name}", streams, *sizes)
    if split.cut:
        kept = [split.tokens[slice(*split.span(row))] for row in range(len(split))]
        text = shortened(text, kept, f"at most {context} tokens of each document", tokenizer)
    return text


def task_text(config: DataConfig, window: int) -> Text:
    """The held-out samples of a task, each of `window` tokens."""
    task = TaskSamples(config, "validation", window)
    inputs, _ = task.batch(range(len(task)))
    return Text(f"held-out samples of the task {config.source}", list(inputs.numpy()), task=task)


def put_eos_first(text: Text, tokenizer: PreTrainedTokenizerFast) -> None:
    """Puts an EOS before each stream, so that its first token is scored too."""
    eos = tokenizer.eos_token_id
    if eos is None:
        raise UserError(
            "first_token eos needs a tokenizer with an EOS token, this one has none: "
            "use first_token skip"
        )
    text.streams = [np.concatenate(([eos], tokens)) for tokens in text.streams]


def limit(text: Text, max_tokens: int, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The beginning of the text with at most `max_tokens` targets; 0: all."""
    kept, left = [], max_tokens
    for tokens in text.streams:
        if left > 0:
            kept.append(tokens[: left + 1])
            left -= len(kept[-1]) - 1
    if not max_tokens or sum(map(len, kept)) == sum(map(len, text.streams)):
        return text
    return shortened(text, kept, f"first {max_tokens} tokens", tokenizer)


def shortened(
    text: Text, kept: list[np.ndarray], how: str, tokenizer: PreTrainedTokenizerFast
) -> Text:
    """The text of the streams that are kept, and the size of what their tokens decode to."""
    sizes, words = token_bytes(tokenizer), 0
    for tokens in kept:
        document = tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        words += len(document.replace(tokenizer.eos_token or "\n", "\n").split())
    size = sum(int(sizes[tokens].sum()) for tokens in kept)
    return Text(f"{text.name} ({how})", kept, size, words, text.loses)
