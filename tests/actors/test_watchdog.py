"""Whoever stands still is reported in time, whoever works is not blamed, and an overdue worker is told once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from novainfer.actors.device.fake import FakeDevice
from novainfer.actors.runtime import Runtime, Timeouts
from novainfer.fsm.core.dwell import ANSWER_LIMIT_S, DYING_LIMIT_S, LOAD_STALL_LIMIT_S
from novainfer.fsm.device.process import ProcessState
from novainfer.fsm.device.worker import WorkerState
from novainfer.fsm.engine import EngineState
from novainfer.fsm.health import (
    PERIOD_S,
    RECOVERY_READY_S,
    TURN_LIMIT_S,
    Late,
    Sighting,
)
from novainfer.fsm.messages.events import Fault, Overdue, WorkerLost
from tests.actors.helpers import WAIT_S, Valve, answer, ask, eventually, expected, read_all, running

STEP_TIMEOUT_S = 20.0


class Clock:
    """The watchdog's clock, moved by the test; the timer of the loop is off."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.now_s = 5000.0
        runtime.watchdog.stop()
        runtime.watchdog.clock = lambda: self.now_s

    async def look(self, after_s: float = PERIOD_S) -> tuple[Late, ...]:
        """One look, `after_s` seconds after the last; every actor that can take its turns takes them before."""
        for _ in range(5):
            await asyncio.sleep(0)
        self.now_s += after_s
        return self.runtime.watchdog.look().late

    async def run(self, seconds: float) -> tuple[Late, ...]:
        """Look every period for so long; what the last one found."""
        late: tuple[Late, ...] = ()
        for _ in range(round(seconds / PERIOD_S)):
            late = await self.look()
        return late

    async def until_late(self, seconds_max: float = 60.0) -> tuple[float, Late]:
        """Who was first found late, and after how many seconds."""
        begun_s = self.now_s
        while self.now_s < begun_s + seconds_max:
            if late := await self.look():
                return self.now_s - begun_s, late[0]
        raise AssertionError("nobody was found late")


@asynccontextmanager
async def watched(device: FakeDevice | None = None) -> AsyncIterator[tuple[Runtime, Clock]]:
    """A running system whose watchdog looks when the test says so."""
    async with running(device, timeouts=Timeouts(step_timeout_s=STEP_TIMEOUT_S)) as runtime:
        clock = Clock(runtime)
        await clock.run(2)
        yield runtime, clock


@pytest.mark.parametrize("name", ["gate", "engine", "scheduler", "worker"])
async def test_an_actor_frozen_on_purpose_is_reported_within_its_deadline_and_a_second(name: str) -> None:
    async with watched() as (runtime, clock):
        runtime._actors[name].freeze()
        after_s, late = await clock.until_late()
        assert after_s <= TURN_LIMIT_S + 1
        assert (late.actor, late.what) == (name, "turn")
        assert [i.message for i in runtime.incidents.records()] == [late.sentence()]
        await clock.run(10)
        assert len(runtime.incidents.records()) == 1  # told once, however long it lasts
        assert runtime.watchdog.wait_s(name) > 10
        runtime._actors[name].thaw()
        assert await clock.run(2 * PERIOD_S) == ()
        assert (await answer(runtime, "after")).token_ids == expected("after", 8)


async def test_a_frozen_tokenizer_is_reported_and_goes_on_when_it_is_thawed() -> None:
    async with watched() as (runtime, clock):
        runtime._threads.freeze()
        assert await clock.run(300) == ()  # nothing waits for it
        handle = ask(runtime, "text")
        _, late = await clock.until_late(90)
        assert (late.actor, late.state, late.what) == ("tokenizer", "ENCODING", "dwell")
        runtime._threads.thaw()
        assert (await read_all(handle)).is_well
        assert await clock.run(1) == ()


async def test_a_scheduler_that_never_answers_is_found_by_the_engine_that_waits_for_it() -> None:
    async with watched() as (runtime, clock):
        runtime._actors["scheduler"].freeze()
        handle = ask(runtime, [65, 66])
        found = await clock.run(ANSWER_LIMIT_S + 1)
        assert {(late.actor, late.what) for late in found} == {("scheduler", "turn"), ("engine", "dwell")}
        runtime._actors["scheduler"].thaw()
        assert (await read_all(handle)).is_well
        assert await clock.run(1) == ()


async def test_a_step_beyond_its_deadline_is_told_to_the_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    valve = Valve()
    async with watched(FakeDevice(on_step=valve)) as (runtime, clock):
        told: list[Any] = []
        monkeypatch.setattr(runtime.watchdog, "_overdue", told.append)
        ask(runtime, [65, 66])
        await valve.step_arrived()
        after_s, late = await clock.until_late()
        assert STEP_TIMEOUT_S < after_s <= STEP_TIMEOUT_S + 1
        assert (late.actor, late.state) == ("worker", "RUNNING")
        assert runtime.watchdog.stuck == ()  # the worker's machine has a moment to do something about it
        await clock.run(10)
        (overdue,) = told
        assert isinstance(overdue, Overdue)
        assert overdue.epoch == 0
        assert "RUNNING" in overdue.message
        assert runtime.watchdog.stuck[0].actor == "worker"


async def test_a_loop_that_was_blocked_for_an_hour_blames_nobody() -> None:
    valve = Valve()
    async with watched(FakeDevice(on_step=valve)) as (runtime, clock):
        ask(runtime, [65, 66])
        await valve.step_arrived()
        assert await clock.look(after_s=3600) == ()
        assert runtime.watchdog.verdict.lag_s == 3600 - PERIOD_S
        assert await clock.run(5) == ()
        assert runtime.incidents.records() == []


