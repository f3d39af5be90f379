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
from mixer.reporting.matrices import write_pages


def inspect(checkpoints: list[str], output: Path) -> Path:
    """Writes the pages about the last checkpoint, and its change since another if there are two,
    into `output`, and returns their index.

    Raises UserError for a directory that is not a checkpoint of a masked mixer, and for checkpoints
    of different models.
    """
    read = {name: mixing_matrices(load_masked_mixer(Path(name))) for name in checkpoints}
    shapes = [
        [{name: x.shape for name, x in layer.items()} for layer in layers]
        for layers in read.values()
    ]
    if shapes[0] != shapes[-1]:
        raise UserError(
            f"{checkpoints[-1]} has other layers, heads, taps or context than {checkpoints[0]}, so "
            "there is no change to show: give checkpoints of one model, or one alone"
        )
    return write_pages(read, output)


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixer.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    how = {"nargs": "+", "type": settled, "required": True, "metavar": "DIR"}
    which = "one to picture, or an earlier one and that"
    parser.add_argument("--checkpoint", **how, help=which)
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
