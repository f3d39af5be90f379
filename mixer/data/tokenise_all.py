"""Tokenises the shards of a source in worker processes, and appends their tokens in order."""

import math
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from mixer.common.say import Say
from mixer.data import sources
from mixer.data.append import SplitFiles, append_shard
from mixer.data.config import DataConfig
from mixer.data.corpus import SplitShards
from mixer.data.progress import Meter, Progress
from mixer.data.tokenise import Counts, Job, TokeniseShard
from mixer.data.workers import available_cores, results

DOCUMENTS_A_WORKER = 1000  # of data.max_documents: fewer are done before a worker has started


def tokenise_all(
    config: DataConfig,
    shards: SplitShards,
    task: TokeniseShard,
    progress: Progress,
    files: dict[str, SplitFiles],
    say: Say,
) -> None:
    """Tokenise the shards that are not in the files yet, and append each."""
    workers = min(
        config.workers or available_cores(), _useful_workers(config, shards[progress.shards :])
    )
    jobs = _jobs(config, shards, progress)
    meter = Meter(progress, say)
    with closing(results(task, jobs, workers, meter.update)) as finished:  # ends the workers
        for job, counts in finished:
            counts = _within_limit(job, counts, progress, task)
            append_shard(job, task.place(job), counts, progress, files)
    meter.finish()


def _useful_workers(config: DataConfig, shards: SplitShards) -> int:
    """How many workers have something to do; small corpora need no other process."""
    size = sum(shard.bytes or sources.SHARD_BYTES for _, shard in shards)
    useful = max(1, min(len(shards), math.ceil(size / sources.SHARD_BYTES)))
    if config.max_documents:
        useful = min(useful, math.ceil(config.max_documents / DOCUMENTS_A_WORKER))
    return useful


def _jobs(config: DataConfig, shards: SplitShards, progress: Progress) -> Iterator[Job]:
    """The shards that are not in the files yet, up to the last document that is wanted."""
    most = config.max_documents or None
    for number in range(progress.shards, len(shards)):
        split, shard = shards[number]
        if split == "validation":
            yield Job(number, split, shard, None)
        elif not most or progress.documents < most:
            yield Job(number, split, shard, most)


def _within_limit(
    job: Job, counts: dict[str, Counts], progress: Progress, task: TokeniseShard
) -> dict[str, Counts]:
    """The counts of a shard, tokenised again if it holds more documents than are left."""
    if job.limit is None:
        return counts
    left = max(job.limit - progress.documents, 0)
    if sum(count.documents for count in counts.values()) <= left:
        return counts
    shutil.rmtree(task.place(job))
    return task(replace(job, limit=left), lambda update: None)
