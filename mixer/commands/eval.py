"""Evaluate checkpoints: perplexity per token, word and byte, loss by position, speed and memory.

On the validation split of the run:
    mixer eval --checkpoint runs/demo/step-600
On any UTF-8 text, alongside any causal language model:
    mixer eval --checkpoint runs/demo/step-600 path/to/gpt2 --text book.txt
On a dataset of the hub:
    mixer eval --checkpoint runs/demo/step-600 --hub Salesforce/wikitext \\
        --subset wikitext-103-raw-v1
How well queries find documents, of a collection in BEIR's layout:
    mixer eval --checkpoint runs/pairs/best --retrieval scifact
On several GPUs, which share the windows:
    accelerate launch --multi_gpu eval.py --checkpoint runs/v100/step-200000
With the conventions of lm-evaluation-harness:
    mixer eval ... --first-token eos --last-window full
"""

from dataclasses import Field, fields
from functools import partial

from mixer.checkpoints.model_files import existing
from mixer.common.errors import command_parser, run_command
from mixer.common.files import as_path, check_writable
from mixer.common.ranks import rank
from mixer.distributed.launcher import follow_launcher
from mixer.evaluation.config import SOURCES, EvalOptions, check_options, default_directory


def main(arguments: list[str] | None = None) -> None:
    follow_launcher()
    is_main = rank() == 0
    parser = command_parser("mixer eval", __doc__)
    sources = parser.add_mutually_exclusive_group()
    for field in fields(EvalOptions):
        add_option(sources if field.name in SOURCES else parser, field)
    parser.add_argument("--output", metavar="DIR", help="default: beside the first checkpoint")
    options = vars(parser.parse_args(arguments))
    checkpoints = options.pop("checkpoint")
    output = options.pop("output")
    evaluations = [EvalOptions(checkpoint=str(path), **options) for path in checkpoints]
    for evaluation in evaluations:
        check_options(evaluation)
    directory = as_path(output or default_directory(evaluations))
    if is_main:
        check_writable(directory)
    # Only now, as this takes seconds.
    from mixer.evaluation.evaluate import evaluate

    evaluate(evaluations, directory)


def add_option(group, field: Field) -> None:
    """Adds the option for a field of EvalOptions to a parser, or to a group of its options."""
    flag = "--" + field.name.replace("_", "-")
    add = partial(group.add_argument, flag, default=field.default, help=field.metadata["help"])
    if field.name == "checkpoint":
        add(nargs="+", required=True, type=existing, metavar="DIR")
    elif field.name == "text":
        add(nargs="+", metavar="FILE")
    elif field.metadata["choices"]:
        add(choices=[choice for choice in field.metadata["choices"] if choice])
    elif isinstance(field.default, str):
        add(metavar="NAME")
    else:
        add(type=int, metavar="N")


if __name__ == "__main__":
    run_command(main)
