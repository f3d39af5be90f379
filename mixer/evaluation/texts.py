"""What is evaluated: the options of eval.py, the token streams that they name, and the size of
their text.

Each document is a stream of its own, tokenized exactly as training data is, with nothing added.
Packed prepared data is one stream with an EOS after each document.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from mixer.checkpoints.checkpoint import read_trainer
from mixer.common.errors import UserError
from mixer.common.files import as_path
from mixer.common.hardware import TYPES
from mixer.common.options import option, option_problems
from mixer.data.config import TASKS, DataConfig
from mixer.data.samples import TokenFile
from mixer.data.sources import SUFFIXES, Part, documents, local_files, source_parts
from mixer.data.tasks import TaskSamples
from mixer.data.tokenizer import TextBytes, load_tokenizer, loss_of_text, text_encoder
from mixer.evaluation.scoring import DEVICES
from mixer.ops import BACKENDS

SAMPLE = 100  # documents that tell whether the tokenizer loses text
FIRST_TOKEN = {"skip": "not scored", "eos": "scored, after an EOS put before it"}
# Options that not all of text, hub, data, pairs and a task read.
READ_BY = {"subset": ("hub",), "split": ("hub",), "text_field": ("text", "hub")}
OF_TEXTS = ("stride", "max_tokens", "first_token", "last_window")
READ_BY |= dict.fromkeys(OF_TEXTS, ("text", "data", "hub"))
LAST_WINDOW = {"short": "may be shorter", "full": "begins earlier, to be as long"}


@dataclass
class EvalOptions:
    """What to evaluate, and how; the fields are the options of eval.py."""

    checkpoint: str = option(MISSING, "checkpoints, or directories of any causal language model")
    # At most one of these four.
    text: Sequence[str] = option((), "files, folders or globs; .jsonl: one document per row")
    data: str = option("", "prepared data directory; default: the run's")
    pairs: str = option("", "prepared pairs: measure how often a text finds its partner")
    hub: str = option("", "dataset of the hub")
    subset: str = option("", "hub: the dataset's configuration")
    split: str = option("test", "hub: the split to read")
    text_field: str = option("text", "field with the text of a row")
    window: int | None = option(None, "longest window; default: the context", at_least=1)
    stride: int | None = option(None, "window step in tokens; default: the window", at_least=1)
    batch_size: int = option(16, "windows per forward pass", at_least=1)
    max_tokens: int = option(0, "score at most this many tokens; 0: all", at_least=0)
    # Under eos a blank row is a document, too.
    first_token: str = option("skip", "skip it, or score it after an EOS", choices=FIRST_TOKEN)
    last_window: str = option("short", "may be short, or starts earlier", choices=LAST_WINDOW)
    device: str = option("auto", "where to compute", choices=DEVICES)
    dtype: str = option("fp32", "precision; fp16 and bf16: autocast", choices=TYPES)
    backend: str = option("", "mixing backend; default: the checkpoint's", choices=("", *BACKENDS))

    @property
    def source(self) -> DataConfig | str | None:
        """What is scored without `text` and `hub`: the run's task, or a data directory."""
        trainer = read_trainer(as_path(self.checkpoint))
        data = trainer.get("settings", {}).get("data", {})
        is_task = data.get("source") in TASKS and not self.data
        if not is_task:
            return self.data or trainer.get("data_directory")
        known = {item.name for item in fields(DataConfig)}  # another version may have more
        task = DataConfig(**{name: data[name] for name in data if name in known})
        if problems := option_problems(task, "data."):
            raise UserError(f"{self.checkpoint} was trained on {'; '.join(problems)}: give --data")
        return task


@dataclass
class Text:
    """Token streams to score, and the size of the text they stand for."""

    name: str
    streams: list[np.ndarray]  # each (tokens,)
    bytes: int = 0  # of the UTF-8 encoding
    words: int = 0  # what str.split() counts
    loses: str = ""  # what the tokenizer loses of it, see tokenizer.loss_of_text
    task: TaskSamples | None = None  # the streams are its samples, of which the answers are scored


