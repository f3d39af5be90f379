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
    some = f"of {', '.join(FORMS)}; one with mixing first: the others take their memory from it"
    parser.add_argument("--forms", type=names, default=DEFAULT_FORMS, help=some)
    parser.add_argument("--tokens", type=numbers, default=[512, 2048, 8192])
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    batch_ms = "time of one round of one form"
    parser.add_argument("--batch-ms", type=float, default=400.0, help=batch_ms)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
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
    ceiling_size = 8192 if options.device == "cuda" else 256
    result["ceiling_size"] = ceiling_size
    result["ceiling_tflops"] = timing.product_tflops(torch.bfloat16, options.device, ceiling_size)
    result["cases"] = []
    for tokens in options.tokens:
        batch = max(1, options.batch_tokens // tokens)
        size = Size(tokens, batch, options.hidden, options.layers, options.vocabulary)
        result["cases"].append(measure_size(size, options))
        save(result, table(result), options.output)
    return result


def measure_size(size: Size, options: argparse.Namespace) -> dict:
    rows: dict[str, dict] = {}
    steps: dict[str, Step] = {}
    memory = SharedMemory()
    for name in options.forms:
        row, step = prepare(FORMS[name], size, options.device, memory)
        rows[name] = {"what": FORMS[name].description} | row
        print(f"{size.tokens} tokens, {name}: {row}", flush=True)
        if step is not None:
            steps[name] = step
    timings = timing.interleaved(
        steps, options.device, 1, options.rounds, options.batch_ms, hide_host=False
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
    allocated = torch.cuda.memory_allocated() if device == "cuda" and memory.weights else 0
    began = time.perf_counter()
    try:
        step = Step(form, size, device, memory)
        losses = [float(step())]  # compiles
        row = {"first_step_seconds": round(time.perf_counter() - began, 1)}
        losses += [float(step()), float(step())]
        if device == "cuda" and not form.graph:  # a graph's own memory is not counted
            torch.cuda.reset_peak_memory_stats()
            step()
            peak = torch.cuda.max_memory_allocated() - allocated
            if allocated:
                peak += memory.bytes
            row["peak_gb"] = round(peak / 2**30, 2)
    # Of the compiler, or out of memory: the others still have their numbers.
    except Exception as error:
        return {"failure": first_line(error)}, None
    return row | {"losses": losses}, step


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
    title = f"# A training step on {result['hardware'].get('device')}"
    paragraphs = [title, introduction(result)]
    for case in result["cases"]:
        paragraphs += [f"## {case['batch']} x {case['tokens']} tokens", forms(case, result)]
    paragraphs.append(f"Measured on {origin(result)}.")
    return "\n\n".join(paragraphs) + "\n"


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
            if name in WITHOUT_MIXING:
                flops -= case["useful_flops"]["token_mixing"]
            share = 1e-9 * flops / row["ms"] / result["ceiling_tflops"]
            cells = [f"{row['ms']:.1f}", f"{row['low']:.1f}-{row['high']:.1f}"]
            cells.append(f"{row['tokens_per_second']:,.0f}")
            cells += [ratio(case, row, baseline) for baseline in BASELINES]
            cells.append(f"{share:.1%}")
            cells.append(f"{row['peak_gb']:.1f}" if "peak_gb" in row else "-")
            cells.append(f"{row['first_step_seconds']:.0f}")
        rows.append([f"{name}: {row['what']}", *cells])
    return markdown(head, rows)


def ratio(case: dict, row: dict, form: str) -> str:
    baseline = case["forms"].get(form, {})
    return f"{baseline['ms'] / row['ms']:.3f}" if "ms" in baseline else "-"


if __name__ == "__main__":
    run_command(main)
