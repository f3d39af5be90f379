"""Where a run's numbers go: metrics.jsonl always, the terminal, and wandb where asked for."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class LoggingConfig:
    log_every: int = field(default=10, metadata={"help": "steps between lines of metrics"})
    wandb: str = field(default="disabled", metadata={"help": "mirror the metrics to wandb: disabled, offline or online"})
    wandb_project: str = field(default="masked-mixer", metadata={"help": "wandb's project"})


class Metrics:
    """The metrics of one run, written by its main process alone.

    Resuming at step N drops the lines of later steps, which the killed run wrote after its last checkpoint, so that no
    step stands there twice.
    """

    def __init__(self, directory: Path, config: LoggingConfig, resumed_step: int, run: dict, wandb_id: str | None):
        self.path = directory / "metrics.jsonl"
        _keep_lines_through(self.path, resumed_step)
        self.file = open(self.path, "a", encoding="utf-8")
        self.wandb = _start_wandb(config, directory, run, wandb_id)
        self.wandb_id = self.wandb.id if self.wandb else None

    def write(self, line: dict[str, Any]) -> None:
        """One JSON line, flushed; the same to wandb. `line` holds at least "step"."""
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log({k: v for k, v in line.items() if k != "step"}, step=line["step"])

    def close(self) -> None:
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def _keep_lines_through(path: Path, step: int) -> None:
    """Rewrites the file with the lines up to `step`; a line cut short by a kill goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    os.replace(partial, path)


def _start_wandb(config: LoggingConfig, directory: Path, run: dict, wandb_id: str | None):
    if config.wandb == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        print("wandb is not installed: metrics go to metrics.jsonl alone (pip install wandb)", flush=True)
        return None
    return wandb.init(
        project=config.wandb_project,
        name=directory.name,
        dir=directory,
        mode=config.wandb,
        config=run,
        id=wandb_id,
        resume="allow" if wandb_id else None,
    )
