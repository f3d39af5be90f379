"""How far tokenising is: saved, so that it can go on after a kill, and said."""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from mixer.common.json_file import read_json
from mixer.common.say import Say
from mixer.data.manifest import SPLITS
from mixer.data.tokenise import IS_DELETED, Counts, totals

PROGRESS_FILE = "progress.json"
REPORT_SECONDS = 5.0


@dataclass
class Progress:
    """How far a preparation is: `shards` of them are in the token files, which hold `splits`."""

    tokenizer_bytes: int
    tokenizer_loses: str = ""  # see tokenizer.loss_of_text
    shards: int = 0
    splits: dict[str, Counts] = field(default_factory=lambda: {name: Counts() for name in SPLITS})

    @property
    def documents(self) -> int:
        return sum(counts.documents for counts in self.splits.values())

    @classmethod
    def load(cls, file: Path) -> "Progress":
        kinds = {"tokenizer_bytes": int, "shards": int, "splits": dict}
        values = read_json(file, IS_DELETED, required=kinds)
        return cls(**values | {"splits": {k: Counts(**v) for k, v in values["splits"].items()}})

    def save(self, file: Path) -> None:
        """In one step, but not flushed to the disk, which would take longer than the work."""
        stage = file.with_name(file.name + ".partial")
        stage.write_text(json.dumps(asdict(self)))
        os.replace(stage, file)


class Meter:
    """Says every few seconds how far tokenising is, and at the end what it came to."""

    def __init__(self, progress: Progress, say: Say):
        self.progress, self.say = progress, say
        self.began = self.reported = time.perf_counter()
        self.before = totals(progress.splits.values())  # done by an earlier call
        self.done = self.before

    def update(self, more: tuple[int, int, int]) -> None:
        """Adds what a worker has done since its last update (see `TokeniseShard`)."""
        self.done = tuple(np.add(self.done, more).tolist())
        if time.perf_counter() - self.reported > REPORT_SECONDS:
            self.reported = time.perf_counter()
            self._report(self.done)

    def finish(self) -> None:
        self._report(totals(self.progress.splits.values()))

    def _report(self, done: tuple[int, int, int]) -> None:
        documents, size, tokens = done
        seconds = max(time.perf_counter() - self.began, 1e-9)
        speed, token_speed = (size - self.before[1]) / seconds, (tokens - self.before[2]) / seconds
        self.say(
            f"tokenised: {documents} documents, {size / 1e6:.1f} MB, {tokens / 1e6:.2f} M tokens "
            f"in {seconds:.1f} s ({speed / 1e6:.2f} MB/s, {token_speed:.0f} tokens/s)"
        )
