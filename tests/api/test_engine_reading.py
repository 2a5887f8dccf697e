"""How a request is read, polled, cancelled and left."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import Any

import pytest

from novainfer import (
    Delta,
    Engine,
    FinishReason,
    RequestCancelled,
    RequestNotFound,
    RequestTimeout,
    StepFailedError,
)
from novainfer.actors.device.fake import FakeDevice
from tests.actors.helpers import Valve, eventually, expected
from tests.api.helpers import ask, blocks_back, fake_engine, greedy


async def test_waiting_for_results_gives_deltas_then_none_and_forgets_the_request() -> None:
    async with fake_engine() as engine:
        name = engine.add_request("abc", greedy(4), request_id="mine")
        assert name == "mine"
        tokens: list[int] = []
        while (delta := await engine.wait_result(name)) is not None:
            tokens += delta.token_ids
            assert delta.request_id == "mine"
        assert tokens == expected("abc", 4)
        with pytest.raises(RequestNotFound, match="no request mine"):
            await engine.wait_result(name)


async def test_what_is_forwarded_comes_with_its_step_and_the_rest_is_read_as_ever() -> None:
    async with fake_engine() as engine:
        taken: list[int] = []

        def take(delta: Delta) -> bool:
            assert delta.request_id == "mine"
            taken.extend(delta.token_ids)
            return len(taken) < 5

        async with aclosing(engine.generate("abc", greedy(9), request_id="mine")) as deltas:
            taken += (await anext(deltas)).token_ids
            await engine.forward("mine", take)
            assert len(taken) == 5
            taken += (await anext(deltas)).token_ids
            await engine.forward("mine", take)  # False at once, which is one delta more
            taken += [token async for delta in deltas for token in delta.token_ids]
        assert taken == expected("abc", 9)
        with pytest.raises(RequestNotFound, match="no request mine"):
            await engine.forward("mine", take)


async def test_forwarding_ends_where_a_request_does_and_reading_says_how() -> None:
    async with fake_engine() as engine:
        name = engine.add_request("abc", greedy(2000))
        taken: list[Delta] = []
        forwarding = asyncio.create_task(engine.forward(name, lambda delta: not taken.append(delta)))
        await eventually(lambda: len(taken) > 3)
        engine.cancel(name)
        await forwarding
        with pytest.raises(RequestCancelled):
            await engine.wait_result(name)
        await blocks_back(engine)


async def test_polling_never_waits_and_ends_with_the_finish_reason() -> None:
    async with fake_engine() as engine:
        name = engine.add_request("abc", greedy(4))
        assert engine.poll_result(name) is None
        tokens: list[int] = []
        reasons: list[FinishReason] = []
        async with asyncio.timeout(10):
            while not reasons:
                delta = engine.poll_result(name)
                if delta is None:
                    await asyncio.sleep(0)
                    continue
                tokens += delta.token_ids
                reasons += [delta.finish_reason] if delta.finish_reason else []
        assert tokens == expected("abc", 4)
        with pytest.raises(RequestNotFound):
            engine.poll_result(name)
        assert len(engine._runtime._streams) == 0


async def test_polling_gives_every_choice_before_it_forgets() -> None:
    async with fake_engine() as engine:
        name = engine.add_request("abc", greedy(4, n=3))
        finished: set[int] = set()
        async with asyncio.timeout(10):
            while len(finished) < 3:
                if (delta := engine.poll_result(name)) is not None and delta.finish_reason:
                    finished.add(delta.index)
                await asyncio.sleep(0)
        with pytest.raises(RequestNotFound):
            engine.poll_result(name)


async def wait_to_the_end(engine: Engine, name: str) -> None:
    while await engine.wait_result(name) is not None:
        pass


async def poll_to_the_end(engine: Engine, name: str) -> None:
    async with asyncio.timeout(10):
        while True:
            engine.poll_result(name)
            await asyncio.sleep(0)


async def test_a_cancelled_request_raises_where_it_is_read() -> None:
    async with fake_engine() as engine:
        waited = engine.add_request("abc", greedy(1000))
        polled = engine.add_request("abd", greedy(1000))
        assert engine.cancel(waited)
        assert engine.cancel(waited)
        assert engine.cancel(polled)
        with pytest.raises(RequestCancelled):
            await wait_to_the_end(engine, waited)
        with pytest.raises(RequestCancelled):
            await poll_to_the_end(engine, polled)
        assert not engine.cancel(waited)
        assert not engine.cancel("never heard of")
        await blocks_back(engine)


async def test_an_id_that_is_in_use_is_made_another() -> None:
    async with fake_engine() as engine:
        first = engine.add_request("abc", greedy(3), request_id="same")
        second = engine.add_request("abd", greedy(3), request_id="same")
        assert first == "same"
        assert second.startswith("same-")
        for name, prompt in ((first, "abc"), (second, "abd")):
            tokens: list[int] = []
            while (delta := await engine.wait_result(name)) is not None:
                tokens += delta.token_ids
            assert tokens == expected(prompt, 3)


async def leave_by_break(engine: Engine) -> None:
    async for _ in engine.generate("abc", greedy(1000)):
        break


async def leave_by_aclose(engine: Engine) -> None:
    stream = engine.generate("abc", greedy(1000))
    await anext(stream)
    await stream.aclose()


async def leave_by_exception(engine: Engine) -> None:
    with suppress(ZeroDivisionError):
        async for _ in engine.generate("abc", greedy(1000)):
            raise ZeroDivisionError


async def leave_by_cancel(engine: Engine) -> None:
    task = asyncio.create_task(ask(engine, "abc", greedy(1000)))
    await eventually(lambda: engine.statistics().num_running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timeout(engine: Engine) -> None:
    async with aclosing(engine.generate("abc", greedy(1900))) as stream:
        await anext(stream)
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                async for _ in stream:
                    await asyncio.sleep(0)


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_aclose, leave_by_exception, leave_by_cancel, leave_by_timeout]
)
async def test_leaving_the_generator_early_cancels_the_request(leave: Any) -> None:
    async with fake_engine() as engine:
        await leave(engine)
        await blocks_back(engine)
        found = engine.statistics()
        assert found.num_running == found.num_waiting == 0
        assert found.requests_finished["FINISHED_ABORTED"] == 1
        assert engine._handles == {}


async def test_leaving_takes_effect_within_a_step() -> None:
    valve = Valve()
    async with fake_engine(FakeDevice(on_step=valve)) as engine:
        stream = engine.generate("abc", greedy(1000))
        first = asyncio.create_task(anext(stream))
        valve.let(3)
        for _ in range(4):
            await valve.step_arrived()
        await first
        await stream.aclose()
        steps = len(valve.plans)
        valve.open()
        await blocks_back(engine)
        assert len(valve.plans) == steps  # the step that was on the device was its last


async def test_a_deadline_raises() -> None:
    valve = Valve()
    async with fake_engine(FakeDevice(on_step=valve)) as engine:
        with pytest.raises(RequestTimeout, match="deadline") as caught:
            await ask(engine, "abc", greedy(5, timeout_s=0.01))
        assert caught.value.status == 408
        valve.open()


async def test_a_failing_step_raises_for_its_request_only() -> None:
    def on_step(plan: Any) -> None:
        if 200 in plan.input_ids:
            raise ValueError("bad luck")

    async with fake_engine(FakeDevice(on_step=on_step)) as engine:
        good = asyncio.create_task(ask(engine, "abc", greedy(30)))
        with pytest.raises(StepFailedError, match="bad luck"):
            await ask(engine, [200], greedy())
        assert (await good).token_ids() == expected("abc", 30)
        assert engine.statistics().step_failures > 0
