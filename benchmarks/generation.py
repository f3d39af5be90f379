"""Generation, measured: a mixer's tokens per second with its cache and without, and those of a
Llama with its KV cache.

    python benchmarks/generation.py --output PATH [--commit NAME]
    python benchmarks/generation.py --output PATH --device cpu --hidden 32 --layers 2 \\
        --context 64 --prompt 40 --new 4

Writes PATH.json (hardware, commit, every time) and PATH.md (a table). Weights are random, all go
through generate(), greedily, without an end token. A new token's time is what all but the first add
to a call: the prompt is not in it, the capture of a static cache's step is.
"""

import argparse
import statistics
import time

import torch
from saving import markdown, measured_by, numbers, origin, parser_of, save
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.common.errors import UserError, run_command
from mixer.ops import choice


def main() -> None:
    options = arguments()
    result = measure(options)
    save(result, table(result), options.output)
    print(table(result))


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add, number = parser.add_argument, {"type": int}
    add("--hidden", default=1024, **number)
    add("--layers", default=16, **number)
    add("--vocabulary", default=8000, **number)
    add("--context", default=2048, **number)
    add("--prompt", default=1468, help="tokens of the prompt", **number)
    add("--new", default=64, help="tokens; the uncached loop writes a quarter of them", **number)
    add("--batches", type=numbers, default=[1, 64])
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


def models(options: argparse.Namespace) -> tuple[MaskedMixerForCausalLM, LlamaForCausalLM]:
    """A mixer, and a Llama of the same width, depth and vocabulary with heads of 64 channels and an
    MLP with as many parameters as the mixer's.
    """
    shape = {"vocab_size": options.vocabulary, "hidden_size": options.hidden}
    shape |= {"num_hidden_layers": options.layers, "max_position_embeddings": options.context}
    llama = LlamaConfig(
        **shape,
        intermediate_size=options.hidden * 8 // 3 // 64 * 64 or 64,
        num_attention_heads=max(options.hidden // 64, 1),
    )
    found = MaskedMixerForCausalLM(MaskedMixerConfig(**shape)), LlamaForCausalLM(llama)
    for model in found:
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
    mixer, llama = models(options)
    sizes = [sum(one.numel() for one in model.parameters()) for model in (mixer, llama)]
    result |= {"parameters": sizes[0], "llama_parameters": sizes[1]}
    fewer, static = max(options.new // 4, 2), {"cache_implementation": "static"}
    faster = static | {"compile_config": CompileConfig()}
    calls = [  # model, cache, options of generate, new tokens
        ("mixer", "cached", {}, options.new),
        ("mixer", "cached, static", static, options.new),
        ("mixer", "cached, static, compiled", faster, options.new),
        ("mixer", "uncached", {"use_cache": False}, fewer),
        ("Llama", "cached", {}, options.new),
    ]
    result["generate"] = []
    for batch in options.batches:
        for name, cache, how, new in calls:
            model = {"mixer": mixer, "Llama": llama}[name]
            print(f"{time.perf_counter() - started:7.1f} s  {name} {cache}, {batch}", flush=True)
            row = {"model": name, "cache": cache, "batch": batch, "new": new}
            result["generate"].append(row | time_generate(model, batch, new, how, options))
    return result | {"seconds": round(time.perf_counter() - started, 1)}


def settings(options: argparse.Namespace) -> dict:
    names = ("hidden", "layers", "vocabulary", "context", "prompt", "new", "repeats")
    return {name: getattr(options, name) for name in names} | {"dtype": "bfloat16"}


def prompts(batch: int, options: argparse.Namespace) -> Tensor:
    return torch.randint(1, options.vocabulary, (batch, options.prompt), device=options.device)


def time_generate(model, batch: int, new: int, how: dict, options: argparse.Namespace) -> dict:
    """Seconds of whole calls, and milliseconds of a token after the first."""
    ids = prompts(batch, options)

    def seconds(tokens: int) -> float:
        synchronize(options.device)
        start = time.perf_counter()
        written = model.generate(ids, max_new_tokens=tokens, do_sample=False, **how)
        synchronize(options.device)
        assert written.shape == (batch, options.prompt + tokens), "generate stopped early"
        return time.perf_counter() - start

    seconds(min(new, 4))  # kernels, libraries and the allocator's memory
    first = statistics.median(seconds(1) for _ in range(options.repeats))
    whole = statistics.median(seconds(new) for _ in range(options.repeats))
    ms = 1e3 * (whole - first) / (new - 1)
    found = {"first_token_s": first, "whole_s": whole, "ms_per_token": ms}
    return found | {"tokens_per_second": 1e3 * batch / ms}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ------------------------------------------------------------------------- tables


def table(result: dict) -> str:
    """Everything as Markdown."""
    head = ["model", "cache", "batch", "new tokens", "ms a token", "tokens/s"]
    keys, forms = ("model", "cache", "batch", "new"), {"ms_per_token": ".3f"}
    forms["tokens_per_second"] = ",.0f"
    rows = [
        [str(row[key]) for key in keys] + [format(row[key], form) for key, form in forms.items()]
        for row in result["generate"]
    ]
    parts = [
        f"# Generation on {result['hardware'].get('device')}",
        introduction(result),
        "A token after the first, greedy; the median of the calls.",
        markdown(head, rows),
        f"Measured on {origin(result)}; {result['seconds']} s.",
    ]
    return "\n\n".join(parts) + "\n"


def introduction(result: dict) -> str:
    sizes = result["settings"]
    return (
        f"Hidden {sizes['hidden']}, {sizes['layers']} layers, vocabulary {sizes['vocabulary']}, "
        f"context {sizes['context']}, {sizes['dtype']}, random weights; prompts of "
        f"{sizes['prompt']} tokens. Mixer: {result['parameters'] / 1e6:.1f}M parameters; Llama: "
        f"{result['llama_parameters'] / 1e6:.1f}M."
    )


if __name__ == "__main__":
    run_command(main)
