"""Perplexity of checkpoints on a text, with the conventions beside every number."""

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mixer.checkpoints.format import read_trainer
from mixer.checkpoints.pretrained import check_checkpoint, check_token, load_checkpoint
from mixer.common.errors import UserError, rank
from mixer.common.files import check_writable, directory_for
from mixer.common.hardware import memory_for, peak_memory_gb
from mixer.common.options import option, option_problems
from mixer.data.config import TASKS, DataConfig
from mixer.data.prepared import PairFile
from mixer.distributed.world import leave_with_error
from mixer.evaluation import scoring, texts
from mixer.evaluation.report import evaluation_report, write_evaluation
from mixer.evaluation.scoring import AUTOCAST_TYPES, DEVICES, Place, TokenScores
from mixer.evaluation.texts import Text
from mixer.ops import BACKENDS

FIRST_TOKEN = {"skip": "not scored", "eos": "scored, after an EOS put before it"}
LAST_WINDOW = {"short": "may be shorter", "full": "begins earlier, to be as long"}


@dataclass
class EvalOptions:
    """What to evaluate, and how; the fields are the options of eval.py."""

    checkpoint: str = option(
        MISSING, "a checkpoint, e.g. runs/demo/step-600, or the directory of any causal LM"
    )
    # At most one of these four.
    text: Sequence[str] = option(
        (), "files, folders or globs: each text file is a document, each row of .jsonl or .parquet"
    )
    data: str = option("", "prepared data directory; default: the one of the run")
    pairs: str = option("", "prepared data directory: how often texts find their partners there")
    hub: str = option("", "dataset of the hub, each row a document")
    subset: str = option("", "hub: the dataset's configuration")
    split: str = option("test", "hub: the split to read")
    text_field: str = option("text", "field of a row that holds its text")
    window: int | None = option(
        None,
        "longest window in tokens; default: the context, which mixing weights by lag can exceed",
        at_least=1,
    )
    stride: int | None = option(
        None, "tokens between windows, 1..window; default: the window (disjoint)", at_least=1
    )
    batch_size: int = option(16, "windows per forward", at_least=1)
    max_tokens: int = option(0, "score at most that many tokens; 0: all", at_least=0)
    first_token: str = option(
        "skip",
        "first token of a stream: skip, or eos: score it after an EOS, and blank rows too",
        choices=FIRST_TOKEN,
    )
    last_window: str = option(
        "short",
        "last window of a stream: short, or full: let it begin earlier, as long as the others",
        choices=LAST_WINDOW,
    )
    device: str = option("auto", "auto, cpu or cuda", choices=DEVICES)
    dtype: str = option("fp32", "fp32, fp16 or bf16 (autocast)", choices=AUTOCAST_TYPES)
    backend: str = option(
        "", "auto, cuda or dense; default: what the checkpoint says", choices=("", *BACKENDS)
    )

    @property
    def source(self) -> DataConfig | str | None:
        """What is scored where no text is named: the task or the data directory of the run."""
        trainer = read_trainer(Path(self.checkpoint))
        data = trainer.get("settings", {}).get("data", {})
        is_task = data.get("source") in TASKS and not self.data
        return DataConfig(**data) if is_task else self.data or trainer.get("data_directory")


def evaluate(evaluations: list[EvalOptions], output: str | None = None) -> None:
    """Evaluates each checkpoint, prints the table and writes the report into `output`.

    By default the report goes into a directory beside the first checkpoint, whose name stands for
    these options alone. Every process of an `accelerate launch` calls this; the first one prints
    and writes. Raises UserError as `evaluate_checkpoint` does, where possible before the first
    model is loaded.
    """
    for options in evaluations:
        check_options(options)
    directory = Path(output or default_directory(evaluations))
    if rank() == 0:
        check_writable(directory)
    try:
        results = [evaluate_checkpoint(options) for options in evaluations]
    except BaseException as error:
        if dist.is_initialized():
            leave_with_error(error)  # so that no other process waits for this one
        raise
    if rank() == 0:
        write_evaluation(results, directory)
        print(f"{evaluation_report(results)}\n\nthe report is in {directory}")
    if dist.is_initialized():
        dist.destroy_process_group()