async def test_many_long_prompts_at_once_raise_no_alarm() -> None:
    """Each step takes half of its deadline, for minutes on end, with more work waiting than fits."""
    valve = Valve()
    async with watched(FakeDevice(on_step=valve, num_blocks=4096)) as (runtime, clock):
        readers = [asyncio.create_task(answer(runtime, [65 + i % 20] * 1500)) for i in range(80)]
        for _ in range(60):
            await valve.step_arrived()
            assert await clock.run(STEP_TIMEOUT_S / 2) == ()
            valve.let()
        valve.open()
        assert all(found.is_well for found in await asyncio.gather(*readers))
        assert runtime.incidents.records() == []


async def test_a_silent_process_is_overdue_in_any_state_that_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched() as (runtime, clock):
        told: list[Overdue] = []
        monkeypatch.setattr(runtime.watchdog, "_overdue", told.append)
        died_s = clock.now_s
        monkeypatch.setattr(runtime.watchdog, "_silence_s", lambda: clock.now_s - died_s)
        after_s, late = await clock.until_late()
        assert 5.0 < after_s <= 6.0
        assert (late.actor, late.what) == ("worker", "silence")
        assert len(told) == 1


async def test_the_timer_looks_by_itself_and_leaves_nothing_behind() -> None:
    async with running() as runtime:
        begun = runtime._actors["gate"]._num_turns
        await eventually(lambda: runtime._actors["gate"]._num_turns >= begun + 2)
        assert runtime.watchdog.verdict.ok


async def test_a_server_is_ready_while_its_worker_is_replaced_and_not_when_something_is_stuck() -> None:
    async with watched() as (runtime, clock):
        runtime._engine.handle(WorkerLost(0, Fault.LOST, "killed"))
        found = runtime.health()
        assert (found.is_live, found.is_ready, found.state) == (True, True, "RECOVERING")
        runtime._actors["gate"].freeze()
        await clock.until_late()
        found = runtime.health()
        assert (found.is_live, found.is_ready) == (False, False)
        assert found.reason is not None
        assert found.reason.startswith("the gate has taken no turn for")


async def test_a_server_whose_worker_does_not_come_back_is_not_ready_and_says_why() -> None:
    async with watched() as (runtime, clock):
        runtime._engine.handle(WorkerLost(0, Fault.LOST, "killed"))
        await clock.run(RECOVERY_READY_S)
        assert runtime.health().is_ready
        await clock.run(1.0)
        found = runtime.health()
        assert (found.is_live, found.is_ready, found.state) == (True, False, "RECOVERING")
        assert found.reason == "the worker was lost 11 s ago, and is not back yet: requests wait for it"


async def test_one_that_is_reconfigured_for_long_is_not_ready_either() -> None:
    class Slow(FakeDevice):
        def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
            assert not is_new or may_fit.wait(WAIT_S)
            return super().fit(num_blocks, is_new=is_new)

    may_fit = threading.Event()
    async with watched(Slow()) as (runtime, clock):
        answer = runtime.reconfigure(300, None)
        await eventually(lambda: runtime._engine.state is EngineState.RECONFIGURING)
        await clock.run(RECOVERY_READY_S)
        assert runtime.health().is_ready
        await clock.run(1.0)
        found = runtime.health()
        assert (found.is_ready, found.state) == (False, "RECONFIGURING")
        assert found.reason == "the worker began to be reconfigured 11 s ago, and is not back yet: requests wait for it"
        may_fit.set()
        assert (await answer).error is None


async def test_a_load_of_a_process_that_reads_nothing_any_more_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched() as (runtime, clock):
        told: list[Overdue] = []
        monkeypatch.setattr(runtime.watchdog, "_overdue", told.append)
        worker, signs = runtime._actors["worker"], [0]
        loading = Sighting("worker", WorkerState.LOADING, clock.now_s)
        monkeypatch.setattr(worker, "sighting", lambda: loading)
        monkeypatch.setattr(runtime.watchdog, "_num_signs", lambda: signs[0])
        for _ in range(4):
            signs[0] += 1
            assert await clock.run(LOAD_STALL_LIMIT_S - 1) == ()
        _, late = await clock.until_late()
        assert (late.actor, late.what, late.state) == ("worker", "dwell", "LOADING")
        assert len(told) == 1


async def test_a_spare_and_a_process_that_does_not_end_are_told_and_the_server_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with watched() as (runtime, clock):
        asked: list[str] = []
        seen = [
            Sighting("spare", ProcessState.READY, clock.now_s, None, 0.0, 5.0),
            Sighting("process 17", ProcessState.DYING, clock.now_s),
        ]
        begun_s = clock.now_s

        def more() -> list[Sighting]:
            return [msgspec.structs.replace(seen[0], silent_s=clock.now_s - begun_s), seen[1]]

        monkeypatch.setattr(runtime.watchdog, "_more", more)
        monkeypatch.setattr(runtime.watchdog, "_rescue", lambda actor, _: actor == "spare" and not asked.append(actor))
        await clock.run(DYING_LIMIT_S + 1)
        assert asked == ["spare"]
        (incident,) = runtime.incidents.records()
        assert (incident.kind, incident.action) == ("frozen", "it is left behind")
        assert incident.message.startswith("the process 17 has been DYING for 10.")
        assert runtime.health().is_live


async def test_a_system_that_has_died_is_neither_live_nor_ready() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # told there, too
    async with running() as runtime:
        runtime._died("scheduler", KeyError("a planted bug"))
        found = runtime.health()
        assert (found.is_live, found.is_ready) == (False, False)
        assert found.reason == "the scheduler died: KeyError: 'a planted bug'"
