"""What a device's thread knows of the steps on the device, and what is said of each, in order."""

from __future__ import annotations

from typing import Any

import pytest

from novainfer.fsm.core.machine import IllegalEvent, Send
from novainfer.fsm.device.flights import Flights, FlightsState, Landed, LaunchStep, Unsent
from novainfer.fsm.messages.events import Fault, StepFailed
from novainfer.fsm.messages.step import StepDone

S = FlightsState
BEHIND = "step 1, which it follows, failed while both were on the device"


def flights(*events: Any) -> Flights:
    """After these, each of which said nothing."""
    machine = Flights()
    for event in events:
        assert machine.handle(event) == []
    return machine


def said(machine: Flights, event: Any) -> list[Any]:
    return [effect.event for effect in machine.handle(event) if isinstance(effect, Send)]


FIRST, SECOND = LaunchStep(1, 7), LaunchStep(2, 7, after=1)


def failed(step_id: int, fault: Fault = Fault.EXCEPTION, **more: Any) -> StepFailed:
    return StepFailed(step_id, 7, fault, "broken", **more)


def test_two_steps_fly_and_are_answered_as_they_end() -> None:
    machine = flights(FIRST, SECOND)
    assert machine.state is S.FULL
    assert said(machine, Landed(StepDone(1, 7, [5]))) == [StepDone(1, 7, [5])]
    assert machine.state is S.FLYING
    assert said(machine, Landed(StepDone(2, 7, [6]))) == [StepDone(2, 7, [6])]
    assert machine.state is S.CLEAR


def test_a_step_whose_predecessor_did_not_end_well_is_refused() -> None:
    machine = flights(FIRST)
    assert said(machine, Landed(failed(1))) == [failed(1)]
    (refused,) = said(machine, SECOND)
    assert (refused.step_id, refused.epoch, refused.launched) == (2, 7, False)
    (refused,) = said(machine, LaunchStep(3, 7, after=2))
    assert refused.step_id == 3
    assert machine.handle(LaunchStep(4, 7)) == []


def test_a_launch_that_fails_is_answered_behind_the_step_that_is_computed() -> None:
    machine = flights(FIRST, SECOND, Landed(failed(2, Fault.OOM)))
    assert machine.state is S.FAILING
    assert said(machine, Landed(StepDone(1, 7, [5]))) == [StepDone(1, 7, [5]), failed(2, Fault.OOM)]
    assert machine.state is S.CLEAR
    assert said(machine, LaunchStep(3, 7, after=2))[0].launched is False


def test_what_fails_late_takes_the_step_behind_it_along_when_that_has_ended() -> None:
    machine = flights(FIRST, SECOND)
    assert said(machine, Landed(failed(1))) == [failed(1, launched_behind=True)]
    assert machine.state is S.FAILING
    assert said(machine, Landed(StepDone(2, 7, [6]))) == [StepFailed(2, 7, Fault.EXCEPTION, BEHIND)]
    assert machine.state is S.CLEAR


def test_both_fail_one_late_and_one_at_its_launch() -> None:
    machine = flights(FIRST, SECOND, Landed(failed(2, Fault.OOM)))
    assert said(machine, Landed(failed(1))) == [failed(1, launched_behind=True), failed(2, Fault.OOM)]
    machine = flights(FIRST, SECOND)
    machine.handle(Landed(failed(1)))
    assert said(machine, Landed(failed(2, Fault.OOM))) == [StepFailed(2, 7, Fault.EXCEPTION, BEHIND)]


@pytest.mark.parametrize("has_another", [False, True])
def test_an_answer_that_cannot_be_sent_fails_its_step_and_the_one_behind(has_another: bool) -> None:
    machine = flights(FIRST, *([SECOND] if has_another else []))
    machine.handle(Landed(StepDone(1, 7, [2**70])))
    assert said(machine, Unsent(failed(1))) == [failed(1, launched_behind=has_another)]
    assert machine.state is (S.FAILING if has_another else S.CLEAR)
    if has_another:
        assert said(machine, Landed(StepDone(2, 7, [6]))) == [StepFailed(2, 7, Fault.EXCEPTION, BEHIND)]
    assert said(machine, LaunchStep(3, 7, after=1))[0].launched is False


def test_only_the_step_that_follows_the_newest_is_launched_beside_another() -> None:
    machine = flights(FIRST)
    assert machine.takes(1)
    assert not machine.takes(0)
    with pytest.raises(IllegalEvent, match="waits until all have ended"):
        machine.handle(LaunchStep(2, 7))
    machine.handle(SECOND)
    assert not machine.takes(2)
    with pytest.raises(IllegalEvent, match="buffers for no more"):
        machine.handle(LaunchStep(3, 7, after=2))
    machine.handle(Landed(failed(1)))
    assert not machine.takes(0)
    with pytest.raises(IllegalEvent, match="end first"):
        machine.handle(LaunchStep(3, 7))


def test_steps_end_in_order() -> None:
    machine = flights(FIRST, SECOND)
    with pytest.raises(IllegalEvent, match="in order"):
        machine.handle(Landed(StepDone(2, 7, [6])))
    machine.handle(Landed(failed(2)))
    with pytest.raises(IllegalEvent, match="in order"):
        machine.handle(Landed(failed(2)))
    assert machine.state is S.FAILING
