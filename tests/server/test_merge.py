"""Several prompts of one request: begun a few a turn, merged in the order they come, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from novainfer import Delta, EngineOverloaded
from novainfer.server.openai.merge import BEGUN_A_TURN, BUFFERED_MAX, merge_deltas, turns_to_begin


class Sources:
    """`number` sources of one delta each; `fails` raises instead."""

    def __init__(self, number: int, *, num_deltas: int = 1, fails: int | None = None) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.all = [self._source(i, num_deltas, fails == i) for i in range(number)]

    async def _source(self, at: int, num_deltas: int, fails: bool) -> AsyncGenerator[Delta, None]:
        self.begun.append(at)
        try:
            if fails:
                raise EngineOverloaded("the queue is full", retry_after_s=1.0)
            for _ in range(num_deltas):
                yield Delta(request_id="")
                await asyncio.sleep(0)
        finally:
            self.ended.append(at)


@pytest.mark.parametrize("number", [1, BEGUN_A_TURN, BEGUN_A_TURN + 1, 10 * BEGUN_A_TURN])
async def test_a_few_prompts_begin_in_one_turn_of_the_loop_and_all_after_the_turns_that_are_said(number: int) -> None:
    sources = Sources(number)
    deltas = merge_deltas(sources.all, 1)
    first = asyncio.ensure_future(anext(deltas))
    before = 0
    for _ in range(1 + turns_to_begin(number)):
        await asyncio.sleep(0)
        assert len(sources.begun) - before <= BEGUN_A_TURN
        before = len(sources.begun)
    assert before == number
    found = [(await first).index, *[delta.index async for delta in deltas]]
    assert sorted(found) == list(range(number))


async def test_when_an_early_prompt_fails_later_ones_are_not_begun() -> None:
    sources = Sources(10 * BEGUN_A_TURN, num_deltas=100, fails=3)
    with pytest.raises(EngineOverloaded):
        async for _ in merge_deltas(sources.all, 1):
            pass
    assert len(sources.begun) <= 3 * BEGUN_A_TURN
    assert sorted(sources.ended) == sources.begun


async def test_a_reader_that_leaves_ends_all_though_the_buffer_is_full() -> None:
    sources = Sources(2 * BUFFERED_MAX, num_deltas=100)
    deltas = merge_deltas(sources.all, 1)
    await anext(deltas)
    for _ in range(100):
        await asyncio.sleep(0)
    await deltas.aclose()
    assert sorted(sources.ended) == sources.begun == list(range(2 * BUFFERED_MAX))


async def test_a_reader_that_is_cancelled_while_it_leaves_ends_all_the_same() -> None:
    sources = Sources(10 * BEGUN_A_TURN, num_deltas=1000)
    deltas = merge_deltas(sources.all, 1)
    await anext(deltas)
    for _ in range(2 * turns_to_begin(10 * BEGUN_A_TURN)):
        await asyncio.sleep(0)

    async def close() -> None:
        await deltas.aclose()

    leaving = asyncio.create_task(close())
    for _ in range(3):  # some are ended, and most are not
        await asyncio.sleep(0)
    assert len(sources.ended) < len(sources.begun)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(sources.ended) == sources.begun
