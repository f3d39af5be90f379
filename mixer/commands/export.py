"""Turn a checkpoint into a directory to publish.

    mixer export runs/v100/best --output my-mixer --license apache-2.0
    hf upload NAME my-mixer

The directory contains what `from_pretrained` needs, the model's code for machines without this
package, and a model card with the run's settings and last losses, but no optimizer state.
"""

import re

from mixer.checkpoints.model_files import existing
from mixer.common.errors import UserError, command_parser, run_command
from mixer.common.files import as_path, check_new
from mixer.evaluation.config import TYPES


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("mixer export", __doc__)
    add = parser.add_argument
    add("checkpoint", type=existing, metavar="DIR", help="a checkpoint of a masked mixer")
    add("--output", type=as_path, required=True, metavar="DIR", help="new; its name is the model's")
    add("--license", required=True, metavar="NAME", help="the model's license, for the card")
    add("--dtype", choices=TYPES, default="fp32", help="type of the weights; default: fp32")
    options = parser.parse_args(arguments)
    if not re.fullmatch(r"[\w.+-]+", options.license):
        allowed = "a name without spaces, such as apache-2.0, mit or other"
        raise UserError(f"--license {options.license!r:.60}; allowed: {allowed}")
    check_new(options.output)
    # Only now, as this takes seconds.
    from mixer.checkpoints.export import export

    export(options.checkpoint, options.output, options.license, options.dtype)


if __name__ == "__main__":
    run_command(main)
