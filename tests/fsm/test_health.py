"""Who is late, on a clock that the test moves: found within a second after its deadline, and nobody else is blamed."""

from __future__ import annotations

from enum import StrEnum

import pytest

from novainfer.fsm.client.gate import GateState
from novainfer.fsm.core.dwell import LOAD_STALL_LIMIT_S
from novainfer.fsm.core.machine import Machine
from novainfer.fsm.device.worker import WorkerState
from novainfer.fsm.engine import EngineState
from novainfer.fsm.health import (
    DWELLS,
    LOAD_SILENCE_S,
    LOOK_S_MAX,
    PERIOD_S,
    TURN_LIMIT_S,
    Late,
    Sighting,
    Silence,
    TokenizerState,
    Verdict,
    Watch,
)
from novainfer.fsm.machines import MACHINES, states

STEP_S = 60.0
LIMITED = [state for dwells in DWELLS.values() for state, dwell in dwells.items() if dwell.limit_s is not None]
UNLIMITED = [state for dwells in DWELLS.values() for state, dwell in dwells.items() if dwell.limit_s is None]


def dwell_limit_s(state: StrEnum, step_timeout_s: float) -> float | None:
    return DWELLS[type(state)][state].seconds(step_timeout_s)


class World:
    """One actor and the clock that its watch is told."""

    def __init__(self, state: StrEnum = EngineState.IDLE) -> None:
        self.watch = Watch(STEP_S)
        self.now_s = 1000.0
        self.state = state
        self.since_s = self.now_s
        self.turns = 0
        self.is_frozen = False
        self.silent_since_s: float | None = None
        self.num_signs: int | None = 0

    def enter(self, state: StrEnum) -> None:
        self.state, self.since_s = state, self.now_s

    def look(self) -> Verdict:
        silent_s = None if self.silent_since_s is None else self.now_s - self.silent_since_s
        self.turns += not self.is_frozen
        return self.watch.look(
            self.now_s,
            [Sighting("actor", self.state, self.since_s, self.turns, silent_s, 5.0, self.num_signs)],
        )

    def run(self, seconds: float) -> Verdict:
        """Look every period for so long; the last verdict."""
        verdict = Verdict()
        for _ in range(round(seconds / PERIOD_S)):
            self.now_s += PERIOD_S
            verdict = self.look()
        return verdict

    def until_late(self, seconds_max: float) -> tuple[float, Late]:
        """When somebody was first found late, in seconds from now."""
        begun_s = self.now_s
        while self.now_s < begun_s + seconds_max:
            self.now_s += PERIOD_S
            if late := self.look().late:
                return self.now_s - begun_s, late[0]
        raise AssertionError("nobody was found late")


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.__name__)
def test_every_state_of_every_machine_has_a_deadline_or_a_reason_for_none(machine: type[Machine]) -> None:
    wanted = states(machine)
    found = DWELLS[type(wanted[0])]
    assert set(found) == set(wanted)
    for state, dwell in found.items():
        assert dwell.why, state
        assert dwell.limit_s is None or dwell.limit_s > 0 or dwell.and_step


@pytest.mark.parametrize("state", LIMITED)
def test_who_stays_too_long_is_found_within_a_second_after_the_deadline(state: StrEnum) -> None:
    world = World()
    world.look()
    world.enter(state)
    limit_s = dwell_limit_s(state, STEP_S)
    assert limit_s is not None
    after_s, late = world.until_late(limit_s + 5)
    assert limit_s < after_s <= limit_s + 1
    assert (late.what, late.state, late.limit_s) == ("dwell", str(state), limit_s)


@pytest.mark.parametrize("state", UNLIMITED)
def test_who_may_stay_for_any_time_is_not_late_after_an_hour(state: StrEnum) -> None:
    world = World(state)
    assert world.run(3600).ok


def test_the_step_has_the_deadline_that_was_asked_for() -> None:
    assert dwell_limit_s(WorkerState.RUNNING, 7.0) == 7.0
    assert dwell_limit_s(EngineState.WAITING_WORKER, 7.0) > 7.0  # type: ignore[operator]


def test_steps_that_follow_each_other_are_progress_however_long_it_goes_on() -> None:
    world = World(WorkerState.RUNNING)
    for _ in range(20):
        world.enter(WorkerState.RUNNING)  # it was READY between two looks
        assert world.run(STEP_S - 1).ok


