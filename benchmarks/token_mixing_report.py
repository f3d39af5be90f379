"""The tables and the picture of `token_mixing.py`, from its JSON alone.

Earlier results have kernels of several taps, and variants that are gone.
"""

from collections.abc import Callable
from pathlib import Path

from saving import markdown, origin

# In the order of the tables.
OPERATIONS = {
    "forward": "Forward, weight packed",
    "grad_input": "Gradient of the input",
    "grad_weight": "Gradient of the weight",
    "grad_weight_bias": "Gradients of the weight and the bias",
    "fused": "Forward with bias and residual",
    "pack": "Packing the weight: lower triangle, cast",
    "autograd": "Forward and backward through autograd, fp32 parameters",
}
SPEEDUP_OPERATIONS = ("forward", "fused", "grad_input", "grad_weight", "autograd")
OURS = ("ours", "by lag", "auto")
FAMILIES = ("by lag", "dense", "Conv1d", "Linear", "panels", "compiled")  # columns of the tables
RATES = ("useful TFLOP/s", "% of ceiling", "% of floor")  # columns of what `rates` returns
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


# ------------------------------------------------------------------------- comparisons


def passed(case: dict, key: str = "ms") -> list[dict]:
    """Variants that passed their check and have a time."""
    return [row for row in case["variants"] if not row["failure"] and row.get(key)]


def of_family(case: dict, family: str, key: str = "ms") -> dict | None:
    """The fastest variant of a family, or None."""
    rows = [row for row in passed(case, key) if row["family"] == family]
    return min(rows, key=lambda row: row[key], default=None)


def best_alternative(case: dict, key: str = "ms") -> dict | None:
    rows = [row for row in passed(case, key) if row["family"] not in OURS]
    return min(rows, key=lambda row: row[key], default=None)


def speedup(case: dict, key: str = "ms", over: str | None = None) -> float | None:
    """How many times as fast as the best alternative (or the best one of a family); None unless
    both passed their check.
    """
    mine = of_family(case, "ours", key)
    alternative = of_family(case, over, key) if over else best_alternative(case, key)
    return alternative[key] / mine[key] if mine and alternative else None


# ------------------------------------------------------------------------- tables


def table(result: dict) -> str:
    """Everything as Markdown."""
    title = f"# Token mixing on {result['hardware'].get('device')}"
    paragraphs = [title, introduction(result)]
    for suite, tables in (("main", main_tables), ("sweep", sweep_tables)):
        for operation, operation_title in OPERATIONS.items():
            cases = [
                case
                for case in result["cases"]
                if case["suite"] == suite and case["operation"] == operation
            ]
            if cases:
                paragraphs += section(suite, operation_title, cases, tables)
    paragraphs += [*failures(result), f"Measured on {origin(result)}."]
    return "\n\n".join(paragraphs) + "\n"


def section(suite: str, title: str, cases: list[dict], tables: Callable) -> list[str]:
    base = cases[0]
    size = f"{base['channels']} channels, batch x tokens {base['batch_tokens']:,}"
    if suite == "main":
        paragraphs = [f"## {title}", f"{size}, {arithmetic(base)}."]
    else:
        paragraphs = [f"## Sweep: {title.lower()}"]
    if base["operation"] != "autograd":
        return [*paragraphs, *tables(cases, "ms")]
    paragraphs += ["Wall time of eager calls in a row, the host's share included:"]
    paragraphs += tables(cases, "ms")
    if any(passed(case, "graph_ms") for case in cases):
        graphs = "GPU time alone, the same replayed as a CUDA graph:"
        paragraphs += [graphs, tables(cases, "graph_ms")[0]]
    return paragraphs


def introduction(result: dict) -> str:
    size = f"{result['ceiling_size']}^3"
    ceilings = ", ".join(
        f"{name} {value:.4g} TFLOP/s" for name, value in result["ceilings_tflops"].items()
    )
    if result["hardware"].get("device") == "cpu":
        method = "plain PyTorch in the place of our kernels, wall time of a CPU"
    else:
        method = (
            "buffers rotate beyond three times the L2 cache; GPU time, host hidden, except where "
            "it says wall time"
        )
    return (
        f"Ours is backend `cuda`. Medians of {result['rounds']} interleaved rounds, in "
        f"milliseconds; {method}. The speed-up is over the best alternative of any column. Useful "
        "operations are those on and below the diagonal. Ceiling: the library's dense product of "
        f"{size} ({ceilings}). Floor: the slower of memory (every byte once, at the "
        f"{result['copy_tb_s']:.3g} TB/s of a copy) and arithmetic (in steps of 64 rows, at the "
        "ceiling). Results were first checked against fp64; what failed has no time and no "
        "speed-up."
    )


def number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def main_tables(cases: list[dict], key: str) -> list[str]:
    return [comparison(cases, key), all_variants(cases, key)]


def comparison(cases: list[dict], key: str) -> str:
    families = [
        family for family in FAMILIES if any(of_family(case, family, key) for case in cases)
    ]
    head = ["tokens", "ours", *families, "speed-up", *RATES]
    rows = []
    for case in cases:
        row = [str(case["tokens"]), ours_cell(case, key)]
        row += [cell(case, family, key) for family in families]
        rows.append([*row, number(speedup(case, key), ".2f"), *rates(case, key)])
    return markdown(head, rows)


