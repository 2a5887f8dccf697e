"""The worker: one device, and what it is doing. It lives in the engine's process wherever the device is.

    LOADING ──▶ FITTING ──▶ WARMING ──▶ READY ──Launch──▶ RUNNING ──StepDone, StepFailed──▶ READY
       ▲                                  │ └─another mode─▶ SWITCHING ──▶ RUNNING
       │                                  │                   RUNNING ──StepFailed(oom)──▶ OOM ──▶ READY
    RESTARTING ◀──DeviceLost, Overdue── all of these ──budget spent──▶ FAILED
    READY ──Reconfigure──▶ FITTING: another KV cache in place;  LOADING: another precision, by a new process if need be

Each arrow out of LOADING, FITTING, WARMING, RUNNING, SWITCHING and OOM is the end of a job on the device. After an
out-of-memory step the device first gives back what the step left behind; only then does the engine hear of it. A
device that is lost, or gives no sign of life, is replaced by one of the next epoch; what the old one may still say is
dropped. The budget counts losses in a row, without a good step between them. Any state goes to STOPPED.

A worker that is reconfigured is one of the next epoch, too. Where a job fails on the way there, it goes back, by one
more epoch, to what it was when it was READY last; that it is again, too, when it is lost on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import (
    BACKOFF_LIMIT_S,
    ENDED,
    LOAD_STALL_LIMIT_S,
    MEMORY_LIMIT_S,
    RECLAIM_LIMIT_S,
    SWITCH_LIMIT_S,
    Dwell,
    any_time,
)
from novainfer.fsm.core.guards import OfEpoch, OfJob, OfStep
from novainfer.fsm.core.machine import Guard, Machine, Table, ignore, never, on, stay, table, timer
from novainfer.fsm.messages.events import (
    Begin,
    Close,
    DeviceLost,
    Fault,
    Fit,
    Incident,
    JobDone,
    JobFailed,
    Kill,
    Launch,
    Load,
    Overdue,
    Reclaim,
    Reconfigure,
    Restart,
    Run,
    Spawn,
    StepFailed,
    Stop,
    Switch,
    Warm,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
)
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import StepDone, StepPlan

BACKOFF_S = 0.1  # before the second restart in a row; the first comes at once, each further one after twice as long
BACKOFF_S_MAX = 5.0


class WorkerState(StrEnum):
    """What the device does."""

    LOADING = "LOADING"
    FITTING = "FITTING"
    WARMING = "WARMING"
    READY = "READY"
    RUNNING = "RUNNING"
    SWITCHING = "SWITCHING"
    OOM = "OOM"
    RESTARTING = "RESTARTING"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


S = WorkerState
COMING_UP = (S.LOADING, S.FITTING, S.WARMING)
UP = (S.READY, S.RUNNING, S.SWITCHING, S.OOM)
DOWN = (S.FAILED, S.STOPPED)
SWITCH_LOSSES_MAX = 2  # once is chance; a mode that costs a worker each time would spend the budget of restarts
LATE = "it came twice, or late"
OLD = "it belongs to an older epoch"


class OfSpawn(Guard):
    """The device is there, as it was asked for; its Load is the next job of the same state."""

    name = "of Spawn"
    why = OfJob.why

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return bool(event.job == "Spawn") and OfJob.holds(machine, event)


class OfDevice(Guard):
    """The device is the worker's: it may have been the one before's as well."""

    name = "of this device"
    why = "it is of a device that was replaced"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return bool(machine.device_epoch <= event.epoch <= machine.epoch)


class OfPlan(Guard):
    """The plan was made for this worker, and the step that it follows has not failed."""

    name = "that can be begun"
    why = "it was planned for a worker that is lost, or behind a step that has failed"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        plan = event.plan
        return bool(plan.epoch == machine.epoch and plan.after in (0, machine.last_step_id))


class RestartPolicy(msgspec.Struct, frozen=True):
    """`max_restarts` losses within `window_s` seconds, without a good step between them, are borne; one more is not.

    A device that is a thread of this process cannot be replaced: its policy is `max_restarts=0`. So may be that of a
    process, which can be ended all the same: `is_process` says so where restarts do not.
    """

    max_restarts: int = 0
    window_s: float = 60.0
    is_process: bool = False

    @property
    def may_kill(self) -> bool:
        """Whether there is a process that can be ended."""
        return self.is_process or self.max_restarts > 0


class Worker(Machine):
    """See the module; `epoch` is stamped on everything it says."""

    TABLE: ClassVar[Table] = table(
        S,
        (Begin, Launch, Reconfigure, JobDone, JobFailed, StepDone, StepFailed, DeviceLost, Overdue, Restart, Stop),
        on(S.LOADING, Begin, "_begin", S.LOADING),
        never((S.FITTING, S.WARMING, *UP, S.RESTARTING, S.FAILED), Begin, "a worker is begun once"),
        ignore(S.STOPPED, Begin, "it was stopped before it began"),
        on(S.LOADING, JobDone, "_spawned", S.LOADING, only=OfSpawn, renews=True),
        on(S.LOADING, JobDone, "_loaded", S.FITTING, only=OfJob),
        on(S.FITTING, JobDone, "_fitted", S.WARMING, only=OfJob),
        on(S.WARMING, JobDone, "_warmed", S.READY, only=OfJob),
        on(S.SWITCHING, JobDone, "_switched", S.RUNNING, only=OfJob),
        on(S.OOM, JobDone, "_reclaimed", S.READY, only=OfJob),
        ignore((S.READY, S.RUNNING, S.RESTARTING), JobDone, LATE),
        ignore(DOWN, JobDone, "no job is waited for"),
        on(COMING_UP, JobFailed, "_job_failed", S.FAILED, S.RESTARTING, S.LOADING, S.FITTING, only=OfJob),
        on(S.SWITCHING, JobFailed, "_switch_failed", S.READY, only=OfJob),
        on(S.OOM, JobFailed, "_job_failed", S.FAILED, S.RESTARTING, only=OfJob),
        ignore((S.READY, S.RUNNING, S.RESTARTING), JobFailed, LATE),
        ignore(DOWN, JobFailed, "no job is waited for"),
        on(S.READY, Launch, "_launch", S.RUNNING, S.SWITCHING, S.READY, only=OfPlan),
        stay(S.RUNNING, Launch, "_launch_behind", only=OfPlan),
        stay(S.SWITCHING, Launch, "_wait_behind", only=OfPlan),
        never((S.RUNNING, S.SWITCHING), Launch, "the engine waits for the steps before"),
        ignore(S.OOM, Launch, "it was planned behind the step that has failed"),
        ignore((*COMING_UP, S.RESTARTING), Launch, "it was sent before the engine had heard that the worker is lost"),
        ignore(DOWN, Launch, "it was sent before the engine had heard, or after it was stopped"),
        on(S.READY, Reconfigure, "_reconfigure", S.FITTING, S.LOADING, only=OfEpoch),
        never((S.RUNNING, S.SWITCHING, S.OOM), Reconfigure, "the engine waits until nothing is in flight"),
        ignore(
            (*COMING_UP, S.RESTARTING), Reconfigure, "it was sent before the engine had heard that the worker is lost"
        ),
        ignore(DOWN, Reconfigure, "it was sent before the engine had heard, or after it was stopped"),
        on(S.RUNNING, StepDone, "_step_done", S.READY, S.RUNNING, only=OfStep, renews=True),
        on(S.RUNNING, StepFailed, "_step_failed", S.READY, S.OOM, only=OfStep),
        ignore((S.READY, S.SWITCHING, S.OOM, *DOWN), StepDone, LATE),
        ignore((S.READY, S.SWITCHING, S.OOM, *DOWN), StepFailed, LATE),
        ignore((*COMING_UP, S.RESTARTING), StepDone, OLD),
        ignore((*COMING_UP, S.RESTARTING), StepFailed, OLD),
        on((*COMING_UP, *UP), DeviceLost, "_device_lost", S.RESTARTING, S.FAILED, only=OfDevice),
        ignore(S.RESTARTING, DeviceLost, "it is being replaced already"),
        ignore(DOWN, DeviceLost, "the device is not needed any more"),
        on((*COMING_UP, *UP), Overdue, "_overdue", S.RESTARTING, S.FAILED, only=OfDevice),
        ignore(S.RESTARTING, Overdue, "it is being replaced already"),
        ignore(DOWN, Overdue, "no job is waited for"),
        timer(S.RESTARTING, Restart, "_restart", S.LOADING),
        on((*COMING_UP, *UP, S.RESTARTING, S.FAILED), Stop, "_stop", S.STOPPED),
        ignore(S.STOPPED, Stop, "stopping twice is stopping once"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.LOADING: Dwell(LOAD_STALL_LIMIT_S, "a large model may be read for hours, but it is read on", by_signs=True),
        S.FITTING: Dwell(MEMORY_LIMIT_S, "allocating the KV cache"),
        S.WARMING: Dwell(MEMORY_LIMIT_S, "compiling and running the kernels once"),
        S.READY: any_time("it waits for a step"),
        S.RUNNING: Dwell(0.0, "the step's own deadline", True),
        S.SWITCHING: Dwell(SWITCH_LIMIT_S, "packing the weights anew"),
        S.OOM: Dwell(RECLAIM_LIMIT_S, "giving back what the step left behind"),
        S.RESTARTING: Dwell(BACKOFF_LIMIT_S, "a pause before the next try"),
        S.FAILED: ENDED,
        S.STOPPED: ENDED,
    }

    def __init__(self, policy: RestartPolicy | None = None) -> None:
        super().__init__(S.LOADING)
        self._policy = policy or RestartPolicy()
        self.epoch = 0
        self.device_epoch = 0  # in which the device was there first
        self._losses: list[float] = []  # when, since the last good step
        self._fatal: dict[Mode, int] = {}  # how often it was lost in the switch to a mode, since one that went well
        self._found: dict[str, Any] = {}  # what Load and Fit found out about the model
        self._num_blocks: int | None = None  # of the KV cache when it was ready last
        self._precision: str | None = None  # of the weights then; None: as the engine was started
        self._wanted: Reconfigure | None = None  # on the way there
        self._error: str | None = None  # why it went back
        self._is_changing = False  # from one that was ready: the engine hears of it again when it is
        self.asked = ("", 0)  # the job under way, and the epoch that it was asked in
        self.last_step_id = -1  # of the plans that were taken; -1 after a failure
        self._stood_by = False  # the device was a spare's
        self._was_ready = False
        self._modes: tuple[Mode, ...] = ()  # of the device, best first: it comes up in the first
        self._mode = Mode()
        self._plans: list[StepPlan] = []  # of the steps at the device, or that wait for the switch, oldest first
        self._failure: StepFailed | None = None

    @property
    def step(self) -> tuple[int, int]:
        """The number and the epoch of the step whose outcome is next."""
        return (self._plans[0].step_id, self._plans[0].epoch) if self._plans else (-1, -1)

    @property
    def is_same_device(self) -> bool:
        """Whether the device was there before this epoch: with another cache, and what it had on the host."""
        return self.device_epoch < self.epoch

    # ---- coming up -----------------------------------------------------------------------------------------------

    def _ask(self, job: Any) -> None:
        self.asked = (type(job).__name__, self.epoch)
        self._start(job)

    def _begin(self, _: Begin) -> WorkerState:
        return self._spawn()

    def _restart(self, _: Restart) -> WorkerState:
        return self._spawn()

    def _spawn(self) -> WorkerState:
        self.device_epoch = self.epoch
        self._ask(Spawn(self.epoch, self._precision_wanted))
        return S.LOADING

    @property
    def _precision_wanted(self) -> str | None:
        wanted = self._wanted
        return self._precision if wanted is None or wanted.precision is None else wanted.precision

    def _spawned(self, event: JobDone) -> WorkerState:
        self._stood_by = bool((event.value or {}).get("spare", False))
        self._ask(Load(self.epoch, self._precision_wanted))
        return S.LOADING

    def _loaded(self, event: JobDone) -> WorkerState:
        self._found.update(event.value)
        self._modes = msgspec.convert(self._found.get("modes", [{}]), tuple[Mode, ...])
        self._mode = self._modes[0]
        return self._fit()

    def _fit(self) -> WorkerState:
        num_blocks, is_new = self._num_blocks, False
        if self._wanted is not None and self._wanted.num_blocks is not None:
            num_blocks, is_new = self._wanted.num_blocks, True
        self._ask(Fit(self.epoch, num_blocks, is_new))
        return S.FITTING

    def _fitted(self, event: JobDone) -> WorkerState:
        self._found.update(event.value)
        self._ask(Warm(self.epoch))
        return S.WARMING

    def _warmed(self, event: JobDone) -> WorkerState:
        self._was_ready = True
        found = self._found
        found.update(event.value or {})  # a spare says no costs of steps: those of the worker before it stay
        error, self._error = self._error, None
        self._num_blocks, self._precision = found["num_blocks"], self._precision_wanted
        self._wanted, self._is_changing = None, False
        ready = WorkerReady(
            epoch=self.epoch,
            num_blocks=found["num_blocks"],
            max_model_len=found["max_model_len"],
            vocab_size=found["vocab_size"],
            eos_token_ids=found["eos_token_ids"],
            facts=found,
            num_host_blocks=found.get("num_host_blocks", 0),
            modes=self._modes,
            step_costs=[(int(tokens), float(ms)) for tokens, ms in found.get("step_costs", ())],
            keeps_host=self.is_same_device,
            error=error,
        )
        self._send("engine", ready)
        return S.READY

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _launch(self, event: Launch) -> WorkerState:
        plan = event.plan
        if plan.mode != self._mode:
            if (num_lost := self._fatal.get(plan.mode, 0)) >= SWITCH_LOSSES_MAX:
                why = f"{num_lost} workers were lost while they were switched to {plan.mode}"
                self._send("engine", StepFailed(plan.step_id, plan.epoch, Fault.SWITCH, why, launched=False))
                self.last_step_id = -1
                return S.READY
            self._take(plan)
            self._ask(Switch(plan.mode, self.epoch))
            return S.SWITCHING
        self._take(plan)
        self._start(Run(plan))
        return S.RUNNING

    def _take(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self.last_step_id = plan.step_id

    def _launch_behind(self, event: Launch) -> WorkerState:
        assert event.plan.mode == self._mode, "modes are changed when nothing is in flight"
        self._take(event.plan)
        self._start(Run(event.plan))
        return S.RUNNING

    def _wait_behind(self, event: Launch) -> WorkerState:
        self._take(event.plan)
        return S.SWITCHING

    def _switched(self, _: JobDone) -> WorkerState:
        self._mode = self._plans[0].mode
        self._fatal.pop(self._mode, None)
        for plan in self._plans:
            self._start(Run(plan))
        return S.RUNNING

    def _switch_failed(self, event: JobFailed) -> WorkerState:
        failed = StepFailed(*self.step, Fault.SWITCH, event.message, launched=False)
        self._drop_plans()
        self._send("engine", failed)
        return S.READY

    def _drop_plans(self) -> None:
        """The first has failed, and the device begins none that was planned behind it."""
        self._plans.clear()
        self.last_step_id = -1

    def _step_done(self, event: StepDone) -> WorkerState:
        self._losses.clear()
        del self._plans[0]
        self._send("engine", event)
        return S.RUNNING if self._plans else S.READY

    def _step_failed(self, event: StepFailed) -> WorkerState:
        self._drop_plans()
        if event.fault is Fault.OOM:
            self._failure = event
            self._ask(Reclaim(self.epoch))
            return S.OOM
        self._send("engine", event)
        return S.READY

    def _reclaimed(self, _: JobDone) -> WorkerState:
        self._send("engine", self._failure)
        self._failure = None
        return S.READY

    # ---- another configuration -----------------------------------------------------------------------------------

    def _reconfigure(self, event: Reconfigure) -> WorkerState:
        self._wanted, self._is_changing = event, True
        first = self._modes[0]
        return self._change(in_place=event.precision in (None, first.precision) and self._mode == first)

    def _change(self, *, in_place: bool) -> WorkerState:
        """Go on as what is wanted, or back to what it was: with another cache, or from the weights on."""
        self._stood_by = False  # it has shown that it can come up
        if in_place:
            self.epoch += 1
            return self._fit()
        if self._policy.may_kill:  # elsewhere the device lets go of what it has by itself
            self._start(Kill(self.epoch))
        self.epoch += 1
        return self._spawn()

    def _go_back(self, event: JobFailed) -> WorkerState:
        """What was wanted cannot be: be again what it was, and say why."""
        self._error, self._wanted = event.message, None
        return self._change(in_place=self.is_same_device)

    # ---- going down, and up again --------------------------------------------------------------------------------

    def _job_failed(self, event: JobFailed) -> WorkerState:
        if self._wanted is not None:
            return self._go_back(event)
        if self._stood_by and self.state in COMING_UP:
            return self._do_without_spare(event)
        return self._lose(Fault.EXCEPTION, event.message, event.at_s)

    def _do_without_spare(self, event: JobFailed) -> WorkerState:
        """A spare that cannot come up is no loss: the process before it may still hold the memory that it needs.

        This comes once for each loss, since no spare is started before a worker is warm.
        """
        self._start(Kill(self.epoch))
        message = f"the spare that took over failed: {event.job}: {event.message}"
        self._send("incidents", Incident(kind="spare", message=message, action="a new process is started"))
        self.epoch += 1
        self._stood_by = False
        return self._spawn()

    def _device_lost(self, event: DeviceLost) -> WorkerState:
        return self._lose(Fault.LOST, event.message, event.at_s)

    def _overdue(self, event: Overdue) -> WorkerState:
        return self._lose(Fault.TIMEOUT, event.message, event.at_s)

    def _lose(self, fault: Fault, message: str, at_s: float) -> WorkerState:
        """The device is of no more use since `at_s`: replace it while the budget lasts."""
        policy = self._policy
        if policy.may_kill:
            self._start(Kill(self.epoch))
        self._losses = [loss_s for loss_s in self._losses if loss_s > at_s - policy.window_s] + [at_s]
        was_up = self.state in UP or self._is_changing
        lost, step_id = self.epoch, -1
        if self.state is S.RUNNING:
            step_id = self._plans[0].step_id
        elif self._failure is not None:
            step_id = self._failure.step_id
        if self.state is S.SWITCHING and self._plans[0].mode != self._modes[0]:
            mode = self._plans[0].mode  # to the first mode it need not be switched again: it comes up in it
            self._fatal[mode] = self._fatal.get(mode, 0) + 1
        if not self._was_ready:  # it never came up: the caller that starts it should hear that at once
            return self._give_up(fault, message)
        if len(self._losses) > policy.max_restarts:
            times = f" {len(self._losses)} times in a row" if policy.max_restarts else ""
            return self._give_up(fault, f"the worker was lost{times}: {message}")
        self.epoch += 1
        self._drop_plans()
        self._failure = None
        self._stood_by = self._is_changing = False
        self._wanted = self._error = None
        if was_up:
            self._send("engine", WorkerLost(lost, fault, message, step_id))
        action = f"restart {len(self._losses)} of at most {policy.max_restarts}"
        self._send("incidents", Incident(kind=fault, message=message, action=action, epoch=lost))
        nth = len(self._losses)
        self._until_left(0.0 if nth == 1 else min(BACKOFF_S * 2 ** (nth - 2), BACKOFF_S_MAX), Restart())
        return S.RESTARTING

    def _give_up(self, fault: Fault, message: str) -> WorkerState:
        self._send("incidents", Incident(kind="gave_up", message=message, action="the engine stops", epoch=self.epoch))
        self._send("engine", WorkerFailed(message))
        return S.FAILED

    def _stop(self, _: Stop) -> WorkerState:
        self._start(Close(self.epoch))
        return S.STOPPED