def choose_text(options: EvalOptions, window: int, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The text that the options name, cut to max_tokens, or what the run was trained on.

    Raises UserError for a text or data that is missing, damaged, empty, or of another tokenizer.
    """
    if options.text or options.hub:
        text = documents_of(options, tokenizer)
    elif isinstance(task := options.source, DataConfig):
        samples = TaskSamples(task, "validation", window)
        streams = list(samples.batch(range(len(samples)))[0].numpy())
        return Text(f"held-out samples of the task {task.source}", streams, task=samples)
    else:
        text = validation_text(as_path(options.source), window, tokenizer)
    if options.first_token == "eos":
        if tokenizer.eos_token_id is None:
            raise UserError("--first-token eos needs a tokenizer with an EOS token: use skip")
        text.streams = [np.insert(tokens, 0, tokenizer.eos_token_id) for tokens in text.streams]
    if all(len(tokens) < 2 for tokens in text.streams):
        raise UserError(f"{text.name} is shorter than 2 tokens: give a longer text")
    most, kept, count = options.max_tokens, [], 0
    for tokens in text.streams:
        if count < most:
            kept.append(tokens[: most - count + 1])
            count += len(kept[-1]) - 1
    if 0 < most < sum(len(tokens) - 1 for tokens in text.streams):
        return shortened(text, kept, f"first {most:,} tokens", tokenizer)
    return text


def documents_of(options: EvalOptions, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The documents of files or of a hub dataset, as many as have max_tokens targets."""
    field, blank = {"text_field": options.text_field}, options.first_token == "eos"
    if options.text:
        names = [as_path(path).name for path in options.text]
        name = ", ".join(names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} others"])
        sources = [DataConfig("text", path, **field) for path in options.text]
    else:
        split = options.split
        if (as_path(options.hub) / "state.json").is_file():  # saved without splits
            if split != EvalOptions.split:
                raise UserError(f"{options.hub} has no splits: leave out --split")
            split = ""
        where = options.hub, options.subset, split
        name, sources = " ".join(filter(None, where)), [DataConfig("hub", *where, **field)]
    encode, sample, targets, text = text_encoder(tokenizer), [], 0, Text(name, [])
    found = (documents(parts_of(source), source, blank) for source in sources)
    for document in itertools.chain.from_iterable(found):
        text.streams.append(encode(document).astype(np.int64))
        text.bytes += len(document.encode())
        text.words += len(document.split())
        sample += [document] if len(sample) < SAMPLE else []
        targets += len(text.streams[-1]) - 1
        if targets > options.max_tokens > 0:
            break
    text.loses = loss_of_text(tokenizer, sample)
    return text


def parts_of(source: DataConfig) -> Iterator[Part]:
    """A hub dataset, or files: .jsonl, .json and .parquet have rows, others are one document."""
    if source.source == "hub":
        yield from source_parts(source)
        return
    for file in local_files(source):
        kinds = (kind for kind, ends in SUFFIXES.items() if file.name.lower().endswith(ends))
        yield Part(replace(source, source=next(kinds, "text")), file)


def validation_text(directory: Path, context: int, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The validation split of prepared data: packed, one stream; otherwise one per document."""
    split = TokenFile(directory, "validation", context)
    if load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
        problem = "was prepared with another tokenizer than the checkpoint's"
        raise UserError(f"{directory} {problem}: give data of its run, or --text")
    tokens = split.tokens
    streams = [tokens] if split.packed else np.split(tokens, split.document_ends()[:-1])
    counts, name = split.manifest.splits["validation"], as_path(directory.resolve()).name
    sizes = counts.bytes, counts.words, split.manifest.tokenizer_loses
    text = Text(f"validation split of {name}", streams, *sizes)
    if split.cut:
        kept = [tokens[slice(*split.span(row))] for row in range(len(split))]
        text = shortened(text, kept, f"at most {context:,} tokens of each document", tokenizer)
    return text


def shortened(
    text: Text, kept: list[np.ndarray], how: str, tokenizer: PreTrainedTokenizerFast
) -> Text:
    """The text of the streams that are kept, and the size of what their tokens decode to."""
    text_bytes, words = TextBytes(tokenizer, text.streams, text.bytes), 0
    for tokens in kept:
        document = tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        words += len(document.replace(tokenizer.eos_token or "\n", "\n").split())
    size = round(sum(map(text_bytes.count, kept)))
    return Text(f"{text.name} ({how})", kept, size, words, text.loses)