def default_directory(evaluations: list[EvalOptions]) -> Path:
    """Beside the first checkpoint, with a name of its own for all options that change numbers."""
    first = evaluations[0]
    asked = [
        (item.name, value)
        for item in fields(first)
        if item.name not in ("checkpoint", "batch_size", "device")
        and (value := getattr(first, item.name)) != item.default
    ]
    asked += [options.checkpoint for options in evaluations[1:]]
    paths = filter(None, [*first.text, first.data, first.pairs])
    about = " ".join(Path(path).resolve().name for path in paths) or first.hub
    what = "retrieval" if first.pairs else "eval"
    return directory_for(Path(first.checkpoint), what, about, repr(asked) if asked else "")


def check_options(options: EvalOptions) -> None:
    """Raises UserError for whatever can be found wrong before a model is loaded."""
    if problems := option_problems(options):
        raise UserError("; ".join(problems))
    directory = Path(options.checkpoint)
    check_checkpoint(directory)
    if options.text or options.hub or options.pairs:
        return
    source, give = options.source, "--data DIR, --text FILE... or --hub NAME"
    if isinstance(source, DataConfig):
        if options.first_token != "skip" or options.max_tokens:
            raise UserError(
                f"{directory} was trained on a task, of which all answers are scored: leave out "
                f"--first-token and --max-tokens, or give {give}"
            )
    elif not source or not Path(source).is_dir():
        raise UserError(
            f"{directory} was trained on {source or 'data that it does not name'}, which is not "
            f"in {Path.cwd()}: give {give}"
        )


