"""Perplexity of checkpoints on a text: from options to numbers and their report."""

import hashlib
import json
import math
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mixer.checkpoints.checkpoint import read_trainer
from mixer.checkpoints.pretrained import check_checkpoint, check_token, load_checkpoint
from mixer.common.errors import UserError, rank
from mixer.common.files import (
    as_path,
    check_writable,
    directory_for,
    results_locked,
    whole_directory,
)
from mixer.common.hardware import TYPES, memory_for, peak_memory_gb
from mixer.common.options import option_problems
from mixer.data.config import DataConfig
from mixer.data.samples import PairFile
from mixer.distributed.world import leave_with_error
from mixer.evaluation import scoring, texts
from mixer.evaluation.scoring import Place, TokenScores
from mixer.evaluation.texts import EvalOptions, Text
from mixer.models.retrieval import CANDIDATES
from mixer.reporting.figure import can_draw, plot_loss_by_position
from mixer.reporting.text import (
    ACCURACY,
    COUNT,
    LOSS,
    MEMORY,
    PERPLEXITY,
    SPEED,
    TOP1,
    in_form,
    table,
    wrapped,
)

UNCHANGING = ("checkpoint", "batch_size", "device")  # options that change no number
COLUMNS = {  # of the report's table: the key and the form
    "tokens scored": ("tokens_scored", COUNT),
    "loss (nats/token)": ("loss", LOSS),
    "token ppl": ("token_perplexity", PERPLEXITY),
    "word ppl": ("word_perplexity", PERPLEXITY),
    "byte ppl": ("byte_perplexity", PERPLEXITY),
    "bits/byte": ("bits_per_byte", LOSS),
    "accuracy": ("accuracy", ACCURACY),
    "tokens/s": ("tokens_per_second", SPEED),
    "peak memory, GB": ("peak_memory_gb", MEMORY),
    "loss, 2nd half": ("loss_second_half", LOSS),
    "loss past context": ("loss_past_context", LOSS),
    "pairs": ("pairs", COUNT),
    "tokens": ("tokens", COUNT),
    **{f"top1 of {count}": (f"top1_of_{count}", TOP1) for count in CANDIDATES},
}


def evaluate(evaluations: list[EvalOptions], output: str | None = None) -> None:
    """Evaluates each checkpoint, prints the table and writes the report into `output`.

    By default the report goes into a directory beside the first checkpoint, whose name stands for
    these options alone. Every process of an `accelerate launch` calls this; the first one prints
    and writes. Raises UserError as `evaluate_checkpoint` does, if possible before loading a model.
    """
    for options in evaluations:
        check_options(options)
    directory = as_path(output or default_directory(evaluations))
    if rank() == 0:
        check_writable(directory)
    with results_locked(directory) if rank() == 0 else nullcontext():
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
    first, others = evaluations[0], [options.checkpoint for options in evaluations[1:]]
    changed = {name: value for name, value in vars(first).items() if name not in UNCHANGING}
    asked = [item for item in changed.items() if item[1] != getattr(EvalOptions, item[0])]
    paths = filter(None, [*first.text, first.data, first.pairs])
    about = " ".join(as_path(path).resolve().name for path in paths) or first.hub
    what, own = "retrieval" if first.pairs else "eval", [*asked, *others]
    return directory_for(as_path(first.checkpoint), what, about, repr(own) if own else "")


def check_options(options: EvalOptions) -> None:
    """Raises UserError for whatever can be found wrong before a model is loaded."""
    if problems := option_problems(options):
        raise UserError("; ".join(problems))
    directory = as_path(options.checkpoint)
    check_checkpoint(directory)
    default = "a task" if isinstance(source := options.source, DataConfig) else "data"
    kind = next((kind for kind in ("text", "hub", "pairs") if getattr(options, kind)), default)
    for name, readers in texts.READ_BY.items():
        if kind not in readers and getattr(options, name) != getattr(EvalOptions, name):
            unread = f"--{name.replace('_', '-')} is given, which scoring {kind} does not read"
            raise UserError(f"{unread}: leave it out, or give --{' or --'.join(readers)}")
    if kind == "data" and not options.data and not (source and as_path(source).is_dir()):
        said = f"was trained on {source}, which is not in {Path.cwd()}" if source else ""
        said = said or "does not say what data it was trained on"
        raise UserError(f"{directory} {said}: give --data DIR, --text FILE... or --hub NAME")