@pytest.mark.parametrize("state", [EngineState.IDLE, GateState.OPEN, WorkerState.READY])
def test_an_actor_that_takes_no_turn_is_found_even_if_it_has_nothing_to_do(state: StrEnum) -> None:
    world = World(state)
    world.run(10)
    world.is_frozen = True
    after_s, late = world.until_late(60)
    assert TURN_LIMIT_S < after_s <= TURN_LIMIT_S + 1
    assert late.what == "turn"
    assert world.watch.wait_s("actor") == late.for_s
    world.is_frozen = False
    assert world.run(PERIOD_S).ok
    assert world.watch.wait_s("actor") == 0


def test_silence_is_found_in_a_state_that_may_last_for_ever() -> None:
    world = World(WorkerState.LOADING)
    world.silent_since_s = world.now_s
    after_s, late = world.until_late(60)
    assert 5.0 < after_s <= 6.0
    assert late.what == "silence"


def test_signs_of_life_keep_the_silence_short() -> None:
    world = World(WorkerState.LOADING)
    world.silent_since_s = world.now_s
    for _ in range(10):
        assert world.run(4).ok
        world.silent_since_s = world.now_s - 0.1


def test_a_sleep_of_the_machine_uses_up_nothing_of_what_loading_excuses() -> None:
    silence = Silence(0.0)
    assert silence.look(0.0, 3600.0, is_warm=False) == 0.0
    for look in range(round(LOAD_SILENCE_S / PERIOD_S) - 2):
        assert silence.look(0.0, 3600.0 + (look + 1) * PERIOD_S, is_warm=False) == 0.0
    silent_s = [silence.look(0.0, 3659.75 + look * PERIOD_S, is_warm=False) for look in range(4)]
    assert silent_s == [0.25, 0.5, 0.75, 1.0]
    assert silence.look(3660.9, 3661.0, is_warm=False) == 0.0
    assert silence.look(3660.9, 3661.25, is_warm=True) == pytest.approx(0.35)


@pytest.mark.parametrize("gap_s", [60.0, 3600.0])
@pytest.mark.parametrize("state", [WorkerState.RUNNING, EngineState.SCHEDULING, TokenizerState.ENCODING])
def test_a_look_that_comes_late_blames_nobody_for_the_gap(state: StrEnum, gap_s: float) -> None:
    world = World(state)
    world.silent_since_s = world.now_s
    world.look()
    world.is_frozen = True  # nobody could take a turn
    world.now_s += gap_s
    verdict = world.look()
    assert verdict.ok
    assert verdict.lag_s == pytest.approx(gap_s - PERIOD_S)
    assert world.watch.wait_s("actor") <= LOOK_S_MAX


def test_after_a_gap_who_is_really_stuck_is_still_found() -> None:
    world = World(EngineState.SCHEDULING)
    world.look()
    world.now_s += 3600
    world.look()
    limit_s = dwell_limit_s(EngineState.SCHEDULING, STEP_S)
    assert limit_s is not None
    after_s, _ = world.until_late(60)
    assert after_s <= limit_s + 1


def test_a_clock_that_goes_back_harms_nobody() -> None:
    world = World(EngineState.SCHEDULING)
    world.look()
    world.now_s -= 100
    assert world.look().ok


def test_each_fault_is_told_in_a_sentence() -> None:
    def say(what: str) -> str:
        return Late(actor="scheduler", what=what, state="FULL", for_s=2.25, limit_s=2.0).sentence()

    assert say("turn") == "the scheduler has taken no turn for 2.2 s (at most 2 s)"
    assert say("silence") == "the scheduler has given no sign of life for 2.2 s (at most 2 s)"
    assert say("dwell") == "the scheduler has been FULL for 2.2 s (at most 2 s)"


def test_a_load_that_gets_on_may_take_hours() -> None:
    world = World()
    world.look()
    world.enter(WorkerState.LOADING)
    for sign in range(60):
        world.num_signs = sign
        assert world.run(LOAD_STALL_LIMIT_S - PERIOD_S).ok
    after_s, late = world.until_late(LOAD_STALL_LIMIT_S)
    assert (late.what, late.state) == ("dwell", "LOADING")
    assert after_s < LOAD_STALL_LIMIT_S


def test_where_no_signs_are_given_a_load_may_take_hours() -> None:
    world = World()
    world.num_signs = None
    world.look()
    world.enter(WorkerState.LOADING)
    assert world.run(10 * LOAD_STALL_LIMIT_S).ok


def test_a_state_that_a_step_is_in_may_last_as_long_as_that_and_one_that_gives_signs_has_no_other_limit() -> None:
    watch = Watch(STEP_S)
    assert watch.limit_s(WorkerState.RUNNING) == STEP_S
    assert watch.limit_s(WorkerState.LOADING) is None
    assert watch.limit_s(GateState.OPEN) is None
    assert watch.limit_s(WorkerState.WARMING) == dwell_limit_s(WorkerState.WARMING, STEP_S)
