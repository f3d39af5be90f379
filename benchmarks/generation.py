"""Generation, measured: a mixer's tokens per second with its cache and without, and those of a
Llama with its KV cache.

    python benchmarks/generation.py --output PATH [--commit NAME]
    python benchmarks/generation.py --output PATH --device cpu --hidden 32 --layers 2 \\
        --context 64 --prompt 40 --new 4

Writes PATH.json (hardware, commit, every time) and PATH.md (tables). Weights are random, all three
go through generate(), greedily, without an end token. A new token's time is what all but the first
add to a call: the prompt is not in it, the capture of a static cache's step is. Beside these: the
captured step itself against the time of reading the weights (alone) once.

With --recurrent, mixers with mixing weights by rows and by columns in place of the steps, and the
memory of all:

    python benchmarks/generation.py --output PATH --recurrent --hidden 512 --batches 1,64,1024
"""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Iterator

import timing
import torch
from saving import add_options, measured_by, origin, save
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.common.errors import UserError, run_command
from mixer.models.masked_mixer.cache import MixingCache
from mixer.ops import choice

STATIC_CACHE = {"cache_implementation": "static"}
CACHES = {  # and the options of generate that make them
    "cached": {},
    "cached, static": STATIC_CACHE,
    "cached, static, compiled": STATIC_CACHE | {"compile_config": CompileConfig()},
    "uncached": {"use_cache": False},
}
SHORTER = 8  # With --recurrent, memory is measured of a shorter prompt, too.
STATIC = ("static", "compiled")  # steps of a static cache
CAPTURED = 3  # so many steps of a static cache, and it is captured
ROUNDS, WARM_UP_SECONDS = 9, 0.5  # of a step's timing
# of a captured step's logits against the whole forward's, relative to their size: bf16 gives 0.01
ALLOWED_ERROR = 0.05


