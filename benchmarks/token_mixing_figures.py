"""The picture of `token_mixing.py`, from its JSON alone. matplotlib is imported where it draws."""

from pathlib import Path

from token_mixing_report import speedup
from token_mixing_work import OPERATIONS

SPEEDUP_OPERATIONS = ("forward", "fused", "grad_input", "grad_weight", "autograd")


def plain_cases(result: dict, operation: str) -> list[dict]:
    """Cases that differ in tokens alone, by tokens: the main suite, or without one the sweep's."""
    cases = [
        case
        for case in result["cases"]
        if case["operation"] == operation and case["factor"] in ("base", "tokens")
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
