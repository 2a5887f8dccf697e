"""The steps on a device: which were launched, which have ended, and what is said of them, in order.

    CLEAR ──LaunchStep──▶ FLYING ──LaunchStep──▶ FULL
      ▲                    │  ▲                   │
      ├───────Landed───────┘  └──────Landed───────┤
      └───────Landed────── FAILING ◀───failed─────┘

A device that computes beside its host is told of a step before the one before it has ended. It takes one that follows
the newest that it was told of; every other one waits until none is left, and so does every other job.

Answers come in the order of the steps. When one fails, those behind it, which go on on what it has left, have failed
with it: they are waited for, since they read and write memory that is theirs until they end, and nothing is launched
before that. A launch may fail while the step before is computed: that is said behind that step's answer.

The oldest step is blamed for what surfaces while it is waited for. That may be the fault of the one behind it; where
nothing but a new process helps, both are lost, and the oldest is blamed as for any process that dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import Dwell, any_time
from novainfer.fsm.core.machine import Guard, Machine, Table, never, on, table
from novainfer.fsm.messages.events import Fault, StepFailed
from novainfer.fsm.messages.step import StepDone


class FlightsState(StrEnum):
    """What the device has to do."""

    CLEAR = "CLEAR"
    FLYING = "FLYING"  # it has a step, and takes the one that follows
    FULL = "FULL"  # it has two: there are buffers for no more
    FAILING = "FAILING"  # one of two has failed, and one is still on the device


S = FlightsState


class LaunchStep(msgspec.Struct, frozen=True):
    """The device is about to be told of a step, planned behind the step `after`, or behind none (0)."""

    step_id: int
    epoch: int
    after: int = 0


class Landed(msgspec.Struct, frozen=True):
    """A step has ended: the oldest, or one that failed at its launch."""

    answer: StepDone | StepFailed


class Unsent(msgspec.Struct, frozen=True):
    """`failed` is the answer to a step, instead of the one just said; no message could carry that, or the plan."""

    failed: StepFailed


class OfLast(Guard):
    """The step that it follows has ended well, just before it; or it follows none."""

    name = "that can be begun"
    why = "the step before did not end well"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return event.after in (0, machine.last_step_id)


class OfNewest(Guard):
    """The step follows the newest on the device."""

    name = "that follows the newest"
    why = "it waits until all have ended"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return bool(event.after == machine.last_step_id)


class OfFlight(Guard):
    """The answer is to the oldest step; or another one has failed at its launch."""

    name = "of the oldest, or of the newest's launch"
    why = "steps end in order"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        steps, answer = machine.steps, event.answer
        if steps[0].step_id == answer.step_id:
            return True
        return isinstance(answer, StepFailed) and steps[-1].step_id == answer.step_id and not steps[-1].has_landed


class Step(msgspec.Struct):
    """One step on the device."""

    step_id: int
    epoch: int
    failed: StepFailed | None = None  # what will be said of it, however it ends
    has_landed: bool = False  # and waits for those before it to be answered


class Flights(Machine):
    """See the module. What is said goes to "worker"."""

    TABLE: ClassVar[Table] = table(
        S,
        (LaunchStep, Landed, Unsent),
        on(S.CLEAR, LaunchStep, "_launch", S.FLYING, only=OfLast),
        on(S.CLEAR, LaunchStep, "_refuse", S.CLEAR),
        on(S.FLYING, LaunchStep, "_launch_behind", S.FULL, only=OfNewest),
        never(S.FLYING, LaunchStep, "a step that does not follow the newest waits until all have ended"),
        never(S.FULL, LaunchStep, "there are buffers for no more steps"),
        never(S.FAILING, LaunchStep, "those that were launched behind the one that failed end first"),
        never(S.CLEAR, Landed, "no step is on the device"),
        on(S.FLYING, Landed, "_landed", S.CLEAR, only=OfFlight),
        on(S.FULL, Landed, "_landed", S.FLYING, S.FAILING, only=OfFlight),
        on(S.FAILING, Landed, "_came_down", S.CLEAR, only=OfFlight),
        never((S.FLYING, S.FULL, S.FAILING), Landed, "steps end in order"),
        on((S.CLEAR, S.FLYING), Unsent, "_unsent", S.CLEAR, S.FAILING),
        never((S.FULL, S.FAILING), Unsent, "the step that was answered last has made room, or has failed itself"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.CLEAR: any_time("it waits for a step"),
        S.FLYING: any_time("the worker's state has a deadline for its steps"),
        S.FULL: any_time("the worker's state has a deadline for its steps"),
        S.FAILING: any_time("the worker's state has a deadline for what comes next"),
    }

    def __init__(self) -> None:
        super().__init__(S.CLEAR)
        self.steps: list[Step] = []  # on the device, oldest first
        self.last_step_id = 0  # of the newest, if none has failed since; 0 where one has

    def takes(self, after: int) -> bool:
        """Whether a step planned behind the step `after` need not wait: it is launched now, or refused."""
        return self.state is S.CLEAR or (self.state is S.FLYING and after == self.last_step_id)

    def _launch(self, event: LaunchStep) -> FlightsState:
        self._take(event)
        return S.FLYING

    def _launch_behind(self, event: LaunchStep) -> FlightsState:
        self._take(event)
        return S.FULL

    def _take(self, event: LaunchStep) -> None:
        self.steps.append(Step(event.step_id, event.epoch))
        self.last_step_id = event.step_id

    def _refuse(self, event: LaunchStep) -> FlightsState:
        self.last_step_id = 0
        why = f"step {event.after}, which it follows, did not end well just before it"
        self._send("worker", StepFailed(event.step_id, event.epoch, Fault.EXCEPTION, why, launched=False))
        return S.CLEAR

    def _landed(self, event: Landed) -> FlightsState:
        answer = event.answer
        if answer.step_id != self.steps[0].step_id:
            assert isinstance(answer, StepFailed)
            self.last_step_id = 0
            self.steps[1].failed, self.steps[1].has_landed = answer, True
            return S.FAILING
        del self.steps[0]
        if isinstance(answer, StepFailed):
            return self._fail(answer)
        self._send("worker", answer)
        return S.FLYING if self.steps else S.CLEAR

    def _came_down(self, event: Landed) -> FlightsState:
        """What is said of a step is what became of it, or of the one before it."""
        first, *others = self.steps
        answer: StepDone | StepFailed = first.failed or event.answer
        self.steps = others
        if first.failed is None and isinstance(answer, StepFailed):
            self._fail(answer)
        else:
            self._send("worker", answer)
        for step in others:
            assert step.has_landed, "there are two, and the newest has failed at its launch"
            self._send("worker", step.failed)
        self.steps = []
        return S.CLEAR

    def _unsent(self, event: Unsent) -> FlightsState:
        return self._fail(event.failed)

    def _fail(self, failed: StepFailed) -> FlightsState:
        """Say that a step has failed, and with it those that were launched behind it."""
        self.last_step_id = 0
        self._send(
            "worker", msgspec.structs.replace(failed, launched_behind=failed.launched_behind or bool(self.steps))
        )
        why = f"step {failed.step_id}, which it follows, failed while both were on the device"
        for step in self.steps:
            step.failed = step.failed or StepFailed(step.step_id, step.epoch, Fault.EXCEPTION, why)
        return S.FAILING if self.steps else S.CLEAR