def choose_window(options: EvalOptions, model: PreTrainedModel) -> tuple[int, int]:
    """(window, stride) in tokens."""
    context = scoring.context_of(model)
    window = options.window or context or 0
    stride = options.stride or window
    if not 0 < stride <= window:
        said = f"the window of {options.checkpoint} is {window}, the stride {stride}"
        raise UserError(f"{said}: give --window N, and --stride 1..window")
    scoring.check_length(window, model, options.checkpoint, f"--window is {window}")
    return window, stride


def evaluate_checkpoint(options: EvalOptions) -> dict:
    """Loads a checkpoint, scores its text and returns the numbers with their conventions, of all
    processes together. Raises UserError for a checkpoint, text, data, window or dtype that cannot
    be used, a model that is not causal, a loss that is not finite, and too little memory.
    """
    check_options(options)
    place = scoring.join_processes(scoring.choose_device(options.device, options.dtype))
    window = options.window or "the context's"
    sizes = f"--batch-size {options.batch_size}, --window {window} tokens, --dtype {options.dtype}"
    is_half = options.dtype != "fp32"
    lower = [*["a smaller --batch-size"] * (options.batch_size > 1), "a smaller --window"]
    lower += [] if is_half else ["--dtype bf16"]
    how = {"dtype": TYPES[options.dtype] if is_half else None, "enabled": is_half}
    remedy = f"Give {' or '.join(lower)}"
    with memory_for(place[0], f"evaluating {options.checkpoint}", sizes, remedy):
        # Each weight is used once in a forward pass: copies of all would only take memory.
        with torch.autocast(place[0].type, cache_enabled=False, **how):
            return _evaluate(options, place)


