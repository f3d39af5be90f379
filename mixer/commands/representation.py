"""The representation test of arXiv 2409.01482: how much of a text can be recovered from a layer's
output, in any causal language model, with its trained weights and with random ones.

    mixer representation --checkpoint runs/demo/step-600
    mixer representation --checkpoint path/to/gpt2 --text book.txt --layers 1 6

mixer/evaluation/representation.py says how.
"""

import json

from mixer.checkpoints.model_files import existing
from mixer.common.errors import command_parser, run_command
from mixer.common.files import (
    as_path,
    check_writable,
    directory_for,
    results_locked,
    whole_directory,
)
from mixer.evaluation.config import DEVICES, EvalOptions, check_options
from mixer.reporting.text import shown_width


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("mixer representation", __doc__)
    add = parser.add_argument
    layers_help = "blocks, from 1; 0: the embedding; default: all"
    tokens_help = "text lengths; default: those of 16, 32, 64 and 128 that fit"
    steps_help = "gradient descent steps; default: 500"
    add("--checkpoint", required=True, type=existing, metavar="DIR", help="a causal model")
    add("--data", default="", metavar="DIR", help="prepared data; default: the run's")
    add("--text", nargs="+", default=[], metavar="FILE", help="files instead; the longest is used")
    add("--layers", nargs="+", type=int, metavar="N", help=layers_help)
    add("--tokens", nargs="+", type=int, metavar="N", help=tokens_help)
    add("--steps", type=int, metavar="N", default=500, help=steps_help)
    add("--device", default="auto", choices=DEVICES)
    add("--output", metavar="DIR", help="default: CHECKPOINT/../representation-<checkpoint>")
    options = parser.parse_args(arguments)
    output = as_path(options.output or directory_for(options.checkpoint, "representation"))
    check_writable(output)
    source = EvalOptions(
        checkpoint=str(options.checkpoint),
        text=options.text,
        data=options.data,
        device=options.device,
    )
    check_options(source)
    # Only now, as this takes seconds.
    from mixer.evaluation.representation import report, representation

    with results_locked(output):
        result = representation(source, options.layers, options.tokens, options.steps)
        print(report(result, shown_width()))
        with whole_directory(output) as stage:
            (stage / "representation.md").write_text(f"# Representation\n\n{report(result)}\n")
            (stage / "representation.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nrepresentation.json and .md are in {output}")


if __name__ == "__main__":
    run_command(main)
