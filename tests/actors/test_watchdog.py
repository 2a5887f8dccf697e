"""Whoever stands still is reported in time, whoever works is not blamed, and an overdue worker is told once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from novainfer.actors.fake import FakeDevice
from novainfer.actors.system import Patience, System
from novainfer.fsm.dwell import ANSWER_LIMIT_S, DYING_LIMIT_S, LOAD_STALL_LIMIT_S
from novainfer.fsm.events import Fault, Overdue, WorkerLost
from novainfer.fsm.health import (
    PERIOD_S,
    RECOVERY_READY_S,
    TURN_LIMIT_S,
    Late,
    Sighting,
)
from novainfer.fsm.process import ProcessState
from novainfer.fsm.worker import WorkerState
from tests.actors.helpers import Valve, answer, ask, eventually, expected, read_all, running

STEP_TIMEOUT_S = 20.0


class Clock:
    """The watchdog's clock, moved by the test; the timer of the loop is off."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.now_s = 5000.0
        system.watchdog.stop()
        system.watchdog.clock = lambda: self.now_s

    async def look(self, after_s: float = PERIOD_S) -> tuple[Late, ...]:
        """One look, `after_s` seconds after the last; every actor that can take its turns takes them before."""
        for _ in range(5):
            await asyncio.sleep(0)
        self.now_s += after_s
        return self.system.watchdog.look().late

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
async def watched(device: FakeDevice | None = None) -> AsyncIterator[tuple[System, Clock]]:
    """A running system whose watchdog looks when the test says so."""
    async with running(device, patience=Patience(step_timeout_s=STEP_TIMEOUT_S)) as system:
        clock = Clock(system)
        await clock.run(2)
        yield system, clock


@pytest.mark.parametrize("name", ["gate", "engine", "scheduler", "worker"])
async def test_an_actor_frozen_on_purpose_is_reported_within_its_deadline_and_a_second(name: str) -> None:
    async with watched() as (system, clock):
        system._actors[name].freeze()
        after_s, late = await clock.until_late()
        assert after_s <= TURN_LIMIT_S + 1
        assert (late.actor, late.what) == (name, "turn")
        assert [i.message for i in system.incidents.records()] == [late.sentence()]
        await clock.run(10)
        assert len(system.incidents.records()) == 1  # told once, however long it lasts
        assert system.watchdog.wait_s(name) > 10
        system._actors[name].thaw()
        assert await clock.run(2 * PERIOD_S) == ()
        assert (await answer(system, "after")).token_ids == expected("after", 8)


async def test_a_frozen_tokenizer_is_reported_and_goes_on_when_it_is_thawed() -> None:
    async with watched() as (system, clock):
        system._encoding.freeze()
        assert await clock.run(300) == ()  # nothing waits for it
        handle = ask(system, "text")
        _, late = await clock.until_late(90)
        assert (late.actor, late.state, late.what) == ("tokenizer", "ENCODING", "dwell")
        system._encoding.thaw()
        assert (await read_all(handle)).is_well
        assert await clock.run(1) == ()


async def test_a_scheduler_that_never_answers_is_found_by_the_engine_that_waits_for_it() -> None:
    async with watched() as (system, clock):
        system._actors["scheduler"].freeze()
        handle = ask(system, [65, 66])
        found = await clock.run(ANSWER_LIMIT_S + 1)
        assert {(late.actor, late.what) for late in found} == {("scheduler", "turn"), ("engine", "dwell")}
        system._actors["scheduler"].thaw()
        assert (await read_all(handle)).is_well
        assert await clock.run(1) == ()


async def test_a_step_beyond_its_deadline_is_told_to_the_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    valve = Valve()
    async with watched(FakeDevice(on_step=valve)) as (system, clock):
        told: list[Any] = []
        monkeypatch.setattr(system.watchdog, "_overdue", told.append)
        ask(system, [65, 66])
        await valve.step_arrived()
        after_s, late = await clock.until_late()
        assert STEP_TIMEOUT_S < after_s <= STEP_TIMEOUT_S + 1
        assert (late.actor, late.state) == ("worker", "RUNNING")
        assert system.watchdog.stuck == ()  # the worker's machine has a moment to do something about it
        await clock.run(10)
        (overdue,) = told
        assert isinstance(overdue, Overdue)
        assert overdue.epoch == 0
        assert "RUNNING" in overdue.message
        assert system.watchdog.stuck[0].actor == "worker"


async def test_a_loop_that_was_blocked_for_an_hour_blames_nobody() -> None:
    valve = Valve()
    async with watched(FakeDevice(on_step=valve)) as (system, clock):
        ask(system, [65, 66])
        await valve.step_arrived()
        assert await clock.look(after_s=3600) == ()
        assert system.watchdog.verdict.lag_s == 3600 - PERIOD_S
        assert await clock.run(5) == ()
        assert system.incidents.records() == []


