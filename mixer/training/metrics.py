"""The metrics of a run: every line goes to metrics.jsonl, and to wandb if asked for."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixer.common.errors import UserError
from mixer.common.files import write_text
from mixer.common.options import option
from mixer.common.say import Say
from mixer.reporting.metrics_file import readable_lines


@dataclass
class LoggingConfig:
    log_every: int = option(10, "steps between lines of metrics", at_least=1)
    wandb: str = option(
        "disabled", "copy the metrics to wandb", choices=("disabled", "offline", "online")
    )
    wandb_project: str = option("masked-mixer", "wandb's project")
    profile_step: int = option(20, "the first step of a profile", at_least=1)
    profile_steps: int = option(0, "steps to write a Chrome trace of; 0 for none", at_least=0)


class Metrics:
    """Writes the metrics of a run; only the main process has one."""

    def __init__(self, directory: Path, config: LoggingConfig, run: dict, wandb_id: str | None):
        self.path = directory / "metrics.jsonl"
        self._open()
        self.wandb = _start_wandb(config, directory, run, wandb_id)
        self.wandb_id = self.wandb.id if self.wandb else wandb_id
        self.validation_losses: dict[int, float] = {}  # by step

    def rewind(self, step: int, again: set[str], say: Say = print) -> None:
        """Removes the lines that a killed run wrote after its checkpoint of `step`, so that the
        file has each step once.

        Lines of `step` itself that have one of the keys in `again` are removed too, as they will be
        written again, and so are damaged lines, which `say` names. Lines that wandb lacks are sent
        to it: wandb's own process may have lost some with the kill.
        """
        kept = []
        for text, line in readable_lines(self.path, say):
            if line["step"] < step or (line["step"] == step and not again & line.keys()):
                kept.append(text + "\n")
                self._note_validation(line)
                if self.wandb and line["step"] >= self.wandb.step:
                    self._mirror(line)
        write_text(self.path, "".join(kept))
        self.file.close()
        self._open()

    def write(self, line: dict[str, Any]) -> None:
        """Writes one line, which has at least the key "step". Numbers that are not finite become
        null, as JSON has no others.
        """
        self.file.write(json.dumps({key: _in_json(value) for key, value in line.items()}) + "\n")
        self.file.flush()
        self._note_validation(line)
        if self.wandb:
            self._mirror(line)

    def _open(self) -> None:
        try:
            self.file = open(self.path, "a", encoding="utf-8")
        except FileNotFoundError:  # its directory is there, so it can only be a link
            raise UserError(
                f"{self.path} is a link to where no file can be made ({self.path.resolve()}): make "
                "the directory that it points to, or delete the link"
            ) from None

    def _mirror(self, line: dict[str, Any]) -> None:
        values = {key: value for key, value in line.items() if key != "step"}
        self._try(lambda: self.wandb.log(values, step=line["step"]))

    def _try(self, call: Callable[[], Any]) -> None:
        """Calls wandb, and stops using it if that fails. wandb has a process of its own, which dies
        if the whole job gets a signal; the run must not end with it.
        """
        try:
            call()
        except Exception as error:
            self.wandb = None
            _say_failed(error)
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
        if self.wandb:
            self._try(self.wandb.finish)


def _in_json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _start_wandb(config: LoggingConfig, directory: Path, run: dict, wandb_id: str | None):
    if config.wandb == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        print(
            "wandb is not installed: metrics go to metrics.jsonl only (pip install wandb)",
            flush=True,
        )
        return None
    try:
        return wandb.init(
            project=config.wandb_project,
            name=directory.name,
            dir=directory,
            mode=config.wandb,
            config=run,
            id=wandb_id,
            resume="allow" if wandb_id else None,
        )
    except Exception as error:  # no network, or nobody logged in
        _say_failed(error)
        return None


def _say_failed(error: Exception) -> None:
    print(
        f"wandb has failed, the run goes on without: {type(error).__name__}: {error}; "
        "metrics.jsonl has every line, and wandb gets the missing ones when the run is resumed "
        "(logging.wandb=offline needs no network)",
        flush=True,
    )
