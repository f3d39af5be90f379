"""Tables and pictures of `token_mixing.py`, from its JSON alone. matplotlib is imported where a
picture is drawn.
"""

from pathlib import Path

from saving import origin
from token_mixing_work import OPERATIONS

FAMILIES = ("dense", "Conv1d", "Linear", "panels", "compiled")
ROOFLINE_OPERATIONS = ("forward", "grad_input", "grad_weight")
SPEEDUP_OPERATIONS = ("forward", "fused", "grad_input", "grad_weight", "autograd")
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
    mine, other = (
        of_family(case, family, key),
        of_family(case, over, key) if over else best_alternative(case, key),
    )
    return other[key] / mine[key] if mine and other else None


def select(result: dict, suite: str, operation: str) -> list[dict]:
    return [
        case for case in result["cases"] if (case["suite"], case["operation"]) == (suite, operation)
    ]


# ------------------------------------------------------------------------- tables


def table(result: dict) -> str:
    """Everything as Markdown."""
    parts = [f"# Token mixing on {result['hardware'].get('device')}", introduction(result)]
    for operation, title in OPERATIONS.items():
        parts += main_section(operation, title, select(result, "main", operation))
    for operation, title in OPERATIONS.items():
        parts += sweep_section(title, select(result, "sweep", operation))
    parts += failures(result)
    parts += [f"Measured on {origin(result)}."]
    return "\n\n".join(part for part in parts if part) + "\n"


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


def main_section(operation: str, title: str, cases: list[dict]) -> list[str]:
    if not cases:
        return []
    base = cases[0]
    parts = [
        f"## {title}",
        f"{base['channels']} channels, batch x tokens {base['batch_tokens']:,}, "
        f"{arithmetic(base)}.",
    ]
    if operation != "autograd":
        return parts + [comparison(cases, "ms"), all_variants(cases, "ms")]
    parts += [
        "Wall time of eager calls in a row, the host's share included:",
        comparison(cases, "ms"),
        all_variants(cases, "ms"),
    ]
    if any(passed(case, "graph_ms") for case in cases):
        parts += [
            "GPU time alone, the same replayed as a CUDA graph:",
            comparison(cases, "graph_ms"),
        ]
    return parts


def comparison(cases: list[dict], key: str) -> str:
    families = [
        family for family in FAMILIES if any(of_family(case, family, key) for case in cases)
    ]
    auto = any(of_family(case, "auto", key) for case in cases)
    head = [
        "tokens",
        "ours",
        *(["auto"] if auto else []),
        *families,
        "speed-up",
        "useful TFLOP/s",
        "% of ceiling",
        "% of floor",
    ]
    rows = []
    for case in cases:
        others = [cell(case, family, key) for family in (["auto"] if auto else []) + families]
        rows.append(
            [
                str(case["tokens"]),
                ours_cell(case, key),
                *others,
                number(speedup(case, key), ".2f"),
                *rates(case, key),
            ]
        )
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
    known = (
        [f"{reached:.4g}", f"{100 * reached / case['ceiling_tflops']:.0f}"]
        if reached
        else ["-", "-"]
    )
    return [*known, f"{100 * case['floor_ms'] / mine[key]:.0f}"]


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


def sweep_section(title: str, cases: list[dict]) -> list[str]:
    if not cases:
        return []
    parts = [f"## Sweep: {title.lower()}"]
    if cases[0]["operation"] != "autograd":
        return parts + [sweep_table(cases, "ms")]
    parts += [
        "Wall time of eager calls in a row, the host's share included:",
        sweep_table(cases, "ms"),
    ]
    if any(passed(case, "graph_ms") for case in cases):
        parts += [
            "GPU time alone, the same replayed as a CUDA graph:",
            sweep_table(cases, "graph_ms"),
        ]
    return parts


def sweep_table(cases: list[dict], key: str) -> str:
    auto = any(of_family(case, "auto", key) for case in cases)
    head = [
        "case",
        "ours",
        "best alternative",
        "speed-up",
        *(["auto", "its speed-up"] if auto else []),
    ]
    rows = []
    for case in cases:
        best = best_alternative(case, key)
        row = [
            changes(case),
            ours_cell(case, key),
            f"{best[key]:.3f} ({best['name']})" if best else "-",
        ]
        row.append(number(speedup(case, key), ".2f"))
        if auto:
            row += [ours_cell(case, key, "auto"), number(speedup(case, key, "auto"), ".2f")]
        rows.append(row + rates(case, key))
    return markdown([*head, "useful TFLOP/s", "% of ceiling", "% of floor"], rows)


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


# ------------------------------------------------------------------------- pictures


