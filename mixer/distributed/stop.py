"""Ending a run early: a signal to any process, and all of them save and end after the same step."""

import signal
import time

from mixer.distributed.parallel import Hosts

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Launchers pass a signal on to processes that may have got it themselves; within this time it is
# still the first one.
SAME_SIGNAL_SECONDS = 1.0


class Stop:
    """Notes the first signal; the second one ends the process at once.

    At each step `ask` begins to ask all processes, `agreed` has the answer: meanwhile the step is
    computed.
    """

    def __init__(self, hosts: Hosts):
        self.hosts, self.number, self.since = hosts, 0, 0.0
        self.before = {number: signal.signal(number, self._note) for number in SIGNALS}

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
        if self.number and now - self.since > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif not self.number:
            self.number, self.since = number, now
