"""How long requests wait, are prefilled and decode, counted in buckets as they end; by the states they were in.

    came ──queue──▶ first ran ──prefill──▶ DECODE ──decode──▶ ended        inference: both of the latter

One that never ran is in none of them. A preempted request that waits again is in its prefill, or its decode.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from novainfer.actors.inspection.records import Transition
from novainfer.fsm.schedule.request import RequestState

# vLLM's buckets (v1/metrics/buckets.py), so that its dashboards' quantiles stay right; seconds
_UP_TO_80 = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, *_UP_TO_80, 160.0, 640.0, 2560.0)
INTER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, *_UP_TO_80[3:])
_UP_TO_8_MIN = (10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
LATENCY_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, *_UP_TO_8_MIN, 960.0, 1920.0, 7680.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (0, 1, 2, 5, 10, 20)

WAITS = frozenset({"OVERFLOW", str(RequestState.WAITING)})  # the states of a request that has not run yet
DECODE, PREEMPTED = str(RequestState.DECODE), str(RequestState.PREEMPTED)


class HistogramRecord(msgspec.Struct, frozen=True):
    """How many observations were at most each of `bounds`, and above the one before it; the last count: above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float = 0.0


class Histogram:
    """Counts of observations by bucket, 0.1 µs each; single-threaded."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """So many observations of one value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def record(self) -> HistogramRecord:
        """As it is now."""
        return HistogramRecord(self.bounds, tuple(self.counts), self.sum)


def _none(bounds: tuple[float, ...]) -> HistogramRecord:
    return HistogramRecord(bounds, (0,) * (len(bounds) + 1))


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Of all requests that ran and have ended, each choice for itself: seconds, and how often they were preempted."""

    queue: HistogramRecord = _none(LATENCY_S)
    prefill: HistogramRecord = _none(LATENCY_S)
    decode: HistogramRecord = _none(LATENCY_S)
    inference: HistogramRecord = _none(LATENCY_S)
    per_token: HistogramRecord = _none(INTER_TOKEN_S)
    preemptions: HistogramRecord = _none(PREEMPTIONS)


class TimeLog:
    """Counts them, as they end."""

    def __init__(self) -> None:
        self._times = {name: Histogram(none.bounds) for name, none in msgspec.structs.asdict(RequestTimes()).items()}

    def ended(self, history: Sequence[Transition], num_tokens: int) -> None:
        """A request has ended, which was in the states of `history`, and was given so many tokens."""
        ran_s = next((one.time for one in history[:-1] if one.state not in WAITS), None)
        if ran_s is None:
            return
        end_s, times = history[-1].time, self._times
        first_s = next((one.time for one in history if one.state == DECODE), end_s)
        times["queue"].observe(max(ran_s - history[0].time, 0.0))
        times["prefill"].observe(first_s - ran_s)
        times["decode"].observe(end_s - first_s)
        times["inference"].observe(end_s - ran_s)
        times["preemptions"].observe(sum(one.state == PREEMPTED for one in history))
        if num_tokens > 1:
            times["per_token"].observe((end_s - first_s) / (num_tokens - 1))

    def record(self) -> RequestTimes:
        """As they are now."""
        return RequestTimes(**{name: histogram.record() for name, histogram in self._times.items()})