def cell(case: dict, family: str, key: str) -> str:
    """Milliseconds of the best of a family, named where there were several."""
    best = of_family(case, family, key)
    if best is None:
        return "-"
    several = sum(row["family"] == family for row in case["variants"]) > 1
    return f"{best[key]:.3f} ({best['name']})" if several else f"{best[key]:.3f}"


def ours_cell(case: dict, key: str) -> str:
    mine = of_family(case, "ours", key)
    if mine:
        return f"{mine[key]:.3f}"
    failed = [row for row in case["variants"] if row["family"] == "ours" and row["failure"]]
    return "failed" if failed else "-"


def rates(case: dict, key: str) -> list[str]:
    """Useful TFLOP/s, percent of the ceiling, percent of the floor."""
    mine = of_family(case, "ours", key)
    if mine is None:
        return ["-", "-", "-"]
    of_floor = f"{100 * case['floor_ms'] / mine[key]:.0f}"
    tflops = case["useful_flops"] / mine[key] / 1e9
    if tflops == 0:  # packing multiplies nothing
        return ["-", "-", of_floor]
    return [f"{tflops:.4g}", f"{100 * tflops / case['ceiling_tflops']:.0f}", of_floor]


def all_variants(cases: list[dict], key: str) -> str:
    """Every variant, folded away: what the best of a column was chosen from."""
    names = list(dict.fromkeys(row["name"] for case in cases for row in case["variants"]))
    times = [{row["name"]: row[key] for row in passed(case, key)} for case in cases]
    rows = [[name, *(number(of_case.get(name), ".4f") for of_case in times)] for name in names]
    head = ["variant", *(str(case["tokens"]) for case in cases)]
    return f"<details><summary>Every variant</summary>\n\n{markdown(head, rows)}\n\n</details>"


def arithmetic(case: dict) -> str:
    tf32 = case["dtype"] == "float32" and case.get("tf32", True)
    return SHORT_DTYPES.get(case["dtype"], case["dtype"]) + (" with tf32" if tf32 else "")


def changes(case: dict) -> str:
    """What sets a case of the sweep apart."""
    text = f"{case['tokens']} tokens"
    factor = case["factor"]
    values = {
        "channels": case["channels"],
        "heads": case["heads"],
        "kernel size": case.get("taps"),
        "dtype": arithmetic(case),
        "batch x tokens": f"{case['batch_tokens']:,}",
    }
    return f"{text}, {factor} {values[factor]}" if factor in values else text


def sweep_tables(cases: list[dict], key: str) -> list[str]:
    head = ["case", "ours", "best alternative", "speed-up", *RATES]
    rows = []
    for case in cases:
        best = best_alternative(case, key)
        row = [changes(case), ours_cell(case, key)]
        row += [f"{best[key]:.3f} ({best['name']})" if best else "-"]
        rows.append([*row, number(speedup(case, key), ".2f"), *rates(case, key)])
    return [markdown(head, rows)]


def failures(result: dict) -> list[str]:
    """What has no number, and why."""
    lines = [
        f"- {case['operation']}, {changes(case)}: {row['name']}: {row['failure']}"
        for case in result["cases"]
        for row in case["variants"]
        if row["failure"]
    ]
    lines += [
        f"- {shape['suite']}, {changes(shape)}: left out, the time was up"
        for shape in result.get("left_out", [])  # of earlier results
    ]
    return ["## Without a number", "\n".join(lines)] if lines else []


# ------------------------------------------------------------------------- the picture


def plain_cases(result: dict, operation: str) -> list[dict]:
    """Cases that differ in tokens alone, by tokens: the main suite, or without one the sweep's."""
    cases = [
        case
        for case in result["cases"]
        if case["operation"] == operation and case["factor"] in ("base", "tokens")
    ]
    main = [case for case in cases if case["suite"] == "main"]
    return sorted(main or cases, key=lambda case: case["tokens"])


def plot_speedups(result: dict, path: Path) -> Path:
    """Bars over the contexts, one picture an operation: ours over the best of each family."""
    from mixer.reporting.figure import COLOURS, new_figure

    hatches = {"dense": "", "Conv1d": "//", "panels": "..", "compiled": "xx"}
    colours = dict(zip(hatches, COLOURS, strict=False))
    shown = [operation for operation in SPEEDUP_OPERATIONS if plain_cases(result, operation)]
    figure = new_figure(figsize=(11, 2.7 * len(shown)))
    rows = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, operation in zip(rows, shown, strict=True):
        cases = plain_cases(result, operation)
        families = [
            family for family in hatches if any(speedup(case, over=family) for case in cases)
        ]
        width = 0.8 / max(1, len(families))
        for index, family in enumerate(families):
            values = [speedup(case, over=family) for case in cases]
            bars = axes.bar(
                [position - 0.4 + (index + 0.5) * width for position in range(len(cases))],
                [value or 0 for value in values],
                width * 0.92,
                label=family,
                color=colours[family],
                hatch=hatches[family],
                edgecolor="white",
            )
            labels = [f"{value:.2f}" if value else "-" for value in values]
            axes.bar_label(bars, labels, fontsize=8.5, padding=2)
        axes.axhline(1, color="#777777", linewidth=1)
        axes.set_xticks(range(len(cases)), [str(case["tokens"]) for case in cases])
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.18)
        axes.set_ylabel("ours is ... times as fast")
        wall_time = ", wall time" if operation == "autograd" else ""
        axes.set_title(f"{OPERATIONS[operation]}{wall_time}")
        if families:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_xlabel("tokens")
    figure.savefig(path)
    return path
