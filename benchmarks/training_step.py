"""A whole training step, timed: forward, backward, clipping and the optimizer on random tokens, one
GPU, bf16 autocast.

    python benchmarks/training_step.py --output PATH [--forms blocks,matmul,...] \\
        [--tokens 512,2048,8192]

Writes PATH.json and PATH.md. The forms of a context run in interleaved rounds of one process, and
share their weights' memory. FORMS in training_step_models.py says what each form is.
"""

import argparse
import gc
import time

import timing
import torch
from saving import markdown, measured_by, names, numbers, origin, parser_of, save
from training_step_models import DEFAULT_FORMS, FORMS, Form, SharedMemory, Size, Step

from mixer import MaskedMixerConfig, MaskedMixerForCausalLM
from mixer.common.errors import UserError, first_line, run_command


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    some = f"of {', '.join(FORMS)}; one with mixing first: the others take their memory from it"
    add("--forms", type=names, default=DEFAULT_FORMS, help=some)
    add("--tokens", type=numbers, default=[512, 2048, 8192])
    add("--batch-tokens", type=int, default=65536, help="tokens of a step")
    add("--hidden", type=int, default=1024)
    add("--layers", type=int, default=16)
    add("--vocabulary", type=int, default=8000)
    add("--rounds", type=int, default=5)
    add("--batch-ms", type=float, default=400.0, help="time of one round of one form")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if unknown := [name for name in options.forms if name not in FORMS]:
        raise UserError(f"--forms has {', '.join(unknown)}; allowed: {', '.join(FORMS)}")
    print(table(measure(options)))


def measure(options: argparse.Namespace) -> dict:
    timing.set_tf32(True)
    torch._dynamo.config.recompile_limit = 1000  # of one function, which all forms share
    result = measured_by(options, options.device)
    for name in ("hidden", "layers", "vocabulary", "batch_tokens", "rounds"):
        result[name] = getattr(options, name)
    result["ceiling_size"] = side = 8192 if options.device == "cuda" else 256
    result["ceiling_tflops"] = timing.product_tflops(torch.bfloat16, options.device, side)
    result["cases"] = []
    for tokens in options.tokens:
        batch = max(1, options.batch_tokens // tokens)
        size = Size(tokens, batch, options.hidden, options.layers, options.vocabulary)
        result["cases"].append(measure_size(size, options))
        save(result, table(result), options.output)
    return result


def measure_size(size: Size, options: argparse.Namespace) -> dict:
    rows, steps, memory = {}, {}, SharedMemory()
    for name in options.forms:
        row, step = prepare(FORMS[name], size, options.device, memory)
        rows[name] = {"what": FORMS[name].what} | row
        print(f"{size.tokens} tokens, {name}: {row}", flush=True)
        if step is not None:
            steps[name] = step
    times = options.rounds, options.batch_ms
    timings = timing.interleaved(steps, options.device, 1, *times, hide_host=False)
    for name, row in rows.items():
        row |= timings.get(name, {})
        if "ms" in row:
            row["tokens_per_second"] = 1e3 * size.batch * size.tokens / row["ms"]
    del steps, memory
    torch.compiler.reset()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    of_size = {"tokens": size.tokens, "batch": size.batch, "useful_flops": useful_flops(size)}
    return of_size | {"forms": rows}


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
        if device == "cuda" and not form.graph:  # a graph's own memory is not counted
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


# ------------------------------------------------------------------------- tables

# Forms whose products are the others' without token mixing; earlier results have `without`.
WITHOUT_MIXING = ("without", "limit")
BASELINES = {"matmul": "dense matmul", "reference": "reference", "limit": "limit"}


def table(result: dict) -> str:
    """Everything as Markdown."""
    parts = [f"# A training step on {result['hardware'].get('device')}", introduction(result)]
    for case in result["cases"]:
        parts += [f"## {case['batch']} x {case['tokens']} tokens", forms(case, result)]
    return "\n\n".join([*parts, f"Measured on {origin(result)}."]) + "\n"


def introduction(result: dict) -> str:
    size = f"{result['ceiling_size']}^3"
    return (
        "Forward, backward, clipping and the optimizer (AdamW) on random tokens, bf16 "
        f"autocast, {result['batch_tokens']:,} tokens a step, vocabulary {result['vocabulary']:,}, "
        f"hidden size {result['hidden']:,}, {result['layers']} layers; medians of "
        f"{result['rounds']} interleaved rounds. Ratios are of tokens a second. The limit is the "
        "clean model with token mixing removed, compiled. Useful operations are the products that "
        "the model is defined by, of a triangle those on and below the diagonal; their share is of "
        f"the library's bf16 product of {size}, {result['ceiling_tflops']:.4g} TFLOP/s."
    )


def forms(case: dict, result: dict) -> str:
    ratios = [f"vs {text}" for text in BASELINES.values()]
    head = ["form", "ms", "spread", "tokens/s", *ratios, "share", "peak GB", "first step, s"]
    rows = []
    for name, row in case["forms"].items():
        cells = [f"failed: {row.get('failure')}", *["-"] * (len(head) - 2)]
        if "ms" in row:
            flops = case["useful_flops"]["useful"]
            flops -= case["useful_flops"]["token_mixing"] * (name in WITHOUT_MIXING)
            share = 1e-9 * flops / row["ms"] / result["ceiling_tflops"]
            cells = [f"{row['ms']:.1f}", f"{row['low']:.1f}-{row['high']:.1f}"]
            cells += [f"{row['tokens_per_second']:,.0f}"]
            cells += [ratio(case, row, base) for base in BASELINES] + [f"{share:.1%}"]
            cells += [f"{row['peak_gb']:.1f}" if "peak_gb" in row else "-"]
            cells += [f"{row['first_step_seconds']:.0f}"]
        rows.append([f"{name}: {row['what']}", *cells])
    return markdown(head, rows)


def ratio(case: dict, row: dict, base: str) -> str:
    other = case["forms"].get(base, {})
    return f"{other['ms'] / row['ms']:.3f}" if "ms" in other else "-"


if __name__ == "__main__":
    run_command(main)
