"""Says how far tokenising is."""

import time

import numpy as np

from mixer.common.say import Say
from mixer.data.joined import Joined
from mixer.data.tokenise import news_of

REPORT_SECONDS = 5.0


class Meter:
    """Says every few seconds how far tokenising is, and at the end what it came to."""

    def __init__(self, joined: Joined, say: Say):
        self.joined, self.say = joined, say
        self.began = self.reported = time.perf_counter()
        self.before = news_of(joined.splits.values())  # done by an earlier call
        self.heard = self.before

    def hear(self, news: tuple[int, int, int]) -> None:
        """Takes news of a shard (see `TokeniseShard`)."""
        self.heard = tuple(np.add(self.heard, news).tolist())
        if time.perf_counter() - self.reported > REPORT_SECONDS:
            self.reported = time.perf_counter()
            self._report(self.heard)

    def finish(self) -> None:
        self._report(news_of(self.joined.splits.values()))

    def _report(self, done: tuple[int, int, int]) -> None:
        documents, size, tokens = done
        seconds = max(time.perf_counter() - self.began, 1e-9)
        speed, token_speed = (size - self.before[1]) / seconds, (tokens - self.before[2]) / seconds
        self.say(
            f"tokenised: {documents} documents, {size / 1e6:.1f} MB, {tokens / 1e6:.2f} M tokens "
            f"in {seconds:.1f} s ({speed / 1e6:.2f} MB/s, {token_speed:.0f} tokens/s)"
        )
