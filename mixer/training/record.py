"""What a run trains with. Its checkpoints keep that, so it is compared when the run goes on, and a
start that trains nothing cannot change it.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mixer.checkpoints.format import earlier_settings
from mixer.common.errors import UserError
from mixer.common.files import write_text
from mixer.common.yaml_file import as_yaml
from mixer.data.config import unused_options
from mixer.distributed.world import World
from mixer.training.config import RunConfig, flatten
from mixer.training.optim import learning_rate

SETTINGS = ("seed", "model", "data", "train", "optim")  # what decides what is trained
OF_ONE_MACHINE = ("directory", "workers")  # of the data, which they do not change
# What another start may change though no step is left: they do not change what was trained.
HARMLESS = {"train.steps", "processes"}


def start_record(run: RunConfig, trainer: dict | None, world: World) -> dict[str, Any]:
    """The entries `settings` and `earlier` of trainer.json (see mixer/checkpoints/format.py) for a
    run that goes on from the checkpoint of `trainer`, or begins. Changed settings are said.

    Raises UserError where settings are changed and no step is left to train with them.
    """
    known = used_settings(run)
    settings = {name: known[name] for name in SETTINGS if name in known}
    settings["processes"] = world.size
    settings["data"] = {k: v for k, v in known["data"].items() if k not in OF_ONE_MACHINE}
    if trainer is None:
        return {"settings": settings, "earlier": {}}
    before, now = dict(flatten(trainer.get("settings", {}))), dict(flatten(settings))
    changed = {key: before[key] for key in before if key in now and before[key] != now[key]}
    step, earlier = trainer["step"], trainer.get("earlier", {})
    listed = ", ".join(f"{key} = {now[key]} (was {old})" for key, old in changed.items())
    if step >= run.train.steps:
        if changed.keys() - HARMLESS:
            raise UserError(
                f"{run.directory} has {step} steps, which were trained with other settings: "
                f"{listed}. train.steps = {run.train.steps} leaves none to train with these: "
                "choose another name for another run, set them back, or raise train.steps to go on"
            )
    elif changed:
        world.say(f"settings from step {step + 1} on: {listed}")
        _warn_of_rate(run, changed, step, world)
        earlier = earlier | {str(step): changed}
    return {"settings": settings, "earlier": earlier}


def _warn_of_rate(run: RunConfig, changed: dict[str, Any], step: int, world: World) -> None:
    """Says where the learning rate rises after `step`, as the settings were others before."""
    options = {key.partition(".")[2]: changed[key] for key in changed if key.startswith("optim.")}
    optim, steps = replace(run.optim, **options), changed.get("train.steps", run.train.steps)
    last = learning_rate(optim, step - 1, steps)
    next = learning_rate(optim, step, steps) if step < steps else last  # higher in a warm-up
    now = learning_rate(run.optim, step, run.train.steps)
    if now > 1.1 * max(last, next):
        world.say(
            f"the learning rate jumps from {last:.3g} to {now:.3g}, to that of the new schedule: "
            "the loss may rise. To go on at the old rate set optim.schedule=constant "
            f"optim.lr={last:.3g} optim.warmup_steps=0; for one schedule over all steps train anew "
            "under another name"
        )


def used_settings(run: RunConfig) -> dict[str, Any]:
    """The configuration without the options that its source of data does not use."""
    known = asdict(run)
    for name in unused_options(run.data):
        del known["data"][name]
    return known


def save_config(run: RunConfig, path: Path, earlier: dict[str, dict[str, Any]]) -> None:
    """The resolved configuration as YAML, written whole or not at all. What earlier steps had in
    place of it is said in comments.
    """
    comments = "".join(f"# {line}\n" for line in earlier_settings(earlier))
    write_text(path, comments + as_yaml(used_settings(run)))
