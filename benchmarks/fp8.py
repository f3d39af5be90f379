"""What fp8 products are worth in training: torchao's linear layers in fp8 against those in bf16.

    python benchmarks/fp8.py --output PATH [--forms bf16 tensorwise ...] [--hidden 1024 2048] \\
        [--profile]
    python benchmarks/fp8.py --output PATH --steps 1000 data.path=TEXTS \\
        data.validation_path=OTHER_TEXTS data.directory=data/books

Times a whole training step of the flat mixer with the recipe's optimizer on random tokens, one GPU:
forward, backward, clipping, Muon and AdamW, each block, the output layer and the loss compiled. The
linear layers inside the blocks are converted; embedding, output layer and token mixing stay as they
are. With --steps the trainer itself then trains configs/recipe.yaml (otherwise as
benchmarks/plans/recipe_512.yaml) in bf16 and in the form that is the fastest at the first --hidden,
unless no form is fast enough to be kept. Writes PATH.json and PATH.md.

Needs torchao, which is not among this project's dependencies. For torch 2.11 that is
`pip install --no-deps torchao==0.17.0`; its wheel for any machine (py3-none-any) is enough. On a
CPU the products are emulated, which shows that all runs, and nothing of the speed.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import timing
import torch
from recipe import given_options, recipe, run
from saving import add_options, measured_by, origin, save
from torch import nn
from training_step import measure_size
from training_step_models import FORMS, Size
from training_step_report import kinds, markdown

from mixer.common.errors import UserError, run_command
from mixer.common.yaml_file import read_yaml
from mixer.training import start

try:
    from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import ScalingType
except ImportError:
    sys.exit("torchao is not installed: pip install --no-deps torchao==0.17.0")

ROOT = Path(__file__).parents[1]
RECIPE, PLAN = ROOT / "configs/recipe.yaml", ROOT / "benchmarks/plans/recipe_512.yaml"

# fp8 is kept if a step is so many times as fast as in bf16, by hidden size, and if the validation
# loss after 1,000 steps is at most so many times that of bf16.
ENOUGH = {1024: 1.10, 2048: 1.25}
LOSS_LIMIT = 1.005

BF16 = "bf16"
WHAT = {
    "tensorwise": "all three products in fp8, one scale a tensor; gradients in e5m2",
    "tensorwise_with_gw_hp": "likewise, the weights' gradients in bf16",
    "rowwise": "all three products in fp8, a scale for each row; e4m3",
    "rowwise_with_gw_hp": "likewise, the weights' gradients in bf16",
}


def main() -> None:
    options, overrides = arguments()
    forms = {BF16: replace(FORMS["recipe"], what="all products in bf16")}
    for name, what in WHAT.items():
        change = partial(convert, name=name, emulate=options.device == "cpu")
        forms[name] = replace(FORMS["recipe"], what=what, change=change)
    FORMS.update(forms)  # where measure_size finds them
    if options.forms[0] != BF16 or not set() < set(options.forms[1:]) <= set(WHAT):
        raise UserError(
            f"--forms {' '.join(options.forms)}; allowed: {BF16} first, then one or more of "
            f"{', '.join(WHAT)}"
        )
    result = measured_by(options, options.device) | {"settings": vars(options), "cases": []}
    for case in timed(options):
        result["cases"].append(case)
        save(result, table(result), options.output)
    if options.steps:
        result["training"] = trained(options, overrides, fastest(result["cases"], options.forms))
    save(result, table(result), options.output)
    print(table(result))


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--forms", nargs="+", default=[BF16, *WHAT], help="bf16 and some of fp8")
    parser.add_argument("--hidden", nargs="*", type=int, default=list(ENOUGH), help="sizes timed")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512, help="the context")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-ms", type=float, default=400.0, help="time of one round of a form")
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    parser.add_argument("--steps", type=int, default=0, help="steps of the runs; 0 for none")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_known_args()


# ------------------------------------------------------------------------- fp8


def convert(model: nn.Module, name: str, emulate: bool) -> None:
    """Exchanges the linear layers inside the blocks for torchao's, which keep the parameters: so
    optimizers find them as before. A forward pass under autocast takes their inputs in its type.
    """
    config = replace(float8_config(name), emulate=emulate)
    output = model.get_output_embeddings()
    convert_to_float8_training(
        model, module_filter_fn=lambda module, _: module is not output, config=config
    )


def float8_config(name: str) -> Float8LinearConfig:
    """torchao's configuration of a form. All scales are of the step's own numbers ("dynamic")."""
    if name != "tensorwise_with_gw_hp":
        return Float8LinearConfig.from_recipe_name(name)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    return Float8LinearConfig(
        cast_config_input_for_grad_weight=CastConfig(ScalingType.DISABLED, target_dtype=e4m3),
        cast_config_grad_output_for_grad_weight=CastConfig(ScalingType.DISABLED, target_dtype=e5m2),
    )


# ------------------------------------------------------------------------- the two measurements


def timed(options: argparse.Namespace) -> Iterator[dict]:
    """Each width, with all forms in interleaved rounds."""
    timing.set_tf32(True)
    torch._dynamo.config.recompile_limit = 1000  # of one function, whose forms are all compiled
    for hidden in options.hidden:
        batch = max(1, options.batch_tokens // options.tokens)
        size = Size(options.tokens, batch, hidden, options.layers, options.vocabulary)
        case = {"hidden": hidden} | measure_size(size, options, math.inf, [])
        yield case | {"speedups": speedups(case["forms"])}


def speedups(rows: dict[str, dict]) -> dict[str, float]:
    """Of the forms in fp8 that ran, how many times as fast as bf16 they are."""
    base = rows[BF16].get("ms", math.nan)
    return {name: base / row["ms"] for name, row in rows.items() if name != BF16 and "ms" in row}


def fastest(cases: list[dict], forms: list[str]) -> str | None:
    """The fastest form in fp8 at the first width; None if at no width any is fast enough. The first
    one that was named, if nothing was timed.
    """
    if not cases:
        return forms[1]
    found = [ratio >= enough(case) for case in cases for ratio in case["speedups"].values()]
    return max(cases[0]["speedups"], key=cases[0]["speedups"].get) if any(found) else None


def enough(case: dict) -> float:
    return ENOUGH.get(case["hidden"], min(ENOUGH.values()))


def trained(options: argparse.Namespace, overrides: list[str], name: str | None) -> dict:
    """The runs of bf16 and of `name`, as benchmarks/recipe.py reports them."""
    if name is None:
        return {}
    settings = read_yaml(PLAN)["common"] | recipe({"recipe": str(RECIPE)})
    settings |= given_options(overrides)
    settings["train.steps"] = options.steps
    runs = {"settings": settings}
    for form in (BF16, name):
        with changed_models(FORMS[form].change):
            runs[form] = run(form, settings)
        print(f"{form}: {runs[form].get('validation') or runs[form]}", flush=True)
    return runs


@contextmanager
def changed_models(change: Callable[[nn.Module], object]) -> Iterator[None]:
    """Here the trainer's models are changed when it has built them, before it compiles them and
    makes their optimizer. It has no place of its own for that.
    """
    parallelize = start.parallelize

    def change_first(model: nn.Module, *others):
        change(model)
        return parallelize(model, *others)

    with mock.patch.object(start, "parallelize", change_first):
        yield


# ------------------------------------------------------------------------- the report


def table(result: dict) -> str:
    parts = ["# Products in fp8", "\n".join(f"- {name}: {WHAT[name]}" for name in WHAT)]
    for case in result["cases"]:
        title = (
            f"## A step at hidden size {case['hidden']}, {case['batch']} x {case['tokens']} tokens"
        )
        limit = f"Fast enough to be kept: {enough(case):.2f} times as fast as bf16."
        parts += [title, times(case), limit, kinds(case)]
    if "training" in result:
        parts += ["## Validation losses", losses(result["training"])]
    parts += [f"Measured on {origin(result)}."]
    return "\n\n".join(part for part in parts if part) + "\n"


def times(case: dict) -> str:
    rows = []
    for name, row in case["forms"].items():
        if "failure" in row:
            rows.append([name, f"failed: {row['failure']}", *["-"] * 4])
            continue
        ratio = f"{case['speedups'][name]:.3f}" if name in case["speedups"] else "1"
        spread = f"{row['low']:.1f}-{row['high']:.1f}"
        memory = f"{row['peak_gb']:.1f}" if "peak_gb" in row else "-"
        first = f"{row['first_step_seconds']:.0f}"
        rows.append([name, f"{row['ms']:.1f}", spread, ratio, memory, first])
    head = ["form", "ms", "spread", "times as fast as bf16", "peak GB", "first step, s"]
    return markdown(head, rows)


def losses(runs: dict) -> str:
    """The two runs, or why there are none."""
    if not runs:
        return "Not trained, as no form is fast enough."
    rows, reference = [], last_loss(runs[BF16])
    for name, one in runs.items():
        if name != "settings":
            steps, seconds = one.get("steps", 0), one.get("training_seconds", math.nan)
            loss, failure = last_loss(one), one.get("failure", "")
            shown = [f"{loss:.4f}", f"{loss / reference:.4f}", f"{steps:,}", f"{seconds:.1f}"]
            rows.append([name, *shown, failure])
    head = ["form", "validation loss", "to that of bf16", "steps", "training, s", "failure"]
    return markdown(head, rows) + f"\n\nNear enough to be kept: {LOSS_LIMIT}, after 1,000 steps."


def last_loss(one: dict) -> float:
    return one["validation"][-1][1] if "validation" in one else math.nan


if __name__ == "__main__":
    run_command(main)
