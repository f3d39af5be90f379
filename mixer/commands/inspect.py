"""Draw the mixing matrices of a checkpoint.

    mixer inspect --checkpoint runs/demo/step-600

The command writes a page with statistics of all matrices, heat maps, and a plot of how far back
they reach. A matrix W is (context, context) and lower-triangular: token i receives W[i, j] of
token j, at lag i - j.
"""

from mixer.checkpoints.model_files import existing
from mixer.common.errors import command_parser, run_command
from mixer.common.files import as_path, check_writable, directory_for


def main(arguments: list[str] | None = None) -> None:
    parser = command_parser("mixer inspect", __doc__)
    parser.add_argument("--checkpoint", type=existing, required=True, help="a masked mixer")
    parser.add_argument("--output", help="default: CHECKPOINT/../inspect-<checkpoint>")
    options = parser.parse_args(arguments)
    output = as_path(options.output or directory_for(options.checkpoint, "inspect"))
    check_writable(output)
    # Only now, as this takes seconds.
    from mixer.evaluation.matrices import write_matrices

    write_matrices(options.checkpoint, output)
    print(output / "index.md")


if __name__ == "__main__":
    run_command(main)
