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
from mixer.data.corpus import Corpus, Place, batches, rows
from mixer.data.manifest import SPLITS
from mixer.data.tokenise import Counts, Tokenise, Tokens
from mixer.data.workers import available_cores, results

PROGRESS_FILE = "progress.json"
KINDS = {"identity": str, "tokenizer_bytes": int, "tokenizer_loses": str}
KINDS |= {"place": list, "splits": dict}
REPORT_SECONDS = 5.0
IS_DELETED = "what was left of the preparation is deleted; give the same command again"


@dataclass
class Progress:
    """How far a preparation is: the token files hold `splits`, all of the corpus up to `place`.
    identity: what a preparation that goes on must have in common with it.
    """

    identity: str
    tokenizer_bytes: int
    tokenizer_loses: str  # see tokenizer.loss_of_text
    place: Place = Place()
    splits: dict[str, Counts] = field(default_factory=lambda: {name: Counts() for name in SPLITS})

    @property
    def total(self) -> Counts:
        return sum(self.splits.values(), Counts())

    @classmethod
    def load(cls, directory: Path, identity: str) -> "Progress | None":
        """That of an earlier call for the same; None if there is none."""
        if not (directory / PROGRESS_FILE).is_file():
            return None
        values = read_json(directory / PROGRESS_FILE, IS_DELETED, {"identity": str}, KINDS)
        if values["identity"] != identity:
            return None
        splits = {name: Counts(**counts) for name, counts in values["splits"].items()}
        return cls(**values | {"place": Place(*values["place"]), "splits": splits})

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
    left = rows(corpus, config, progress.place, before.documents)
    made = results(task, batches(left), config.workers or available_cores())
    with ExitStack() as opened:
        files = {}
        for name, counts in progress.splits.items():
            sizes = {".bin": counts.tokens * np.dtype(task.dtype).itemsize}
            sizes[".docs.bin"] = counts.documents * 8
            for kind, size in sizes.items():
                file = _open_at(directory / f"{name}{kind}", size)
                files[f"{name}{kind}"] = opened.enter_context(file)
        # closing ends the workers, also where appending fails
        for batch, splits in opened.enter_context(closing(made)):
            append(splits, progress, files)
            progress.place = batch.end
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
    speed, token_speed = (done.bytes - before.bytes), (done.tokens - before.tokens)
    return (
        f"tokenised: {done.documents} documents ({held_out} of them for validation), "
        f"{done.bytes / 1e6:.1f} MB, {done.tokens / 1e6:.2f} M tokens in {seconds:.1f} s "
        f"({speed / seconds / 1e6:.2f} MB/s, {token_speed / seconds:.0f} tokens/s)"
    )
