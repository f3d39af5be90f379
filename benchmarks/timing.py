"""Timing for benchmarks: interleaved rounds of batched calls, CUDA graph replay, and the two
ceilings of a roofline.

A call takes the number of a buffer slot and returns what it made. Slots rotate, so that nothing is
found in the L2 cache because the same call ran just before; results are held for one turn of the
slots, so that outputs rotate as well.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from mixer.common.errors import first_line

Call = Callable[[int], object]

SPIN_CYCLES_PER_MS = 2_000_000  # of torch.cuda._sleep at 2 GHz; a slower clock only spins longer
# Host time of a batch behind the spin: a longer one would fill the launch queue and block.
MAX_QUEUED_MS = 4.0


def interleaved(
    calls: dict[str, Call],
    device: str,
    slots: int,
    rounds: int,
    batch_ms: float,
    hide_host: bool = True,
) -> dict[str, dict]:
    """Milliseconds per call: name -> median, quartiles, rounds and calls a round, or {"failure":
    why}.

    A round runs a batch of each call of about `batch_ms`, in an order that rotates, so that clocks
    and heat favour none. With `hide_host` a batch is queued behind a spinning kernel: GPU time
    alone. Without it a batch starts on an idle GPU and the host's share counts, as it does for a
    user; the first calls, which find caches and memory pool as another call left them, go untimed.
    """
    turns: dict[str, Iterator[int]] = {}
    plans: dict[str, tuple[int, int]] = {}
    samples: dict[str, list[float]] = {}
    results: dict[str, dict] = {}
    for name, call in calls.items():
        try:
            turns[name] = itertools.count()
            plans[name] = plan(call, turns[name], device, slots, batch_ms, hide_host)
            samples[name] = []
        except RuntimeError as error:  # out of memory, mostly
            results[name] = {"failure": first_line(error)}
    names = list(plans)
    for index in range(rounds + 1 if names else 0):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            count, spin = plans[name]
            if not hide_host:
                batch(calls[name], turns[name], max(2, slots), device, slots)
            ms, _ = batch(calls[name], turns[name], count, device, slots, spin)
            if index:  # round 0 fills the allocator and the instruction cache
                samples[name].append(ms)
    for name in names:
        quartiles = statistics.quantiles(samples[name], n=4) if rounds > 1 else samples[name] * 3
        results[name] = {
            "ms": quartiles[1],
            "low": quartiles[0],
            "high": quartiles[2],
            "rounds": rounds,
            "calls": plans[name][0],
        }
    return {name: results[name] for name in calls}


def plan(
    call: Call, turn: Iterator[int], device: str, slots: int, batch_ms: float, hide_host: bool
) -> tuple[int, int]:
    """(calls in a batch, cycles of the spin before it)."""
    batch(call, turn, slots + 1, device, slots)
    ms, host_ms = batch(call, turn, 3 if hide_host else 10, device, slots)
    count = max(1, round(batch_ms / max(ms, 1e-3)))
    if device == "cpu" or not hide_host:
        return count, 0
    count = max(1, min(count, int(MAX_QUEUED_MS / host_ms)))
    spin_ms = min(count * host_ms + 0.02, 2 * MAX_QUEUED_MS)
    return count, int(1.25 * SPIN_CYCLES_PER_MS * spin_ms)


def batch(
    call: Call, turn: Iterator[int], count: int, device: str, slots: int, spin: int = 0
) -> tuple[float, float]:
    """(milliseconds per call, milliseconds of host time per call) of `count` calls in a row."""
    outputs = [None] * slots  # of one turn of the slots
    picked = [next(turn) % slots for _ in range(count)]
    if device == "cpu":
        start = time.perf_counter()
        for slot in picked:
            outputs[slot] = call(slot)
        ms = 1e3 * (time.perf_counter() - start) / count
        return ms, ms
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if spin:
        torch.cuda._sleep(spin)
    begin.record()
    start = time.perf_counter()
    for slot in picked:
        outputs[slot] = call(slot)
    host_ms = 1e3 * (time.perf_counter() - start) / count
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count, host_ms


# ------------------------------------------------------------------------- CUDA graphs


def replayed(
    calls: dict[str, Call], slots: int, rounds: int, batch_ms: float
) -> dict[str, float | None]:
    """GPU milliseconds of each call, from replays of a graph that holds one call on every slot;
    None where none was captured.

    The graphs share one memory pool: they are replayed one at a time and nobody reads their
    results.
    """
    pool = torch.cuda.graph_pool_handle()
    graphs = {name: capture(call, slots, pool) for name, call in calls.items()}
    replays = {
        name: lambda _, graph=graph: graph.replay() for name, graph in graphs.items() if graph
    }
    timings = interleaved(replays, "cuda", 1, rounds, batch_ms) if replays else {}
    return {
        name: timings[name]["ms"] / slots if "ms" in timings.get(name, {}) else None
        for name in calls
    }


def capture(call: Call, slots: int, pool) -> torch.cuda.CUDAGraph | None:
    stream = torch.cuda.current_stream()
    graph = torch.cuda.CUDAGraph()
    try:
        warm_up(call)
        with torch.cuda.graph(graph, pool=pool):
            # All at once in memory, so that outputs rotate here too.
            outputs = [call(slot) for slot in range(slots)]
        del outputs
        return graph
    except RuntimeError:
        torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream behind
        torch.cuda.synchronize()
        return None


def warm_up(call: Call) -> None:
    """One call on a side stream, as capture wants it: what is made on first use must not be made
    inside a graph.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream().wait_stream(side)


# ------------------------------------------------------------------------- ceilings


def set_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def product_tflops(dtype: torch.dtype, device: str, size: int) -> float:
    """What the vendor's library reaches on a dense product of size^3, in TFLOP/s."""
    a, b, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    batch_ms = 15.0 if device == "cuda" else 2.0
    times = interleaved({"product": lambda _: torch.mm(a, b, out=out)}, device, 1, 9, batch_ms)
    return 2e-9 * size**3 / times["product"]["ms"]


def copy_bytes_per_ms(device: str) -> float:
    """Bytes read plus bytes written by a copy that no cache holds, per millisecond."""
    size = 2**31 if device == "cuda" else 2**24
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    batch_ms = 10.0 if device == "cuda" else 2.0
    times = interleaved({"copy": lambda _: target.copy_(source)}, device, 1, 9, batch_ms)
    return 2 * size / times["copy"]["ms"]
