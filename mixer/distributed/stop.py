"""Ending a run early: a signal to any process, and all of them save and end after the same step."""

import signal
import time

import torch
import torch.distributed as dist

from mixer.distributed.world import World

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A launcher passes a signal on to processes that may have received it themselves. Within this time
# it counts as the same signal.
SAME_SIGNAL_SECONDS = 1.0


def stop_signals() -> list[signal.Signals]:
    """The signals that end a run: not SIGHUP, where nohup has this process ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (ignored and number is signal.SIGHUP)]


class Stop:
    """Remembers the first signal. The same signal again ends the process at once; a different one
    does not, because a launcher that ends at Ctrl-C also sends SIGTERM, see launch.py.

    In each step `ask` starts to ask all processes whether they received a signal, and `agreed`
    returns the answer. The step is computed in between, so asking costs no time.
    """

    def __init__(self, world: World):
        self.group, self.number, self.since = world.group, 0, 0.0
        self.before = {number: signal.signal(number, self._note) for number in stop_signals()}

    def ask(self) -> None:
        if self.group is not None:
            self.signals = torch.tensor(int(self.number != 0))
            self.asked = dist.all_reduce(self.signals, group=self.group, async_op=True)

    def agreed(self) -> bool:
        if self.group is None:
            return self.number != 0
        self.asked.wait()
        return bool(self.signals)

    def close(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number, frame) -> None:
        now = time.monotonic()
        if self.number == number and now - self.since > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self.number:
            self.number, self.since = number, now