def write_plots(result: dict, output: Path) -> list[Path]:
    """PATH.png, PATH_speedup.png and, of a sweep, PATH_sweep.png: those for which there are
    cases.
    """
    written = []
    if plain_cases(result, "forward", "grad_input", "grad_weight"):
        written.append(plot_roofline(result, output.with_name(output.name + ".png")))
    if plain_cases(result, *SPEEDUP_OPERATIONS):
        written.append(plot_speedups(result, output.with_name(output.name + "_speedup.png")))
    if any(case["suite"] == "sweep" for case in result["cases"]):
        written.append(plot_sweep(result, output.with_name(output.name + "_sweep.png")))
    return written


def plain_cases(result: dict, *operations: str) -> list[dict]:
    """Cases that differ in tokens alone, by tokens: the main suite, or without one the sweep's."""
    cases = [
        case
        for case in result["cases"]
        if case["operation"] in operations and case["factor"] in ("base", "tokens")
    ]
    main = [case for case in cases if case["suite"] == "main"]
    return sorted(main or cases, key=lambda case: case["tokens"])


def label_ours(result: dict) -> str:
    return {"cuda": "ours"}.get(result["ours"], f"ours ({result['ours']})")


def plot_roofline(result: dict, path: Path) -> Path:
    """Useful TFLOP/s over useful operations per byte that must move; two measured ceilings; a point
    for each context.
    """
    from mixer.reporting.figure import new_figure, save

    figure = new_figure(figsize=(12, 5.2))
    grid = figure.subplots(1, 3, sharex=True, sharey=True)
    for axes, operation in zip(grid, ROOFLINE_OPERATIONS, strict=True):
        cases = plain_cases(result, operation)
        if not cases:
            axes.set_visible(False)
            continue
        draw_ceilings(axes, result, plain_cases(result, *ROOFLINE_OPERATIONS))
        draw_points(axes, result, cases)
        axes.set_title(OPERATIONS[operation])
        axes.set_xlabel("useful operations per byte")
    grid[0].set_ylabel("useful TFLOP/s")
    lines, labels = next(axes for axes in grid if axes.get_visible()).get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(subtitle(result), fontsize=10, color="#555555")
    return save(figure, path)


def intensity(case: dict) -> float:
    return case["useful_flops"] / case["least_bytes"]


def tflops(case: dict, family: str) -> float | None:
    best = of_family(case, family)
    return case["useful_flops"] / best["ms"] / 1e9 if best else None


def draw_points(axes, result: dict, cases: list[dict]) -> None:
    from mixer.reporting.figure import COLOURS

    looks = {"ours": ("o", COLOURS[0]), "panels": ("s", COLOURS[2]), "dense": ("^", COLOURS[1])}
    for family, (marker, colour) in looks.items():
        points = [
            (intensity(case), tflops(case, family)) for case in cases if of_family(case, family)
        ]
        look = {
            "color": colour,
            "marker": marker,
            "markerfacecolor": colour if family == "ours" else "white",
            "zorder": 3,
        }
        label = label_ours(result) if family == "ours" else f"best {family}"
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, **look)
    for case in cases:
        axes.axvline(intensity(case), color="#cccccc", linewidth=0.8)
        place = {
            "transform": axes.get_xaxis_transform(),
            "rotation": 90,
            "ha": "right",
            "va": "bottom",
            "zorder": 2,
        }
        axes.text(
            intensity(case),
            0.015,
            f"{case['tokens']} tokens",
            fontsize=8.5,
            color="#666666",
            **place,
            **halo(),
        )


def draw_ceilings(axes, result: dict, cases: list[dict]) -> None:
    ceiling, rate = cases[0]["ceiling_tflops"], result["copy_tb_s"]
    ridge = ceiling / rate
    low, high = min(*map(intensity, cases), ridge) / 4, 1.6 * max(*map(intensity, cases), ridge)
    axes.plot([low, ridge, high], [low * rate, ceiling, ceiling], color="#222222", linewidth=2)
    axes.axhline(
        ceiling / 2,
        color="#777777",
        linestyle="--",
        linewidth=1,
        label="half the ceiling: the most of a full product",
    )
    place = {
        "textcoords": "offset points",
        "fontsize": 9,
        "va": "bottom",
        "ha": "right",
        "color": "#222222",
        **halo(),
    }
    axes.annotate(f"dense product\n{ceiling:.4g} TFLOP/s", (high, ceiling), xytext=(-2, 3), **place)
    axes.annotate(f"copy\n{rate:.3g} TB/s", (ridge * 0.75, ceiling * 0.75), xytext=(-5, 0), **place)
    shown = [
        tflops(case, family)
        for case in cases
        for family in ("ours", "panels", "dense")
        if of_family(case, family)
    ]
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(min(shown + [ceiling / 2]) / 2, ceiling * 1.5),
    )
    for axis in (axes.xaxis, axes.yaxis):
        powers_of_two(axis)


