"""Tables of benchmarks/training_step.py: the forms side by side."""

from saving import origin
from training_step_models import FORMS

WITHOUT_MIXING = ("without", "limit")  # models: their products are the others' without token mixing
BASELINES = {"matmul": "dense matmul", "reference": "reference", "limit": "limit"}


def table(result: dict) -> str:
    """Everything as Markdown."""
    parts = [f"# A training step on {result['hardware'].get('device')}", introduction(result)]
    for case in result["cases"]:
        parts += [
            f"## {case['batch']} x {case['tokens']} tokens",
            forms(case, result["ceiling_tflops"]),
        ]
    if result["left_out"]:
        parts += ["Left out, since the time was up: " + "; ".join(result["left_out"]) + "."]
    parts += [f"Measured on {origin(result)}."]
    return "\n\n".join(part for part in parts if part) + "\n"


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


def forms(case: dict, ceiling_tflops: float) -> str:
    head = [
        "form",
        "ms",
        "spread",
        "tokens/s",
        *(f"vs {text}" for text in BASELINES.values()),
        "share",
        "peak GB",
        "first step, s",
    ]
    rows = []
    for name, row in case["forms"].items():
        if "failure" in row:
            rows.append(
                [
                    f"{name}: {FORMS[name].what}",
                    f"failed: {row['failure']}",
                    *["-"] * (len(head) - 2),
                ]
            )
            continue
        mixing = 0 if FORMS[name].model in WITHOUT_MIXING else case["useful_flops"]["token_mixing"]
        flops = case["useful_flops"]["useful"] - case["useful_flops"]["token_mixing"] + mixing
        rows.append(
            [
                f"{name}: {FORMS[name].what}",
                f"{row['ms']:.1f}",
                f"{row['low']:.1f}-{row['high']:.1f}",
            ]
            + [f"{row['tokens_per_second']:,.0f}", *(ratio(case, row, base) for base in BASELINES)]
            + [
                f"{1e-9 * flops / row['ms'] / ceiling_tflops:.1%}",
                f"{row['peak_gb']:.1f}" if "peak_gb" in row else "-",
            ]
            + [f"{row['first_step_seconds']:.0f}"]
        )
    return markdown(head, rows)


def ratio(case: dict, row: dict, base: str) -> str:
    other = case["forms"].get(base, {})
    return f"{other['ms'] / row['ms']:.3f}" if "ms" in other else "-"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
