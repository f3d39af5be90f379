"""What share of a training step is token mixing, from the Chrome trace that the trainer writes
(logging.profile_steps).

The model marks its token mixing with a range; the backward pass runs outside of it, often in
another thread. What belongs together is told by autograd's sequence numbers: the nodes made inside
of a range have those from the number at its first operation up to the number at the first operation
after it, and the backward pass notes the number of the node that it runs. On a GPU, time is that of
the kernels which were launched from there, as a share of that of all kernels.

Compiled, a model has no ranges. Then the operations that token mixing is made of are looked for by
their names: ours, and attention; a compiled `dense` leaves no trace of either, and its share is not
known.
"""

import json
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path

RANGE = "token_mixing"
OPERATIONS = ("mixer::triangular_conv", "aten::scaled_dot_product", "aten::_scaled_dot_product")
BACKWARD = "autograd::engine::evaluate_function"
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Span = tuple[float, float]  # start and end in microseconds


def token_mixing_share(path: Path) -> float | None:
    """Token mixing, forward and backward, as a share of the time of the profiled steps; None where
    the trace cannot tell.
    """
    events = [
        event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"
    ]
    spans = _ranges(events) or _operations(events)
    if not spans:
        return None
    spans = {thread: _merged(of_thread) for thread, of_thread in spans.items()}
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    if on_device:
        launched = {
            event["args"]["correlation"]
            for event in events
            if event.get("cat") in LAUNCHES
            and "correlation" in event.get("args", {})
            and _inside(event, spans)
        }
        mixing = sum(
            event["dur"] for event in on_device if event["args"].get("correlation") in launched
        )
        return mixing / sum(event["dur"] for event in on_device)
    ran = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    whole = max(event["ts"] + event["dur"] for event in ran) - min(event["ts"] for event in ran)
    return sum(end - start for of_thread in spans.values() for start, end in of_thread) / whole


def _ranges(events: list[dict]) -> dict[int, list[Span]]:
    """By thread, the model's ranges and the backward passes of what was computed in them; nothing
    where one of both lacks.
    """
    forward = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] == RANGE:
            forward[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    numbers = {thread: _node_numbers(events, thread, spans) for thread, spans in forward.items()}
    spans, found = {thread: list(of_thread) for thread, of_thread in forward.items()}, False
    for event in events:
        number = event.get("args", {}).get("Sequence number")
        if event["name"].startswith(BACKWARD) and any(
            number in of_thread for of_thread in numbers.values()
        ):
            spans.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
            found = True
    return spans if found else {}


def _node_numbers(events: list[dict], thread: int, spans: list[Span]) -> set[int]:
    """Sequence numbers of the autograd nodes that were made in the spans of a thread."""
    noted = sorted(
        (event["ts"], event["args"]["Sequence number"])
        for event in events
        if event["tid"] == thread
        and not event["name"].startswith(BACKWARD)
        # An operation of the backward pass repeats its node's number, with the thread of the
        # forward one.
        and "Sequence number" in event.get("args", {})
        and not event["args"].get("Fwd thread id")
    )
    times = [time for time, _ in noted]
    numbers = set()
    for start, end in spans:
        first, after = bisect_right(times, start), bisect_right(times, end)
        if first < after < len(noted):
            numbers.update(range(noted[first][1], noted[after][1]))
    return numbers


def _operations(events: list[dict]) -> dict[int, list[Span]]:
    spans = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].startswith(OPERATIONS):
            spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return spans


def _merged(spans: list[Span]) -> list[Span]:
    """In order, without overlap."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _inside(event: dict, spans: dict[int, list[Span]]) -> bool:
    of_thread = spans.get(event["tid"], [])
    place = bisect_right(of_thread, (event["ts"], float("inf"))) - 1
    return place >= 0 and event["ts"] <= of_thread[place][1]
