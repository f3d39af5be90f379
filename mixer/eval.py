"""Evaluate checkpoints: perplexity per token, word and byte, loss by position, speed and memory.

On the validation split of the run:
    python eval.py --checkpoint runs/demo/step-600
On any UTF-8 text, alongside any causal language model:
    python eval.py --checkpoint runs/demo/step-600 path/to/gpt2 --text book.txt
On a dataset of the hub:
    python eval.py --checkpoint runs/demo/step-600 --hub Salesforce/wikitext \\
        --subset wikitext-103-raw-v1
On several GPUs, which share the windows:
    accelerate launch --multi_gpu eval.py --checkpoint runs/v100/step-200000
With the conventions of lm-evaluation-harness:
    python eval.py ... --first-token eos --last-window full
"""

from dataclasses import Field, fields
from functools import partial

from mixer.checkpoints.pretrained import settled
from mixer.common.errors import command_parser, run_command
from mixer.distributed.launcher import follow_launcher
from mixer.evaluation.evaluate import EvalOptions, evaluate

SOURCES = ("text", "data", "pairs", "hub")  # of which at most one is given


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser(None, __doc__)
    sources = parser.add_mutually_exclusive_group()
    for field in fields(EvalOptions):
        add_option(sources if field.name in SOURCES else parser, field)
    parser.add_argument("--output", metavar="DIR", help="default: beside the first checkpoint")
    options = vars(parser.parse_args(arguments))
    follow_launcher()
    checkpoints = options.pop("checkpoint")
    output = options.pop("output")
    evaluate([EvalOptions(checkpoint=str(path), **options) for path in checkpoints], output)


def add_option(group, field: Field) -> None:
    """Adds the option for a field of EvalOptions to a parser, or to a group of its options."""
    flag = "--" + field.name.replace("_", "-")
    add = partial(group.add_argument, flag, default=field.default, help=field.metadata["help"])
    if field.name == "checkpoint":
        add(nargs="+", required=True, type=settled, metavar="DIR")
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
