"""Perplexity of a checkpoint on a text, with the conventions beside every number."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from mixer.data import TokenFile, load_tokenizer
from mixer.errors import UserError
from mixer.scoring import TokenScores, check_stride, evaluate_streams, evaluate_tokens
from mixer.tokenizer import pieces, raw_encoder

__all__ = ["EvalOptions", "TokenScores", "evaluate_checkpoint", "evaluate_streams", "evaluate_tokens"]

DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
BACKENDS = ("auto", "cuda", "panels", "dense")
FIRST_TOKEN = {"skip": "not scored", "eos": "scored, after an EOS put before it"}


@dataclass
class EvalOptions:
    """What to evaluate, and how."""

    checkpoint: str = field(metadata={"help": "checkpoint directory, e.g. runs/demo/step-200"})
    text: list[str] = field(default_factory=list, metadata={"help": "UTF-8 text files to score"})
    data: str = field(default="", metadata={"help": "prepared data directory; default: the one of the run"})
    stride: int = field(default=0, metadata={"help": "tokens between windows, 1..context; 0: context (disjoint windows)"})
    batch_size: int = field(default=16, metadata={"help": "windows per forward"})
    max_tokens: int = field(default=0, metadata={"help": "score at most that many tokens; 0: all"})
    first_token: str = field(default="skip", metadata={"help": "first token of a stream: skip, or eos: score it after an EOS"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    dtype: str = field(default="fp32", metadata={"help": "fp32, fp16 or bf16 (autocast)"})
    backend: str = field(default="", metadata={"help": "auto, cuda, panels or dense; default: what the checkpoint says"})


@dataclass
class Text:
    """Token streams to score, and the size of the text they stand for."""

    streams: list[np.ndarray]  # each (tokens,)
    name: str
    bytes: int = 0
    words: int = 0
    counted: str = ""  # where bytes and words come from


# ------------------------------------------------------------------------------------------------------------ texts


def text_from_files(paths: Sequence[str], tokenizer) -> Text:
    """Each file becomes a stream of its own: no separator between files, none at their ends.

    Tokenised exactly as the preparation of training data does it.
    """
    encode = raw_encoder(tokenizer)
    text = Text([], ", ".join(str(path) for path in paths), counted="the files")
    for path in map(Path, paths):
        if not path.is_file():
            raise UserError(f"text file {path} does not exist: give the path of a UTF-8 text file")
        raw = path.read_bytes()
        try:
            content = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"text file {path} is not UTF-8 (byte {error.start}): convert it, e.g. iconv -f latin1 -t utf-8"
            ) from None
        if not content.strip():
            raise UserError(f"text file {path} is empty: give a file with text in it")
        tokens = np.concatenate([np.array(ids, dtype=np.int64) for ids in encode(list(pieces(content)))])
        if len(tokens) < 2:
            raise UserError(f"text file {path} is shorter than 2 tokens, so nothing can be predicted: give a longer text")
        text.streams.append(tokens)
        text.bytes += len(raw)
        text.words += len(content.split())
    return text


def validation_text(directory: Path, context: int, tokenizer) -> Text:
    """The validation split of prepared data: packed, one stream with an EOS after each document; else one per document.

    Raises UserError if the data is missing or damaged, or was prepared with another tokenizer than `tokenizer`.
    """
    split = TokenFile(directory, "validation", context)
    if load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{directory} was prepared with another tokenizer than the checkpoint's: give data of its run, or --text")
    streams = [split.tokens] if split.packed else np.split(split.tokens, split.document_ends[:-1].astype(np.int64))
    counts = split.manifest.splits["validation"]
    return Text(streams, f"validation split of {directory}", counts.bytes, counts.words, "the manifest")


def decoded_size(streams: Sequence[np.ndarray], tokenizer) -> tuple[int, int]:
    """UTF-8 bytes and words of the decoded streams, each cut at its EOS tokens, which stand for no text."""
    size, words = 0, 0
    for tokens in streams:
        cuts = np.flatnonzero(tokens == tokenizer.eos_token_id) if tokenizer.eos_token_id is not None else []
        for piece in np.split(tokens, cuts):
            document = tokenizer.decode(piece.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            size += len(document.encode("utf-8", errors="replace"))
            words += len(document.split())
    return size, words


def limit(text: Text, max_tokens: int, tokenizer) -> Text:
    """The beginning of the text with at most `max_tokens` targets; its size is that of the decoded tokens."""
    if max_tokens <= 0 or sum(len(tokens) - 1 for tokens in text.streams) <= max_tokens:
        return text
    kept, left = [], max_tokens
    for tokens in text.streams:
        if left < 1:
            break
        kept.append(tokens[: left + 1])
        left -= len(kept[-1]) - 1
    size, words = decoded_size(kept, tokenizer)
    return Text(kept, f"{text.name} (first {max_tokens} tokens)", size, words, "the decoded tokens")


def put_eos_first(text: Text, tokenizer) -> Text:
    """The same streams with an EOS before each, so that their first token is scored too."""
    if tokenizer.eos_token_id is None:
        raise UserError("first_token eos needs a tokenizer with an EOS token, this one has none: use first_token skip")
    text.streams = [np.concatenate(([tokenizer.eos_token_id], tokens)) for tokens in text.streams]
    return text


# ------------------------------------------------------------------------------------------------------ checkpoints


def check_checkpoint(directory: Path) -> None:
    """Raises UserError naming what a checkpoint directory lacks."""
    if not directory.is_dir():
        raise UserError(f"checkpoint {directory} is not a directory: give one such as runs/demo/step-200")
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (directory / name).is_file()]
    steps = sorted((path for path in directory.glob("step-*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    if missing and steps:
        raise UserError(f"{directory} is a run, not a checkpoint: give one of its steps, e.g. {steps[-1]}")
    if missing:
        raise UserError(f"checkpoint {directory} is incomplete, it lacks {', '.join(missing)}: give a complete checkpoint")


def load_checkpoint(directory: Path, device: torch.device, backend: str = ""):
    """(model in fp32 on the device and in eval mode, tokenizer)."""
    from safetensors import SafetensorError
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    from mixer import MaskedMixerForCausalLM

    check_checkpoint(directory)
    disable_progress_bar()
    override = {"mixing_backend": backend} if backend else {}
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(directory))
        model, loading = MaskedMixerForCausalLM.from_pretrained(
            str(directory), dtype=torch.float32, output_loading_info=True, **override
        )
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"checkpoint {directory} cannot be read ({error}): give another checkpoint") from error
    absent = sorted(loading["missing_keys"])
    if absent:  # transformers would go on with random numbers in their place
        raise UserError(f"checkpoint {directory} lacks the weights {', '.join(absent[:3])}...: give a complete checkpoint")
    return model.to(device).eval(), tokenizer


def choose_device(name: str, dtype: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device {name!r} is unknown: choose auto, cpu or cuda")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for and PyTorch sees no CUDA device: use --device cpu, or install a CUDA build")
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and dtype == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        raise UserError(f"{torch.cuda.get_device_name()} has no bf16 arithmetic: use --dtype fp16 or --dtype fp32")
    return device


def trainer_state(directory: Path) -> dict:
    path = directory / "trainer_state" / "trainer.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def exp_or_none(value: float) -> float | None:
    """exp, or None where fp64 has no such number: word perplexity of an untrained model can be that large."""
    return math.exp(value) if value < 709 else None


def perplexities(scores: TokenScores, size: int, words: int) -> dict:
    """Perplexity per token, word and byte, and bits per byte (nats / ln 2 / bytes)."""
    return {
        "loss": scores.loss,
        "token_perplexity": exp_or_none(scores.loss),
        "word_perplexity": exp_or_none(scores.nats / max(words, 1)),
        "byte_perplexity": exp_or_none(scores.nats / size),
        "bits_per_byte": scores.nats / math.log(2) / size,
    }


def choose_text(options: EvalOptions, directory: Path, tokenizer, context: int) -> Text:
    if options.text and options.data:
        raise UserError("both text and data were given: give --text FILE... or --data DIR, not both")
    if options.first_token not in FIRST_TOKEN:
        raise UserError(f"first_token {options.first_token!r} is unknown: choose one of {', '.join(FIRST_TOKEN)}")
    if options.text:
        text = text_from_files(options.text, tokenizer)
    else:
        data = options.data or trainer_state(directory).get("data_directory")
        if not data:
            raise UserError(f"{directory} does not say which data it was trained on: give --data DIR or --text FILE...")
        text = validation_text(Path(data), context, tokenizer)
    text = limit(text, options.max_tokens, tokenizer)
    return put_eos_first(text, tokenizer) if options.first_token == "eos" else text


def evaluate_checkpoint(options: EvalOptions) -> dict:
    """Load a checkpoint, score its text and return the numbers with their conventions.

    Raises UserError for an incomplete checkpoint, a missing, empty, too short or non-UTF-8 text, missing data, an
    unknown setting, and a dtype that the device lacks.
    """
    directory = Path(options.checkpoint)
    if options.batch_size < 1:
        raise UserError(f"batch_size {options.batch_size} is too small: give 1 or more")
    if options.max_tokens < 0:
        raise UserError(f"max_tokens {options.max_tokens} is negative: give 0 for all tokens, or how many to score")
    device = choose_device(options.device, options.dtype)
    if options.backend and options.backend not in BACKENDS:
        raise UserError(f"backend {options.backend!r} is unknown: choose one of {', '.join(BACKENDS)}")
    model, tokenizer = load_checkpoint(directory, device, options.backend)
    context = model.config.max_position_embeddings
    stride = check_stride(options.stride or context, context)
    text = choose_text(options, directory, tokenizer, context)
    largest = max(int(tokens.max()) for tokens in text.streams if len(tokens))
    if largest >= model.config.vocab_size:
        raise UserError(
            f"{text.name} has token {largest}, the model's vocabulary ends at {model.config.vocab_size - 1}: "
            "give data that was prepared with the checkpoint's own tokenizer"
        )
    start = time.perf_counter()
    scores = evaluate_streams(model, text.streams, context, stride, options.batch_size, device, DTYPES[options.dtype])
    seconds = time.perf_counter() - start
    if not math.isfinite(scores.nats):
        raise UserError(f"the loss is {scores.nats} in {options.dtype}: use --dtype fp32; if it stays, the checkpoint diverged")
    eos = tokenizer.eos_token_id
    return {
        "label": f"{directory.resolve().parent.name}/{directory.resolve().name}",
        "checkpoint": str(directory),
        "step": trainer_state(directory).get("step"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "text": text.name,
        "bytes": text.bytes,
        "words": text.words,
        "sizes_counted_from": text.counted,
        "streams": len(text.streams),
        "first_token": FIRST_TOKEN[options.first_token],
        "window": context,
        "stride": stride,
        "windows": scores.windows,
        "tokens_scored": scores.tokens,
        "eos_scored": sum(int((tokens[1:] == eos).sum()) for tokens in text.streams) if eos is not None else 0,
        "nats": scores.nats,
        **perplexities(scores, text.bytes, text.words),
        "backend": model.config.mixing_backend,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "tokens_per_second": scores.tokens / seconds,
        "loss_by_position": scores.loss_by_position,
        "count_by_position": scores.count_by_position.tolist(),
    }
