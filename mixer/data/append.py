"""The token files of data that is being prepared: finished shards are appended to them in order.

They hold what the saved `Progress` says: a process that is killed may leave more, which is cut off.
"""

import shutil
from pathlib import Path

import numpy as np

from mixer.common.checksums import sha256
from mixer.common.errors import UserError
from mixer.data.progress import PROGRESS_FILE, Progress
from mixer.data.tokenise import IS_DELETED, Counts, Job

BLOCK = 1 << 24  # bytes copied at once


class SplitFiles:
    """The two files of a split, which shards are appended to."""

    def __init__(self, directory: Path, name: str, dtype: str, counts: Counts):
        self.name, self.files = name, []
        sizes = {
            ".bin": counts.tokens * np.dtype(dtype).itemsize,
            ".docs.bin": counts.documents * 8,
        }
        for suffix, size in sizes.items():
            file = open(directory / f"{name}{suffix}", "ab", buffering=0)
            if file.tell() < size:
                raise UserError(f"{file.name} is shorter than it was left: {IS_DELETED}")
            file.truncate(size)
            self.files.append(file)

    def append(self, shard: Path, counts: Counts) -> None:
        """counts: of the split before this shard."""
        with open(shard / f"{self.name}.bin", "rb") as tokens:
            while block := tokens.read(BLOCK):
                self._write(0, block)
        ends = np.fromfile(shard / f"{self.name}.docs.bin", dtype="<u8")
        self._write(1, (ends + np.uint64(counts.tokens)).tobytes())

    def _write(self, file: int, data: bytes) -> None:
        left = memoryview(data)
        while left:  # an unbuffered file may take a part
            left = left[self.files[file].write(left) :]

    def close(self) -> dict[str, str]:
        """The files' hashes, under the manifest's names."""
        for file in self.files:
            file.close()
        names = ("tokens_sha256", "documents_sha256")
        return {name: sha256(file.name) for name, file in zip(names, self.files, strict=True)}


def append_shard(
    job: Job,
    shard: Path,
    counts: dict[str, Counts],
    progress: Progress,
    files: dict[str, SplitFiles],
) -> None:
    """Append a finished shard to the files. After a kill before `progress` is saved, it is appended
    again: the files are cut to what `progress` says when they are opened.
    """
    for name, split in files.items():
        split.append(shard, progress.splits[name])
        progress.splits[name] += counts[name]
    progress.shards = job.number + 1
    progress.save(shard.parent / PROGRESS_FILE)
    shutil.rmtree(shard)
