"""Tokenises the shards of a source in worker processes, and joins them in their order."""

import math
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from mixer.common.say import Say
from mixer.data import sources
from mixer.data.config import DataConfig
from mixer.data.corpus import Plan
from mixer.data.joined import Joined, SplitFiles, join
from mixer.data.progress import Meter
from mixer.data.tokenise import Counts, Job, TokeniseShard
from mixer.data.workers import available_cores, results

DOCUMENTS_A_WORKER = 1000  # of data.max_documents: fewer are done before a worker has started


def tokenise_all(
    config: DataConfig,
    plan: Plan,
    task: TokeniseShard,
    joined: Joined,
    files: dict[str, SplitFiles],
    say: Say,
) -> None:
    """Tokenise the shards that are not joined yet, and append each to the files."""
    workers = min(
        config.workers or available_cores(), _useful_workers(config, plan[joined.shards :])
    )
    jobs = _jobs(config, plan, joined)
    meter = Meter(joined, say)
    with closing(results(task, jobs, workers, meter.hear)) as finished:  # ends the workers
        for job, counts in finished:
            counts = _within_limit(job, counts, joined, task)
            join(job, task.place(job), counts, joined, files)
    meter.finish()


def _useful_workers(config: DataConfig, plan: Plan) -> int:
    """How many workers have something to do; small corpora need no other process."""
    size = sum(shard.bytes or sources.SHARD_BYTES for _, shard in plan)
    useful = max(1, min(len(plan), math.ceil(size / sources.SHARD_BYTES)))
    if config.max_documents:
        useful = min(useful, math.ceil(config.max_documents / DOCUMENTS_A_WORKER))
    return useful


def _jobs(config: DataConfig, plan: Plan, joined: Joined) -> Iterator[Job]:
    """The shards that are not joined yet, but those after the last document that is wanted."""
    most = config.max_documents or None
    for number in range(joined.shards, len(plan)):
        split, shard = plan[number]
        if split == "validation":
            yield Job(number, split, shard, None)
        elif not most or joined.documents < most:
            yield Job(number, split, shard, most)


def _within_limit(
    job: Job, counts: dict[str, Counts], joined: Joined, task: TokeniseShard
) -> dict[str, Counts]:
    """The counts of a shard, tokenised again if it holds more documents than are left."""
    if job.limit is None:
        return counts
    left = max(job.limit - joined.documents, 0)
    if sum(count.documents for count in counts.values()) <= left:
        return counts
    shutil.rmtree(task.place(job))
    return task(replace(job, limit=left), lambda news: None)
