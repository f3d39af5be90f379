"""What is evaluated: the token streams that options name, and the size of their text.

Each document is a stream of its own, tokenized exactly as training data is, with nothing added.
Packed prepared data is one stream with an EOS after each document.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from mixer.common.errors import UserError
from mixer.common.files import as_path
from mixer.data.config import DataConfig, has_no_splits
from mixer.data.samples import Samples, TokenFile
from mixer.data.sources import Shard, documents, local_files, source_of_rows, source_shards
from mixer.data.tokenizer import TextBytes, load_tokenizer, lost_text, text_encoder
from mixer.evaluation.config import EvalOptions
from mixer.objectives.objective import objective_of

SAMPLE = 100  # documents that tell whether the tokenizer loses text


@dataclass
class Text:
    """Token streams to score, and the size of the text they stand for."""

    name: str
    streams: list[np.ndarray]  # each (tokens,), one or more
    bytes: int = 0  # of the UTF-8 encoding
    words: int = 0  # what str.split() counts
    loses: str = ""  # what the tokenizer loses of it, see tokenizer.lost_text
    samples: Samples | None = None  # the streams are theirs, of which their targets are scored

    @property
    def largest_token(self) -> int:
        return max(int(tokens.max()) for tokens in self.streams)

    @property
    def targets(self) -> int:
        """How many tokens can be scored: all but the first of each stream."""
        return sum(len(tokens) - 1 for tokens in self.streams)


def choose_text(options: EvalOptions, window: int, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The text that the options name, cut to max_tokens, or what the run was trained on.

    Raises UserError for a text or data that is missing, damaged, empty, or of another tokenizer.
    """
    source = options.source
    if source == "samples":
        train, data = options.objective_settings()
        samples = objective_of(train, data, window).open_data().validation
        streams = list(samples.batch(range(len(samples)))[0].numpy())
        return Text(f"held-out samples of the task {data.source}", streams, samples=samples)
    if source in ("text", "hub"):
        text = documents_of(options, tokenizer)
    else:
        directory = options.data_directory
        assert directory is not None  # or the options would have been refused
        text = validation_text(as_path(directory), window, tokenizer)
    if options.first_token == "eos":
        if tokenizer.eos_token_id is None:
            raise UserError("--first-token eos needs a tokenizer with an EOS token: use skip")
        text.streams = [np.insert(tokens, 0, tokenizer.eos_token_id) for tokens in text.streams]
    if not text.targets:
        raise UserError(f"{text.name} is shorter than 2 tokens: give a longer text")
    most = options.max_tokens
    if 0 < most < text.targets:
        return shortened(
            text, first_targets(text.streams, most), f"first {most:,} tokens", tokenizer
        )
    return text


def first_targets(streams: list[np.ndarray], most: int) -> list[np.ndarray]:
    """The beginnings of streams with `most` targets together."""
    beginnings = []
    for tokens in streams:
        if most <= 0:
            break
        beginnings.append(tokens[: most + 1])
        most -= len(beginnings[-1]) - 1
    return beginnings


def documents_of(options: EvalOptions, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The documents of files or of a hub dataset, as many as have max_tokens targets."""
    text_field = options.text_field
    if options.text:
        names = [as_path(path).name for path in options.text]
        if len(names) > 3:
            names = [*names[:2], f"{len(names) - 2} others"]
        name = ", ".join(names)
        sources = [DataConfig("text", path, text_field=text_field) for path in options.text]
    else:
        split = "" if has_no_splits(options.hub) else options.split_or_default
        name = " ".join(filter(None, (options.hub, options.subset, split)))
        sources = [DataConfig("hub", options.hub, options.subset, split, text_field=text_field)]
    text = Text(name, [])
    encode = text_encoder(tokenizer)
    sample: list[str] = []
    targets = 0
    blank = options.first_token == "eos"
    documents_of_sources = (documents(shards_of(source), source, blank) for source in sources)
    for document in itertools.chain.from_iterable(documents_of_sources):
        tokens = encode(document).astype(np.int64)
        if len(tokens):  # the tokenizer may leave nothing of a document
            text.streams.append(tokens)
            targets += len(tokens) - 1
        text.bytes += len(document.encode())
        text.words += len(document.split())
        if len(sample) < SAMPLE:
            sample.append(document)
        if targets > options.max_tokens > 0:
            break
    text.loses = lost_text(tokenizer, sample)
    return text


def shards_of(source: DataConfig) -> Iterator[Shard]:
    """A hub dataset, or files: .jsonl, .json and .parquet have rows, others are one document."""
    if source.source == "hub":
        yield from source_shards(source)
        return
    for file in local_files(source):
        yield Shard(replace(source, source=source_of_rows(file) or "text"), file)


def validation_text(directory: Path, context: int, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The validation split of prepared data: packed, one stream; otherwise one per document."""
    split = TokenFile(directory, "validation", context)
    check_vocabulary(directory, tokenizer)
    tokens = split.all_tokens()
    streams = [tokens] if split.packed else np.split(tokens, split.document_ends()[:-1])
    text = Text(
        name=f"validation split of {as_path(directory.resolve()).name}",
        streams=streams,
        bytes=split.counts.bytes,
        words=split.counts.words,
        loses=split.manifest.tokenizer_loses,
    )
    if split.cut:
        rows = [tokens[slice(*split.span(row))] for row in range(len(split))]
        text = shortened(text, rows, f"at most {context:,} tokens of each document", tokenizer)
    return text


def check_vocabulary(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises UserError for prepared data whose tokens are others than the tokenizer's."""
    if load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
        problem = "was prepared with another tokenizer than the checkpoint's"
        raise UserError(f"{directory} {problem}: give data of its run, or --text")


def shortened(
    text: Text, streams: list[np.ndarray], extent: str, tokenizer: PreTrainedTokenizerFast
) -> Text:
    """The text of `streams`, which are cut from its own, and the size of what their tokens decode
    to. extent: of the cut, in words.
    """
    text_bytes = TextBytes(tokenizer, text.streams, text.bytes)
    separator = tokenizer.eos_token or "\n"
    assert isinstance(separator, str)
    words = 0
    for tokens in streams:
        document = tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        assert isinstance(document, str)
        words += len(document.replace(separator, "\n").split())
    return Text(
        name=f"{text.name} ({extent})",
        streams=streams,
        bytes=round(sum(map(text_bytes.count, streams))),
        words=words,
        loses=text.loses,
    )
