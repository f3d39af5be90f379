"""A whole training step, timed: forward, backward, clipping and the optimizer on random tokens, one
GPU, bf16 autocast.

    python benchmarks/training_step.py --output PATH [--forms blocks,matmul,...] \\
        [--tokens 512,2048,8192]

Writes PATH.json and PATH.md. The forms of a context run in interleaved rounds of one process, and
share their weights' memory. `--list` says what each form is.
"""

import argparse
import gc
import time

import timing
import torch
from saving import add_options, measured_by, save
from training_step_models import DEFAULT_FORMS, FORMS, Form, SharedMemory, Size, Step
from training_step_report import table

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.common.errors import UserError, first_line, run_command


def main() -> None:
    options = arguments()
    if options.list:
        print("\n".join(f"{name:18s} {form.what}" for name, form in FORMS.items()))
        return
    unknown = [name for name in options.forms if name not in FORMS]
    if unknown:
        raise UserError(
            f"--forms has {', '.join(unknown)}; allowed: {', '.join(FORMS)}; --list says what they "
            "are"
        )
    if not options.output:
        raise UserError("give --output PATH for the results")
    print(table(measure(options)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, required=False)
    parser.add_argument(
        "--forms",
        type=lambda text: text.split(","),
        default=DEFAULT_FORMS,
        help="some of --list, one with mixing first: the others take their memory from it",
    )
    parser.add_argument(
        "--list", action="store_true", help="say what each form is, and measure nothing"
    )
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[512, 2048, 8192],
    )
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--batch-ms", type=float, default=400.0, help="time of one round of one form"
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="build no further form or context after so long"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict:
    timing.set_tf32(True)
    torch._dynamo.config.recompile_limit = (
        1000  # of one function, whose forms are all compiled here
    )
    result = measured_by(options, options.device)
    result |= {
        name: getattr(options, name)
        for name in ("hidden", "layers", "vocabulary", "batch_tokens", "rounds")
    }
    result["ceiling_size"] = 8192 if options.device == "cuda" else 256
    result["ceiling_tflops"] = timing.product_tflops(
        torch.bfloat16, options.device, result["ceiling_size"]
    )
    result |= {"cases": [], "left_out": []}
    deadline = time.perf_counter() + options.seconds
    for tokens in options.tokens:
        size = Size(
            tokens,
            max(1, options.batch_tokens // tokens),
            options.hidden,
            options.layers,
            options.vocabulary,
        )
        result["cases"].append(measure_size(size, options, deadline, result["left_out"]))
        save(result, table(result), options.output)
    return result


def measure_size(size: Size, options: argparse.Namespace, deadline: float, left_out: list) -> dict:
    rows, steps, memory = {}, {}, SharedMemory()
    for name in options.forms:
        if time.perf_counter() > deadline:
            left_out.append(f"{name}, {size.tokens} tokens")
            continue
        rows[name], step = prepare(FORMS[name], size, options.device, memory)
        print(f"{size.tokens} tokens, {name}: {rows[name]}", flush=True)
        if step is not None:
            steps[name] = step
    timings = (
        timing.interleaved(
            steps, options.device, 1, options.rounds, options.batch_ms, hide_host=False
        )
        if steps
        else {}
    )
    for name, row in rows.items():
        row |= timings.get(name, {})
        if "ms" in row:
            row["tokens_per_second"] = 1e3 * size.batch * size.tokens / row["ms"]
    del steps, memory
    torch.compiler.reset()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return {
        "tokens": size.tokens,
        "batch": size.batch,
        "useful_flops": useful_flops(size),
        "forms": rows,
    }


def prepare(form: Form, size: Size, device: str, memory: SharedMemory) -> tuple[dict, Step | None]:
    """(what its first steps show, the form ready to be timed), or (its failure, None)."""
    gc.collect()
    before = torch.cuda.memory_allocated() if device == "cuda" and memory.weights else 0
    began = time.perf_counter()
    try:
        step = Step(form, size, device, memory)
        first = float(step())  # compiles
        row = {"first_step_seconds": round(time.perf_counter() - began, 1)}
        second, third = float(step()), float(step())
        if device == "cuda" and not form.graphs:  # a graph's own memory is not counted
            torch.cuda.reset_peak_memory_stats()
            step()
            shared = memory.bytes if before else 0
            row["peak_gb"] = round((torch.cuda.max_memory_allocated() - before + shared) / 2**30, 2)
    # Of the compiler, or out of memory: the others still have their numbers.
    except Exception as error:
        return {"failure": first_line(error)}, None
    return row | {"losses": [first, second, third]}, step


def useful_flops(size: Size) -> dict[str, float]:
    """Of a step, with the triangle counted exactly, and of its token mixing."""
    config = MaskedMixerConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        max_position_embeddings=size.tokens,
    )
    with torch.device("meta"):
        counts = MaskedMixerForCausalLM(config).flops_per_token()
    return {name: counts[name] * size.tokens * size.batch for name in ("useful", "token_mixing")}


if __name__ == "__main__":
    run_command(main)
