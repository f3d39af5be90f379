"""Generation, measured: a mixer's tokens per second with its cache and without, and those of a
Llama with its KV cache.

    python benchmarks/generation.py --output PATH [--commit NAME]
    python benchmarks/generation.py --output PATH --device cpu --hidden 32 --layers 2 \\
        --context 64 --prompt 40 --new 4

Writes PATH.json (hardware, commit, every time) and PATH.md (a table). Weights are random, all go
through generate(), greedily, without an end token. A new token's time is what all but the first add
to a call: the prompt is not in it, the capture of a static cache's step is.

With --recurrent, mixers with mixing weights by rows and by columns take the place of the slower
caches:

    python benchmarks/generation.py --output PATH --recurrent --hidden 512 --batches 1,64,1024
"""

import argparse
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable

import torch
from saving import markdown, measured_by, numbers, origin, parser_of, save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.common.errors import UserError, run_command
from mixer.ops import selftest

CACHES = {  # and the options of generate that make them
    "cached": {},
    "cached, static": {"cache_implementation": "static"},
    "uncached": {"use_cache": False},
}
SHORTER = 8  # memory is measured of a prompt so much shorter, too


def main() -> None:
    options = arguments()
    print(table(measure(options)))


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=1468, help="tokens of the prompt")
    fewer = "tokens; the uncached loop writes a quarter of them"
    parser.add_argument("--new", type=int, default=64, help=fewer)
    parser.add_argument("--batches", type=numbers, default=[1, 64])
    parser.add_argument("--recurrent", action="store_true", help="compare with rows and columns")
    repeats = "calls of generate, of which the median counts"
    parser.add_argument("--repeats", type=int, default=3, help=repeats)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.new < 4 or options.prompt + options.new > options.context:
        raise UserError(
            f"--prompt {options.prompt} and --new {options.new} do not fit --context "
            f"{options.context}; give at least 4 new tokens, and together at most the context"
        )
    return options


# ------------------------------------------------------------------------- models


def models(options: argparse.Namespace) -> dict[str, PreTrainedModel]:
    """A mixer, with --recurrent two more by rows and by columns, and a Llama of the same width,
    depth and vocabulary with heads of 64 channels and an MLP with as many parameters as the
    mixer's.
    """
    built: dict[str, PreTrainedModel] = {"mixer": build_mixer(options, "full")}
    if options.recurrent:
        built["rows"] = build_mixer(options, "rows")
        built["columns"] = build_mixer(options, "columns")
    llama = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        max_position_embeddings=options.context,
        intermediate_size=options.hidden * 8 // 3 // 64 * 64 or 64,
        num_attention_heads=max(options.hidden // 64, 1),
    )
    built["Llama"] = LlamaForCausalLM(llama)
    return {name: ready(model, options.device) for name, model in built.items()}