def _evaluate(options: EvalOptions, place: Place) -> dict:
    directory, (device, _, processes) = as_path(options.checkpoint), place
    model, tokenizer = load_checkpoint(directory, device, options.backend)
    found = describe_model(directory, model, tokenizer)
    # A transformer would keep keys and values that nothing reads.
    model.config.get_text_config().use_cache = False
    window, stride = choose_window(options, model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found |= {
        "window": window,
        "stride": stride,
        "first_token": texts.FIRST_TOKEN[options.first_token],
        "last_window": texts.LAST_WINDOW[options.last_window],
        "backend": getattr(model.config, "mixing_backend", "none (not a masked mixer)"),
        "dtype": options.dtype,
        "device": f"{processes} x {name}" if processes > 1 else name,
    }
    size = options.batch_size
    if options.pairs:
        directory = as_path(options.pairs)
        texts.validation_text(directory, window, tokenizer)  # refuses another tokenizer
        pairs = PairFile(directory, "validation", window)
        shares = scoring.find_partners(model, pairs, size, place)
        return found | {"data": options.pairs, "tokens": window} | shares
    text = texts.choose_text(options, window, tokenizer)
    check_token(max(int(ids.max()) for ids in text.streams if len(ids)), model, text.name)
    scoring.check_causality(model, max(text.streams, key=len)[: max(window, 2)], options.dtype)
    batches = scoring.window_batches(text.streams, window, stride, size, options.last_window)
    if task := text.task:
        ends = range(size, len(task) + size, size)
        batches = (task.batch(range(end - size, min(end, len(task)))) for end in ends)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of an earlier checkpoint
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    scores = scoring.evaluate_batches(model, batches, window, place)
    found["tokens_per_second"] = scores.tokens / (time.perf_counter() - began)
    found["peak_memory_gb"] = peak_memory_gb(device)
    if not math.isfinite(scores.nats):
        remedy = "use --dtype fp32; if it persists, the checkpoint diverged"
        raise UserError(f"the loss is {scores.nats} in {options.dtype}: {remedy}")
    return found | numbers(scores, text, found["context"] or window)


def describe_model(
    directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> dict:
    """The result's entries about the model; the tokenizer's hash tells tokenizers apart."""
    specification = tokenizer.backend_tokenizer.to_str().encode()
    place = as_path(directory.resolve())
    return {
        "label": f"{place.parent.name}/{place.name}",
        "checkpoint": str(directory),
        "step": read_trainer(directory).get("step"),
        "architecture": model.config.model_type,
        "parameters": model.num_parameters(),
        "vocabulary": model.config.get_text_config().vocab_size,
        "context": scoring.context_of(model),
        "tokenizer_sha256": hashlib.sha256(specification).hexdigest(),
    }


def numbers(scores: TokenScores, text: Text, context: int) -> dict:
    """What a report has of the text and its scores, also per word and byte but for a task. Where
    windows are longer than the trained `context`, it has the loss in its second half and past it:
    the first tokens, with little to go by, would raise the former.
    """
    found = {
        "text": text.name,
        "bytes": text.bytes,
        "words": text.words,
        "tokenizer_loses": text.loses,
        "streams": len(text.streams),
        "tokens_scored": scores.tokens,
        "nats": scores.nats,
        "accuracy": float(scores.right_by_position.sum()) / scores.tokens,
        "loss": scores.nats / scores.tokens,
        "loss_by_position": scores.by_position(scores.nats_by_position),
        "accuracy_by_position": scores.by_position(scores.right_by_position),
        "count_by_position": scores.count_by_position.tolist(),
    }
    sizes = {"token": scores.tokens}
    if not text.task:
        sizes |= {"word": max(text.words, 1), "byte": text.bytes}
        found["bits_per_byte"] = scores.nats / math.log(2) / text.bytes
    for unit, size in sizes.items():  # of words, that of an untrained model can exceed fp64
        nats = scores.nats / size
        found[f"{unit}_perplexity"] = math.exp(nats) if nats < 709 else None
    half = slice(context // 2, context)
    parts = {"loss_second_half": half, "loss_past_context": slice(context, None)}
    for name, part in parts.items() if context < len(scores.nats_by_position) else ():
        if count := scores.count_by_position[part].sum():
            found[name] = scores.nats_by_position[part].sum() / count
    return found


def evaluation_report(results: list[dict]) -> str:
    """Markdown: one row a checkpoint, and under the table what it was measured by."""
    cells = [{"checkpoint": result["label"]} for result in results]
    for title, (key, form) in COLUMNS.items():
        if any(key in result for result in results):
            for row, result in zip(cells, results, strict=True):
                row[title] = in_form(result[key], form) if key in result else "-"
    rows = table(cells)
    if "pairs" in results[0]:
        return rows
    found: dict[str, list[str]] = {}  # each note, and the checkpoints that it holds for
    for result in results:
        for note in conventions(result):
            found.setdefault(note, []).append(result["label"])
    if len({result["tokenizer_sha256"] for result in results}) > 1:
        note = "The tokenizers differ: compare bits/byte and the perplexities per byte and word, "
        found[note + "not those per token."] = results
    notes = [rows, ""]
    for note, holds in found.items():
        of = "" if len(holds) == len(results) else f" ({', '.join(holds)})"
        notes.append(wrapped(note + of, "- ", "  "))
    return "\n".join(notes)


def conventions(r: dict) -> list[str]:
    """What a reader must know of a result to compare its numbers."""
    sizes = f"{r['bytes']:,} bytes and {r['words']:,} words (UTF-8, split at white space)"
    about = filter(None, [r["text"], "bits_per_byte" in r and sizes, r["tokenizer_loses"]])
    size = f"{r['parameters']:,} parameters, vocabulary {r['vocabulary']:,}"
    windows = f"at most {r['window']:,} tokens, stride {r['stride']:,}"
    return [
        f"text: {'; '.join(about)}",
        f"model: {r['architecture']}, {size}",
        f"streams: {r['streams']:,}, first token of each {r['first_token']}",
        f"windows: {windows}, the last of a stream {r['last_window']}",
        f"computed: backend {r['backend']}, {r['dtype']}, {r['device']}",
    ]


def write_evaluation(results: list[dict], directory: Path) -> None:
    """report.json, report.md and loss_by_position.png in `directory`."""
    is_drawn = can_draw() and "pairs" not in results[0]
    picture = "\n![Loss by position](loss_by_position.png)\n" if is_drawn else ""
    text = f"# Evaluation\n\n{evaluation_report(results)}\n{picture}"
    with whole_directory(directory) as stage:
        (stage / "report.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        (stage / "report.md").write_text(text, encoding="utf-8")
        if is_drawn:
            plot_loss_by_position(results, stage / "loss_by_position.png")
