"""Perplexity of checkpoints on a text, with the conventions beside every number."""

import hashlib
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mixer.checkpoints.format import read_trainer
from mixer.checkpoints.pretrained import check_checkpoint, check_token, load_checkpoint
from mixer.common.errors import UserError, rank
from mixer.common.files import check_writable, directory_for
from mixer.common.hardware import memory_for, peak_memory_gb
from mixer.common.options import option_problems
from mixer.data.config import DataConfig
from mixer.data.samples import PairFile
from mixer.distributed.world import leave_with_error
from mixer.evaluation import scoring, texts
from mixer.evaluation.report import evaluation_report, write_evaluation
from mixer.evaluation.scoring import Place, TokenScores
from mixer.evaluation.texts import EvalOptions, Text

UNCHANGING = ("checkpoint", "batch_size", "device")  # options that change no number


def evaluate(evaluations: list[EvalOptions], output: str | None = None) -> None:
    """Evaluates each checkpoint, prints the table and writes the report into `output`.

    By default the report goes into a directory beside the first checkpoint, whose name stands for
    these options alone. Every process of an `accelerate launch` calls this; the first one prints
    and writes. Raises UserError as `evaluate_checkpoint` does, if possible before loading a model.
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
    first, others = evaluations[0], [options.checkpoint for options in evaluations[1:]]
    changed = {name: value for name, value in vars(first).items() if name not in UNCHANGING}
    asked = [item for item in changed.items() if item[1] != getattr(EvalOptions, item[0])]
    paths = filter(None, [*first.text, first.data, first.pairs])
    about = " ".join(Path(path).resolve().name for path in paths) or first.hub
    what, own = "retrieval" if first.pairs else "eval", [*asked, *others]
    return directory_for(Path(first.checkpoint), what, about, repr(own) if own else "")


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
    window = options.window or context or 0
    stride = options.stride or window
    if not 0 < stride <= window or (context and not scoring.extend_to(model, window)):
        raise UserError(
            f"the context of {options.checkpoint} is {context}, the window {window}, the stride "
            f"{stride}: give --window 1..{context or 'N'}, and --stride 1..window"
        )
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
        "stride": stride,
        "first_token": texts.FIRST_TOKEN[options.first_token],
        "last_window": texts.LAST_WINDOW[options.last_window],
        "backend": getattr(model.config, "mixing_backend", "none (not a masked mixer)"),
        "dtype": options.dtype,
        "device": f"{processes} x {name}" if processes > 1 else name,
    }
    dtype, size = scoring.AUTOCAST_TYPES[options.dtype], options.batch_size
    if options.pairs:
        texts.validation_text(Path(options.pairs), window, tokenizer)  # refuses another tokenizer
        pairs = PairFile(options.pairs, "validation", window)
        shares = scoring.find_partners(model, pairs, size, dtype, place)
        return found | {"data": options.pairs, "tokens": window} | shares
    text = texts.choose_text(options, window, tokenizer)
    check_token(max(int(ids.max()) for ids in text.streams if len(ids)), model, text.name)
    scoring.check_causality(model, max(text.streams, key=len)[: max(window, 2)], options.dtype)
    batches = scoring.window_batches(text.streams, window, stride, size, options.last_window)
    if task := text.task:
        ends = range(size, len(task) + size, size)
        batches = (task.batch(range(end - size, min(end, len(task)))) for end in ends)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    scores = scoring.evaluate_batches(model, batches, window, dtype, place)
    found["tokens_per_second"] = scores.tokens / (time.perf_counter() - began)
    found["peak_memory_gb"] = peak_memory_gb(device)
    if not math.isfinite(scores.nats):
        remedy = "use --dtype fp32; if it stays, the checkpoint diverged"
        raise UserError(f"the loss is {scores.nats} in {options.dtype}: {remedy}")
    return found | numbers(scores, text, found["context"] or window)


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


def numbers(scores: TokenScores, text: Text, context: int) -> dict:
    """What a report has of the text and its scores, also per word and byte but for a task. Where
    windows are longer than the trained `context`, it has the loss up to it and past it.
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
        "loss": scores.loss,
    }
    sizes = {"token": scores.tokens}
    if not text.task:
        sizes |= {"word": max(text.words, 1), "byte": text.bytes}
        found["bits_per_byte"] = scores.nats / math.log(2) / text.bytes
    for unit, size in sizes.items():  # of words, that of an untrained model can exceed fp64
        nats = scores.nats / size
        found[f"{unit}_perplexity"] = math.exp(nats) if nats < 709 else None
    if context < len(scores.nats_by_position):
        parts = {"loss_to_context": slice(context), "loss_past_context": slice(context, None)}
        for name, part in parts.items():
            if count := scores.count_by_position[part].sum():
                found[name] = scores.nats_by_position[part].sum() / count
    return found | scores.by_position
