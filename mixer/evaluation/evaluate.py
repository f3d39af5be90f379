"""Perplexity of checkpoints on a text, or what they find: from options to numbers and a report."""

import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mixer.checkpoints.checkpoint import read_trainer
from mixer.checkpoints.pretrained import check_token, load_checkpoint
from mixer.common.errors import UserError, say_on_stderr
from mixer.common.files import as_path, results_locked, whole_directory
from mixer.common.hardware import TYPES, memory_for, peak_memory_gb
from mixer.common.progress import time_reported
from mixer.common.ranks import rank
from mixer.data.samples import Batch
from mixer.data.tokenizer import TextBytes
from mixer.distributed.world import LASTING_GROUPS, Process, leave_with_error
from mixer.evaluation import scoring, texts
from mixer.evaluation.beir import measures, read_collection
from mixer.evaluation.config import FIRST_TOKEN, LAST_WINDOW, EvalOptions, check_options
from mixer.evaluation.search import search
from mixer.evaluation.texts import Text
from mixer.objectives.config import CANDIDATES, ObjectiveConfig
from mixer.objectives.language import TokenLoss, TokenScores, score_tokens
from mixer.objectives.retrieval import PairFile, PairLoss, score_pairs
from mixer.reporting.figure import can_draw, plot_loss_by_position
from mixer.reporting.text import (
    ACCURACY,
    COUNT,
    LOSS,
    MEMORY,
    PERPLEXITY,
    SPEED,
    TOP1,
    WIDTH,
    in_form,
    shown_width,
    table,
    wrapped,
)

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
    "nDCG@10": ("ndcg_at_10", LOSS),
    "recall@100": ("recall_at_100", LOSS),
    "MRR@10": ("mrr_at_10", LOSS),
    **{f"top1 of {count}": (f"top1_of_{count}", TOP1) for count in CANDIDATES},
}


def evaluate(evaluations: list[EvalOptions], directory: Path) -> None:
    """Evaluates each checkpoint, prints the table and writes the report into a directory.

    Every process of an `accelerate launch` calls this; the first one prints and writes. Raises
    UserError as `evaluate_checkpoint` does.
    """
    with results_locked(directory) if rank() == 0 else nullcontext():
        try:
            device = scoring.choose_device(evaluations[0].device, evaluations[0].dtype)
            say_on_stderr(f"evaluating on {scoring.devices_in_words(device)}")
            results = [evaluate_checkpoint(options) for options in evaluations]
        except BaseException as error:
            if dist.is_initialized():
                leave_with_error(error)  # so that no other process waits for this one
            raise
        if rank() == 0:
            write_evaluation(results, directory)
            print(f"{evaluation_report(results, shown_width())}\n\nthe report is in {directory}")
    if dist.is_initialized():
        LASTING_GROUPS.append(dist.group.WORLD)
        dist.destroy_process_group()


def choose_window(options: EvalOptions, model: PreTrainedModel) -> tuple[int, int]:
    """(window, stride) in tokens."""
    context = scoring.context_of(model)
    window = options.window or context or 0
    stride = options.stride or window
    if not 0 < stride <= window:
        problem = f"the window of {options.checkpoint} is {window}, the stride {stride}"
        raise UserError(f"{problem}: give --window N, and --stride 1..window")
    scoring.check_length(window, model, options.checkpoint, f"--window is {window}")
    return window, stride


def evaluate_checkpoint(options: EvalOptions) -> dict:
    """Loads a checkpoint, scores its text, or what it finds, and returns the numbers with their
    conventions, of all processes together. Raises UserError for a checkpoint, text, data, window or
    dtype that cannot be used, a model that is not causal, a loss that is not finite, and too little
    memory.
    """
    check_options(options)
    process = scoring.join_processes(scoring.choose_device(options.device, options.dtype))
    if options.backend == "cuda" and process.device.type != "cuda":
        problem = f"--backend is cuda, but evaluating on the {process.device.type}"
        raise UserError(f"{problem}; allowed there: auto, dense")
    torch.backends.cuda.matmul.allow_tf32 = False  # as a training in this process may have set it
    is_half = options.dtype != "fp32"
    window = options.window or "the context's"
    sizes = f"--batch-size {options.batch_size}, --window {window} tokens, --dtype {options.dtype}"
    remedies = ["a smaller --batch-size"] if options.batch_size > 1 else []
    remedies.append("a smaller --window")
    if not is_half:
        remedies.append("--dtype bf16")
    remedy = f"Give {' or '.join(remedies)}"
    # Each weight is used once in a forward pass: copies of all would only take memory.
    autocast = torch.autocast(
        process.device.type,
        dtype=TYPES[options.dtype] if is_half else None,
        enabled=is_half,
        cache_enabled=False,
    )
    with memory_for(process.device, f"evaluating {options.checkpoint}", sizes, remedy), autocast:
        return _evaluate(options, process)


