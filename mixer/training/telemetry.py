"""How fast a run is: throughput and memory between two lines of metrics, and a profile of some
steps.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mixer.common.hardware import peak_memory_gb, peak_tflops
from mixer.common.say import Say
from mixer.distributed.world import World


class Timer:
    """Wall time between two lines of metrics, without evaluation and the writing of checkpoints."""

    def __init__(self, tokens: int):
        """tokens: trained on so far."""
        self._begin(tokens)

    def _begin(self, tokens: int) -> None:
        self.tokens = tokens
        self.waited, self.left_out = 0.0, 0.0
        self.started = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waiting for data."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time inside, which is not training."""
        began = time.perf_counter()
        yield
        self.left_out += time.perf_counter() - began

    def window(
        self, tokens: int, flops_per_token: float, world: World, precision: str
    ) -> dict[str, float]:
        """Throughput of all processes since the last call, and the share of time that this process
        waited for data.

        tokens: trained on so far by all processes, padding left out.
        """
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.started - self.left_out
        rate = (tokens - self.tokens) / seconds
        line = throughput(rate, flops_per_token, world.size, world.device, precision)
        line |= {"seconds": seconds, "data_wait_share": self.waited / seconds}
        line["peak_memory_gb"] = peak_memory_gb(world.device)
        self._begin(tokens)
        return line


def throughput(
    tokens_per_second: float, flops_per_token: float, devices: int, device, precision: str
) -> dict[str, float]:
    """Useful TFLOP/s of all devices together, and the share of their peak if that is known."""
    tflops = tokens_per_second * flops_per_token / 1e12
    peak = peak_tflops(device, precision)
    line = {"tokens_per_second": tokens_per_second, "useful_tflops": tflops}
    return line | ({"peak_share": tflops / (peak * devices)} if peak else {})


class Profiler:
    """Profiles `steps` steps of one process, from step `first` on, and writes a Chrome trace (for
    chrome://tracing or ui.perfetto.dev).
    """

    def __init__(self, directory: Path, first: int, steps: int, say: Say):
        self.path, self.say = directory / f"profile-step-{first}.json", say
        self.first, self.last = first, first + steps - 1
        self.profile, self.due = None, steps > 0

    def between_steps(self, done: int) -> None:
        """To be called before the first step and after each one, with the number of steps done."""
        if self.due and done == self.first - 1:
            self.profile, self.due = torch.profiler.profile(), False
            self.profile.start()
        elif self.profile is not None and done == self.last:
            self.close()

    def close(self) -> None:
        """Writes the trace of the steps so far, or says that none has begun."""
        if self.profile is not None:
            self.profile.stop()
            self.profile.export_chrome_trace(str(self.path))
            self.profile = None
            self.say(f"profile of steps {self.first} to {self.last}: {self.path}")
        elif self.due:  # such as one of a step before the checkpoint that the run went on from
            self.say(f"no profile: step {self.first} (logging.profile_step) was not trained")
