"""The files of a masked mixer or any other causal language model that transformers knows: a
directory is checked here, with every fault named, before anything is loaded.

Importing this file takes no time.
"""

import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mixer.checkpoints.checkpoint import REMEDY, STATE, damage
from mixer.common.errors import UserError
from mixer.common.files import as_path, check_writable, read_json

# A number of layers in config.json, under the names that configurations of transformers have.
LAYERS = re.compile(r'"(num_hidden_layers|num_layers|n_layers?)": *(-?\d+)')


def settled(checkpoint: str | Path) -> Path:
    """The checkpoint that a link such as runs/demo/best points to now. Training may move the link
    while a command reads several files.
    """
    checkpoint = as_path(checkpoint)
    return as_path(os.path.realpath(checkpoint)) if checkpoint.is_symlink() else checkpoint


def existing(checkpoint: str | Path) -> Path:
    """`settled`, of a directory that has a model. Raises UserError naming what it lacks."""
    directory = settled(checkpoint)
    files = [directory / "config.json", *weight_files(directory)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise _no_checkpoint(directory, missing)
    return directory


def refused(checkpoint: Path, problem: str, advice: str = "") -> UserError:
    return UserError(f"checkpoint {checkpoint} {problem}: {REMEDY}{advice}")


def check_checkpoint(directory: Path) -> None:
    """Raises UserError naming what a checkpoint directory lacks, or which of its files is cut short
    or not what training wrote. Loads nothing.
    """
    existing(directory)
    if re.fullmatch(r"step-\d+(\.old)?\.partial", directory.name):
        raise refused(directory, "was being written or deleted")
    if (directory / STATE).is_dir():  # a model from elsewhere has none
        problem = damage(directory, for_resume=False)
        if problem is not None:
            remedy = f"to edit a checkpoint, delete {STATE}/ from a copy"
            raise refused(directory, f"is damaged: {problem}; {remedy}")
    if (directory / "adapter_config.json").is_file():
        raise refused(directory, "has an adapter, adapter_config.json, which changes its weights")
    config = directory / "config.json"
    read_json(config, REMEDY)
    tensors = len(weight_types(directory))
    # Before anything has as many layers as config.json says.
    for name, layers in LAYERS.findall(config.read_text(encoding="utf-8")):
        if not 1 <= float(layers) <= tensors:
            has = f"has {name} {layers:.60} in its config.json, and {tensors} tensors of weights"
            raise refused(directory, has)


def _no_checkpoint(directory: Path, missing: list[str]) -> UserError:
    """Of a directory that lacks files, with the checkpoints that are near it."""
    run = directory if directory.is_dir() else directory.parent
    newest = sorted(run.glob("step-*[0-9]/config.json"), key=os.path.getmtime)[-4:]
    checkpoints = [str(file.parent) for file in (*run.glob("best/config.json"), *newest)]
    advice = f"give {' or '.join(checkpoints) or 'RUN/best or RUN/step-N'}"
    if not directory.is_dir():
        nor = "" if run.is_dir() else f", nor {run}"
        return UserError(f"checkpoint {directory}: there is no such directory{nor}; {advice}")
    if checkpoints:
        return UserError(f"{directory} is a run, not a checkpoint: {advice}")
    of_runs = [*directory.glob("*/best/config.json")] or [*directory.glob("*/step-*/config.json")]
    if of_runs:
        listed = " or ".join(str(file.parent) for file in sorted(of_runs)[:4])
        return UserError(f"{directory} is a folder of runs, not a checkpoint: give {listed}")
    lacks = f"lacks {', '.join(missing)} (weights are read as safetensors, not pickled)"
    return refused(directory, lacks)


def weight_files(directory: Path) -> list[Path]:
    """The files that transformers reads: model.safetensors, or else the shards in the index."""
    file = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if file.is_file() or not index.is_file():
        return [file]
    shards = read_json(index, REMEDY, required={"weight_map": dict})["weight_map"].values()
    return [directory / name for name in sorted(set(map(str, shards)))]


def weight_types(directory: Path) -> dict[str, str]:
    """The type of each tensor, by name, from the headers of the weight files. This also finds a
    file that is cut short, because safetensors compares its length with the header.
    """
    types = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, "np") as opened:
                types |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}
        except (SafetensorError, OSError) as error:
            raise refused(directory, f"has {file.name} damaged or cut short ({error})") from None
    return types


def check_weights_file(file: Path) -> None:
    """Raises UserError unless it is a safetensors file of the author's."""
    try:
        with safe_open(file, "np"):
            pass
    except (OSError, SafetensorError) as error:
        problem = "is a directory" if file.is_dir() else f"cannot be read ({error})"
        allowed = "a .safetensors file, or a checkpoint with --back or --mixing-weight"
        raise UserError(f"{file} {problem}; give {allowed}") from None


def check_new_weights(output: Path) -> None:
    """Raises UserError unless `output` can be a new file of weights."""
    if output.exists() or output.suffix != ".safetensors":
        raise UserError(
            f"--output is {output}; with --back give a .safetensors file that does not exist yet"
        )
    check_writable(output.parent)