def main() -> None:
    options = arguments()
    result = measure(options)
    save(result, table(result), options.output)
    print(table(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    add, number = parser.add_argument, {"type": int}
    add("--hidden", default=1024, **number)
    add("--layers", default=16, **number)
    add("--vocabulary", default=8000, **number)
    add("--context", default=2048, **number)
    add("--prompt", default=1468, help="tokens of the prompt", **number)
    add("--new", default=64, help="tokens; the uncached loop writes a quarter of them", **number)
    add("--batches", type=lambda text: [*map(int, text.split(","))], default=[1, 64])
    add("--recurrent", action="store_true", help="compare with rows and columns, and the memory")
    add("--repeats", default=3, help="calls of generate, of which the median counts", **number)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, choices=("cuda", "cpu"))
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
    shape = {"vocab_size": options.vocabulary, "hidden_size": options.hidden}
    shape |= {"num_hidden_layers": options.layers, "max_position_embeddings": options.context}
    llama = LlamaConfig(
        **shape,
        intermediate_size=options.hidden * 8 // 3 // 64 * 64 or 64,
        num_attention_heads=max(options.hidden // 64, 1),
    )
    found = {"mixer": MaskedMixerForCausalLM(MaskedMixerConfig(**shape))}
    for form in ("rows", "columns") if options.recurrent else ():
        config = MaskedMixerConfig(**shape, mixing_weight=form, mixing_decay=True)
        found[form] = MaskedMixerForCausalLM(config)
    found["Llama"] = LlamaForCausalLM(llama)
    for model in found.values():
        # Every call writes as many tokens as it is asked for.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        model.to(options.device, torch.bfloat16).eval()
    return found


# ------------------------------------------------------------------------- measuring


def measure(options: argparse.Namespace) -> dict:
    started = time.perf_counter()
    torch.manual_seed(0)
    if options.device == "cuda" and (reason := choice.device_reason(0)):
        raise UserError(f"nothing to measure: {reason}")
    result = measured_by(options, options.device) | {"settings": settings(options)}
    result["copy_bytes_per_ms"] = timing.copy_bytes_per_ms(options.device)
    found = models(options)
    sizes = {name: model.num_parameters() for name, model in found.items()}
    result |= {"parameters": sizes["mixer"], "llama_parameters": sizes["Llama"]}
    if options.recurrent:
        result["rows_parameters"] = sizes["rows"]
    else:
        mixer = found["mixer"]
        result["weight_bytes"] = weight_bytes(mixer)
        result["step"] = [time_step(mixer, batch, result, options) for batch in options.batches]
    result["generate"] = []
    for batch in options.batches:
        for name, cache, new in calls(options):
            print(f"{time.perf_counter() - started:7.1f} s  {name} {cache}, {batch}", flush=True)
            row = {"model": name, "cache": cache, "batch": batch, "new": new}
            measured = time_generate(found[name], batch, new, CACHES[cache], options)
            result["generate"].append(row | measured)
    return result | {"seconds": round(time.perf_counter() - started, 1)}


def calls(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """(model, cache, new tokens) of what is timed."""
    if not options.recurrent:
        mixer = [("mixer", cache, options.new) for cache in CACHES if cache != "uncached"]
        fewer = max(options.new // 4, 2)
        return [*mixer, ("mixer", "uncached", fewer), ("Llama", "cached", options.new)]
    fastest = "cached, static, compiled"
    mixers = [(name, fastest, options.new) for name in ("mixer", "rows", "columns")]
    llamas = [("Llama", cache, options.new) for cache in ("cached", "cached, static")]
    return mixers + llamas


def settings(options: argparse.Namespace) -> dict:
    names = ("hidden", "layers", "vocabulary", "context", "prompt", "new", "repeats")
    return {name: getattr(options, name) for name in names} | {"dtype": "bfloat16"}


def prompts(batch: int, options: argparse.Namespace) -> Tensor:
    return torch.randint(1, options.vocabulary, (batch, options.prompt), device=options.device)


def time_generate(model, batch: int, new: int, how: dict, options: argparse.Namespace) -> dict:
    """Seconds of whole calls, and milliseconds of a token after the first; with --recurrent the
    memory, too, and nothing where it is too little.
    """
    ids = prompts(batch, options)

    def seconds(tokens: int) -> float:
        synchronize(options.device)
        start = time.perf_counter()
        written = model.generate(ids, max_new_tokens=tokens, do_sample=False, **how)
        synchronize(options.device)
        assert written.shape == (batch, options.prompt + tokens), "generate stopped early"
        return time.perf_counter() - start

    try:
        seconds(min(new, 4))  # kernels, libraries and the allocator's memory
        first = statistics.median(seconds(1) for _ in range(options.repeats))
        whole = statistics.median(seconds(new) for _ in range(options.repeats))
        short = ids[:, : max(options.prompt // SHORTER, 1)]
        memory = [decoding_mb(model, x, how) for x in (short, ids) if options.recurrent]
    except torch.OutOfMemoryError:
        if not options.recurrent:
            raise
        return dict.fromkeys(("ms_per_token", "tokens_per_second", "short_mb", "long_mb"), math.nan)
    ms = 1e3 * (whole - first) / (new - 1)
    found = {"first_token_s": first, "whole_s": whole, "ms_per_token": ms}
    found |= dict(zip(("short_mb", "long_mb"), memory, strict=False))
    return found | {"tokens_per_second": 1e3 * batch / ms}


def decoding_mb(model, ids: Tensor, how: dict) -> float:
    """The most memory in MB that a call takes after its first token, beside the weights; zero on a
    CPU, which does not count it.
    """
    if not ids.is_cuda:
        return 0.0
    gc.collect()  # caches of earlier calls
    before, places = torch.cuda.memory_allocated(), []

    def count(written: Tensor, logits: Tensor) -> Tensor:
        if not places:  # the prompt is done
            torch.cuda.reset_peak_memory_stats()
        places.append(written.shape[1])
        return logits

    model.generate(ids, max_new_tokens=4, do_sample=False, logits_processor=[count], **how)
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def weight_bytes(model: MaskedMixerForCausalLM) -> int:
    """Bytes of the weights that one token needs: all, but of each mixing weight and of the
    embedding one row.
    """
    rows_alone = {
        model.model.embed_tokens.weight,
        *(block.mixing.conv.weight for block in model.model.layers),
    }
    values = (
        weight.shape[-1] if weight in rows_alone else weight.numel()
        for weight in model.parameters()
    )
    return 2 * sum(values)


@torch.no_grad()
def time_step(
    model: MaskedMixerForCausalLM, batch: int, result: dict, options: argparse.Namespace
) -> dict:
    """Milliseconds of a call of the model for one new token, queued one after another: as it is,
    captured, compiled too.
    """
    ids, row = prompts(batch, options), {"batch": batch}
    last = torch.randint(1, options.vocabulary, (batch, options.new), device=options.device)
    expected = model(torch.cat([ids, last], 1), logits_to_keep=1).logits.float()
    for name in ("eager", *STATIC):
        cache = MixingCache(model.config, static=name in STATIC, compiled=name == "compiled")
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

        def steps(first: int, end: int, cache=cache) -> tuple[float, Tensor]:
            """Seconds of these new tokens' steps, and the last logits."""
            cache.set_length(ids.shape[1] + first)
            synchronize(options.device)
            start = time.perf_counter()
            for place in range(first, end):
                logits = model(
                    last[:, place : place + 1], past_key_values=cache, use_cache=True
                ).logits
            synchronize(options.device)
            return time.perf_counter() - start, logits.float()

        row[f"{name}_first_s"], _ = steps(0, CAPTURED)
        for _ in warm_up_rounds(options.device):
            steps(CAPTURED, options.new)
        rounds = [steps(CAPTURED, options.new) for _ in range(ROUNDS)]
        row[f"{name}_ms"] = (
            1e3 * statistics.median(seconds for seconds, _ in rounds) / (options.new - CAPTURED)
        )
        row[f"{name}_error"] = ((rounds[-1][1] - expected).norm() / expected.norm()).item()
        if not row[f"{name}_error"] < ALLOWED_ERROR:
            raise RuntimeError(
                f"the {name} step's logits are off by {row[f'{name}_error']:.3f}, relative to "
                "their size"
            )
        if cache.captured is not None:
            row[f"{name}_replay_ms"] = replay_ms(cache)
    row["captured"] = cache.captured is not None
    return row | {"floor_ms": result["weight_bytes"] / result["copy_bytes_per_ms"]}


def warm_up_rounds(device: str) -> Iterator[None]:
    """So many untimed rounds as a GPU needs to raise its clocks, which fall while a step is
    compiled.
    """
    until = time.perf_counter() + (WARM_UP_SECONDS if device == "cuda" else 0)
    while time.perf_counter() < until:
        yield


def replay_ms(cache: MixingCache) -> float:
    return timing.interleaved({"": lambda _: cache.captured.graph.replay()}, "cuda", 1, 9, 10.0)[
        ""
    ]["ms"]


# ------------------------------------------------------------------------- tables


def table(result: dict) -> str:
    """Everything as Markdown."""
    if "step" not in result:
        return recurrent_table(result)
    weights = f"{result['weight_bytes'] / 1e6:.0f} MB"
    copy_rate = f"{result['copy_bytes_per_ms'] / 1e9:.2f} TB/s"
    kept = f"{kept_megabytes(result['settings']):.3g} MB"
    steps = (
        "One call of the model for one new token of each sample, beside the floor: the time to "
        f"read the weights that a token needs ({weights}) once, at the rate of a copy "
        f"({copy_rate}). The floor leaves out the cache: {kept} of kept inputs per sample."
    )
    parts = [
        f"# Generation on {result['hardware'].get('device')}",
        introduction(result),
        "## Through generate()",
        "A token after the first, greedy; the median of the calls.",
        lines(
            "model | cache | batch | new tokens | ms a token | tokens/s",
            result["generate"],
            "{model} | {cache} | {batch} | {new} | {ms_per_token:.3f} | {tokens_per_second:,.0f}",
        ),
        "## A decoding step",
        steps,
        lines(
            "batch | eager, ms | static, ms | compiled, ms | compiling, s | captured | floor, ms "
            "| static to it | compiled to it",
            [
                row | {f"{name}_ratio": row[f"{name}_ms"] / row["floor_ms"] for name in STATIC}
                for row in result["step"]
            ],
            "{batch} | {eager_ms:.3f} | {static_ms:.3f} | {compiled_ms:.3f} | "
            "{compiled_first_s:.1f} | {captured} | "
            "{floor_ms:.3f} | {static_ratio:.2f} | {compiled_ratio:.2f}",
        ),
        f"Measured on {origin(result)}; {result['seconds']} s.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def recurrent_table(result: dict) -> str:
    """What --recurrent has measured, as Markdown."""
    long = result["settings"]["prompt"]
    memory = (
        "A token after the first, greedy; the median of the calls. Memory is the most that a call "
        f"takes after its first token, beside the weights, for prompts of {long // SHORTER} and of "
        f"{long} tokens. `nan`: out of memory."
    )
    parts = [
        f"# Generation with recurrent mixing weights on {result['hardware'].get('device')}",
        f"{introduction(result)} By rows or columns: {result['rows_parameters'] / 1e6:.1f}M.",
        memory,
        lines(
            f"model | cache | batch | ms a token | tokens/s | MB after {long // SHORTER} | "
            f"MB after {long}",
            result["generate"],
            "{model} | {cache} | {batch} | {ms_per_token:.3f} | {tokens_per_second:,.0f} | "
            "{short_mb:,.0f} | {long_mb:,.0f}",
        ),
        f"Measured on {origin(result)}; {result['seconds']} s.",
    ]
    return "\n\n".join(parts) + "\n"


def kept_megabytes(sizes: dict) -> float:
    """What a step reads of one sample's cache, half way through the new tokens, in bf16."""
    return sizes["layers"] * (sizes["prompt"] + sizes["new"] // 2) * sizes["hidden"] * 2 / 1e6


def introduction(result: dict) -> str:
    sizes = result["settings"]
    return (
        f"Hidden {sizes['hidden']}, {sizes['layers']} layers, vocabulary {sizes['vocabulary']}, "
        f"context {sizes['context']}, {sizes['dtype']}, random weights; prompts of "
        f"{sizes['prompt']} tokens. Mixer: {result['parameters'] / 1e6:.1f}M parameters; Llama: "
        f"{result['llama_parameters'] / 1e6:.1f}M."
    )


def lines(heading: str, rows: list[dict], form: str) -> str:
    """A Markdown table: a row for each of `rows`, its cells as `form` has them."""
    rule = "|".join("---:" for _ in heading.split("|"))
    return "\n".join(
        [f"| {heading} |", f"|{rule}|", *(f"| {form.format(**row)} |" for row in rows)]
    )


if __name__ == "__main__":
    run_command(main)