def ready(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """The model in bfloat16; every call of generate writes as many tokens as it is asked for."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(torch.device(device), torch.bfloat16).eval()


def build_mixer(options: argparse.Namespace, mixing_weight: str) -> MaskedMixerForCausalLM:
    config = MaskedMixerConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        max_position_embeddings=options.context,
        mixing_weight=mixing_weight,
        mixing_decay=mixing_weight != "full",
    )
    return MaskedMixerForCausalLM(config)


# ------------------------------------------------------------------------- measuring


def measure(options: argparse.Namespace) -> dict:
    started = time.perf_counter()
    torch.manual_seed(0)
    reason = selftest.fault(0) if options.device == "cuda" else None
    if reason:
        raise UserError(f"nothing to measure: {reason}")
    names = ("hidden", "layers", "vocabulary", "context", "prompt", "new", "repeats")
    settings = {name: getattr(options, name) for name in names} | {"dtype": "bfloat16"}
    result = measured_by(options, options.device) | {"settings": settings}
    built = models(options)
    result["parameters"] = built["mixer"].num_parameters()
    result["llama_parameters"] = built["Llama"].num_parameters()
    if options.recurrent:
        result["rows_parameters"] = built["rows"].num_parameters()
    result["generate"] = []
    for batch in options.batches:
        for name, cache, new in calls(options):
            print(f"{time.perf_counter() - started:7.1f} s  {name} {cache}, {batch}", flush=True)
            row = {"model": name, "cache": cache, "batch": batch, "new": new}
            row |= time_generate(built[name], batch, new, CACHES[cache], options)
            result["generate"].append(row)
            result["seconds"] = round(time.perf_counter() - started, 1)
            save(result, table(result), options.output)
    return result


def calls(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """(model, cache, new tokens) of what is timed."""
    if not options.recurrent:
        mixer = [("mixer", cache, options.new) for cache in CACHES if cache != "uncached"]
        fewer = max(options.new // 4, 2)
        return [*mixer, ("mixer", "uncached", fewer), ("Llama", "cached", options.new)]
    mixers = [(name, "cached, static", options.new) for name in ("mixer", "rows", "columns")]
    llamas = [("Llama", cache, options.new) for cache in ("cached", "cached, static")]
    return mixers + llamas


def time_generate(
    model: PreTrainedModel,
    batch: int,
    new: int,
    cache_options: dict,
    options: argparse.Namespace,
) -> dict:
    """Seconds of whole calls, milliseconds of a token after the first, and the memory of a step
    after a short prompt and after the whole one; nothing where memory is too little.
    """
    vocabulary = model.config.vocab_size
    ids = torch.randint(1, vocabulary, (batch, options.prompt), device=options.device)
    generate = functools.partial(model.generate, do_sample=False, **cache_options)

    def seconds(tokens: int) -> float:
        synchronize(options.device)
        start = time.perf_counter()
        written = generate(ids, max_new_tokens=tokens)
        synchronize(options.device)
        assert written.shape == (batch, options.prompt + tokens), "generate stopped early"
        return time.perf_counter() - start

    try:
        seconds(min(new, 4))  # kernels, libraries and the allocator's memory
        first_s = statistics.median(seconds(1) for _ in range(options.repeats))
        whole_s = statistics.median(seconds(new) for _ in range(options.repeats))
        short_ids = ids[:, : max(options.prompt // SHORTER, 1)]
        short_mb = decoding_mb(generate, short_ids)
        long_mb = decoding_mb(generate, ids)
    except torch.OutOfMemoryError:
        unmeasured = ("ms_per_token", "tokens_per_second", "short_mb", "long_mb")
        return dict.fromkeys(unmeasured, math.nan)
    ms = 1e3 * (whole_s - first_s) / (new - 1)
    return {
        "first_token_s": first_s,
        "whole_s": whole_s,
        "ms_per_token": ms,
        "short_mb": short_mb,
        "long_mb": long_mb,
        "tokens_per_second": 1e3 * batch / ms,
    }


def decoding_mb(generate: Callable, ids: Tensor) -> float:
    """The most memory in MB that a call takes after its first token, beside the weights; zero on a
    CPU, which does not count it.
    """
    if not ids.is_cuda:
        return 0.0
    gc.collect()  # caches of earlier calls
    allocated = torch.cuda.memory_allocated()

    def forget_the_prompt(written: Tensor, logits: Tensor) -> Tensor:
        if written.shape[1] == ids.shape[1]:  # before the first new token
            torch.cuda.reset_peak_memory_stats()
        return logits

    generate(ids, max_new_tokens=4, logits_processor=[forget_the_prompt])
    return (torch.cuda.max_memory_allocated() - allocated) / 1e6


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ------------------------------------------------------------------------- tables


COLUMNS = {  # of the table: what a row has under these keys, and its format
    "model": ("model", ""),
    "cache": ("cache", ""),
    "batch": ("batch", ""),
    "new tokens": ("new", ""),
    "ms a token": ("ms_per_token", ".3f"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    f"MB after 1/{SHORTER} of the prompt": ("short_mb", ",.0f"),
    "MB after the prompt": ("long_mb", ",.0f"),
}


def table(result: dict) -> str:
    """Everything as Markdown."""
    rows = result["generate"]
    # Earlier results have no memory.
    columns = {title: column for title, column in COLUMNS.items() if column[0] in rows[0]}
    cells = [[format(row[key], form) for key, form in columns.values()] for row in rows]
    caption = (
        "A token after the first, greedy; the median of the calls. Memory is the most that a call "
        "takes after its first token, beside the weights. `nan`: out of memory."
    )
    title = f"# Generation on {result['hardware'].get('device')}"
    measured = f"Measured on {origin(result)}; {result['seconds']} s."
    paragraphs = [title, introduction(result), caption, markdown(list(columns), cells), measured]
    return "\n\n".join(paragraphs) + "\n"


def introduction(result: dict) -> str:
    settings = result["settings"]
    text = (
        f"Hidden {settings['hidden']}, {settings['layers']} layers, vocabulary "
        f"{settings['vocabulary']}, context {settings['context']}, {settings['dtype']}, random "
        f"weights; prompts of {settings['prompt']} tokens. Mixer: "
        f"{result['parameters'] / 1e6:.1f}M parameters; Llama: "
        f"{result['llama_parameters'] / 1e6:.1f}M."
    )
    if "rows_parameters" in result:
        text += f" By rows or columns: {result['rows_parameters'] / 1e6:.1f}M."
    return text


if __name__ == "__main__":
    run_command(main)