def _evaluate(options: EvalOptions, process: Process) -> dict:
    """`evaluate_checkpoint`, of options that are allowed, on a process that has joined."""
    directory = as_path(options.checkpoint)
    device = process.device
    with time_reported(f"loading {directory}"):
        model, tokenizer = load_checkpoint(directory, device, options.backend)
    result = describe_model(directory, model, tokenizer)
    # A transformer would keep keys and values that nothing reads.
    model.config.get_text_config().use_cache = False
    window, stride = choose_window(options, model)
    result |= {
        "window": window,
        "stride": stride,
        "first_token": FIRST_TOKEN[options.first_token],
        "last_window": LAST_WINDOW[options.last_window],
        "backend": getattr(model.config, "mixing_backend", "none (not a masked mixer)"),
        "dtype": options.dtype,
        "device": scoring.devices_in_words(device),
    }
    if options.pairs:
        return result | evaluate_pairs(options, model, tokenizer, window, process)
    if options.retrieval:
        return result | evaluate_retrieval(options, model, tokenizer, window, process)
    return result | evaluate_text(options, model, tokenizer, window, stride, process)


def evaluate_pairs(
    options: EvalOptions,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    window: int,
    process: Process,
) -> dict:
    """The result's entries about pairs: how often a query's own target is the nearest."""
    directory = as_path(options.pairs)
    pairs = PairFile(directory, "validation", window)
    texts.check_vocabulary(directory, tokenizer)
    pair_loss = PairLoss(model, ObjectiveConfig.temperature).eval()
    with time_reported("reading pairs"):
        scores = score_pairs(pair_loss, pairs, len(pairs), options.batch_size, process)
    scoring.check_vectors(scores.loss)
    if not scores.top1:
        fewest = min(CANDIDATES)
        say_on_stderr(f"{scores.pairs} pairs: none is sought among others; that takes {fewest}")
    return {"data": options.pairs, "tokens": window, "pairs": scores.pairs} | scores.top1


def evaluate_retrieval(
    options: EvalOptions,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    window: int,
    process: Process,
) -> dict:
    """The result's entries about the documents that were found in a collection."""
    folder = as_path(options.retrieval)
    split = options.split_or_default
    collection = read_collection(folder, split)
    hits = search(model, tokenizer, collection, window, options.batch_size, process)
    return {
        "collection": f"{folder.resolve().name} {split}",
        "queries": len(collection.queries),
        "documents": len(collection.document_ids),
        "queries_cut": hits.queries_cut,
        "documents_cut": hits.documents_cut,
    } | measures(hits.rankings, collection.relevance)


def evaluate_text(
    options: EvalOptions,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    window: int,
    stride: int,
    process: Process,
) -> dict:
    """The result's entries about a text: its losses, and how fast they were computed."""
    device = process.device
    size = options.batch_size
    with time_reported("reading the text"):
        text = texts.choose_text(options, window, tokenizer)
    check_token(text.largest_token, model, text.name)
    scoring.check_causality(model, max(text.streams, key=len)[: max(window, 2)], options.dtype)
    if (samples := text.samples) is not None:
        count = len(samples)
        starts = range(0, count, size)
        batches = (samples.batch(range(start, min(start + size, count))) for start in starts)
    else:
        batches = scoring.window_batches(text.streams, window, stride, size, options.last_window)
    has_bytes = text.bytes > 0
    text_bytes = TextBytes(tokenizer, text.streams, text.bytes) if has_bytes else None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of an earlier checkpoint
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    with said_progress(batches, text) as batches:
        own_batches = itertools.islice(batches, process.rank, None, process.size)
        scores = score_tokens(TokenLoss(model).eval(), own_batches, window, process, text_bytes)
    speed = {
        "tokens_per_second": scores.tokens / (time.perf_counter() - began),
        "peak_memory_gb": peak_memory_gb(device),
    }
    if not math.isfinite(scores.nats):
        remedy = "use --dtype fp32; if it persists, the checkpoint diverged"
        raise UserError(f"the loss is {scores.nats} in {options.dtype}: {remedy}")
    return speed | numbers(scores, text, scoring.context_of(model) or window)


@contextmanager
def said_progress(batches: Iterable[Batch], text: Text) -> Iterator[Iterator[Batch]]:
    """The batches of a text; while they are used, it is said how many of its targets they had."""
    is_task = text.samples is not None  # of which only the answers are scored
    of_total = "" if is_task else f" of {text.targets:,}"
    scored = 0

    def counted_batches() -> Iterator[Batch]:
        nonlocal scored
        for inputs, targets in batches:
            yield inputs, targets
            scored += int((targets != -100).sum())

    def amount() -> str:
        return f"{scored:,}{of_total} tokens, "

    with time_reported(f"scoring {text.name}", amount=amount):
        yield counted_batches()


