"""How long a device takes for something: on a GPU by its own events, around replays of a graph.

Launching costs more than many kernels take, and a cache holds more than many inputs: so a measurement is of a graph
that holds the work on several sets of inputs, one after the other, and what is reported is the median of its replays,
each divided by the number of sets.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Clock", "Spread"]

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of one call: the median, and how far a fifth of all measurements lies from it on either side."""

    median_s: float
    low_s: float
    high_s: float


class Clock:
    """Measures on one device; on a CPU, where this can only be rehearsed, by the wall clock."""

    def __init__(self, device: torch.device, *, num_replays: int = 30, min_s: float = 0.0) -> None:
        """At least `num_replays` replays, and as many more as take `min_s` seconds together."""
        self.device = device
        self._num_replays = num_replays
        self._min_s = min_s

    def measure(self, calls: Sequence[Work], *, in_graph: bool = True) -> Spread:
        """Of one of `calls`, which do the same on inputs of their own; each has been called before when it counts."""
        if self.device.type != "cuda":
            return _spread([_wall_s(calls) / len(calls) for _ in range(self._num_replays + 1)][1:])
        return self._measure_cuda(calls, in_graph=in_graph)

    def _measure_cuda(self, calls: Sequence[Work], *, in_graph: bool) -> Spread:
        def work() -> None:
            for call in calls:
                call()

        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.synchronize(self.device)
        replay: Work = work
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            replay = graph.replay
        for _ in range(3):
            replay()
        times_s: list[float] = []
        began_s = time.monotonic()
        while len(times_s) < self._num_replays or time.monotonic() - began_s < self._min_s:
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times_s.append(begin.elapsed_time(end) / 1e3 / len(calls))
        return _spread(times_s)


def _wall_s(calls: Sequence[Work]) -> float:
    began_s = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - began_s


def _spread(times_s: Sequence[float]) -> Spread:
    ordered = sorted(times_s)
    fifth = len(ordered) // 5
    return Spread(statistics.median(ordered), ordered[fifth], ordered[-1 - fifth])
