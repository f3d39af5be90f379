"""The pictures of `token_mixing.py`, from its JSON alone. matplotlib is imported where it draws."""

from pathlib import Path

from token_mixing_report import changes, select, speedup
from token_mixing_work import OPERATIONS

SPEEDUP_OPERATIONS = ("forward", "fused", "grad_input", "grad_weight", "autograd")


def write_plots(result: dict, output: Path) -> list[Path]:
    """PATH_speedup.png and, of a sweep, PATH_sweep.png: those for which there are cases."""
    written = []
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


def halo() -> dict:
    """Of a label: white around the letters, so that a line behind them leaves them readable."""
    from matplotlib.patheffects import withStroke

    return {"path_effects": [withStroke(linewidth=2.5, foreground="white")]}


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
        for operation in ("forward", "grad_input", "grad_weight", "autograd")
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
