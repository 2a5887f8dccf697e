"""The last steps by phase: what a step was, and how long its planning, its device and its outputs took.

    MakeBatch ──schedule──▶ Run ──device──▶ StepDone        outputs: handing on what the step before brought, while
                                                            the device computes

With two steps in flight a step is planned and handed to the device while the one before it runs: its time there begins
when that ends. A few readings of the clock and a few lengths a step; nothing is kept of the plan itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

import msgspec

from novainfer.fsm.messages.events import StepFailed
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import StepDone, StepPlan

IN_FLIGHT_MAX = 2
STEPS_MAX = 1024  # about 200 kB: twenty seconds of a busy small model


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step: when it was launched (seconds since 1970), what was in it, how it went, and its phases in µs.

    `schedule_us` is the commit of the step before and the planning of this one, with the messages between the actors;
    `device_us` is from launch, or the answer to the step before it if that came later, to the answer; `outputs_us` is
    handing on its outputs (None: there were none). `outcome` is "running", "done", a fault ("oom", "exception",
    "timeout", "lost"), or "discarded": the step before it failed, and it was not begun.
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
    __slots__ = (
        *("asked_s", "began_s", "done_s", "epoch", "launched_s", "lengths", "mode", "outcome", "outputs_s", "step_id"),
    )

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
        self.began_s = launched_s
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
        self._planned: deque[tuple[int, int, float]] = deque(maxlen=IN_FLIGHT_MAX)  # (id, epoch, asked), not launched
        self._done_s = 0.0  # when the device answered last
        self._committing: tuple[int, int] | None = None  # (id, epoch) of the step that was given to be committed
        self._handed_on: deque[tuple[int, int] | None] = deque()  # the steps of outputs that are not delivered yet
        self._totals = [[0.0, 0], [0.0, 0], [0.0, 0]]

    def asked(self, outcome: StepDone | StepFailed | None = None) -> None:
        """The engine asks the scheduler for a step, and gives it the `outcome` of one."""
        self._asked_s = self._clock()
        self._committing = None if outcome is None else (outcome.step_id, outcome.epoch)

    def planned(self, plan: StepPlan) -> None:
        """The engine has the plan that it has asked for last."""
        self._planned.append((plan.step_id, plan.epoch, self._asked_s))

    def launched(self, plan: StepPlan) -> None:
        """The plan goes to the device."""
        asked_s = self._asked_s
        for step_id, epoch, at in self._planned:
            if step_id == plan.step_id and epoch == plan.epoch:
                asked_s = at
                break
        step = _Step(plan, asked_s, self._clock())
        self._steps.append(step)
        self._add(0, step.launched_s - step.asked_s)

    def returned(self, event: StepDone | StepFailed) -> None:
        """The device has answered; an answer that comes twice, or for none of the last steps, is not noted."""
        step = self._find(event.step_id, event.epoch)
        if step is not None and step.done_s is None:
            step.began_s = max(step.launched_s, self._done_s)
            step.done_s = self._done_s = self._clock()
            if isinstance(event, StepDone):
                step.outcome = "done"
            else:
                step.outcome = str(event.fault) if event.launched else "discarded"
            self._add(1, step.done_s - step.began_s)

    def handed_on(self) -> None:
        """What the scheduler's last answer brought is on its way to the streams."""
        self._handed_on.append(self._committing)

    def delivered(self, seconds: float) -> None:
        """The oldest outputs that were handed on are with the streams, which took so long."""
        self._add(2, seconds)
        committed = self._handed_on.popleft()
        step = self._find(*committed) if committed is not None else None
        if step is not None:
            step.outputs_s = seconds

    def _find(self, step_id: int, epoch: int) -> _Step | None:
        for step in islice(reversed(self._steps), IN_FLIGHT_MAX + 1):  # the one that is committed has left the device
            if step.step_id == step_id and step.epoch == epoch:
                return step
        return None

    def totals(self) -> PhaseTotals:
        """Seconds and counts since the start."""
        schedule, device, outputs = ((float(s), int(n)) for s, n in self._totals)
        return PhaseTotals(schedule, device, outputs)

    def records(self, last: int, *, is_running: bool) -> list[StepRecord]:
        """The newest `last` steps, the newest one at the end; `is_running`: those without an answer are on the device.

        Otherwise, and behind an answer or of an older epoch, they were lost with their worker.
        """
        steps = list(self._steps)
        num_done = next((i for i in range(len(steps), 0, -1) if steps[i - 1].outcome), 0)
        running = [step for step in steps[num_done:] if is_running and step.epoch == steps[-1].epoch]
        return [self._record(step, is_running=step in running) for step in steps[-last:]] if last > 0 else []

    def _add(self, phase: int, seconds: float) -> None:
        total = self._totals[phase]
        total[0] += seconds
        total[1] += 1

    def _record(self, step: _Step, *, is_running: bool) -> StepRecord:
        outcome = step.outcome or ("running" if is_running else "lost")
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
            device_us=None if step.done_s is None else _us(step.done_s - step.began_s),
            outputs_us=None if step.outputs_s is None else _us(step.outputs_s),
        )


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
