"""Evaluate checkpoints: perplexity per token, word and byte, bits per byte, loss by position.

python eval.py --checkpoint runs/demo/step-200                  # the validation split of the run's own data
python eval.py --checkpoint runs/demo/step-200 --text book.txt  # any UTF-8 text
"""

import argparse
from dataclasses import fields
from pathlib import Path

from mixer.errors import run_command


def parse(arguments=None) -> argparse.Namespace:
    from mixer.evaluate import BACKENDS, DTYPES, FIRST_TOKEN, EvalOptions

    defaults = {f.name: f.default for f in fields(EvalOptions)}
    helps = {f.name: f.metadata["help"] for f in fields(EvalOptions)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", nargs="+", required=True, metavar="DIR", help=helps["checkpoint"])
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", nargs="+", metavar="FILE", default=[], help=helps["text"])
    text.add_argument("--data", metavar="DIR", default="", help=helps["data"])
    for name in ("stride", "batch_size", "max_tokens"):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, metavar="N", default=defaults[name], help=helps[name])
    choices = {"device": ("auto", "cpu", "cuda"), "dtype": DTYPES, "backend": BACKENDS, "first_token": FIRST_TOKEN}
    for name, allowed in choices.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, choices=list(allowed), default=defaults[name], help=helps[name])
    parser.add_argument("--output", metavar="DIR", help="where the report goes (default: CHECKPOINT/../eval-<checkpoint>)")
    return parser.parse_args(arguments)


def main(arguments=None) -> None:
    from mixer.evaluate import EvalOptions, evaluate_checkpoint
    from mixer.report import evaluation_table, write_evaluation

    options = parse(arguments)
    settings = {key: value for key, value in vars(options).items() if key not in ("checkpoint", "output")}
    results = [evaluate_checkpoint(EvalOptions(checkpoint=path, **settings)) for path in options.checkpoint]
    first = Path(options.checkpoint[0])
    output = Path(options.output) if options.output else first.parent / f"eval-{first.resolve().name}"
    print(evaluation_table(results))
    print(f"\nreport.json, report.md and loss_by_position.png are in {write_evaluation(results, output)}")


if __name__ == "__main__":
    run_command(main)
