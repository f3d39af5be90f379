"""Writes the token files: batches of the corpus are tokenised by the workers and appended in order.

The files hold what the saved `Progress` says. A process that is killed may leave more, which the
next one cuts off before it goes on.
"""

import json
import os
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mixer.common.errors import UserError
from mixer.common.json_file import read_json
from mixer.common.say import Say
from mixer.data.config import DataConfig
from mixer.data.corpus import Corpus, batches
from mixer.data.manifest import SPLITS, file_sizes
from mixer.data.tokenise import Counts, Tokenise, Tokens
from mixer.data.workers import available_cores, results

PROGRESS_FILE = "progress.json"
REPORT_SECONDS = 5.0
IS_DELETED = "what was left of the preparation is deleted; give the same command again"


@dataclass
class Progress:
    """How far a preparation is: the token files hold `splits`, all up to row `rows` of part number
    `part` of the corpus. identity: what a preparation that goes on must have in common with it.
    """

    identity: str
    tokenizer_bytes: int
    tokenizer_loses: str = ""  # see tokenizer.loss_of_text
    part: int = 0
    rows: int = 0
    splits: dict[str, Counts] = field(default_factory=lambda: {name: Counts() for name in SPLITS})

    @property
    def total(self) -> Counts:
        return sum(self.splits.values(), Counts())

    @classmethod
    def load(cls, directory: Path) -> "Progress | None":
        """That of an earlier call; None if there is none."""
        if not (directory / PROGRESS_FILE).is_file():
            return None
        kinds = {"identity": str, "tokenizer_bytes": int, "part": int, "rows": int, "splits": dict}
        values = read_json(directory / PROGRESS_FILE, IS_DELETED, required=kinds)
        return cls(**values | {"splits": {k: Counts(**v) for k, v in values["splits"].items()}})

    def save(self, directory: Path) -> None:
        """In one step, but not flushed to the disk, which would take longer than the work."""
        stage = directory / f"{PROGRESS_FILE}.partial"
        stage.write_text(json.dumps(asdict(self)))
        os.replace(stage, directory / PROGRESS_FILE)


def write_tokens(
    config: DataConfig,
    corpus: Corpus,
    task: Tokenise,
    progress: Progress,
    directory: Path,
    say: Say,
) -> None:
    """Append all of the corpus that is not in the token files of `directory` yet, and keep
    `progress` there. Every few seconds `say` is told how far it is.
    """
    before, began = progress.total, time.perf_counter()
    said = began
    most = config.workers or available_cores()
    start = progress.part, progress.rows, before.documents
    jobs = batches(corpus, config, *start)
    with ExitStack() as opened:
        files = {
            file: opened.enter_context(_open_at(directory / file, size))
            for name, counts in progress.splits.items()
            for file, size in file_sizes(name, counts, task.dtype).items()
        }
        # closing ends the workers, also where appending fails
        for batch, splits in opened.enter_context(closing(results(task, jobs, most))):
            append(splits, progress, files)
            progress.part, progress.rows = batch.part, batch.rows
            progress.save(directory)
            if time.perf_counter() - said > REPORT_SECONDS:
                said = time.perf_counter()
                say(_report(progress, before, said - began))
    say(_report(progress, before, time.perf_counter() - began))


def _open_at(file: Path, size: int) -> BinaryIO:
    opened = open(file, "ab")
    if opened.tell() < size:
        raise UserError(f"{file} is shorter than it was left: {IS_DELETED}")
    opened.truncate(size)
    return opened


def append(splits: dict[str, Tokens], progress: Progress, files: dict[str, BinaryIO]) -> None:
    """Append the tokens and the ends of documents, and count them in `progress`."""
    for name, tokens in splits.items():
        ends = np.array(tokens.ends, "<u8") + np.uint64(progress.splits[name].tokens)
        for file, data in ((f"{name}.bin", tokens.ids), (f"{name}.docs.bin", ends.tobytes())):
            files[file].write(data)
            files[file].flush()
        progress.splits[name] += tokens.counts


def _report(progress: Progress, before: Counts, seconds: float) -> str:
    done, held_out = progress.total, progress.splits["validation"].documents
    seconds = max(seconds, 1e-9)
    speed, token_speed = (done.bytes - before.bytes), (done.tokens - before.tokens)
    return (
        f"tokenised: {done.documents} documents ({held_out} of them for validation), "
        f"{done.bytes / 1e6:.1f} MB, {done.tokens / 1e6:.2f} M tokens in {seconds:.1f} s "
        f"({speed / seconds / 1e6:.2f} MB/s, {token_speed / seconds:.0f} tokens/s)"
    )
