"""What is scored: token streams made from files, rows, hub datasets or prepared data, and the size
of their text.

Each document is a stream of its own: no separator between documents, none at their ends, tokenised
exactly as the preparation of training data does it. Packed prepared data is one stream with an EOS
after each document.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from mixer.common.errors import UserError
from mixer.common.ranks import rank
from mixer.common.say import say_on_stderr
from mixer.data.config import DataConfig
from mixer.data.corpus import documents
from mixer.data.sources import SUFFIXES, Part, local_files, source_parts
from mixer.data.tasks import TaskSamples
from mixer.data.token_file import TokenFile
from mixer.data.tokenizer import load_tokenizer, pieces, raw_encoder, token_bytes

SAMPLE = 100  # documents by which it is told whether the tokenizer loses text


def say(line: str) -> None:
    if rank() == 0:
        say_on_stderr(line)


@dataclass
class Text:
    """Token streams to score, and the size of the text they stand for."""

    name: str
    public_name: str  # without directories of this machine
    streams: list[np.ndarray] = field(default_factory=list)  # each (tokens,)
    bytes: int = 0  # of the UTF-8 encoding
    words: int = 0  # what str.split() counts
    counted: str = "the text"  # where bytes and words come from
    sample: list[str] = field(default_factory=list)  # of the documents
    loses: str = ""  # what the tokenizer loses of them, see tokenizer.loss_of_text
    task: TaskSamples | None = None  # the streams are its samples, of which the answers are scored

    def add(
        self,
        parts: Iterable[Part],
        settings: DataConfig,
        tokenizer: PreTrainedTokenizerFast,
        every_token: bool,
    ) -> None:
        """Adds the documents of the parts. Raises UserError if all are too short to be scored."""
        encode, before, least = raw_encoder(tokenizer), len(self.streams), 1 if every_token else 2
        for document in documents(parts, settings, every_token, say):
            ids = [np.array(ids, dtype=np.int64) for ids in encode(list(pieces(document)))]
            self.streams.append(np.concatenate(ids))
            self.bytes += len(document.encode("utf-8", errors="replace"))
            self.words += len(document.split())
            if len(self.sample) < SAMPLE:
                self.sample.append(document)
        if all(len(tokens) < least for tokens in self.streams[before:]):
            raise UserError(
                f"{settings.path} is shorter than {least} tokens, so nothing can be predicted: "
                "give a longer text"
            )


def text_from_files(
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    text_field: str = "text",
    max_documents: int = 0,
    every_token: bool = False,
) -> Text:
    """The documents of files, folders and globs: each plain file is one, and each row of a .jsonl,
    .json or .parquet file (also .gz, .bz2, .xz, .zst).

    every_token: whether first tokens are scored too; then one token is enough, and rows of white
    space alone count. Raises UserError for a path without files, and text that is not UTF-8, none,
    or too short.
    """
    names = [Path(path).name for path in paths]
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} others"]
    text = Text(", ".join(map(str, paths)), ", ".join(names), counted="the files")
    for path in map(str, paths):
        settings = DataConfig(
            source="text", path=path, text_field=text_field, max_documents=max_documents
        )
        text.add(_parts(settings), settings, tokenizer, every_token)
    return text


def _parts(settings: DataConfig) -> Iterator[Part]:
    """All files that a path names, each to be read as its name says."""
    for file in local_files(settings, say, "--text"):
        kinds = (kind for kind, ends in SUFFIXES.items() if file.name.lower().endswith(ends))
        yield Part(replace(settings, source=next(kinds, "text")), file)


def text_from_hub(
    name: str,
    subset: str,
    split: str,
    text_field: str,
    max_documents: int,
    tokenizer: PreTrainedTokenizerFast,
    every_token: bool = False,
) -> Text:
    """A document for each row of a dataset of the hub, read as a stream; `name` may also be a
    directory of data files. every_token: see `text_from_files`.
    """
    settings = DataConfig(
        source="hub",
        path=name,
        subset=subset,
        split=split,
        text_field=text_field,
        max_documents=max_documents,
    )
    public_name = Path(name).resolve().name if Path(name).exists() else name
    names = (" ".join(filter(None, (one, subset, split))) for one in (name, public_name))
    text = Text(*names, counted="the documents")
    text.add(source_parts(settings, say), settings, tokenizer, every_token)
    return text


def validation_text(directory: Path, context: int, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The validation split of prepared data: packed, one stream with an EOS after each document;
    else one per document.

    Raises UserError if the data is missing or damaged, or was prepared with another tokenizer than
    `tokenizer`.
    """
    split = TokenFile(directory, "validation", context)
    if load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{directory} was prepared with another tokenizer than the checkpoint's: "
            "give data of its run, or --text"
        )
    streams = (
        [split.tokens]
        if split.packed
        else np.split(split.tokens, split.document_ends[:-1].astype(np.int64))
    )
    counts = split.manifest.splits["validation"]
    names = (f"validation split of {one}" for one in (directory, directory.resolve().name))
    sizes = counts.bytes, counts.words, "the manifest"
    text = Text(*names, streams, *sizes, loses=split.manifest.tokenizer_loses)
    if split.cut:
        kept = [split.tokens[slice(*split.span(row))] for row in range(len(split))]
        text = shortened(text, kept, f"at most {context} tokens of each document", tokenizer)
    return text


def task_text(config: DataConfig, window: int) -> Text:
    """The held-out samples of a task, each of `window` tokens."""
    task = TaskSamples(config, "validation", window)
    inputs, _ = task.batch(range(len(task)))
    name = f"held-out samples of the task {config.source}"
    return Text(name, name, list(inputs.numpy()), task=task)


def limit(text: Text, max_tokens: int, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The beginning of the text with at most `max_tokens` targets; its size is that of the decoded
    tokens.
    """
    if max_tokens <= 0 or sum(len(tokens) - 1 for tokens in text.streams) <= max_tokens:
        return text
    kept, left = [], max_tokens
    for tokens in text.streams:
        if left < 1:
            break
        kept.append(tokens[: left + 1])
        left -= len(kept[-1]) - 1
    return shortened(text, kept, f"first {max_tokens} tokens", tokenizer)


def shortened(
    text: Text, kept: list[np.ndarray], how: str, tokenizer: PreTrainedTokenizerFast
) -> Text:
    """The text with the streams that are kept of it; its size is that of their decoded tokens."""
    sizes, words = token_bytes(tokenizer), 0
    for tokens in kept:
        document = tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        words += len(document.replace(tokenizer.eos_token or "\n", "\n").split())
    size = sum(int(sizes[tokens].sum()) for tokens in kept)
    names = (f"{one} ({how})" for one in (text.name, text.public_name))
    return Text(*names, kept, size, words, "the decoded tokens", loses=text.loses)


def put_eos_first(text: Text, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The same streams with an EOS before each, so that their first token is scored too."""
    if tokenizer.eos_token_id is None:
        raise UserError(
            "first_token eos needs a tokenizer with an EOS token, this one has none: "
            "use first_token skip"
        )
    text.streams = [np.concatenate(([tokenizer.eos_token_id], tokens)) for tokens in text.streams]
    return text
