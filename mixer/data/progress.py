"""Shows how far tokenising is."""

import sys
import time

import numpy as np

from mixer.data.joined import Joined
from mixer.data.tokenise import news_of

REPORT_SECONDS = 5.0


class Meter:
    """Reports the progress of tokenising: a bar on a terminal, else a line every few seconds. At
    the end it gives one line in either case.
    """

    def __init__(self, total: int | None, joined: Joined, progress):
        self.total, self.joined, self.progress = total, joined, progress
        self.bar, self.began = None, time.perf_counter()
        self.reported = self.began
        self.before = news_of(joined.splits.values())  # done by an earlier call
        self.heard = self.before

    def __enter__(self) -> "Meter":
        if self.progress is print and sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
            self.bar = Progress(*columns)
            self.task = self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self.bar:
            self.bar.stop()

    def hear(self, news: tuple[int, int, int]) -> None:
        """Takes news of a shard (see `TokeniseShard`)."""
        self.heard = tuple(np.add(self.heard, news).tolist())
        self.report()

    def report(self, last: bool = False) -> None:
        now = time.perf_counter()
        documents, size, tokens = news_of(self.joined.splits.values()) if last else self.heard
        seconds = max(now - self.began, 1e-9)
        speed, token_speed = (size - self.before[1]) / seconds, (tokens - self.before[2]) / seconds
        line = (
            f"tokenised: {documents} documents, {size / 1e6:.1f} MB, {tokens / 1e6:.2f} M tokens "
            f"in {seconds:.1f} s ({speed / 1e6:.2f} MB/s, {token_speed:.0f} tokens/s)"
        )
        if self.bar:
            self.bar.update(self.task, completed=size, description=line)
        if last or (not self.bar and now - self.reported > REPORT_SECONDS):
            self.reported = now
            self.progress(line)
