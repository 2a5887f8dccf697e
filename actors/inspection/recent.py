"""Times of the last seconds in percentiles, and tokens of the last second, at a cost that does not grow with them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from novainfer.actors.inspection.frames import Percentiles

WINDOW_S = 10.0
SLICE_S = 0.5
GROWTH = 1.05  # from one bound to the next: percentiles are right within 2.5 %
BOUNDS_S = tuple(1e-5 * GROWTH**i for i in range(360))  # 10 us to 7 minutes


class RecentTimes:
    """Observations of the last ten seconds, in buckets; each call is told the time, which only grows."""

    def __init__(self) -> None:
        self._slices: deque[tuple[float, dict[int, int]]] = deque()  # when it began, and counts by bucket

    def observe(self, now_s: float, seconds: float, times: int = 1) -> None:
        """So many observations of one value."""
        slices = self._slices
        if not slices or now_s - slices[-1][0] >= SLICE_S:
            self._forget(now_s)
            slices.append((now_s, {}))
        counts = slices[-1][1]
        bucket = bisect_left(BOUNDS_S, seconds)
        counts[bucket] = counts.get(bucket, 0) + times

    def percentiles_ms(self, now_s: float) -> Percentiles | None:
        """Of those of the last ten seconds, in milliseconds; None: there are none."""
        self._forget(now_s)
        sums: dict[int, int] = {}
        for _, counts in self._slices:
            for bucket, count in counts.items():
                sums[bucket] = sums.get(bucket, 0) + count
        total = sum(sums.values())
        if not total:
            return None
        wanted, found, seen = (0.5, 0.95, 0.99), list[float](), 0
        for bucket in sorted(sums):
            seen += sums[bucket]
            while len(found) < len(wanted) and seen >= wanted[len(found)] * total:
                found.append(round(1e3 * BOUNDS_S[min(bucket, len(BOUNDS_S) - 1)] / GROWTH**0.5, 4))
        return Percentiles(*found)

    def _forget(self, now_s: float) -> None:
        while self._slices and now_s - self._slices[0][0] >= WINDOW_S:
            self._slices.popleft()


class RecentCount:
    """How fast a number has grown within the last second."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def rate(self, now_s: float, count: int) -> float:
        """A second, with `count` as the number is now."""
        seen = self._seen
        seen.append((now_s, count))
        while len(seen) > 2 and now_s - seen[1][0] >= 1.0:
            seen.popleft()
        since_s, before = seen[0]
        return (count - before) / max(now_s - since_s, 1.0)
