"""The worker: one device, and what it is doing. It lives in the engine's process wherever the device is.

    LOADING ──▶ FITTING ──▶ WARMING ──▶ READY ──Launch──▶ RUNNING ──StepDone, StepFailed──▶ READY
       └───────────┴───────────┴──▶ FAILED                   └──StepFailed(oom)──▶ OOM ──▶ READY

Each arrow out of LOADING, FITTING, WARMING, RUNNING and OOM is the end of a job on the device. After an
out-of-memory step the device first gives back what the step left behind; only then does the engine hear of it. A
result that belongs to no running step (it came twice, or late) is dropped by state. Any state goes to STOPPED.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from novainfer.fsm.events import (
    Begin,
    Close,
    Fault,
    Fit,
    JobDone,
    JobFailed,
    Launch,
    Load,
    Reclaim,
    Run,
    StepDone,
    StepFailed,
    Stop,
    Warm,
    WorkerFailed,
    WorkerReady,
)
from novainfer.fsm.machine import Machine, Table, ignore, never, on, table


class WorkerState(StrEnum):
    """What the device does."""

    LOADING = "LOADING"
    FITTING = "FITTING"
    WARMING = "WARMING"
    READY = "READY"
    RUNNING = "RUNNING"
    OOM = "OOM"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


S = WorkerState
COMING_UP = (S.LOADING, S.FITTING, S.WARMING)
UP = (S.READY, S.RUNNING, S.OOM)
DOWN = (S.FAILED, S.STOPPED)


class Worker(Machine):
    """See the module; `epoch` is stamped on everything it says."""

    TABLE: ClassVar[Table] = table(
        S,
        (Begin, Launch, JobDone, JobFailed, StepDone, StepFailed, Stop),
        on(S.LOADING, Begin, "_begin", S.LOADING),
        never((S.FITTING, S.WARMING, *UP, S.FAILED), Begin, "a worker comes up once"),
        ignore(S.STOPPED, Begin, "it was stopped before it began"),
        on(S.LOADING, JobDone, "_loaded", S.FITTING, S.LOADING),
        on(S.FITTING, JobDone, "_fitted", S.WARMING, S.FITTING),
        on(S.WARMING, JobDone, "_warmed", S.READY, S.WARMING),
        on(S.OOM, JobDone, "_reclaimed", S.READY, S.OOM),
        ignore((S.READY, S.RUNNING), JobDone, "it came twice"),
        ignore(DOWN, JobDone, "nobody waits for it"),
        on(COMING_UP, JobFailed, "_failed", S.FAILED),
        on(S.OOM, JobFailed, "_failed", S.FAILED),
        ignore((S.READY, S.RUNNING), JobFailed, "it came twice"),
        ignore(DOWN, JobFailed, "nobody waits for it"),
        on(S.READY, Launch, "_launch", S.RUNNING),
        never((*COMING_UP, S.RUNNING, S.OOM), Launch, "the engine waits for the step before"),
        never(S.FAILED, Launch, "the engine waits for the step whose memory it could not reclaim, or never began"),
        ignore(S.STOPPED, Launch, "the engine was stopped after it had sent the step"),
        on(S.RUNNING, StepDone, "_step_done", S.READY, S.RUNNING),
        on(S.RUNNING, StepFailed, "_step_failed", S.READY, S.OOM, S.RUNNING),
        ignore((S.READY, S.OOM, *DOWN), StepDone, "it came twice, or late"),
        ignore((S.READY, S.OOM, *DOWN), StepFailed, "it came twice, or late"),
        never(COMING_UP, StepDone, "no step was launched"),
        never(COMING_UP, StepFailed, "no step was launched"),
        on((*COMING_UP, *UP, S.FAILED), Stop, "_stop", S.STOPPED),
        ignore(S.STOPPED, Stop, "stopping twice is stopping once"),
    )

    def __init__(self, epoch: int = 0) -> None:
        super().__init__(S.LOADING)
        self._epoch = epoch
        self._found: dict[str, Any] = {}  # what Load and Fit found out about the model
        self._step_id = -1
        self._failure: StepFailed | None = None

    def _begin(self, _: Begin) -> WorkerState:
        self._start(Load())
        return S.LOADING

    def _loaded(self, event: JobDone) -> WorkerState:
        if event.job != "Load":
            return S.LOADING
        self._found.update(event.value)
        self._start(Fit())
        return S.FITTING

    def _fitted(self, event: JobDone) -> WorkerState:
        if event.job != "Fit":
            return S.FITTING
        self._found.update(event.value)
        self._start(Warm())
        return S.WARMING

    def _warmed(self, event: JobDone) -> WorkerState:
        if event.job != "Warm":
            return S.WARMING
        found = self._found
        ready = WorkerReady(
            epoch=self._epoch,
            num_blocks=found["num_blocks"],
            max_model_len=found["max_model_len"],
            vocab_size=found["vocab_size"],
            eos_token_ids=found["eos_token_ids"],
            facts=found,
        )
        self._send("engine", ready)
        return S.READY

    def _failed(self, event: JobFailed) -> WorkerState:
        self._send("engine", WorkerFailed(event.message))
        return S.FAILED

    def _launch(self, event: Launch) -> WorkerState:
        self._step_id = event.plan.step_id
        self._start(Run(event.plan))
        return S.RUNNING

    def _step_done(self, event: StepDone) -> WorkerState:
        if (event.step_id, event.epoch) != (self._step_id, self._epoch):
            return S.RUNNING
        self._send("engine", event)
        return S.READY

    def _step_failed(self, event: StepFailed) -> WorkerState:
        if (event.step_id, event.epoch) != (self._step_id, self._epoch):
            return S.RUNNING
        if event.fault is Fault.OOM:
            self._failure = event
            self._start(Reclaim())
            return S.OOM
        self._send("engine", event)
        return S.READY

    def _reclaimed(self, event: JobDone) -> WorkerState:
        if event.job != "Reclaim":
            return S.OOM
        self._send("engine", self._failure)
        self._failure = None
        return S.READY

    def _stop(self, _: Stop) -> WorkerState:
        self._start(Close())
        return S.STOPPED
