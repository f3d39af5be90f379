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


def plot_speedups(result: dict, path: Path) -> Path:
    """Bars over the contexts, one picture an operation: ours over the best of each family."""
    from mixer.reporting.figure import COLOURS, new_figure, save

    hatches = {"dense": "", "Conv1d": "//", "panels": "..", "compiled": "xx"}
    shown = [operation for operation in SPEEDUP_OPERATIONS if plain_cases(result, operation)]
    figure = new_figure(figsize=(11, 2.7 * len(shown)))
    rows = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, operation in zip(rows, shown, strict=True):
        cases = plain_cases(result, operation)
        families = [family for family in hatches if any(speedup(c, over=family) for c in cases)]
        width = 0.8 / max(1, len(families))
        for index, family in enumerate(families):
            values = [speedup(case, over=family) for case in cases]
            places = [n - 0.4 + (index + 0.5) * width for n in range(len(cases))]
            look = {"color": COLOURS[index + 1], "hatch": hatches[family], "edgecolor": "white"}
            heights = [value or 0 for value in values]
            drawn = axes.bar(places, heights, width * 0.92, label=family, **look)
            labels = [f"{value:.2f}" if value else "-" for value in values]
            axes.bar_label(drawn, labels, fontsize=8.5, padding=2)
        axes.axhline(1, color="#777777", linewidth=1)
        axes.set_xticks(range(len(cases)), [str(case["tokens"]) for case in cases])
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.18)
        axes.set_ylabel("times as fast")
        kind = ", wall time" if operation == "autograd" else ""
        axes.set_title(f"{OPERATIONS[operation]}: ours over the best of each kind{kind}")
        if families:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_xlabel("tokens")
    return save(figure, path)
