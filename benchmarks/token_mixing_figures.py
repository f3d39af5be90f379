"""The pictures of `token_mixing.py`, from its JSON alone. matplotlib is imported where it draws."""

from pathlib import Path

from token_mixing_report import changes, of_family, select, speedup
from token_mixing_work import OPERATIONS

ROOFLINE_OPERATIONS = ("forward", "grad_input", "grad_weight")
SPEEDUP_OPERATIONS = ("forward", "fused", "grad_input", "grad_weight", "autograd")


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
