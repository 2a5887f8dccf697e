"""Percentiles of the last seconds, and tokens of the last one, against lists of all values."""

from __future__ import annotations

import random

import pytest

from novainfer.actors.inspection.recent import GROWTH, RecentCount, RecentTimes


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_are_those_of_a_list_of_all_that_is_younger_than_ten_seconds(seed: int) -> None:
    chance, recent = random.Random(seed), RecentTimes()
    now_s, seen = 100.0, list[tuple[float, float]]()
    for _ in range(3000):
        now_s += chance.expovariate(100)
        seconds = chance.lognormvariate(-4, 1.5)
        times = chance.choice((1, 1, 3))
        recent.observe(now_s, seconds, times)
        seen += [(now_s, seconds)] * times
    found = recent.percentiles_ms(now_s)
    assert found is not None
    # A slice of half a second is forgotten as a whole.
    for part, value in zip((0.5, 0.95, 0.99), (found.p50, found.p95, found.p99), strict=True):
        nearest = []
        for window_s in (9.5, 9.75, 10.0):
            young = sorted(1e3 * seconds for at_s, seconds in seen if at_s > now_s - window_s)
            nearest += [young[min(int(part * len(young)) + more, len(young) - 1)] for more in (-1, 0, 1)]
        assert min(nearest) / GROWTH <= value <= max(nearest) * GROWTH


def test_what_is_older_than_ten_seconds_is_forgotten_and_nothing_is_none() -> None:
    recent = RecentTimes()
    assert recent.percentiles_ms(5.0) is None
    recent.observe(5.0, 0.2)
    recent.observe(14.0, 0.1)
    found = recent.percentiles_ms(14.9)
    assert found is not None
    assert (round(found.p50), round(found.p99)) == (100, 200) or found.p99 == pytest.approx(200, rel=0.03)
    found = recent.percentiles_ms(15.1)
    assert found is not None
    assert found.p99 == pytest.approx(100, rel=0.03)
    assert recent.percentiles_ms(24.1) is None


def test_times_beyond_the_last_bucket_are_the_last_bucket() -> None:
    recent = RecentTimes()
    recent.observe(0.0, 1e9)
    assert recent.percentiles_ms(0.0) is not None


def test_a_rate_is_of_the_last_second() -> None:
    count = RecentCount()
    assert count.rate(10.0, 500) == 0.0
    assert count.rate(10.2, 520) == 20.0, "less than a second counts as one"
    for step in range(1, 11):
        found = count.rate(10.2 + step / 5, 520 + 20 * step)
    assert found == pytest.approx(100.0)
    assert [count.rate(13.0, 720), count.rate(14.5, 720)][-1] == 0.0
