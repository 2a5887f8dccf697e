"""Workers that die, hang, raise and run out of memory under 32 live HTTP streams: every text is exact."""

from __future__ import annotations

import pytest

from tests.reliability import trials


async def all_exact(fault: str, number: int, *, warm_spare: bool = False, seed: int = 0) -> None:
    report = await trials.run(fault, number, warm_spare=warm_spare, seed=seed)
    assert report.injected == report.trials == number
    assert report.ends == {"length": number * trials.NUM_STREAMS}
    assert report.exact == report.streams == number * trials.NUM_STREAMS


@pytest.mark.slow
@pytest.mark.parametrize("warm_spare", [False, True], ids=["cold", "warm spare"])
async def test_a_killed_worker_costs_no_stream_and_no_token(warm_spare: bool) -> None:
    await all_exact("kill", 5 if warm_spare else 2, warm_spare=warm_spare)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["exception", "oom", "eat_memory"])
async def test_a_worker_that_raises_or_eats_its_memory_costs_no_stream_and_no_token(fault: str) -> None:
    await all_exact(fault, 1)


@pytest.mark.slow
async def test_a_worker_that_is_stopped_is_seen_by_its_silence_and_replaced() -> None:
    await all_exact("stop", 1, warm_spare=True)


@pytest.mark.long
@pytest.mark.parametrize("warm_spare", [False, True], ids=["cold", "warm spare"])
async def test_a_hundred_kills_at_random_moments(warm_spare: bool) -> None:
    await all_exact("kill", 100, warm_spare=warm_spare, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["stop", "exception", "oom", "eat_memory"])
async def test_ten_of_every_other_fault(fault: str) -> None:
    await all_exact(fault, 10, warm_spare=True, seed=1)
