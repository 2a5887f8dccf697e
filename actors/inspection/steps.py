"""The last steps by phase: what a step was, and how long its planning, its device and its outputs took.

    MakeBatch ──commit──▶ plans ──▶ Run ──device──▶ StepDone        outputs: handing on what the step before brought,
        └─────── schedule ───────────┘                              while the device computes

With two steps in flight a step is planned and handed to the device while the one before it runs: its time there begins
when that ends. A few readings of the clock and a few lengths a step; nothing is kept of the plan itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from novainfer.actors.inspection.frames import Phase, PhaseName, StepNow
from novainfer.actors.inspection.times import STEP_TOKENS, Histogram
from novainfer.fsm.messages.events import Launch, MakeBatch, StepFailed
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import StepDone, StepPlan

IN_FLIGHT_MAX = 2
TOLD_AFTER_S = 0.25  # a step that has no outputs, and none behind it
STEPS_MAX = 1024  # about 200 kB: twenty seconds of a busy small model


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step: when it was launched (seconds since 1970), what was in it, how it went, and its phases in µs.

    `schedule_us` is the commit of the step before and the planning of this one, with the messages between the actors;
    `device_us` is from launch, or the answer to the step before it if that came later, to the answer, and `sample_us`
    of it what the device says that choosing tokens took (None: it does not); `commit_us` is what it brought becoming
    text (None: it has not), and `outputs_us` handing that on (None: there was nothing). `outcome` is "running", "done",
    a fault ("oom", "exception", "timeout", "lost"), or "discarded": the step before it failed, and it was not begun.
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
    sample_us: float | None = None
    commit_us: float | None = None


class _Step(msgspec.Struct, gc=False, eq=False):
    step_id: int
    epoch: int
    mode: Mode
    lengths: tuple[int, int, int, int, int]  # requests, tokens, samples, blocks swapped out and in
    asked_s: float
    planned_s: float  # when planning began: behind the commit of the step before
    launched_s: float
    began_s: float
    done_s: float | None = None
    sample_s: float = 0.0  # before it was done
    commit: tuple[float, float] | None = None  # when it began and ended
    outputs: tuple[float, float] | None = None  # when it began, and how long it took
    outcome: str = ""  # no answer yet


class PhaseTotals(msgspec.Struct, frozen=True):
    """Seconds and counts of each phase since the start, for the metrics."""

    schedule: tuple[float, int] = (0.0, 0)
    device: tuple[float, int] = (0.0, 0)
    outputs: tuple[float, int] = (0.0, 0)


class _Total:
    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.count += 1

    def all(self) -> tuple[float, int]:
        return self.seconds, self.count


class StepLog:
    """The newest `limit` steps, and totals of all."""

    def __init__(self, *, limit: int = STEPS_MAX, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=limit)
        self._epoch_s = time.time() - clock()  # turns the clock into the time of day
        self._asked_s = self._planning_s = clock()
        # id, epoch, when it was asked for and planned; not launched
        self._planned: deque[tuple[int, int, float, float]] = deque(maxlen=IN_FLIGHT_MAX)
        self.num_launched = 0
        self._newest: deque[_Step] = deque(maxlen=IN_FLIGHT_MAX + 1)  # the one that is committed has left the device
        self._done_s = 0.0  # when the device answered last
        self._committing: _Step | None = None  # that was given to be committed
        self._handed_on: deque[_Step | None] = deque()  # the steps of outputs that are not delivered yet
        self._schedule, self._device, self._outputs = _Total(), _Total(), _Total()
        self.tokens = Histogram(STEP_TOKENS)

    def asked(self, question: MakeBatch) -> None:
        """The engine asks the scheduler for a step, and gives it the outcome of one."""
        outcome = question.outcome
        self._asked_s = self._planning_s = self._clock()
        self._committing = None if outcome is None else self._find(outcome.step_id, outcome.epoch)

    def plans(self) -> None:
        """The scheduler has committed the outcome that it was given, and plans."""
        self._planning_s = self._clock()
        if self._committing is not None:
            self._committing.commit = self._asked_s, self._planning_s

    def planned(self, launch: Launch) -> None:
        """The engine has the plan that it has asked for last."""
        plan = launch.plan
        self._planned.append((plan.step_id, plan.epoch, self._asked_s, self._planning_s))

    def launched(self, plan: StepPlan) -> None:
        """The plan goes to the device; those that were planned before it, and have not gone there, never will."""
        step_id, epoch, asked_s, planned_s = plan.step_id, plan.epoch, self._asked_s, self._planning_s
        while self._planned:
            planned_id, planned_epoch, *at_s = self._planned.popleft()
            if planned_id == step_id and planned_epoch == epoch:
                asked_s, planned_s = at_s
                break
        lengths = (
            len(plan.slots),
            len(plan.input_ids),
            len(plan.sample_seqs),
            len(plan.swap_out_blocks),
            len(plan.swap_in_blocks),
        )
        now_s = self._clock()
        step = _Step(step_id, epoch, plan.mode, lengths, asked_s, planned_s, now_s, now_s)
        self._steps.append(step)
        self.num_launched += 1
        self._newest.append(step)
        self._schedule.add(now_s - asked_s)
        self.tokens.observe(len(plan.input_ids))

    def returned(self, event: StepDone | StepFailed) -> None:
        """The device has answered; an answer that comes twice, or for none of the last steps, is not noted."""
        step = self._find(event.step_id, event.epoch)
        if step is not None and step.done_s is None:
            began_s = step.began_s = step.launched_s if step.launched_s > self._done_s else self._done_s
            step.done_s = self._done_s = now_s = self._clock()
            if isinstance(event, StepDone):
                step.outcome = "done"
                step.sample_s = min(event.sample_s, now_s - began_s)
            else:
                step.outcome = str(event.fault) if event.launched else "discarded"
            self._device.add(now_s - began_s)

    def handed_on(self) -> None:
        """What the scheduler's last answer brought is on its way to the streams."""
        self._handed_on.append(self._committing)

    def delivered(self, seconds: float) -> None:
        """The oldest outputs that were handed on are with the streams, which took so long."""
        self._outputs.add(seconds)
        step = self._handed_on.popleft()
        if step is not None:
            step.outputs = self._clock() - seconds, seconds

    def _find(self, step_id: int, epoch: int) -> _Step | None:
        for step in reversed(self._newest):
            if step.step_id == step_id and step.epoch == epoch:
                return step
        return None

    def totals(self) -> PhaseTotals:
        """Seconds and counts since the start."""
        return PhaseTotals(self._schedule.all(), self._device.all(), self._outputs.all())

    def records(self, last: int, *, is_running: bool) -> list[StepRecord]:
        """The newest `last` steps, the newest one at the end; `is_running`: those without an answer are on the device.

        Otherwise, and behind an answer or of an older epoch, they were lost with their worker.
        """
        steps = list(self._steps)
        num_done = next((i for i in range(len(steps), 0, -1) if steps[i - 1].outcome), 0)
        running = [step for step in steps[num_done:] if is_running and step.epoch == steps[-1].epoch]
        return [self._record(step, is_running=step in running) for step in steps[-last:]] if last > 0 else []

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
            outputs_us=None if step.outputs is None else _us(step.outputs[1]),
            sample_us=_us(step.sample_s) if step.sample_s else None,
            commit_us=None if step.commit is None else _us(step.commit[1] - step.commit[0]),
        )

    # ---- for a flame ---------------------------------------------------------------------------------------------

    def told(self, number: int, budget: int, *, is_running: bool) -> tuple[list[StepNow], int, int]:
        """Those from the launch of this number on that have ended and are told in order, the oldest first.

        Then the number of the next one to be told, and how many are not kept any more. A step is told with all of its
        phases: once it has failed, its outputs are handed on, one behind it has ended, or it has been so for a while.
        """
        steps = self._steps
        first = self.num_launched - len(steps)  # the number of the oldest that is kept
        lost, number = max(first - number, 0), max(number, first)
        found: list[StepNow] = []
        now_s = self._clock()
        num_done = next((i for i in range(len(steps), 0, -1) if steps[i - 1].outcome), 0)
        for at in range(number - first, len(steps)):
            step = steps[at]
            is_old = at + 1 < num_done or (step.done_s is not None and now_s - step.done_s > TOLD_AFTER_S)
            is_whole = step.outputs is not None or step.outcome not in ("", "done")
            if not is_whole and not is_old and (is_running or step.outcome):
                break
            found.append(self._now(step, budget))
        return found, number + len(found), lost

    def _now(self, step: _Step, budget: int) -> StepNow:
        began_s = step.planned_s
        phases = [_phase("schedule", began_s, began_s, step.launched_s)]
        if step.done_s is not None:
            sampled_s = step.done_s - step.sample_s
            phases.append(_phase("kernel", began_s, step.began_s, sampled_s))
            if step.sample_s:
                phases.append(_phase("sample", began_s, sampled_s, step.done_s))
        if step.commit is not None:
            phases.append(_phase("detokenise", began_s, *step.commit))
        if step.outputs is not None:
            at_s, seconds = step.outputs
            phases.append(_phase("send", began_s, at_s, at_s + seconds))
        return StepNow(
            id=step.step_id,
            began=self._epoch_s + began_s,
            phases=phases,
            num_seqs=step.lengths[0],
            num_tokens=step.lengths[1],
            budget=budget,
            is_failed=step.outcome != "done",
            outcome=step.outcome or "lost",
        )


def _phase(name: PhaseName, zero_s: float, began_s: float, ended_s: float) -> Phase:
    return Phase(name, round(1e3 * (began_s - zero_s), 4), round(1e3 * (ended_s - began_s), 4))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
