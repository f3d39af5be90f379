"""What a run trains with, settings and data, as its checkpoints record it: compared when the run
goes on, so that nothing changes unsaid, and a start that trains nothing cannot change the record.
"""

import os
from pathlib import Path
from typing import Any

from mixer.common.errors import UserError
from mixer.common.files import as_path, write_text
from mixer.common.terminal import counted
from mixer.common.values import as_yaml
from mixer.data.config import NOT_COMPARED, Manifest

SECTIONS = ("seed", "model", "data", "train", "optim")  # what decides what is trained
# What another start may change though no step is left: they do not change what was trained.
HARMLESS = {"train.steps", "processes"}
# What decides which state the optimizer has: no resume may change it.
OF_OPTIMIZER = {"optim.name", "train.objective"}


def new_record(configuration: dict[str, Any], manifest: Manifest, processes: int) -> dict[str, Any]:
    """The entries of trainer.json that stay as they are while a run trains, of one without earlier
    steps; configuration: its sections.
    """
    settings = {name: configuration[name] for name in SECTIONS} | {"processes": processes}
    data = configuration["data"]
    settings["data"] = {name: data[name] for name in data if name not in NOT_COMPARED}
    return {
        "data": data_identity(manifest, configuration["seed"]),
        "data_directory": data.get("directory", ""),
        "settings": settings,
        "earlier": {},
        "mixing": {},
    }


def data_identity(manifest: Manifest, seed: int) -> dict[str, Any]:
    """What identifies the data and the order of its samples."""
    hashes = {f"{name}.bin": split.tokens_sha256 for name, split in manifest.splits.items()}
    settings = {f"data.{key}": value for key, value in manifest.settings.items()}
    tokenizer = {"tokenizer": manifest.tokenizer_sha256, "vocab_size": manifest.vocab_size}
    return settings | {"seed": seed} | tokenizer | hashes


def changed_settings(settings: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    """The old values, by section.key, of what has changed since the checkpoint of trainer.json.

    Raises UserError where that decides the optimizer's state or the first weights, or where no step
    is left to train with the new values.
    """
    before = by_key(trainer["settings"])
    after = by_key(settings)
    check_init_from(before.pop("train.init_from"), after["train.init_from"])
    changed = {key: before[key] for key in before if key in after and before[key] != after[key]}
    listed = in_words(changed, settings)
    step = trainer["step"]
    if of_optimizer := {key: changed[key] for key in changed if key in OF_OPTIMIZER}:
        raise UserError(
            f"the run has the state of another optimizer: {in_words(of_optimizer, settings)}; "
            "restore it, or choose another name to start afresh"
        )
    if step >= after["train.steps"] and changed.keys() - HARMLESS:
        raise UserError(
            f"the checkpoint has {counted(step, 'step')}, which were trained with other "
            f"settings: {listed}. Restore these, raise train.steps to continue, or choose "
            "another name without checkpoint.resume to start afresh"
        )
    return changed


def by_key(settings: dict[str, Any]) -> dict[str, Any]:
    """{"seed": 0, "train": {"steps": 1}} -> {"seed": 0, "train.steps": 1}"""
    values = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            values |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            values[name] = value
    return values


def in_words(changed: dict[str, Any], settings: dict[str, Any]) -> str:
    after = by_key(settings)
    return ", ".join(f"{key} = {after[key]} (was {old})" for key, old in changed.items())


def check_init_from(recorded: str, init_from: str) -> None:
    """Raises UserError unless `init_from` is the folder that the run has begun from: a run that
    goes on has those weights, and reads no others.
    """
    folders = {os.path.realpath(as_path(name)) for name in (recorded, init_from)}
    if recorded == init_from or (recorded and init_from and len(folders) == 1):
        return
    began = f"from {recorded}" if recorded else "without it"
    remedy = f"set train.init_from={recorded}" if recorded else "leave it out"
    raise UserError(
        f"train.init_from = {init_from!r}, but the run has begun {began}: {remedy}, or choose "
        "another name without checkpoint.resume to start afresh"
    )


def earlier_settings(earlier: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each change of settings in a run, from trainer.json."""
    return [
        f"Until step {step}: {', '.join(f'{key} = {value}' for key, value in changed.items())}"
        for step, changed in earlier.items()
        if changed
    ]


def save_config(
    configuration: dict[str, Any], path: Path, earlier: dict[str, dict[str, Any]]
) -> None:
    """The resolved configuration as YAML, and in comments what earlier steps had in its place."""
    comments = "".join(f"# {line}\n" for line in earlier_settings(earlier))
    write_text(path, comments + as_yaml(configuration))
