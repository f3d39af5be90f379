"""Pictures of what was learned: the mixing matrices of a checkpoint, and how they changed since an
earlier one.

    python -m mixer.inspect --checkpoint runs/demo/step-600
    python -m mixer.inspect --checkpoint runs/demo/step-400 runs/demo/step-600

The last checkpoint is pictured, and its change is since the first.
"""

import argparse
from pathlib import Path

from mixer.analysis.matrices import mixing_matrices
from mixer.checkpoints.pretrained import load_masked_mixer, settled
from mixer.common.errors import UserError, run_command
from mixer.common.files import check_writable, directory_for
from mixer.reporting.matrices import Layers, write_pages


def inspect(checkpoints: list[str], output: Path) -> Path:
    """Writes the pages about the last checkpoint, and its change since the first, into `output`,
    and returns their index.

    Raises UserError for a directory that is not a checkpoint of a masked mixer, and for checkpoints
    of different models.
    """
    read = {
        checkpoint: mixing_matrices(load_masked_mixer(Path(checkpoint)))
        for checkpoint in (checkpoints[0], checkpoints[-1])
    }
    check_same_shape(read)
    return write_pages(read, output)


def check_same_shape(read: dict[str, Layers]) -> None:
    """Raises UserError unless all checkpoints have the same matrices."""
    shapes = [
        [{name: matrix.shape for name, matrix in layer.items()} for layer in layers]
        for layers in read.values()
    ]
    if shapes[0] != shapes[-1]:
        first, last = read
        raise UserError(
            f"{last} has other layers, heads, taps or context than {first}, so there is no change "
            "to show: give checkpoints of one model, or inspect them one by one"
        )


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    how = {"nargs": "+", "type": settled, "required": True, "metavar": "DIR"}
    what = "one to picture, or an earlier one and that"
    parser.add_argument("--checkpoint", **how, help=what)
    where = "where the pages go (default: CHECKPOINT/../inspect-<checkpoint>)"
    parser.add_argument("--output", metavar="DIR", help=where)
    options = parser.parse_args(arguments)
    if len(options.checkpoint) > 2:
        raise UserError(
            f"--checkpoint has {len(options.checkpoint)} directories; give the one to picture, or "
            "an earlier one and that"
        )
    output = Path(options.output or directory_for(options.checkpoint[-1], "inspect"))
    check_writable(output)
    print(inspect(list(map(str, options.checkpoint)), output))


if __name__ == "__main__":
    run_command(main)
