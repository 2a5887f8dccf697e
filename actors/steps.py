"""The last steps by phase: what a step was, and how long its planning, its device and its outputs took.

    MakeBatch ──schedule──▶ Run ──device──▶ StepDone        outputs: handing on what the step before brought, while
                                                            the device computes

Three readings of the clock and a few lengths a step; nothing is kept of the plan itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from novainfer.fsm.events import StepFailed
from novainfer.fsm.mode import Mode
from novainfer.fsm.step import StepDone, StepPlan

STEPS_MAX = 1024  # about 200 kB: twenty seconds of a busy small model


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step: when it was launched (seconds since 1970), what was in it, how it went, and its phases in µs.

    `schedule_us` is the commit of the step before and the planning of this one, with the messages between the actors;
    `device_us` is from launch to answer; `outputs_us` is handing on its outputs (None: there were none). `outcome` is
    "running", "done", or a fault: "oom", "exception", "timeout", "lost".
    """

    step_id: int
    epoch: int
    time: float
    mode: Mode
    num_requests: int
    num_tokens: int
    num_samples: int
    num_swapped_out: int
    num_swapped_in: int
    outcome: str
    schedule_us: float
    device_us: float | None
    outputs_us: float | None


class _Step:
    __slots__ = ("asked_s", "done_s", "epoch", "launched_s", "lengths", "mode", "outcome", "outputs_s", "step_id")

    def __init__(self, plan: StepPlan, asked_s: float, launched_s: float) -> None:
        self.step_id = plan.step_id
        self.epoch = plan.epoch
        self.mode = plan.mode
        self.lengths = (
            len(plan.slots),
            len(plan.input_ids),
            len(plan.sample_seqs),
            len(plan.swap_out_blocks),
            len(plan.swap_in_blocks),
        )
        self.asked_s = asked_s
        self.launched_s = launched_s
        self.done_s: float | None = None
        self.outputs_s: float | None = None
        self.outcome = ""  # no answer yet


class PhaseTotals(msgspec.Struct, frozen=True):
    """Seconds and counts of each phase since the start, for the metrics."""

    schedule: tuple[float, int] = (0.0, 0)
    device: tuple[float, int] = (0.0, 0)
    outputs: tuple[float, int] = (0.0, 0)


class StepLog:
    """The newest `limit` steps, and totals of all."""

    def __init__(self, *, limit: int = STEPS_MAX, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=limit)
        self._epoch_s = time.time() - clock()  # turns the clock into the time of day
        self._asked_s = clock()
        self._totals = [[0.0, 0], [0.0, 0], [0.0, 0]]

    def asked(self) -> None:
        """The engine asks the scheduler for a step."""
        self._asked_s = self._clock()

    def launched(self, plan: StepPlan) -> None:
        """The plan goes to the device."""
        step = _Step(plan, self._asked_s, self._clock())
        self._steps.append(step)
        self._add(0, step.launched_s - step.asked_s)

    def returned(self, event: StepDone | StepFailed) -> None:
        """The device has answered; an answer for another step than the last is not noted."""
        if not self._steps:
            return
        step = self._steps[-1]
        if (step.step_id, step.epoch) == (event.step_id, event.epoch) and step.done_s is None:
            step.done_s = self._clock()
            step.outcome = "done" if type(event) is StepDone else str(event.fault)  # type: ignore[union-attr]
            self._add(1, step.done_s - step.launched_s)

    def delivered(self, seconds: float) -> None:
        """The outputs of the last step that was committed were handed on, which took so long."""
        self._add(2, seconds)
        for step in reversed(self._steps):
            if step.done_s is not None:
                step.outputs_s = seconds
                break

    def totals(self) -> PhaseTotals:
        """Seconds and counts since the start."""
        schedule, device, outputs = ((float(s), int(n)) for s, n in self._totals)
        return PhaseTotals(schedule, device, outputs)

    def records(self, last: int, *, is_running: bool) -> list[StepRecord]:
        """The newest `last` steps, the newest one at the end; `is_running`: that one is on the device."""
        steps = list(self._steps)[-last:] if last > 0 else []
        return [self._record(step, is_running=is_running and step is steps[-1]) for step in steps]

    def _add(self, phase: int, seconds: float) -> None:
        total = self._totals[phase]
        total[0] += seconds
        total[1] += 1

    def _record(self, step: _Step, *, is_running: bool) -> StepRecord:
        outcome = step.outcome or ("running" if is_running else "lost")  # it was lost with its worker
        num_requests, num_tokens, num_samples, num_out, num_in = step.lengths
        return StepRecord(
            step_id=step.step_id,
            epoch=step.epoch,
            time=self._epoch_s + step.launched_s,
            mode=step.mode,
            num_requests=num_requests,
            num_tokens=num_tokens,
            num_samples=num_samples,
            num_swapped_out=num_out,
            num_swapped_in=num_in,
            outcome=outcome,
            schedule_us=_us(step.launched_s - step.asked_s),
            device_us=None if step.done_s is None else _us(step.done_s - step.launched_s),
            outputs_us=None if step.outputs_s is None else _us(step.outputs_s),
        )


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
