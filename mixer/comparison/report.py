"""The report of a comparison: tables, loss curves and throughput, from the numbers of
mixer.comparison.result.
"""

import json
from pathlib import Path

from mixer.common.files import whole_directory
from mixer.common.provenance import in_words
from mixer.comparison.result import (
    LARGEST_GAP,
    LARGEST_GAP_AT_END,
)
from mixer.reporting.curves import plot_comparison
from mixer.reporting.figure import COLOURS, new_figure, save, short_number
from mixer.reporting.tables import bullets, table, wrapped

MARKS = "osD^v"


def report(result: dict) -> str:
    """The result's tables and verdicts as Markdown, without pictures."""
    tables = [loss_table(result), speed_table(result), rate_table(result)]
    return "\n\n".join([*filter(None, tables), notes(result)]) + "\n"


def write_report(result: dict, lines: dict[str, list[dict]], output: Path) -> Path:
    """Writes report.md, report.json and the pictures into `output`, which has each model's metrics
    already. `lines`: the metrics by model.
    """
    with whole_directory(output) as stage:
        pictures = [
            plot_comparison(lines, stage / "losses.png"),
            plot_throughput(result, stage / "throughput.png"),
            plot_budgets(result, stage / "budgets.png"),
        ]
        shown = "\n\n".join(f"![{picture.stem}]({picture.name})" for picture in pictures)
        title = f"# Comparison: {', '.join(result['models'])}"
        text = f"{title}\n\n{report(result)}\n{shown}\n"
        (stage / "report.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (stage / "report.md").write_text(text, encoding="utf-8")
    return output / "report.md"


def speed_table(result: dict) -> str:
    limit, rows = result["limit"], []
    for name, model in result["models"].items():
        speed, share = model["tokens_per_second"], model["token_mixing_share"]
        peak = model["useful_share_of_peak"]
        rows.append(
            {
                "model": name,
                "parameters, M": f"{model['parameters'] / 1e6:.1f}",
                "tokens/s": f"{speed['median']:,.0f}",
                "lowest to highest": f"{speed['lowest']:,.0f} to {speed['highest']:,.0f}",
                "token mixing": mixing_cell(share) if share else "-",
                "peak memory, GB": f"{model['peak_memory_gb']:.1f}",
                "start-up, s": f"{model['start_up_seconds']:.1f}",
                "useful TFLOP/s": f"{model['useful_tflops']:.3g}",
                "executed TFLOP/s": f"{model['executed_tflops']:.3g}",
                "of peak": f"{peak:.1%}" if peak else "-",
            }
        )
    if limit:
        row = {
            "model": "no mixing (limit)",
            "tokens/s": f"{limit['median']:,.0f}",
            "lowest to highest": f"{limit['lowest']:,.0f} to {limit['highest']:,.0f}",
        }
        rows.append({title: row.get(title, "") for title in rows[0]})
    return table(rows)


def mixing_cell(share: dict) -> str:
    return f"{share['median']:.1%} ({share['lowest']:.1%} to {share['highest']:.1%})"


def loss_table(result: dict) -> str:
    at = f"at {result['equal_seconds']:.1f} s"
    rows = []
    for name, model in result["models"].items():
        equal = model["validation_loss_at_equal_time"]
        rows.append(
            {
                "model": name,
                "steps": f"{model['steps']:,}",
                "tokens, M": f"{model['tokens'] / 1e6:.1f}",
                "lr": f"{model['lr']:g}",
                "seconds": f"{model['training_seconds']:.1f}",
                "validation loss": loss_cell(model),
                at: "-" if equal is None else f"{equal:.4f}",
                "bits/byte": f"{model['validation_bits_per_byte']:.4f}",
            }
        )
    return table(rows)


def loss_cell(model: dict) -> str:
    """The mean of the seeds, and in brackets the lowest and the highest."""
    losses = model["validation_loss_by_seed"].values()
    reach = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
    return f"{model['validation_loss']:.4f}{reach}"


def rate_table(result: dict) -> str:
    """Validation losses of the short runs, a column for each learning rate; the best is bold."""
    swept = {name: model for name, model in result["models"].items() if model["sweep"]}
    rates = sorted({rate for model in swept.values() for rate in model["sweep"]["losses"]})
    rows = []
    for name, model in swept.items():
        row = {"learning rate": name, "steps": f"{model['sweep']['steps']:,}"}
        for rate in rates:
            loss = model["sweep"]["losses"].get(rate, "")
            cell = "diverged" if loss is None else loss and f"{loss:.4f}"
            row[f"{rate:g}"] = f"**{cell}**" if rate == model["lr"] else cell
        rows.append(row)
    return table(rows) if rows else ""


def edge_notes(result: dict) -> list[str]:
    """Whether the best rate of a model may lie outside of those that were tried."""
    found = []
    for name, model in result["models"].items():
        losses = model["sweep"]["losses"] if model["sweep"] else {}
        if len(losses) > 1 and model["lr"] in (min(losses), max(losses)):
            found.append(
                f"{name}: the best rate, {model['lr']:g}, is the last of those tried on its side; "
                "a comparison with more --rates may find a better one."
            )
    return found


def notes(result: dict) -> str:
    """What the numbers are, and whether the backends agree."""
    repeats = len(next(iter(result["models"].values()))["tokens_per_second"]["all"])
    lines = [verdict(gap) for gap in result["gaps"]]
    if result["seconds"]:
        lines.append(
            "Each model has the steps that it was timed to do in "
            f"{result['seconds']:g} s, and its schedule ends with them."
        )
    if result["tune_share"]:
        lines.append(
            f"Each model's learning rate is the best of short runs with {result['tune_share']:.0%} "
            "of the steps and of the warm-up, on the first seed."
        )
    lines += edge_notes(result)
    lines += [
        f"At {result['equal_seconds']:.1f} s: where the shortest run ends. The learning rate of "
        "the others has yet to fall there, so their losses at the end say more.",
        "Seconds are of training alone, without start-up, evaluation and saving.",
        f"tokens/s: median of {repeats} short runs in turn, of {result['timing_steps']} steps each "
        "after as many others.",
        "Limit: the masked mixer without its token mixing. Token mixing: the share of a step by "
        "which a model is slower than that; in brackets from the fastest and the slowest runs.",
        "Useful operations leave out the masked half. Peak memory: what PyTorch allocated on the "
        "GPU, on a CPU what the process held.",
        *(
            shape(name, model["model"])
            for name, model in result["models"].items()
            if model["model"]["architecture"] != "masked_mixer"
        ),
        f"{batches(result)} tokens a step, precision "
        f"{result['settings']['train']['mixed_precision']}, {seeds_of(result)}, "
        f"{result['processes']} process(es). Measured on {in_words(result['hardware'])}; "
        f"commit {result['commit'][:10]}, by",
    ]
    command = " \\\n        ".join(wrapped(result["command"]).splitlines())
    return f"{bullets(lines)}\n\n      {command}"


def batches(result: dict) -> str:
    """Samples x context of a step; model by model where a model's options change it."""
    sizes = {
        name: f"{model['samples_per_step']} x {model['model']['max_position_embeddings']}"
        for name, model in result["models"].items()
    }
    if len(set(sizes.values())) == 1:
        return next(iter(sizes.values()))
    return ", ".join(f"{size} ({name})" for name, size in sizes.items())


def seeds_of(result: dict) -> str:
    seeds = [str(seed) for seed in next(iter(result["models"].values()))["validation_loss_by_seed"]]
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(seeds)}"


