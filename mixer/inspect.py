"""Pictures of what was learned: the mixing matrices of a checkpoint.

python -m mixer.inspect --checkpoint runs/demo/step-600
"""

from pathlib import Path

from mixer.checkpoints.pretrained import load_masked_mixer, settled
from mixer.common.errors import command_parser, run_command
from mixer.common.files import check_writable, directory_for
from mixer.reporting.matrices import mixing_matrices, write_pages


def main(arguments=None) -> None:
    parser = command_parser("mixer.inspect", __doc__)
    how = {"type": settled, "required": True, "metavar": "DIR"}
    parser.add_argument("--checkpoint", **how, help="of a masked mixer")
    where = "where the pages go (default: CHECKPOINT/../inspect-<checkpoint>)"
    parser.add_argument("--output", metavar="DIR", help=where)
    options = parser.parse_args(arguments)
    output = Path(options.output or directory_for(options.checkpoint, "inspect"))
    check_writable(output)
    layers = mixing_matrices(load_masked_mixer(options.checkpoint))
    print(write_pages(str(options.checkpoint), layers, output))


if __name__ == "__main__":
    run_command(main)