def choose_window(options: EvalOptions, model: PreTrainedModel) -> tuple[int, int]:
    """(window, stride) in tokens."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    window = options.window or context
    if window is None or (context and not scoring.reads(model, window)):
        raise UserError(
            f"the context of {options.checkpoint} is {context or 'not known'}, the window "
            f"{options.window}: give --window 1..{context or 'N'}"
        )
    stride = options.stride or window
    if stride > window:
        raise UserError(f"stride {stride} is outside 1..{window} (the window): choose one inside")
    return window, stride


def choose_text(options: EvalOptions, window: int, tokenizer: PreTrainedTokenizerFast) -> Text:
    """The text that the options name, cut to max_tokens, or what the run was trained on."""
    field, blank = options.text_field, options.first_token == "eos"
    if options.text:
        names = [Path(path).name for path in options.text]
        name = ", ".join(names if len(names) <= 3 else [*names[:2], f"{len(names) - 2} others"])
        sources = [DataConfig("text", path, text_field=field) for path in options.text]
        text = texts.text_of(name, sources, tokenizer, blank, options.max_tokens)
    elif options.hub:
        where = options.hub, options.subset, options.split
        sources = [DataConfig("hub", *where, text_field=field)]
        name = " ".join(filter(None, where))
        text = texts.text_of(name, sources, tokenizer, blank, options.max_tokens)
    elif isinstance(source := options.source, DataConfig):
        return texts.task_text(source, window)
    else:
        text = texts.validation_text(Path(source), window, tokenizer)
    if options.first_token == "eos":
        texts.put_eos_first(text, tokenizer)
    if all(len(tokens) < 2 for tokens in text.streams):
        raise UserError(
            f"{text.name} is shorter than 2 tokens, so nothing can be predicted: give a longer text"
        )
    return texts.limit(text, options.max_tokens, tokenizer)


def evaluate_checkpoint(options: EvalOptions) -> dict:
    """Loads a checkpoint, scores its text and returns the numbers with their conventions.

    The processes of an `accelerate launch` share the windows out, and each returns the numbers of
    the whole. Raises UserError for a checkpoint, text, data, window or dtype that cannot be used,
    a model that is not causal, a loss that is not finite, and too little memory.
    """
    check_options(options)
    place = scoring.join_processes(scoring.choose_device(options.device, options.dtype))
    window = options.window or "the context's"
    sizes = f"--batch-size {options.batch_size}, --window {window} tokens, --dtype {options.dtype}"
    lower = "Give a smaller --batch-size, a smaller --window, or --dtype bf16"
    with memory_for(place[0], f"evaluating {options.checkpoint}", sizes, lower):
        return _evaluate(options, place)


def _evaluate(options: EvalOptions, place: Place) -> dict:
    directory, (device, _, processes) = Path(options.checkpoint), place
    model, tokenizer = load_checkpoint(directory, device, options.backend)
    found = describe_model(directory, model, tokenizer)  # before a window extends its context
    # A transformer would keep keys and values that nothing reads.
    model.config.get_text_config().use_cache = False
    window, stride = choose_window(options, model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found |= {
        "window": window,
        "backend": getattr(model.config, "mixing_backend", "none (not a masked mixer)"),
        "dtype": options.dtype,
        "device": f"{processes} x {name}" if processes > 1 else name,
    }
    dtype, size = AUTOCAST_TYPES[options.dtype], options.batch_size
    if options.pairs:
        texts.validation_text(Path(options.pairs), window, tokenizer)  # refuses another tokenizer
        pairs = PairFile(options.pairs, "validation", window)
        shares = scoring.find_partners(model, pairs, size, dtype, place)
        return found | {"data": options.pairs, "tokens": window} | shares
    text = choose_text(options, window, tokenizer)
    check_token(max(int(ids.max()) for ids in text.streams if len(ids)), model, text.name)
    scoring.check_causality(model, max(text.streams, key=len)[: max(window, 2)], options.dtype)
    batches = scoring.window_batches(text.streams, window, stride, size, options.last_window)
    if text.task:
        batches = scoring.sample_batches(text.task, 0, size)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    scores = scoring.evaluate_batches(model, batches, window, dtype, place)
    seconds = time.perf_counter() - began
    if not math.isfinite(scores.nats):
        raise UserError(
            f"the loss is {scores.nats} in {options.dtype}: use --dtype fp32; "
            "if it stays, the checkpoint diverged"
        )
    found |= {
        "stride": stride,
        "first_token": FIRST_TOKEN[options.first_token],
        "last_window": LAST_WINDOW[options.last_window],
        "tokens_per_second": scores.tokens / seconds,
        "peak_memory_gb": peak_memory_gb(device),
    }
    return found | numbers(scores, text, found["context"])


def describe_model(
    directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> dict:
    """The result's entries about the model; the tokenizer's hash tells tokenizers apart."""
    serialised, text = tokenizer.backend_tokenizer.to_str(), model.config.get_text_config()
    return {
        "label": f"{directory.resolve().parent.name}/{directory.resolve().name}",
        "checkpoint": str(directory),
        "step": read_trainer(directory).get("step"),
        "architecture": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": text.vocab_size,
        "context": getattr(text, "max_position_embeddings", None),
        "tokenizer_sha256": hashlib.sha256(serialised.encode()).hexdigest(),
    }


def numbers(scores: TokenScores, text: Text, context: int | None) -> dict:
    """What a report has of the text and its scores: perplexity per token, and but for a task also
    per word and byte, and bits per byte (nats / ln 2 / bytes); the loss up to the trained `context`
    and past it, where windows are longer.
    """
    found = {
        "text": text.name,
        "bytes": text.bytes,
        "words": text.words,
        "tokenizer_loses": text.loses,
        "streams": len(text.streams),
        "windows": scores.windows,
        "tokens_scored": scores.tokens,
        "nats": scores.nats,
        "accuracy": scores.accuracy,
        "loss": scores.loss,
        "token_perplexity": exp_or_none(scores.loss),
    }
    if not text.task:
        found |= {
            "word_perplexity": exp_or_none(scores.nats / max(text.words, 1)),
            "byte_perplexity": exp_or_none(scores.nats / text.bytes),
            "bits_per_byte": scores.nats / math.log(2) / text.bytes,
        }
    if context and context < len(scores.nats_by_position):
        parts = {"loss_to_context": slice(context), "loss_past_context": slice(context, None)}
        for name, part in parts.items():
            if count := scores.count_by_position[part].sum():
                found[name] = scores.nats_by_position[part].sum() / count
    return found | scores.by_kind | scores.by_position


def exp_or_none(value: float) -> float | None:
    """exp(value); None where fp64 has no such number: the words of an untrained model."""
    return math.exp(value) if value < 709 else None
