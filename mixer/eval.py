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

from dataclasses import fields

from mixer.checkpoints.pretrained import settled
from mixer.common.errors import command_parser, run_command
from mixer.distributed.launcher import follow_launcher
from mixer.evaluation.evaluate import EvalOptions, evaluate


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser(None, __doc__)
    text = parser.add_mutually_exclusive_group()
    special = {
        "checkpoint": {"nargs": "+", "required": True, "metavar": "DIR", "type": settled},
        "text": {"nargs": "+", "type": str, "metavar": "FILE"},
    }
    for option in fields(EvalOptions):
        how = {"default": option.default, "help": option.metadata["help"], "metavar": "NAME"}
        if option.metadata["choices"]:
            how |= {"choices": [*filter(None, option.metadata["choices"])], "metavar": None}
        elif not isinstance(option.default, str):
            how |= {"type": int, "metavar": "N"}
        group = text if option.name in ("text", "data", "pairs", "hub") else parser
        flag = "--" + option.name.replace("_", "-")
        group.add_argument(flag, **how | special.get(option.name, {}))
    parser.add_argument("--output", metavar="DIR", help="default: beside the first checkpoint")
    given = vars(parser.parse_args(arguments))
    follow_launcher()
    checkpoints, output = given.pop("checkpoint"), given.pop("output")
    evaluate([EvalOptions(checkpoint=str(path), **given) for path in checkpoints], output)


if __name__ == "__main__":
    run_command(main)
