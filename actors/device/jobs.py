"""A device's jobs, one after the other, and the thread that waits for steps which the device computes beside its host.

A step that is computed when it was begun is answered by the device's thread, at once. Of any other one that thread only
begins it, and is free for the one behind it; another thread waits for them, in order, and answers: the loop is woken
once a step. `fsm/device/flights.py` says what may be begun when, and what is said of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import msgspec

from novainfer.actors.device.device import Device, Flight, sentence_of
from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.device.flights import Flights, FlightsState, Landed, LaunchStep, Unsent
from novainfer.fsm.messages.events import (
    Close,
    Fault,
    Fit,
    JobDone,
    JobFailed,
    Load,
    Reclaim,
    Run,
    Spawn,
    StepFailed,
    Switch,
    Warm,
)
from novainfer.fsm.messages.step import StepDone, StepPlan


class Jobs:
    """The thread that calls `do` is the device's.

    `say` is given answers that come late, by the thread that waits, and never two at once; it gives a sentence where an
    answer cannot be sent, else None.
    """

    def __init__(self, device: Device, say: Callable[[StepDone | StepFailed], str | None]) -> None:
        self._device = device
        self._say = say
        self._flights = Flights()
        self._turn = threading.Condition()  # for the machine, and for what it has said
        self._flown: SimpleQueue[tuple[StepPlan, Flight, float] | None] = SimpleQueue()
        self._waiter: threading.Thread | None = None  # there is one when the first step needs it
        self._ended_s = 0.0  # when the last step ended, if it ended well

    def do(self, job: Any) -> Any:
        """Do one job, and give its answer; None where that comes later.

        A step that does not follow the newest one on the device, and any other job, waits until all have ended.
        """
        if type(job) is Run:
            return self._run(job.plan)
        self._settle()
        name = type(job).__name__
        try:
            return JobDone(name, _OTHER_JOBS[type(job)](self._device, job), job.epoch)
        except Exception as error:
            return JobFailed(name, sentence_of(error), job.epoch)

    def unsent(self, failed: StepFailed) -> StepFailed:
        """`failed` is the answer to a step instead of that which `do` gave; or to one that could not even be told."""
        self._settle()
        self._ended_s = 0.0
        return _said(self._flights.handle(Unsent(failed)))[0]  # type: ignore[no-any-return]

    def end(self) -> None:
        """Have the thread that waits end, behind the steps that it waits for, and wait for that."""
        if self._waiter is not None:
            self._flown.put(None)
            self._waiter.join()

    def _settle(self) -> None:
        """Wait until nothing is on the device."""
        if self._flights.state is not FlightsState.CLEAR:  # only this thread leaves that state
            with self._turn:
                self._turn.wait_for(lambda: self._flights.state is FlightsState.CLEAR)

    def _run(self, plan: StepPlan) -> StepDone | StepFailed | None:
        flights, begin = self._flights, LaunchStep(plan.step_id, plan.epoch, plan.after)
        if self._waiter is None:  # no other thread looks at the machine
            refused = flights.handle(begin)
        else:
            with self._turn:
                self._turn.wait_for(lambda: flights.takes(plan.after))
                refused = flights.handle(begin)
        if refused:
            self._ended_s = 0.0
            return _said(refused)[0]  # type: ignore[no-any-return]
        began_s = time.monotonic()
        try:
            found = self._device.run(plan)
        except Exception as error:
            return self._land(self._failed(plan, error))
        if type(found) is StepDone and len(flights.steps) == 1:
            return self._land(self._timed(found, began_s))
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name="novainfer-waiter", daemon=True)
            self._waiter.start()
        self._flown.put((plan, _Computed(found) if isinstance(found, StepDone) else found, began_s))
        return None

    def _land(self, answer: StepDone | StepFailed) -> StepDone | StepFailed | None:
        """A step has ended as it was begun; its answer, unless it must wait for that of the one before it."""
        if self._waiter is None:
            said = self._flights.handle(Landed(answer))
        else:
            with self._turn:
                said = self._flights.handle(Landed(answer))
        return _said(said)[0] if said else None

    def _timed(self, done: StepDone, began_s: float) -> StepDone:
        """`done`, with the time that the device had for this step alone, and since the step before ended."""
        before_s, self._ended_s = self._ended_s, time.monotonic()
        cycle_s = self._ended_s - before_s if before_s else 0.0
        return msgspec.structs.replace(done, took_s=self._ended_s - max(began_s, before_s), cycle_s=cycle_s)

    def _failed(self, plan: StepPlan, error: BaseException) -> StepFailed:
        self._ended_s = 0.0
        fault = Fault.OOM if isinstance(error, MemoryError) else Fault.EXCEPTION
        return StepFailed(plan.step_id, plan.epoch, fault, sentence_of(error))

    def _wait(self) -> None:
        """What waits for steps, oldest first; it touches nothing of the device but their flights."""
        while (flown := self._flown.get()) is not None:
            plan, flight, began_s = flown
            answer: StepDone | StepFailed
            try:
                flight.wait()
                answer = self._timed(flight.done(), began_s)
            except BaseException as error:
                answer = self._failed(plan, error)
            with self._turn:
                self._tell(_said(self._flights.handle(Landed(answer))))
                self._turn.notify_all()

    def _tell(self, answers: list[Any]) -> None:
        """Say them in this order; an answer that cannot be sent has failed, and with it what was begun behind it."""
        while answers:
            answer = answers.pop(0)
            why = self._say(answer)
            if why is not None and isinstance(answer, StepDone):
                failed = StepFailed(answer.step_id, answer.epoch, Fault.EXCEPTION, why, launched_behind=bool(answers))
                answers = _said(self._flights.handle(Unsent(failed))) + answers


class _Computed:
    """A step that the device computed as it was begun, and whose answer waits for that of the step before it."""

    def __init__(self, found: StepDone) -> None:
        self._found = found

    def wait(self) -> None:
        """It has ended."""

    def done(self) -> StepDone:
        """What it gave."""
        return self._found


def leaves_unusable(device: Device, answer: Any) -> bool:
    """Whether what has failed has left the device of no more use; a step that only found no memory has not."""
    if type(answer) is StepFailed:
        may_have = answer.launched and answer.fault is not Fault.OOM
    else:
        may_have = type(answer) is JobFailed
    return may_have and not device.is_usable()


def _said(effects: list[Effect]) -> list[Any]:
    return [effect.event for effect in effects if isinstance(effect, Send)]


_OTHER_JOBS: dict[type, Callable[[Device, Any], Any]] = {
    Spawn: lambda device, job: None,  # the device is here already
    Load: lambda device, job: device.load(job.precision),
    Fit: lambda device, job: device.fit(job.num_blocks, is_new=job.is_new),
    Warm: lambda device, job: device.warm(measures=job.measures),
    Switch: lambda device, job: device.switch(job.mode),
    Reclaim: lambda device, job: device.reclaim(),
    Close: lambda device, job: device.close(),
}
