"""Results of the ladders, JSON, to ladder.md (a table for each operation and size) and ladder.png
(bars).

    python3 table.py results/*.json [--out DIRECTORY]

A row of a file is one configuration of one version. A version's line in the table is its fastest
configuration; a version of which every configuration failed its check has no time, and says so.
Version 0 is cuBLAS.
"""

import argparse
import json
from pathlib import Path

OPERATIONS = ["forward", "grad_input", "grad_weight"]
TITLES = {
    "forward": "Forward: y = W x",
    "grad_input": "Input gradient: dx = Wᵀ dy",
    "grad_weight": "Weight gradient: dW = tril(Σ dy xᵀ)",
}


def read(paths: list[Path]) -> dict[tuple, list[dict]]:
    """{(operation, batch, tokens, channels): rows}, in the order of the operations and of the
    tokens.
    """
    groups = {}
    for path in paths:
        for row in json.loads(path.read_text()):
            key = (row["operation"], row["batch"], row["tokens"], row["channels"])
            groups.setdefault(key, []).append(row)
    return dict(
        sorted(
            groups.items(), key=lambda item: (OPERATIONS.index(item[0][0]), item[0][2], item[0][1:])
        )
    )


def best(rows: list[dict]) -> dict[int, dict]:
    """{version: its fastest row}; a row without a time only where the version has no other."""
    versions = {}
    for row in rows:
        held = versions.get(row["version"])
        if held is None or row.get("milliseconds", float("inf")) < held.get(
            "milliseconds", float("inf")
        ):
            versions[row["version"]] = row
    return dict(sorted(versions.items()))


def line(row: dict, cublas: float | None) -> str:
    name = "cuBLAS" if row["version"] == 0 else str(row["version"])
    start = f"| {name} | {row['adds']} |"
    if "milliseconds" not in row:
        return f"{start} failed: {row.get('problem', 'no time')} | | | |"
    percent = f"{100 * cublas / row['milliseconds']:.1f}" if cublas else ""
    speed = f"{row['milliseconds']:.4f} | {row['useful_tflops']:.1f}"
    return f"{start} {row['configuration']} | {speed} | {percent} |"


def at(groups: dict[tuple, list[dict]]) -> str:
    """The commits that rows name, where whoever keeps a result has added them."""
    commits = sorted({row["commit"] for rows in groups.values() for row in rows if "commit" in row})
    return f" at commit {', '.join(commits)}" if commits else ""


def markdown(groups: dict[tuple, list[dict]]) -> str:
    devices = sorted({row["device"] for rows in groups.values() for row in rows if "device" in row})
    parts = ["# The ladder", ""]
    if devices:
        parts += [
            f"Measured on {', '.join(devices)}{at(groups)}; bf16, medians; useful TFLOP/s count "
            "the lower triangle alone.",
            "",
        ]
    for (operation, batch, tokens, channels), rows in groups.items():
        versions = best(rows)
        cublas = versions.get(0, {}).get("milliseconds")
        parts += [f"## {TITLES[operation]}, {batch} x {tokens} tokens, {channels} channels", ""]
        parts += [
            "| version | what it adds | best configuration | ms | useful TFLOP/s | % of cuBLAS |"
        ]
        parts += ["|---|---|---|---:|---:|---:|"]
        parts += [line(row, cublas) for row in versions.values()] + [""]
    return "\n".join(parts)


def draw(groups: dict[tuple, list[dict]], path: Path) -> bool:
    """Bars of % of cuBLAS: a panel for each operation, a group of bars for each version, a bar for
    each size.

    False if matplotlib is not installed, or there is nothing to draw.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    bars = {}  # operation -> {(tokens, batch): {version: percent}}
    for (operation, batch, tokens, _), rows in groups.items():
        times = {
            version: row["milliseconds"]
            for version, row in best(rows).items()
            if "milliseconds" in row
        }
        if cublas := times.pop(0, None):
            percents = {version: 100 * cublas / time for version, time in times.items()}
            bars.setdefault(operation, {})[tokens, batch] = percents
    if not bars:
        return False
    figure, panels = pyplot.subplots(
        1, len(bars), figsize=(1 + 4 * len(bars), 3.4), squeeze=False, sharey=True
    )
    # a position and a colour for each size, also where it is missing
    every_size = sorted({size for sizes in bars.values() for size in sizes})
    width = 0.8 / len(every_size)
    for panel, (operation, sizes) in zip(panels[0], bars.items(), strict=True):
        for index, (tokens, batch) in enumerate(every_size):
            percents = sizes.get((tokens, batch), {})
            left = [version - 0.4 + width * (index + 0.5) for version in percents]
            label = f"{batch} x {tokens} tokens"
            panel.bar(left, list(percents.values()), width, color=f"C{index}", label=label)
        panel.axhline(100, color="black", linewidth=0.8, linestyle="--")
        panel.set_title(operation.replace("_", " "))
        panel.set_xlabel("version")
        panel.set_xticks(sorted({version for percents in sizes.values() for version in percents}))
    panels[0][0].set_ylabel("% of cuBLAS (dense)")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="what the ladders wrote with --json")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="where ladder.md and ladder.png go"
    )
    options = parser.parse_args(arguments)
    groups = read(options.files)
    pictured = draw(groups, options.out / "ladder.png")
    text = markdown(groups)
    if pictured:
        text += "\n![% of cuBLAS by version](ladder.png)\n"
    (options.out / "ladder.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
