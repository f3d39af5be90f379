"""Ending a run early: a signal to any process, and all of them save and end after the same step."""

import signal
import time

from mixer.distributed.hosts import Hosts

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A launcher passes a signal on to processes that may have received it themselves. Within this time
# it counts as the same signal.
SAME_SIGNAL_SECONDS = 1.0


def stop_signals() -> list[signal.Signals]:
    """The signals that end a run: not SIGHUP, where nohup has this process ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (ignored and number is signal.SIGHUP)]


class Stop:
    """Remembers the first signal; the same one again ends the process at once. Another one does
    not: a launcher that ends at Ctrl-C is followed by a SIGTERM, see launch.py.

    In each step `ask` starts to ask all processes whether they received a signal, and `agreed`
    returns the answer. The step is computed in between, so asking costs no time.
    """

    def __init__(self, hosts: Hosts):
        self.hosts, self.number, self.since = hosts, 0, 0.0
        self.before = {number: signal.signal(number, self._note) for number in stop_signals()}

    def ask(self) -> None:
        self.pending = self.hosts.begin_any(self.number != 0)

    def agreed(self) -> bool:
        if self.hosts.group is None:
            return self.number != 0
        return self.pending.result()

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