async def test_many_long_prompts_at_once_raise_no_alarm() -> None:
    """Each step takes half of its deadline, for minutes on end, with more work waiting than fits."""
    valve = Valve()
    async with watched(FakeDevice(on_step=valve, num_blocks=4096)) as (system, clock):
        readers = [asyncio.create_task(answer(system, [65 + i % 20] * 1500)) for i in range(80)]
        for _ in range(60):
            await valve.step_arrived()
            assert await clock.run(STEP_TIMEOUT_S / 2) == ()
            valve.let()
        valve.open()
        assert all(found.is_well for found in await asyncio.gather(*readers))
        assert system.incidents.records() == []


async def test_a_silent_process_is_overdue_in_any_state_that_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched() as (system, clock):
        told: list[Overdue] = []
        monkeypatch.setattr(system.watchdog, "_overdue", told.append)
        died_s = clock.now_s
        monkeypatch.setattr(system.watchdog, "_silence_s", lambda: clock.now_s - died_s)
        after_s, late = await clock.until_late()
        assert 5.0 < after_s <= 6.0
        assert (late.actor, late.what) == ("worker", "silence")
        assert len(told) == 1


async def test_the_timer_looks_by_itself_and_leaves_nothing_behind() -> None:
    async with running() as system:
        begun = system._actors["gate"]._turns
        await eventually(lambda: system._actors["gate"]._turns >= begun + 2)
        assert system.watchdog.verdict.ok


async def test_a_server_is_ready_while_its_worker_is_replaced_and_not_when_something_is_stuck() -> None:
    async with watched() as (system, clock):
        system._engine.handle(WorkerLost(0, Fault.LOST, "killed"))
        found = system.health()
        assert (found.is_live, found.is_ready, found.state) == (True, True, "RECOVERING")
        system._actors["gate"].freeze()
        await clock.until_late()
        found = system.health()
        assert (found.is_live, found.is_ready) == (False, False)
        assert found.reason is not None
        assert found.reason.startswith("the gate has taken no turn for")


async def test_a_server_whose_worker_does_not_come_back_is_not_ready_and_says_why() -> None:
    async with watched() as (system, clock):
        system._engine.handle(WorkerLost(0, Fault.LOST, "killed"))
        await clock.run(RECOVERY_READY_S)
        assert system.health().is_ready
        await clock.run(1.0)
        found = system.health()
        assert (found.is_live, found.is_ready, found.state) == (True, False, "RECOVERING")
        assert found.reason == "the worker was lost 11 s ago, and is not back yet: requests wait for it"


async def test_a_load_of_a_process_that_reads_nothing_any_more_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched() as (system, clock):
        told: list[Overdue] = []
        monkeypatch.setattr(system.watchdog, "_overdue", told.append)
        worker, signs = system._actors["worker"], [0]
        loading = Sighting("worker", WorkerState.LOADING, clock.now_s)
        monkeypatch.setattr(worker, "sighting", lambda: loading)
        monkeypatch.setattr(system.watchdog, "_num_signs", lambda: signs[0])
        for _ in range(4):
            signs[0] += 1
            assert await clock.run(LOAD_STALL_LIMIT_S - 1) == ()
        _, late = await clock.until_late()
        assert (late.actor, late.what, late.state) == ("worker", "dwell", "LOADING")
        assert len(told) == 1


async def test_a_spare_and_a_process_that_does_not_end_are_told_and_the_server_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with watched() as (system, clock):
        asked: list[str] = []
        seen = [
            Sighting("spare", ProcessState.READY, clock.now_s, None, 0.0, 5.0),
            Sighting("process 17", ProcessState.DYING, clock.now_s),
        ]
        begun_s = clock.now_s

        def more() -> list[Sighting]:
            return [msgspec.structs.replace(seen[0], silent_s=clock.now_s - begun_s), seen[1]]

        monkeypatch.setattr(system.watchdog, "_more", more)
        monkeypatch.setattr(system.watchdog, "_rescue", lambda actor, _: actor == "spare" and not asked.append(actor))
        await clock.run(DYING_LIMIT_S + 1)
        assert asked == ["spare"]
        (incident,) = system.incidents.records()
        assert (incident.kind, incident.action) == ("frozen", "it is left behind")
        assert incident.message.startswith("the process 17 has been DYING for 10.")
        assert system.health().is_live


async def test_a_system_that_has_died_is_neither_live_nor_ready() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # told there, too
    async with running() as system:
        system._died("scheduler", KeyError("a planted bug"))
        found = system.health()
        assert (found.is_live, found.is_ready) == (False, False)
        assert found.reason == "the scheduler died: KeyError: 'a planted bug'"
