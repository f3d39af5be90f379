"""The metrics of a run: every line goes to metrics.jsonl, and to wandb or TensorBoard if asked
for.
"""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from mixer.common.errors import UserError
from mixer.common.files import write_text
from mixer.common.options import option
from mixer.common.say import Say
from mixer.reporting.metrics_file import readable_lines


@dataclass
class LoggingConfig:
    log_every: int = option(10, "steps between lines of metrics", at_least=1)
    tracker: str = option(
        "none",
        "copy the metrics to wandb (without a network: WANDB_MODE=offline in the environment) or "
        "to TensorBoard",
        choices=("none", "wandb", "tensorboard"),
    )
    wandb_project: str = option("masked-mixer", "wandb's project")
    profile_step: int = option(20, "the first step of a profile", at_least=1)
    profile_steps: int = option(0, "steps to write a Chrome trace of; 0 for none", at_least=0)


class Metrics:
    """Writes the metrics of a run; only the main process has one."""

    def __init__(self, directory: Path, config: LoggingConfig, run: dict, wandb_id: str | None):
        self.path = directory / "metrics.jsonl"
        self._open()
        self.name = config.tracker
        self.tracker = _start_tracker(config, directory, run, wandb_id)
        wandb = self.tracker.tracker if self.tracker and self.name == "wandb" else None
        self.wandb_id = wandb.id if wandb else wandb_id
        self.tracked = wandb.step if wandb else 0  # the tracker has the lines of earlier steps
        self.validation_losses: dict[int, float] = {}  # by step

    def rewind(self, step: int, again: set[str], say: Say = print) -> None:
        """Removes the lines that a killed run wrote after its checkpoint of `step`, so that the
        file has each step once.

        Lines of `step` itself that have one of the keys in `again` are removed too, as they will be
        written again, and so are damaged lines, which `say` names. Lines that the tracker lacks are
        sent to it: wandb's own process may have lost some with the kill.
        """
        kept = []
        for text, line in readable_lines(self.path, say):
            if line["step"] < step or (line["step"] == step and not again & line.keys()):
                kept.append(text + "\n")
                self._note_validation(line)
                if line["step"] >= self.tracked:
                    self._track(line)
        write_text(self.path, "".join(kept))
        self.file.close()
        self._open()

    def write(self, line: dict[str, Any]) -> None:
        """Writes one line, which has at least the key "step". Numbers that are not finite become
        null, as JSON has no others.
        """
        self.file.write(json.dumps({key: in_json(value) for key, value in line.items()}) + "\n")
        self.file.flush()
        self._note_validation(line)
        self._track(line)

    def _open(self) -> None:
        try:
            self.file = open(self.path, "a", encoding="utf-8")
        except FileNotFoundError:  # its directory is there, so it can only be a link
            raise UserError(
                f"{self.path} is a link to where no file can be made ({self.path.resolve()}): make "
                "the directory that it points to, or delete the link"
            ) from None

    def _track(self, line: dict[str, Any]) -> None:
        values = {key: value for key, value in line.items() if key != "step"}
        self._try(lambda: self.tracker.log(values, step=line["step"]))

    def _try(self, call: Callable[[], Any]) -> None:
        """Calls the tracker, if there is one, and stops using it if that fails. wandb has a process
        of its own, which dies if the whole job gets a signal; the run must not end with it.
        """
        if self.tracker is None:
            return
        try:
            call()
        except Exception as error:
            self.tracker = None
            _say_failed(self.name, error)
            if isinstance(error, ConnectionError):
                # Otherwise wandb tries again when Python exits, and prints a traceback.
                import wandb

                with suppress(ConnectionError):
                    wandb.teardown()

    def _note_validation(self, line: dict[str, Any]) -> None:
        if "validation_loss" in line:
            self.validation_losses[line["step"]] = line["validation_loss"]

    def close(self) -> None:
        self.file.close()
        self._try(lambda: self.tracker.finish())


def in_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _start_tracker(
    config: LoggingConfig, directory: Path, run: dict, wandb_id: str | None
) -> GeneralTracker | None:
    name = config.tracker
    if name == "none":
        return None
    try:
        if name == "tensorboard":  # written anew, so that each line is there once
            shutil.rmtree(directory / name, ignore_errors=True)
            tracker = TensorBoardTracker(name, directory)
        else:
            about = {"name": directory.name, "dir": directory, "config": run}
            again = {"id": wandb_id, "resume": "allow"} if wandb_id else {}
            tracker = WandBTracker(config.wandb_project, **about, **again)
        tracker.start()
        return tracker
    except ImportError:
        print(
            f"{name} is not installed: metrics go to metrics.jsonl only (pip install {name})",
            flush=True,
        )
    except Exception as error:  # no network, or nobody logged in
        _say_failed(name, error)
    return None


def _say_failed(name: str, error: Exception) -> None:
    offline = " (WANDB_MODE=offline needs no network)" if name == "wandb" else ""
    print(
        f"{name} has failed, the run goes on without: {type(error).__name__}: {error}; "
        "metrics.jsonl has every line, and the missing ones are sent when the run is resumed"
        f"{offline}",
        flush=True,
    )