def halo() -> dict:
    """Of a label: white around the letters, so that a line behind them leaves them readable."""
    from matplotlib.patheffects import withStroke

    return {"path_effects": [withStroke(linewidth=2.5, foreground="white")]}


def powers_of_two(axis) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base=2, numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:.3g}" if value < 1 else f"{value:.0f}")


def subtitle(result: dict) -> str:
    hardware = result["hardware"]
    cuda = f", CUDA {hardware['cuda']}" if "cuda" in hardware else ""
    where = f"{hardware.get('device')}, torch {hardware.get('torch')}{cuda}"
    return f"{where}; a byte counts once, however often it is read"


def plot_speedups(result: dict, path: Path) -> Path:
    """Bars over the contexts, one picture an operation: ours over the best dense product, Conv1d
    and panels.
    """
    from mixer.reporting.figure import COLOURS, new_figure, save

    looks = {
        "dense": (COLOURS[1], ""),
        "Conv1d": (COLOURS[4], "//"),
        "panels": (COLOURS[2], ".."),
        "compiled": (COLOURS[5], "xx"),
    }
    shown = [operation for operation in SPEEDUP_OPERATIONS if plain_cases(result, operation)]
    figure = new_figure(figsize=(11, 2.7 * len(shown)))
    for axes, operation in zip(
        figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True
    ):
        cases = plain_cases(result, operation)
        families = [family for family in looks if any(speedup(case, over=family) for case in cases)]
        for index, family in enumerate(families):
            bars(axes, cases, family, index, len(families), *looks[family])
        axes.axhline(1, color="#777777", linewidth=1)
        axes.set_xticks(range(len(cases)), [str(case["tokens"]) for case in cases])
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.18)
        axes.set_ylabel("times as fast")
        kind = ", wall time" if operation == "autograd" else ""
        axes.set_title(
            f"{OPERATIONS[operation]}: {label_ours(result)} over the best of each kind{kind}"
        )
        if families:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_xlabel("tokens")
    return save(figure, path)


def bars(
    axes, cases: list[dict], family: str, index: int, count: int, colour: str, hatch: str
) -> None:
    width = 0.8 / count
    values = [speedup(case, over=family) for case in cases]
    places = [position - 0.4 + (index + 0.5) * width for position in range(len(cases))]
    drawn = axes.bar(
        places,
        [value or 0 for value in values],
        width * 0.92,
        color=colour,
        hatch=hatch,
        edgecolor="white",
        label=family,
    )
    axes.bar_label(
        drawn,
        [f"{value:.2f}" if value else "-" for value in values],
        fontsize=8.5,
        padding=2,
        **halo(),
    )


def plot_sweep(result: dict, path: Path) -> Path:
    """Ours over the best alternative in every case of the sweep, a column for each operation."""
    from mixer.reporting.figure import COLOURS, new_figure, save

    operations = [
        operation
        for operation in ROOFLINE_OPERATIONS + ("autograd",)
        if select(result, "sweep", operation)
    ]
    names = list(
        dict.fromkeys(changes(case) for case in result["cases"] if case["suite"] == "sweep")
    )
    figure = new_figure(figsize=(3 + 2.6 * len(operations), 1.6 + 0.27 * len(names)))
    grid = figure.subplots(1, len(operations), sharey=True, squeeze=False)[0]
    for axes, operation in zip(grid, operations, strict=True):
        values = {changes(case): speedup(case) for case in select(result, "sweep", operation)}
        lengths = [values.get(name) or 0 for name in names]
        colours = [COLOURS[0] if length >= 1 else COLOURS[1] for length in lengths]
        drawn = axes.barh(range(len(names)), lengths, 0.75, color=colours)
        axes.bar_label(
            drawn,
            [f"{length:.2f}" if length else "-" for length in lengths],
            fontsize=8.5,
            padding=3,
            **halo(),
        )
        axes.axvline(1, color="#777777", linewidth=1)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.2, y=0.01)
        axes.set_title(
            operation.replace("_", "-") + (", wall time" if operation == "autograd" else "")
        )
        axes.set_xlabel("times as fast")
    grid[0].set_yticks(range(len(names)), names)
    grid[0].invert_yaxis()
    figure.suptitle(
        f"{label_ours(result)} over the best alternative; {result['hardware'].get('device')}",
        fontsize=12,
    )
    return save(figure, path)
