"""The arithmetic of the reports: percentiles, medians over repetitions, and what a timeline of tokens says.

Pure functions over plain numbers; times are in seconds unless a name says otherwise.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from novainfer.bench.peers.child import Timeline

__all__ = ["Timeline"]

PERCENTILES = (50, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of `values` do not exceed, between neighbours by straight line (numpy's default)."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def percentiles_ms(values_s: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99, in milliseconds."""
    return {f"p{percent}": percentile(values_s, percent) * 1e3 for percent in PERCENTILES}


def first_tokens_s(timelines: Iterable[Timeline]) -> list[float]:
    """Time to the first token of each request that got one."""
    return [t.times_s[0] for t in timelines if t.times_s]


def intervals_s(timelines: Iterable[Timeline]) -> list[float]:
    """The time between tokens; when k tokens come together after a gap, the gap counts k times as its k-th part."""
    found: list[float] = []
    for line in timelines:
        for before, now, count in zip(line.times_s, line.times_s[1:], line.counts[1:], strict=False):
            found += [(now - before) / count] * count
    return found


def lags_s(timeline: Timeline, began_s: float, ticks_s: Sequence[float]) -> list[float]:
    """How long each token of a stream was on its way, where one was made at each of `ticks_s` from its first on.

    `began_s` is when the stream's request was sent, by the clock of `ticks_s`, which go up. Which tick was the first
    is not known: it is the latest one by which no token would have come before it was made. So a token that was not
    made at its tick, but later, makes the lag longer, never shorter. Raises ValueError where there are too few ticks.
    """
    arrivals_s = [
        began_s + at_s for at_s, count in zip(timeline.times_s, timeline.counts, strict=True) for _ in range(count)
    ]
    first = min((bisect_right(ticks_s, at_s) - 1 - number for number, at_s in enumerate(arrivals_s)), default=0)
    if first < 0:
        raise ValueError("there are tokens from before the first tick")
    return [at_s - ticks_s[first + number] for number, at_s in enumerate(arrivals_s)]


def summary(timelines: Sequence[Timeline], wall_s: float) -> dict[str, Any]:
    """What one run of a workload came to; requests that failed count as errors and nothing else."""
    good = [t for t in timelines if t.error is None]
    num_output = sum(t.num_output_tokens for t in good)
    num_prompt = sum(t.num_prompt_tokens for t in good)
    return {
        "wall_s": wall_s,
        "requests": len(good),
        "errors": len(timelines) - len(good),
        "output_tokens": num_output,
        "output_tok_s": num_output / wall_s,
        "total_tok_s": (num_output + num_prompt) / wall_s,
        "ttft_ms": percentiles_ms(first_tokens_s(good)),
        "itl_ms": percentiles_ms(intervals_s(good)),
    }


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record from several of the same shape: the median of every number, key by key; other values from the last.

    None where no run has a number.
    """
    found: dict[str, Any] = {}
    for key, last in runs[-1].items():
        values = [run[key] for run in runs if run.get(key) is not None]
        if isinstance(last, dict):
            found[key] = medians(values)
        elif values and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            found[key] = statistics.median(values)
        else:
            found[key] = last
    return found


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of `ratios`."""
    return statistics.median(ratios(ours, theirs))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours / theirs, pair by pair: what disturbs the machine for minutes disturbs both of a pair."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float]) -> list[float]:
    """The smallest and the largest."""
    return [min(values), max(values)]


def line_fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """The least-squares line through the points: (value at x = 0, slope)."""
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept, slope
