"""The place of an API process: never two processes, restarts that are bounded, and an end after which none starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from novainfer.fsm.client.api_process import (
    BACKOFF_MAX_S,
    BACKOFF_MIN_S,
    LOSSES_MAX,
    WINDOW_S,
    ApiProcess,
    ApiProcessState,
    Begin,
    Connected,
    Drain,
    End,
    GiveUp,
    Lost,
    Overdue,
    RestartDue,
    Shut,
    Spawn,
)
from novainfer.fsm.core.machine import After, Drop, Start

S = ApiProcessState


class World:
    """What is around a place: a process or none, a timer or none, and the time."""

    def __init__(self) -> None:
        self.machine = ApiProcess()
        self.now_s = 0.0
        self.lives = False
        self.listens = False
        self.is_told_to_end = False
        self.due_s: float | None = None
        self.has_socket = True
        self.spawned_s: list[float] = []

    def handle(self, event: object) -> None:
        for effect in self.machine.handle(event):
            match effect:
                case Start(Spawn()):
                    assert not self.lives, "two processes at one place"
                    assert self.has_socket
                    self.lives, self.listens, self.is_told_to_end = True, False, False
                    self.spawned_s.append(self.now_s)
                case Start(End()) | Start(Shut()):
                    assert self.lives, "there is nothing to end"
                    self.is_told_to_end = True
                case Start(GiveUp()):
                    self.has_socket = False
                case After(delay_s, RestartDue()):
                    assert 0 <= delay_s <= BACKOFF_MAX_S
                    self.due_s = self.now_s + delay_s
                case Drop(RestartDue()):
                    self.due_s = None
                case _:
                    raise AssertionError(effect)

    def lose(self) -> None:
        self.lives = self.listens = False
        self.handle(Lost(self.now_s))

    def check(self) -> None:
        state = self.machine.state
        assert self.lives == (state in (S.CONNECTING, S.OPEN, S.DRAINING))
        assert (self.due_s is not None) == (state is S.LOST)
        recent = [at_s for at_s in self.spawned_s if at_s > self.now_s - WINDOW_S]
        assert len(recent) <= LOSSES_MAX + 1
        assert self.has_socket or state is S.CLOSED


STEPS = st.lists(
    st.one_of(
        st.sampled_from(["connect", "lose", "overdue", "drain"]),
        st.floats(0.0, 2 * WINDOW_S).map(lambda seconds: ("wait", seconds)),
        st.floats(0.0, 2.0).map(lambda seconds: ("wait", seconds)),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_happens_there_is_one_process_at_most_and_restarts_are_bounded(
    steps: list[str | tuple[str, float]],
) -> None:
    world = World()
    world.handle(Begin())
    has_drained = False
    for step in steps:
        match step:
            case "connect" if world.lives and not world.listens:
                world.listens = True
                world.handle(Connected())
            case "lose" if world.lives:
                world.lose()
            case "overdue":
                world.handle(Overdue())
                assert world.is_told_to_end or not world.lives
            case "drain":
                world.handle(Drain())
                has_drained = True
            case ("wait", float(seconds)):
                world.now_s += seconds
                if world.due_s is not None and world.due_s <= world.now_s:
                    world.due_s = None
                    world.handle(RestartDue())
        world.check()
        assert not has_drained or world.machine.state in (S.DRAINING, S.CLOSED)
        if has_drained:
            assert world.is_told_to_end or not world.lives


def test_losses_in_a_row_are_answered_ever_later_and_the_last_one_with_giving_up() -> None:
    world = World()
    world.handle(Begin())
    delays = []
    for _ in range(LOSSES_MAX):
        world.lose()
        assert world.due_s is not None
        delays.append(world.due_s - world.now_s)
        world.due_s = None
        world.handle(RestartDue())
    assert delays == pytest.approx([0.0, *(BACKOFF_MIN_S * 2**number for number in range(LOSSES_MAX - 1))])
    world.lose()
    assert world.machine.state is S.CLOSED
    assert not world.has_socket
    assert world.machine.num_losses == LOSSES_MAX + 1


def test_losses_of_long_ago_do_not_count() -> None:
    world = World()
    world.handle(Begin())
    for _ in range(3 * LOSSES_MAX):
        world.now_s += WINDOW_S / 3
        world.lose()
        world.due_s = None
        world.handle(RestartDue())
    assert world.machine.state is S.CONNECTING


def test_a_server_that_stops_between_two_processes_starts_no_other() -> None:
    world = World()
    world.handle(Begin())
    world.lose()
    world.handle(Drain())
    assert world.machine.state is S.CLOSED
    assert world.due_s is None
    world.handle(Drain())
    world.handle(Overdue())
    assert len(world.spawned_s) == 1
