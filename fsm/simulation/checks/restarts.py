"""An account of the worker's losses, kept apart from the worker's own: the restart budget must be exact."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from novainfer.fsm.core.machine import After, Effect, Send, Start
from novainfer.fsm.device.worker import Worker, WorkerState
from novainfer.fsm.messages.events import (
    DeviceLost,
    Fit,
    JobDone,
    JobFailed,
    Load,
    Overdue,
    Reconfigure,
    Restart,
    Run,
    Spawn,
    StepFailed,
    Warm,
    WorkerLost,
    WorkerReady,
)
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.world.shape import Shape

S = WorkerState
COMING_UP = (S.LOADING, S.FITTING, S.WARMING)
GONE = (S.RESTARTING, S.FAILED, S.STOPPED)
UP = (S.READY, S.RUNNING, S.SWITCHING, S.OOM)
ITS_JOB: dict[StrEnum, tuple[str, ...]] = {
    S.LOADING: ("Spawn", "Load"),
    S.FITTING: ("Fit",),
    S.WARMING: ("Warm",),
    S.OOM: ("Reclaim",),
}


class Restarts:
    """Looks at the worker before and after each of its events."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._losses: list[float] = []  # when each happened, since the last good step, however long ago
        self._was_ready = False
        self._state: StrEnum = S.LOADING  # before the event
        # Of the worker, before the event; and of its device, when that was first asked for.
        self._epoch = self._spawned = self._last_spawned = 0
        self._is_on_way = self._is_changing = False  # to what was wanted; to that, or back from there
        self._adopted = -1  # the epoch that a spare has begun
        self._begun: set[tuple[str, int]] = set()  # jobs of coming up, by epoch
        self._at_device: list[int] = []  # steps that it was asked for and whose outcome was not passed on, in order

    def _check_blamed(self, sent: list[Any]) -> None:
        """The step that is said to be lost is the oldest one at the device."""
        for event in sent:
            if isinstance(event, StepDone) and self._at_device:
                del self._at_device[0]
            elif isinstance(event, StepFailed):
                self._at_device.clear()
            elif isinstance(event, WorkerLost):
                if event.step_id != (self._at_device or [-1])[0]:
                    raise Violation(f"steps {self._at_device} are at the device, and {event} is told")
                self._at_device.clear()

    def before(self, worker: Worker) -> None:
        """The worker is about to handle an event."""
        self._state, self._epoch, self._spawned = worker.state, worker.epoch, self._last_spawned

    def after(self, worker: Worker, event: Any, effects: Sequence[Effect]) -> None:
        """The worker has handled `event`."""
        sent = [effect.event for effect in effects if isinstance(effect, Send)]
        self._was_ready = self._was_ready or any(isinstance(e, WorkerReady) for e in sent)
        self._check_blamed(sent)
        self._at_device += [e.job.plan.step_id for e in effects if isinstance(e, Start) and isinstance(e.job, Run)]
        for effect in effects:
            if isinstance(effect, Start) and isinstance(effect.job, Spawn | Load | Fit | Warm):
                job = type(effect.job).__name__, effect.job.epoch
                if job in self._begun:
                    raise Violation(f"the worker begins {job} twice")
                self._begun.add(job)
                if isinstance(effect.job, Spawn):
                    self._last_spawned = effect.job.epoch
        num_incidents = sum(effect.to == "incidents" for effect in effects if isinstance(effect, Send))
        was_changing = self._is_changing
        if any(isinstance(e, WorkerReady) for e in sent):
            self._check_ready(worker, next(e for e in sent if isinstance(e, WorkerReady)))
        if self._changes(event):
            if (worker.epoch, num_incidents) != (self._epoch + 1, 0) or worker.state not in (S.LOADING, S.FITTING):
                raise Violation(f"{event}: the worker is {worker.state} in epoch {worker.epoch}")
            self._is_on_way, self._is_changing = isinstance(event, Reconfigure), True
            return
        if isinstance(event, JobDone) and event.job == "Spawn" and (event.value or {}).get("spare"):
            self._adopted = max(self._adopted, event.epoch)
        is_spares = isinstance(event, JobFailed) and self._adopted == event.epoch and self._state in COMING_UP
        if is_spares and self._is_loss(event):
            if (worker.state, worker.epoch, num_incidents) != (S.LOADING, self._epoch + 1, 1):
                raise Violation(f"{event}: a spare failed, and the worker is {worker.state} in epoch {worker.epoch}")
            return
        if not self._is_loss(event):
            if isinstance(event, StepDone) and any(isinstance(e, Send) and e.event is event for e in effects):
                self._losses.clear()
            if worker.epoch != self._epoch or num_incidents:
                raise Violation(f"{event} in {self._state}: the worker's epoch is {worker.epoch}, and nothing is lost")
            return
        shape = self._shape
        self._is_on_way = self._is_changing = False
        self._losses.append(event.at_s)
        num_recent = sum(event.at_s - loss_s < shape.restart_window_s for loss_s in self._losses)
        may_restart = self._was_ready and num_recent <= shape.max_restarts
        if worker.state is not (S.RESTARTING if may_restart else S.FAILED):
            raise Violation(f"after {num_recent} losses in a row the worker is {worker.state}")
        if worker.epoch != self._epoch + may_restart or num_incidents != 1:
            raise Violation(f"{event}: the worker's epoch is {worker.epoch}, with {num_incidents} incidents")
        if may_restart:
            timers = [effect.event for effect in effects if isinstance(effect, After)]
            delays_s = [effect.delay_s for effect in effects if isinstance(effect, After)]
            if delays_s != [_pause_s(num_recent)]:
                raise Violation(f"loss {num_recent} in a row is answered after {delays_s} s")
            was_told = any(isinstance(e, WorkerLost) and e.epoch == self._epoch for e in sent)
            if timers != [Restart()] or was_told is not (self._state in UP or was_changing):
                raise Violation(f"{event} in {self._state}: the timers are {timers}, the engine was told: {was_told}")

    def _changes(self, event: Any) -> bool:
        """Whether the worker is going to be another one with `event`, or the one that it was, and nothing is lost."""
        if isinstance(event, Reconfigure):
            return event.epoch == self._epoch and self._state is S.READY
        return self._is_on_way and isinstance(event, JobFailed) and self._is_loss(event)

    def _check_ready(self, worker: Worker, ready: WorkerReady) -> None:
        """It is what was wanted, or says that it is not."""
        if (ready.error is not None) is not (self._is_changing and not self._is_on_way):
            raise Violation(f"the worker went {'there' if self._is_on_way else 'back'}, and says {ready.error}")
        self._is_on_way = self._is_changing = False

    def _is_loss(self, event: Any) -> bool:
        if isinstance(event, DeviceLost | Overdue):
            return self._spawned <= event.epoch <= self._epoch and self._state not in GONE
        if not isinstance(event, JobFailed) or event.epoch != self._epoch:
            return False
        is_over = event.job == "Spawn" and ("Load", self._epoch) in self._begun  # the device is there: that was told
        return event.job in ITS_JOB.get(self._state, ()) and not is_over


def _pause_s(num_losses: int) -> float:
    """Before the next worker is started: none for the first loss, then 0.1, 0.2, 0.4 s and so on, 5 s at most."""
    return min(0.05 * 2 ** (num_losses - 1), 5.0) if num_losses > 1 else 0.0
