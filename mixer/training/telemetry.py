"""How fast a run is: throughput and memory between two lines of metrics, and a profile of some
steps.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mixer.common.hardware import peak_memory_gb, peak_tflops
from mixer.distributed.world import World
from mixer.training.config import RunConfig


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


def profiler(run: RunConfig, done: int, world: World) -> torch.profiler.profile | None:
    """Profiles the steps of the main process that logging.profile_* names, and writes a Chrome
    trace (for chrome://tracing or ui.perfetto.dev). Its `step` is to be called after each step.

    done: the steps before this start. None where there is nothing to profile.
    """
    first, steps = run.logging.profile_step, run.logging.profile_steps
    if not steps or not world.is_main or done >= first:
        return None
    path = run.directory / f"profile-step-{first}.json"

    def write(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(path))
        world.say(f"profile of steps {first} to {first + steps - 1}: {path}")

    when = torch.profiler.schedule(wait=first - 1 - done, warmup=0, active=steps, repeat=1)
    profile = torch.profiler.profile(schedule=when, on_trace_ready=write)
    profile.start()
    return profile
