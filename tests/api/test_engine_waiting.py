"""A full queue and a reader that stays away, as a program that embeds the engine meets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from novainfer import Chat, Delta, Engine, EngineConfig, EngineOverloaded, ReaderStalled
from novainfer.actors.device.fake import FakeDevice
from novainfer.testing import ByteTokenizer
from tests.actors.helpers import Valve, eventually, expected
from tests.api.helpers import ask, blocks_back, fake_engine, greedy


@pytest.fixture
async def full() -> AsyncIterator[tuple[Engine, Valve]]:
    """An engine with one request that runs and one that is queued."""
    valve = Valve()
    engine = fake_engine(FakeDevice(on_step=valve), max_num_seqs=1, max_num_queued_reqs=1, max_num_overflow_reqs=1)
    async with engine:
        names = [engine.add_request([65], greedy(2))]
        await valve.step_arrived()
        await eventually(lambda: engine.statistics().admission.num_queued == 0)
        names.append(engine.add_request([65], greedy(2)))
        yield engine, valve
        for name in names:
            engine.cancel(name)
        valve.open()


async def test_a_request_that_is_willing_to_waits_for_room(full: tuple[Engine, Valve]) -> None:
    engine, valve = full
    with pytest.raises(EngineOverloaded) as refused:
        engine.add_request([66], greedy(2))
    assert refused.value.retry_after_s > 0
    waits = asyncio.create_task(ask(engine, [66], greedy(3, max_queue_s=3600.0)))
    await eventually(lambda: engine.statistics().admission.num_overflow)
    assert engine.statistics().num_waiting == 2
    with pytest.raises(EngineOverloaded, match="the list of those who wait for it"):
        engine.add_request([66], greedy(2, max_queue_s=3600.0))
    valve.open()
    assert (await waits).token_ids() == expected([66], 3)
    await blocks_back(engine)


async def test_what_waits_for_the_tokenizer_is_told_from_what_waits_for_room() -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(ByteTokenizer):
        def encode_batch(self, prompts: Sequence[str | Chat]) -> list[list[int] | str]:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            return super().encode_batch(prompts)

    valve = Valve()
    engine = Engine(EngineConfig(max_num_seqs=1), device=FakeDevice(on_step=valve), tokenizer=Slow())
    async with engine:

        def waiting() -> tuple[int, int]:
            found = engine.statistics()
            return found.num_waiting, found.num_deferred

        engine.add_request("text", greedy(2))
        await eventually(lambda: waiting() == (1, 1))
        engine.add_request([65], greedy(2))  # has its tokens, and runs
        await valve.step_arrived()
        await eventually(lambda: waiting() == (1, 1))
        gate.set()
        await eventually(lambda: waiting() == (1, 0))
        valve.open()
        await eventually(lambda: waiting() == (0, 0))


async def test_who_waited_in_vain_is_told_when_to_come_back(full: tuple[Engine, Valve]) -> None:
    engine, _ = full
    name = engine.add_request([66], greedy(2, max_queue_s=0.01))
    assert engine.is_overflowed(name)
    with pytest.raises(EngineOverloaded, match=r"no first token came within .*: try again in \d+\.\d s") as waited:
        await engine.wait_result(name)
    assert waited.value.retry_after_s > 0
    assert not engine.is_overflowed(name)


async def test_a_reader_that_stays_away_finds_what_there_was_and_then_why_there_is_no_more() -> None:
    async with fake_engine(stall_timeout_s=0.05) as engine:
        name = engine.add_request([65], greedy(1800))
        await eventually(lambda: engine.errors())
        await blocks_back(engine)
        delta = await engine.wait_result(name)
        assert isinstance(delta, Delta)
        assert delta.token_ids == expected([65], len(delta.token_ids))
        with pytest.raises(ReaderStalled, match=r"took nothing for 0\.05 seconds"):
            await engine.wait_result(name)
        await eventually(lambda: engine.statistics().admission.cancelled_total == {"stalled": 1})