def describe_model(
    directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> dict:
    """The result's entries about the model; the tokenizer's hash tells tokenizers apart."""
    specification = tokenizer.backend_tokenizer.to_str().encode()
    resolved = as_path(directory.resolve())
    return {
        "label": f"{resolved.parent.name}/{resolved.name}",
        "checkpoint": str(directory),
        "step": read_trainer(directory).get("step"),
        "architecture": model.config.model_type,
        "parameters": model.num_parameters(),
        "vocabulary": model.config.get_text_config().vocab_size,
        "context": scoring.context_of(model),
        "tokenizer_sha256": hashlib.sha256(specification).hexdigest(),
    }


def numbers(scores: TokenScores, text: Text, context: int) -> dict:
    """What a report has of the text and its scores, also per word and byte if it has any: of what
    the scored tokens stand for, without the first of a stream. Where windows are longer than the
    trained `context`, it has the loss in its second half and past it: the first tokens, with little
    to go by, would raise the former.
    """
    result = {
        "text": text.name,
        "bytes": text.bytes,
        "words": text.words,
        "tokenizer_loses": text.loses,
        "streams": len(text.streams),
        "tokens_scored": scores.tokens,
        "nats": scores.nats,
        "accuracy": scores.accuracy,
        "loss": scores.nats / scores.tokens,
        "loss_by_position": scores.by_position(scores.nats_by_position),
        "accuracy_by_position": scores.by_position(scores.right_by_position),
        "count_by_position": scores.count_by_position.tolist(),
    }
    sizes = {"token": scores.tokens}
    if text.bytes and scores.bytes:
        share = scores.bytes / text.bytes
        sizes |= {"word": share * max(text.words, 1), "byte": scores.bytes}
        result["bytes_scored"] = scores.bytes
        result["bits_per_byte"] = scores.nats / math.log(2) / scores.bytes
    for unit, size in sizes.items():  # of words, that of an untrained model can exceed fp64
        nats = scores.nats / size
        result[f"{unit}_perplexity"] = math.exp(nats) if nats < 709 else None
    if context < len(scores.nats_by_position):
        ranges = {
            "loss_second_half": slice(context // 2, context),
            "loss_past_context": slice(context, None),
        }
        for name, chosen in ranges.items():
            if count := scores.count_by_position[chosen].sum():
                result[name] = scores.nats_by_position[chosen].sum() / count
    return result


def evaluation_report(results: list[dict], width: int = WIDTH) -> str:
    """Markdown: one row a checkpoint, and under the table what it was measured by."""
    cells = [{"checkpoint": result["label"]} for result in results]
    for title, (key, form) in COLUMNS.items():
        if any(key in result for result in results):
            for row, result in zip(cells, results, strict=True):
                row[title] = in_form(result[key], form) if key in result else "-"
    rows = table(cells, width=width)
    if "pairs" in results[0]:
        return rows
    labels_of_notes: dict[str, list[str]] = {}  # the checkpoints that each note holds for
    for result in results:
        for note in conventions(result):
            labels_of_notes.setdefault(note, []).append(result["label"])
    lines = [rows, ""]
    for note, labels in labels_of_notes.items():
        suffix = "" if len(labels) == len(results) else f" ({', '.join(labels)})"
        lines.append(wrapped(note + suffix, width, "- ", "  "))
    tokenizers = {result["tokenizer_sha256"] for result in results}
    if len(tokenizers) > 1 and "token_perplexity" in results[0]:
        note = (
            "The tokenizers differ: compare bits/byte and the perplexities per byte and word, "
            "not those per token."
        )
        lines.append(wrapped(note, width, "- ", "  "))
    return "\n".join(lines)


def conventions(result: dict) -> list[str]:
    """What a reader must know of a result to compare its numbers."""
    computed = f"computed: backend {result['backend']}, {result['dtype']}, {result['device']}"
    if "collection" in result:
        cut = f"{result['queries_cut']:,} queries and {result['documents_cut']:,} documents"
        sizes = f"{result['queries']:,} queries, {result['documents']:,} documents"
        return [
            f"collection: {result['collection']}, {sizes}",
            f"texts: at most {result['window']:,} tokens; {cut} are longer, and were cut",
            computed,
        ]
    text = [result["text"]]
    if "bits_per_byte" in result:
        words = f"{result['words']:,} words (UTF-8, split at white space)"
        text.append(f"{result['bytes']:,} bytes and {words}")
    if result["tokenizer_loses"]:
        text.append(result["tokenizer_loses"])
    size = f"{result['parameters']:,} parameters, vocabulary {result['vocabulary']:,}"
    windows = f"at most {result['window']:,} tokens, stride {result['stride']:,}"
    return [
        f"text: {'; '.join(text)}",
        f"model: {result['architecture']}, {size}",
        f"streams: {result['streams']:,}, first token of each {result['first_token']}",
        f"windows: {windows}, the last of a stream {result['last_window']}",
        computed,
    ]


def write_evaluation(results: list[dict], directory: Path) -> None:
    """report.json, report.md and loss_by_position.png in `directory`."""
    is_drawn = can_draw() and "loss_by_position" in results[0]
    picture = "\n![Loss by position](loss_by_position.png)\n" if is_drawn else ""
    text = f"# Evaluation\n\n{evaluation_report(results)}\n{picture}"
    with whole_directory(directory) as stage:
        as_json = json.dumps(results, indent=2) + "\n"
        (stage / "report.json").write_text(as_json, encoding="utf-8")
        (stage / "report.md").write_text(text, encoding="utf-8")
        if is_drawn:
            plot_loss_by_position(results, stage / "loss_by_position.png")
