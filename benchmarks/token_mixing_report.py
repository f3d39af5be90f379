"""The tables of `token_mixing.py`, from its JSON alone."""

from collections.abc import Callable

from saving import origin
from token_mixing_work import OPERATIONS

FAMILIES = ("dense", "Conv1d", "Linear", "panels", "compiled")
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


# ------------------------------------------------------------------------- comparisons


def passed(case: dict, key: str = "ms") -> list[dict]:
    """Variants that passed their check and have a time."""
    return [row for row in case["variants"] if not row["failure"] and row.get(key)]


def of_family(case: dict, family: str, key: str = "ms") -> dict | None:
    """The fastest variant of a family, or None."""
    return min(
        (row for row in passed(case, key) if row["family"] == family),
        key=lambda row: row[key],
        default=None,
    )


def best_alternative(case: dict, key: str = "ms") -> dict | None:
    rows = [row for row in passed(case, key) if row["family"] not in ("ours", "auto")]
    return min(rows, key=lambda row: row[key], default=None)


def speedup(
    case: dict, key: str = "ms", family: str = "ours", over: str | None = None
) -> float | None:
    """How many times as fast as the best alternative (or the best one of a family); None unless
    both passed their check.
    """
    mine = of_family(case, family, key)
    other = of_family(case, over, key) if over else best_alternative(case, key)
    return other[key] / mine[key] if mine and other else None


# ------------------------------------------------------------------------- tables


def table(result: dict) -> str:
    """Everything as Markdown."""
    parts = [f"# Token mixing on {result['hardware'].get('device')}", introduction(result)]
    for suite, tables in (("main", main_tables), ("sweep", sweep_tables)):
        for operation, title in OPERATIONS.items():
            of = {"suite": suite, "operation": operation}
            if cases := [case for case in result["cases"] if of.items() <= case.items()]:
                parts += section(suite, title, cases, tables)
    return "\n\n".join([*parts, *failures(result), f"Measured on {origin(result)}."]) + "\n"


def section(suite: str, title: str, cases: list[dict], tables: Callable) -> list[str]:
    base = cases[0]
    size = f"{base['channels']} channels, batch x tokens {base['batch_tokens']:,}"
    if suite == "main":
        parts = [f"## {title}", f"{size}, {arithmetic(base)}."]
    else:
        parts = [f"## Sweep: {title.lower()}"]
    if base["operation"] != "autograd":
        return [*parts, *tables(cases, "ms")]
    parts += ["Wall time of eager calls in a row, the host's share included:"]
    parts += tables(cases, "ms")
    if any(passed(case, "graph_ms") for case in cases):
        graphs = "GPU time alone, the same replayed as a CUDA graph:"
        parts += [graphs, tables(cases, "graph_ms")[0]]
    return parts


def introduction(result: dict) -> str:
    size = f"{result['ceiling_size']}^3"
    ceilings = ", ".join(
        f"{name} {value:.4g} TFLOP/s" for name, value in result["ceilings_tflops"].items()
    )
    rotation = (
        "buffers rotate beyond three times the L2 cache; GPU time, host hidden, except where it "
        "says wall time"
    )
    how = "wall time of a CPU" if result["hardware"].get("device") == "cpu" else rotation
    return (
        f"Ours is backend `{result['ours']}`. Medians of {result['rounds']} interleaved rounds, in "
        f"milliseconds; {how}. The speed-up is over the best alternative of any column. Useful "
        "operations are those on and below the diagonal. Ceiling: the library's dense product of "
        f"{size} ({ceilings}). Floor: the slower of memory (every byte once, at the "
        f"{result['copy_tb_s']:.3g} TB/s of a copy) and arithmetic (in steps of 64 rows, at the "
        "ceiling). Results were first checked against fp64; what failed has no time and no "
        "speed-up."
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---:" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def main_tables(cases: list[dict], key: str) -> list[str]:
    return [comparison(cases, key), all_variants(cases, key)]


def comparison(cases: list[dict], key: str) -> str:
    found = [one for one in ("auto", *FAMILIES) if any(of_family(case, one, key) for case in cases)]
    head = ["tokens", "ours", *found, "speed-up", "useful TFLOP/s", "% of ceiling", "% of floor"]
    rows = []
    for case in cases:
        others = [cell(case, family, key) for family in found]
        faster = number(speedup(case, key), ".2f")
        rows.append([str(case["tokens"]), ours_cell(case, key), *others, faster, *rates(case, key)])
    return markdown(head, rows)


def cell(case: dict, family: str, key: str) -> str:
    """Milliseconds of the best of a family, named where there were several."""
    best = of_family(case, family, key)
    if best is None:
        return "-"
    several = sum(row["family"] == family for row in case["variants"]) > 1
    return f"{best[key]:.3f} ({best['name']})" if several else f"{best[key]:.3f}"


def ours_cell(case: dict, key: str, family: str = "ours") -> str:
    mine = of_family(case, family, key)
    if mine:
        return f"{mine[key]:.3f}"
    failed = [row for row in case["variants"] if row["family"] == family and row["failure"]]
    return "failed" if failed else "-"


def rates(case: dict, key: str) -> list[str]:
    """Useful TFLOP/s, percent of the ceiling, percent of the floor."""
    mine = of_family(case, "ours", key)
    if mine is None:
        return ["-", "-", "-"]
    reached = case["useful_flops"] / mine[key] / 1e9
    known = [f"{reached:.4g}", f"{100 * reached / case['ceiling_tflops']:.0f}"]
    return [*(known if reached else "--"), f"{100 * case['floor_ms'] / mine[key]:.0f}"]


def all_variants(cases: list[dict], key: str) -> str:
    """Every variant, folded away: what the best of a column was chosen from."""
    names = list(dict.fromkeys(row["name"] for case in cases for row in case["variants"]))
    times = [{row["name"]: row[key] for row in passed(case, key)} for case in cases]
    rows = [[name, *(number(known.get(name), ".4f") for known in times)] for name in names]
    head = ["variant", *(str(case["tokens"]) for case in cases)]
    return f"<details><summary>Every variant</summary>\n\n{markdown(head, rows)}\n\n</details>"


def arithmetic(case: dict) -> str:
    return SHORT_DTYPES.get(case["dtype"], case["dtype"]) + (" with tf32" if case["tf32"] else "")


def changes(case: dict) -> str:
    """What sets a case of the sweep apart."""
    parts = [f"{case['tokens']} tokens"]
    values = {"channels": case["channels"], "heads": case["heads"], "kernel size": case["taps"]}
    values |= {"batch x tokens": f"{case['batch_tokens']:,}", "dtype": arithmetic(case)}
    if case["factor"] in values:
        parts.append(f"{case['factor']} {values[case['factor']]}")
    return ", ".join(parts)


def sweep_tables(cases: list[dict], key: str) -> list[str]:
    auto = any(of_family(case, "auto", key) for case in cases)
    head = ["case", "ours", "best alternative", "speed-up"]
    head += ["auto", "its speed-up"] if auto else []
    rows = []
    for case in cases:
        best = best_alternative(case, key)
        row = [changes(case), ours_cell(case, key)]
        row += [f"{best[key]:.3f} ({best['name']})" if best else "-"]
        row += [number(speedup(case, key), ".2f")]
        if auto:
            row += [ours_cell(case, key, "auto"), number(speedup(case, key, "auto"), ".2f")]
        rows.append(row + rates(case, key))
    return [markdown([*head, "useful TFLOP/s", "% of ceiling", "% of floor"], rows)]


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
        for shape in result["left_out"]
    ]
    return ["## Without a number", "\n".join(lines)] if lines else []