def shape(name: str, model: dict) -> str:
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    return (
        f"{name}: transformers' {model['architecture'].title()}ForCausalLM, hidden {hidden}, "
        f"{heads} heads of {hidden // heads}, {model['num_hidden_layers']} layers, "
        f"gated MLP of {model['intermediate_size']}, no norms of queries and keys."
    )


def verdict(gap: dict) -> str:
    first, second = gap["models"]
    agree = "agree" if gap["within_tolerance"] else "do NOT agree"
    return (
        f"{first} and {second} {agree}: training losses apart by {gap['largest']:.2%} at most "
        f"(step {gap['at_step']}; tolerance {LARGEST_GAP:.1%}), {gap['mean']:.2%} on average over "
        f"{gap['steps_compared']} logged steps; over the last {gap['steps_at_end']} their means by "
        f"{gap['of_means_at_end']:.3%} (tolerance {LARGEST_GAP_AT_END:.1%}), single steps by "
        f"{gap['mean_at_end']:.2%}."
    )


def plot_budgets(result: dict, output: Path) -> Path:
    """The final validation loss of each model against each thing that it takes, so that models can
    be compared where they take the same of one of them.
    """
    budgets = {
        "training time (s)": lambda model: model["training_seconds"],
        "tokens": lambda model: model["tokens"],
        "useful FLOP": lambda model: model["training_flops"],
        "parameters": lambda model: model["parameters"],
        "peak memory (GB)": lambda model: model["peak_memory_gb"],
    }
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(figsize=(13, 3.4))
    panels = figure.subplots(1, len(budgets), sharey=True)
    for axes, (label, of) in zip(panels, budgets.items(), strict=True):
        for index, (name, model) in enumerate(result["models"].items()):
            losses = model["validation_loss_by_seed"].values()
            reach = [
                [model["validation_loss"] - min(losses)],
                [max(losses) - model["validation_loss"]],
            ]
            colour, mark = COLOURS[index % len(COLOURS)], MARKS[index % len(MARKS)]
            style = {"color": colour, "fmt": mark, "markerfacecolor": "none", "capsize": 3}
            axes.errorbar(of(model), model["validation_loss"], yerr=reach, label=name, **style)
        axes.set_xlabel(label)
        axes.set_xlim(left=0, right=1.1 * max(map(of, result["models"].values())))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(short_number)
    panels[0].set_ylabel("validation loss\n(nats per token)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    return save(figure, output)


def plot_throughput(result: dict, output: Path) -> Path:
    """A bar for each model with a line from its slowest to its fastest run, and the limit."""
    speeds = {name: model["tokens_per_second"] for name, model in result["models"].items()}
    figure = new_figure(figsize=(8, 1.4 + 0.5 * len(speeds)))
    axes = figure.add_subplot()
    for index, (name, speed) in enumerate(speeds.items()):
        reach = [[speed["median"] - speed["lowest"]], [speed["highest"] - speed["median"]]]
        axes.barh(
            f"{name}  {short_number(speed['median'])}",
            speed["median"],
            xerr=reach,
            color=COLOURS[index % len(COLOURS)],
            height=0.6,
            capsize=4,
        )
    if result["limit"]:
        axes.axvline(
            result["limit"]["median"],
            color="#000000",
            linestyle="--",
            linewidth=1.2,
            label="no token mixing: the limit",
        )
        figure.legend(loc="outside lower right")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(short_number)
    axes.set_xlabel("tokens/s")
    axes.set_title("Training speed")
    return save(figure, output)
