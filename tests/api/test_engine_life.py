"""An engine's life, and what it tells of itself."""

from __future__ import annotations

import asyncio

import pytest

from novainfer import (
    Delta,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineDraining,
    EngineOverloaded,
)
from novainfer.actors.device.fake import FakeDevice
from tests.actors.helpers import Valve, expected
from tests.api.helpers import ask, blocks_back, fake_engine, greedy


async def test_before_the_start_and_after_the_end_it_says_so() -> None:
    engine = fake_engine()
    assert not engine.is_ready
    assert engine.statistics().state == "STARTING"
    with pytest.raises(EngineClosed, match="not started"):
        await ask(engine, "abc")
    with pytest.raises(EngineClosed):
        _ = engine.model_info
    await engine.drain(1.0)
    await engine.aclose()
    await engine.start()
    assert engine.is_ready
    with pytest.raises(EngineClosed, match="starts once"):
        await engine.start()
    await engine.aclose()
    await engine.aclose()
    assert not engine.is_ready
    assert engine.statistics().state == "STOPPED"
    with pytest.raises(EngineClosed):
        await ask(engine, "abc")
    with pytest.raises(EngineClosed):
        await engine.start()


async def test_draining_finishes_what_is_here() -> None:
    valve = Valve()
    async with fake_engine(FakeDevice(on_step=valve)) as engine:
        reader = asyncio.create_task(ask(engine, "abc", greedy(5)))
        await valve.step_arrived()
        drain = asyncio.create_task(engine.drain(60.0))
        await asyncio.sleep(0)
        assert not engine.is_ready
        with pytest.raises(EngineDraining):
            await ask(engine, "late")
        valve.open()
        await drain
        assert (await reader).token_ids() == expected("abc", 5)


async def test_closing_ends_what_is_here_with_an_error() -> None:
    valve = Valve()
    engine = fake_engine(FakeDevice(on_step=valve))
    await engine.start()
    reader = asyncio.create_task(ask(engine, "abc", greedy(5)))
    await valve.step_arrived()
    close = asyncio.create_task(engine.aclose())
    with pytest.raises(EngineDraining, match="closed"):
        await reader
    valve.open()
    await close


async def test_a_full_queue_says_when_to_come_again() -> None:
    valve = Valve()
    async with fake_engine(FakeDevice(on_step=valve), max_num_queued_reqs=2, max_num_seqs=1) as engine:
        first = asyncio.create_task(ask(engine, "a", greedy(2)))
        await valve.step_arrived()
        waiting = [asyncio.create_task(ask(engine, "b", greedy(2))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded) as caught:
            engine.add_request("c", greedy(2))
        assert caught.value.retry_after_s >= 1
        assert "c" not in engine._handles
        assert len(engine._handles) == 3
        valve.open()
        await asyncio.gather(first, *waiting)


async def test_statistics_are_a_record_of_the_moment() -> None:
    valve = Valve()
    async with fake_engine(FakeDevice(on_step=valve)) as engine:
        idle = engine.statistics()
        assert (idle.state, idle.num_running, idle.kv_blocks_total) == ("IDLE", 0, 4096)
        readers = [asyncio.create_task(ask(engine, [65 + i] * 20, greedy(5))) for i in range(3)]
        await valve.step_arrived()
        valve.let()
        await valve.step_arrived()
        busy = engine.statistics()
        assert (busy.state, busy.num_running) == ("WAITING_WORKER", 3)
        assert busy.kv_blocks_owned >= 6
        valve.open()
        await asyncio.gather(*readers)
        await blocks_back(engine)
        done = engine.statistics()
        assert (done.prompt_tokens_total, done.generation_tokens_total) == (60, 15)
        assert done.requests_finished["FINISHED_LENGTH"] == 3
        assert idle.num_running == 0  # the old record has not moved
        with pytest.raises(AttributeError):
            done.steps = 0  # type: ignore[misc]


async def test_the_model_is_described() -> None:
    async with fake_engine(served_model_name="fake") as engine:
        info = engine.model_info
        assert (info.name, info.max_model_len, info.vocab_size, info.device) == ("fake", 2048, 257, "cpu")
        assert info.num_kv_blocks == 4096
        assert info.created > 1_700_000_000


async def test_two_engines_in_one_loop_do_not_meet() -> None:
    async with fake_engine() as one, fake_engine() as two:
        a, b = await asyncio.gather(ask(one, "abc", greedy(20)), ask(two, "xyz", greedy(20)))
        assert (a.token_ids(), b.token_ids()) == (expected("abc", 20), expected("xyz", 20))
        assert one.statistics().generation_tokens_total == 20


async def test_deltas_are_read_as_they_come() -> None:
    valve = Valve()
    async with fake_engine(FakeDevice(on_step=valve)) as engine:
        stream = engine.generate("abc", greedy(5))
        for i in range(5):
            valve.let()
            delta = await anext(stream)
            assert isinstance(delta, Delta)
            assert delta.token_ids == [expected("abc", 5)[i]]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


def test_an_engine_of_the_config_it_was_given() -> None:
    config = EngineConfig(max_num_seqs=3)
    assert Engine(config).config is config
    assert Engine().config == EngineConfig()
