"""The machines of one engine, the links between them, its device and its clients.

A link is FIFO from one sender to one receiver and lane; between links any order may happen. Whatever may happen next
is a *move*, a tuple of its kind and arguments (see `moves`); whoever drives the world (a seed, or the explorer) picks
one and has it made. The machine room goes on until nothing is left to do; clients, faults and time come on top.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from novainfer.fsm.client.gate import Gate
from novainfer.fsm.client.stream import Stream
from novainfer.fsm.core.machine import After, Drop, Effect, Machine, Observer, Row, Send, Start
from novainfer.fsm.device.compiling import Compile, Compiled, CompileOver
from novainfer.fsm.device.flights import Landed, LaunchStep, Unsent
from novainfer.fsm.device.roster import Find, Open
from novainfer.fsm.device.worker import RestartPolicy, Worker
from novainfer.fsm.engine import Engine, EngineState
from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.messages.events import (
    Advance,
    Arrive,
    Batch,
    Begin,
    CancelAll,
    Cause,
    Close,
    Configure,
    Constrain,
    Departed,
    DeviceLost,
    Drain,
    Encode,
    Encoded,
    End,
    EndSession,
    Fault,
    Finished,
    Fit,
    JobDone,
    JobFailed,
    Kill,
    Load,
    Outputs,
    Read,
    Reconfigured,
    Rejected,
    Release,
    Run,
    Spawn,
    StallOver,
    StepFailed,
    Stop,
    Switch,
    Warm,
    WorkerReady,
)
from novainfer.fsm.messages.outputs import Delta
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.messages.tenant import ANYONE, Tenant
from novainfer.fsm.recording.log import TIMERS
from novainfer.fsm.schedule.batching import Flight
from novainfer.fsm.schedule.planner import Limits
from novainfer.fsm.schedule.request import Preempt, Request, Vacate
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.checks.admission import MAILBOX_FEW, check_gate, check_mailbox, check_stall
from novainfer.fsm.simulation.checks.audit import Audit
from novainfer.fsm.simulation.checks.checks import Checks
from novainfer.fsm.simulation.checks.health import check_asked
from novainfer.fsm.simulation.checks.masks import holds_for_masks
from novainfer.fsm.simulation.checks.oracle import VOCABULARY, Violation
from novainfer.fsm.simulation.checks.reconfigurations import Reconfigurations
from novainfer.fsm.simulation.world.client import Client
from novainfer.fsm.simulation.world.costs import COSTS
from novainfer.fsm.simulation.world.device import EOS, VOCAB_SIZE, ScriptedDevice
from novainfer.fsm.simulation.world.drafts import speculation_of
from novainfer.fsm.simulation.world.grammars import Grammars
from novainfer.fsm.simulation.world.process import Processes
from novainfer.fsm.simulation.world.resumed import going_on
from novainfer.fsm.simulation.world.shape import Shape, modes_in

Link = tuple[str, str, bool]  # sender, receiver, whether it is the control lane
Timer = tuple[Any, ...]  # the machine it belongs to, the kind of its event, and the event's fields

TO_WORKER: Link = ("device", "worker", False)
FROM_WORKER: Link = ("worker", "engine", False)
LARGE_SEQS = 256  # in worlds with more slots
CLOSE_LOOK = 16  # one event of so many is looked at closely
_encode = msgspec.msgpack.Encoder().encode


def _timer(source: str, event: Any) -> Timer:
    return (source, type(event).__name__, *msgspec.structs.astuple(event))


class Driver(Protocol):
    """Whoever has a clock hears of all that takes time, when it begins."""

    def timer_set(self, timer: Timer, delay_s: float) -> None:
        """A machine has set `timer`."""

    def job_begun(self, job: Any) -> None:
        """The device begins `job`."""

    def may_launch(self) -> None:
        """The device may be told of a step behind the one that it computes."""

    def process_move(self, kind: str, delay_s: float, *args: Any) -> None:
        """A move of the processes is due within a time of this order."""

    def prompt_came(self, stream_id: int) -> None:
        """The tokenizer has got the prompt of this stream."""

    def compile_begun(self, thread: int) -> None:
        """A thread is at a grammar, perhaps for ever."""

    def mask_wanted(self, request_id: int) -> None:
        """A mask is to be made for this request."""

    def news_came(self, stream_id: int) -> None:
        """There is something to read."""


class Rows(Counter[tuple[str, str, str]]):
    """How often each row was taken, by (machine, state, event)."""


class Watcher(Observer):
    """Counts the rows that the machines of a world take, and shows preemptions to its `audit`, if it has one."""

    def __init__(self, taken: Rows, audit: Audit | None = None) -> None:
        self.taken = taken
        self.audit = audit
        self.for_copies = self if audit is None else Watcher(taken)  # an audit is of one world only

    def takes(self, machine: Machine, event: Any, row: Row) -> None:
        """As `Observer.takes`."""
        if type(event) in (Preempt, Vacate) and self.audit is not None:
            assert isinstance(machine, Request)
            self.audit.loses_blocks(machine, event)
        kind = type(event).__name__
        self.taken[type(machine).__name__, machine.state, f"{kind} {row.of}" if row.of else kind] += 1


def _launch_of(plan: StepPlan) -> LaunchStep:
    return LaunchStep(plan.step_id, plan.epoch, plan.after)


class World:
    """See the module. `trace` is given the bytes of every event that a machine takes, and when."""

    audit: Audit | None = None  # where there is a clock
    is_large = False
    _num_handled = 0

    def __init__(
        self, shape: Shape, trace: Callable[[bytes], None] | None = None, driver: Driver | None = None
    ) -> None:
        self.shape = shape
        limits = Limits(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            prefill_chunk_tokens=shape.prefill_chunk_tokens,
            block_size=shape.block_size,
            enable_prefix_caching=shape.enable_prefix_caching,
            inter_token_target_ms=shape.inter_token_target_ms,
            scheduling_policy=shape.scheduling_policy,
            priority_wait_s=shape.priority_wait_s,
            share_prefix_cache=shape.share_prefix_cache,
            tells_routers=True,
            session_ttl_s=shape.session_ttl_s,
            session_share=shape.session_share,
            max_sessions=shape.max_sessions,
        )
        self.taken = Rows()
        self.gate = Gate(shape.max_num_queued_reqs, shape.max_num_queued_tokens, shape.max_num_overflow_reqs)
        self.engine = Engine()
        self.scheduler = Scheduler(
            limits,
            VOCABULARY,
            stall_keep_s=shape.stall_keep_s,
            ladder_quiet_s=shape.ladder_quiet_s,
            speculation=speculation_of(shape),
            max_in_flight=shape.max_in_flight,
        )
        self.worker = Worker(RestartPolicy(max_restarts=shape.max_restarts, window_s=shape.restart_window_s))
        self.now_s = 0.0
        self.entered_s: dict[str, float] = {}  # when each machine has come into its state
        self.slept_s = 0.0  # of that: what the watch did not see
        self.links: dict[Link, deque[Any]] = {}
        self.busy: list[Link] = []  # links with messages
        self.jobs: deque[Any] = deque()  # at the device
        self.num_blocks = shape.num_blocks  # of the worker's KV cache
        self.modes = shape.modes  # that the worker offers
        self.reconfigurations = Reconfigurations(shape)
        self.watcher = Watcher(self.taken)
        self.device: ScriptedDevice | None = self._new_device(0)  # None: its process is gone
        self.is_closed = False  # the device
        self.processes: Processes | None = None  # a device that is a thread has none
        self.encodings: dict[int, Encode] = {}  # at the tokenizer, by stream
        self.grammars = Grammars()
        self.timers: dict[Timer, Any] = {}
        self.late: list[tuple[Link, Any]] = []  # what came, and will come once more
        self.streams: dict[int, Stream] = {}
        self.clients: dict[int, Client] = {}
        self.is_draining = self.is_stopped = False
        self.is_large = shape.max_num_seqs > LARGE_SEQS
        self._num_handled = 0
        self.budget: dict[str, int] = {}  # what the explorer may still do to this world
        self.counts: Counter[str] = Counter()  # what happened, by kind
        self.checks = Checks(self)
        self._trace = trace
        self._driver = driver
        if driver is not None:
            self.audit = Audit(self)
            self.watcher = Watcher(self.taken, self.audit)
        for machine in (*self.machines.values(), self.grammars.delivery, self.grammars.compiling):
            machine.observer = self.watcher
        if shape.processes:
            self.processes, self.device = Processes(self), None
        self.planned: Flight | None = None  # by what the scheduler has just handled
        self.is_held = False  # it has planned nothing, for masks that are about to come
        self.perform("shell", [Send("worker", Begin())])

    def _new_device(self, epoch: int, num_blocks: int = 0) -> ScriptedDevice:
        shape = self.shape
        device = ScriptedDevice(
            num_blocks or self.num_blocks,
            shape.block_size,
            shape.max_num_seqs,
            num_host_blocks=shape.num_host_blocks,
            epoch=epoch,
            mode=self.modes[0],
            wrong_drafts_of_16=shape.wrong_drafts_of_16,
        )
        device.flights.observer = self.watcher
        return device

    @property
    def looks_closely(self) -> bool:
        """Whether what takes a time that grows with the world is checked after this event; in a small one always."""
        return not self.is_large or self._num_handled % CLOSE_LOOK == 0

    @property
    def machines(self) -> dict[str, Machine]:
        """All of which there is one, by name."""
        return {"gate": self.gate, "engine": self.engine, "scheduler": self.scheduler, "worker": self.worker}

    @property
    def cache(self) -> BlockCache:
        """The scheduler's KV cache, into whose blocks the accounts look."""
        cache = self.scheduler.planner.cache
        assert isinstance(cache, BlockCache)
        return cache

    @property
    def has_begun(self) -> bool:
        """True once the worker was told to come up."""
        return not self.links.get(("shell", "worker", False))

    # ---- what the world does with effects ------------------------------------------------------------------------

    def perform(self, source: str, effects: Sequence[Effect]) -> None:
        """Put each effect where it belongs."""
        for effect in effects:
            kind = type(effect)
            if kind is Send and effect.to == "routers":  # type: ignore[union-attr]
                continue  # the mirror has seen it, and no machine hears of it
            if kind is Send:
                link = (source, effect.to, effect.urgent)  # type: ignore[union-attr]
                queue = self.links.get(link)
                if queue is None:
                    queue = self.links[link] = deque()
                if not queue:
                    self.busy.append(link)
                queue.append(effect.event)  # type: ignore[union-attr]
                if type(effect.event) is Reconfigured:  # type: ignore[union-attr]
                    self.reconfigurations.answered(effect.event)  # type: ignore[union-attr]
                    self.counts["reconfigured" if effect.event.error is None else "not reconfigured"] += 1  # type: ignore[union-attr]
                if type(effect.event) is Departed and self.audit is not None:  # type: ignore[union-attr]
                    self.audit.retry.departs(effect.event)  # type: ignore[union-attr]
                if len(queue) > MAILBOX_FEW:
                    check_mailbox(self, effect.to, effect.urgent)  # type: ignore[union-attr]
            elif kind is Start:
                self._start(effect.job)  # type: ignore[union-attr]
            elif kind is Drop:
                self._drop_timer(source, effect.event)  # type: ignore[union-attr]
            else:
                assert isinstance(effect, After)
                self._set_timer(source, effect)

    def tell(self, source: str, to: str, event: Any, *, urgent: bool = False) -> None:
        """Somebody outside the machines sends `event`."""
        self.perform(source, [Send(to, event, urgent)])

    def handle(self, name: str, machine: Machine, event: Any) -> Sequence[Effect]:
        """One event for one machine, and its effects, which are performed."""
        kind = type(event).__name__
        if self._trace is not None:
            self._trace(_encode((self.now_s, name, kind, event)))
        before, num_renewals = machine.state, machine.num_renewals
        self._num_handled += 1
        is_watched_gate = name == "gate" and self.looks_closely
        queued = set(self.gate.queued) if is_watched_gate else set()
        effects = machine.handle(event)
        if machine.state is not before or machine.num_renewals != num_renewals:
            self.entered_s[name] = self.now_s
        if name == "engine":
            check_asked(self, effects)
        if is_watched_gate:
            check_gate(self, queued, event, effects)
        elif name == "streams":
            check_stall(before, machine.state, event, effects)  # type: ignore[arg-type]
        self.perform(name, effects)
        return effects

    def trace(self, kind: str, event: Any) -> None:
        """Something took `event` that is no machine of this room."""
        if self._trace is not None:
            self._trace(_encode((self.now_s, kind, event)))

    def _set_timer(self, source: str, effect: After) -> None:
        event = effect.event
        self._drop_timer(source, event)
        timer = _timer(source, event)
        self.timers[timer] = event
        self.checks.timer_set(event)
        if self._driver is not None:
            self._driver.timer_set(timer, effect.delay_s)

    def _drop_timer(self, source: str, event: Any) -> None:
        """A timer is stopped; one that has run out is taken from where its event waits."""
        if self.timers.pop(_timer(source, event), None) is not None:
            return
        link: Link = (TIMERS, source, True)
        queue = self.links.get(link)
        if queue and event in queue:
            queue.remove(event)
            self.counts["a timer that had run out, and was dropped"] += 1
            if not queue:
                self.busy.remove(link)

    def _start(self, job: Any) -> None:
        if isinstance(job, Run) and job.plan.mask_ids:
            job = Run(self.grammars.launched(job.plan))
            self._give_masks()
        if self.processes is not None:
            self.processes.put(job)
            return
        if isinstance(job, Kill):
            self.end_device(job.epoch)
            return
        self.follow(job)
        is_for_nobody = self.device is None or self.epoch_of(job) != self.device.epoch
        if is_for_nobody and not isinstance(job, Spawn | Close):
            return  # it is written to a process that is gone: nobody answers
        self.jobs.append(job)
        self.came_to_device()

    def came_to_device(self) -> None:
        """A job has come to the worker's device."""
        if len(self.jobs) == 1:
            self._begin_job()
        elif self.launchable is not None and self._driver is not None:
            self._driver.may_launch()

    def follow(self, job: Any) -> None:
        """A device that goes on with another cache is the next epoch's from now on."""
        if isinstance(job, Fit) and self.device is not None:
            self.device.epoch = max(self.device.epoch, job.epoch)

    def _begin_job(self) -> None:
        device, job = self.device, self.jobs[0] if self.jobs else None
        is_new = device is not None and isinstance(job, Run) and not device.flights.steps
        if device is not None and is_new and (refused := device.flights.handle(_launch_of(self.jobs[0].plan))):
            del self.jobs[0]
            self.counts["steps behind one that failed"] += 1
            self.answer(*refused)
            return
        if device is not None and is_new:
            device.stage(self.jobs[0].plan)
        if self.jobs and self._driver is not None:
            self._driver.job_begun(self.jobs[0])
            if self.launchable is not None:
                self._driver.may_launch()

    # ---- steps that a device is told of while it computes the one before -----------------------------------------

    @property
    def launchable(self) -> Run | None:
        """The step that the device's thread would begin at once, beside one that is computed; None: there is none."""
        device = self.device
        if not self.shape.computes_beside or device is None or len(self.jobs) < 2:
            return None
        num_begun = sum(not step.has_landed for step in device.flights.steps)
        job = self.jobs[num_begun] if 0 < num_begun < len(self.jobs) else None
        return job if isinstance(job, Run) and device.flights.takes(job.plan.after) else None

    def launch(self) -> None:
        """The device is told of a step behind another: what comes of both is settled, unless one fails late."""
        self.counts["steps launched behind one"] += 1
        self._fly(self._begin_behind())

    def fail_launch(self, fault: Fault) -> None:
        """The launch of a step behind another fails, in its midst."""
        device, job = self.device, self._begin_behind()
        assert device is not None
        self.counts[f"{fault} in a launch"] += 1
        plan = job.plan
        self._fly(self.jobs[self.jobs.index(job) - 1])
        self.jobs.remove(job)
        device.spoil(plan)
        device.unstage(plan.step_id)
        failed = StepFailed(plan.step_id, plan.epoch, fault, "injected")
        if said := device.flights.handle(Landed(failed)):
            raise Violation(f"{said}: the step before is answered first")

    def _begin_behind(self) -> Run:
        device, job = self.device, self.launchable
        assert device is not None
        assert job is not None, "there is none"
        said = device.flights.handle(_launch_of(job.plan))
        assert not said, "it follows a step that has not failed"
        device.stage(job.plan)
        return job

    def _fly(self, last: Run) -> None:
        """The stream comes by all steps up to the `last`, but for those that it has come by before."""
        device = self.device
        assert device is not None
        for job in list(self.jobs)[len(device.flown) : self.jobs.index(last) + 1]:
            device.flown.append(device.run(job.plan))
            if self.audit is not None:
                self.audit.degraded.computed(job.plan, device)

    def fail_step(self, fault: Fault, *, launched: bool) -> None:
        """The device fails its oldest job, a step; a launched one leaves garbage, and so does one behind it."""
        device, plan = self.device, self.jobs.popleft().plan
        assert device is not None
        is_new = device.flights.steps[0].failed is None  # else it has failed with the one before it
        behind = self._take_down(plan)
        launched = launched or behind is not None
        if launched and is_new:
            self._spoil(plan, behind or [])
        self.counts[fault if launched else f"{fault} before launch"] += 1
        failed = StepFailed(plan.step_id, plan.epoch, fault, "injected", launched)
        self._answer_failed(device.flights.handle(Landed(failed)), behind or [])

    def unsend_step(self) -> None:
        """The oldest job, a step, goes well, but no message can carry its answer: so it has failed."""
        device, plan = self.device, self.jobs.popleft().plan
        assert device is not None
        self.counts["an answer that no message carries"] += 1
        if not device.flown:
            device.flown.append(device.run(plan))
        done = device.flown[0]
        behind = self._take_down(plan) or []
        said = device.flights.handle(Landed(done))
        if isinstance(said[0].event, StepDone):  # type: ignore[union-attr]  # else it has failed with the one before it
            self._spoil(plan, behind)
            why = "no message can carry its answer"
            failed = StepFailed(plan.step_id, plan.epoch, Fault.EXCEPTION, why, launched_behind=len(said) > 1)
            said = [*device.flights.handle(Unsent(failed)), *said[1:]]
        self._answer_failed(said, behind)

    def _take_down(self, plan: StepPlan) -> list[StepPlan] | None:
        """The oldest step has ended; those behind it that the stream has come by as well, None if not even by it."""
        device = self.device
        assert device is not None
        device.unstage(plan.step_id)
        if not device.flown:
            return None
        del device.flown[0]
        return [job.plan for job in self.jobs if isinstance(job, Run)][: len(device.flown)]

    def _spoil(self, plan: StepPlan, behind: Sequence[StepPlan]) -> None:
        assert self.device is not None
        for spoilt in (plan, *behind):
            self.device.spoil(spoilt)
        if behind:
            self.counts["late faults, with a step behind"] += 1

    def _answer_failed(self, said: Sequence[Effect], behind: Sequence[StepPlan]) -> None:
        failed = said[0].event  # type: ignore[union-attr]
        if behind and not failed.launched_behind:
            raise Violation(f"step {behind[0].step_id} was begun, and the failure of the one before it does not say so")
        self.answer(*said)

    @staticmethod
    def epoch_of(job: Any) -> int:
        """The epoch that `job` is for."""
        epoch: int = job.plan.epoch if isinstance(job, Run) else job.epoch
        return epoch

    # ---- deliveries ----------------------------------------------------------------------------------------------

    def deliver(self, link: Link) -> None:
        """The first message of `link` arrives."""
        queue = self.links[link]
        event = queue.popleft()
        if not queue:
            self.busy.remove(link)
        self.arrives(link[1], event)

    def arrives(self, to: str, event: Any) -> None:
        """`event` is at its receiver."""
        if to == "scheduler":
            self.checks.before_scheduler(event)
            if self.audit is not None:
                self.audit.before_scheduler(event)
            effects = self.handle("scheduler", self.scheduler, event)
            plans = [e.event.plan for e in effects if isinstance(e, Send) and isinstance(e.event, Batch)]
            self.planned = self.scheduler.newest_flight if any(plan is not None for plan in plans) else None
            self.is_held = holds_for_masks(self.scheduler, effects)
            self.checks.after_scheduler(event, effects)
            if isinstance(event, Configure):
                self.reconfigurations.configured(self, event)
            if self.audit is not None:
                self.audit.scheduled(event, effects)
        elif to == "streams":
            self._to_streams(event)
        elif to == "tokenizer":
            self.encodings[event.stream_id] = event
            if self._driver is not None:
                self._driver.prompt_came(event.stream_id)
        elif to == "grammars":
            self._to_grammars(event)
        elif to == "device":
            if self.device is not None and self.device.epoch == event.epoch:
                self.device.give(event)
        elif to == "client":  # who has heard it when it was said
            pass
        elif to == "incidents":
            self.counts[f"incident: {event.kind}"] += 1
        else:
            self.checks.before(to, event)
            if isinstance(event, WorkerReady) and self.engine.state is EngineState.RECOVERING:
                self.reconfigurations.is_back(event)
            if isinstance(event, Drain):
                self.everybody(Cause.DRAIN, self.gate.overflow)
            elif isinstance(event, CancelAll):  # who came after it at the gate, and before it here, is cancelled too
                self.everybody(event.cause)
            self.checks.after(to, event, self.handle(to, getattr(self, to), event))

    def _to_streams(self, event: Stop | Outputs | StallOver) -> None:
        if isinstance(event, StallOver):
            if event.stream_id in self.streams:
                self.handle("streams", self.streams[event.stream_id], event)
                self._news(event.stream_id)
            return
        if isinstance(event, Stop):
            for stream_id, stream in self.streams.items():
                self.handle("streams", stream, event)
                self._news(stream_id)
            return
        for output in event.outputs:
            self.checks.output(output)
            stream_id = output.stream_id
            if stream_id in self.streams:
                self.handle("streams", self.streams[stream_id], output)
            if self.audit is not None:
                self.audit.deadlines.given(output)
                self.audit.degraded.given(output)
                self.audit.counts.given(output)
                self.audit.rungs.given(output)
            if stream_id in self.streams:
                self._news(stream_id)

    def _news(self, stream_id: int) -> None:
        if self._driver is not None:
            self._driver.news_came(stream_id)

    # ---- the machine room ----------------------------------------------------------------------------------------

    def finish_job(self, took_s: float = 0.0) -> None:
        """The device does its oldest job, well; a step says that it took `took_s`."""
        job = self.jobs.popleft()
        if self.processes is not None:
            if isinstance(job, Open | Find):
                self.processes.finish_start(job, fails=False)
                return
            self.processes.must_be_able(job)
        if isinstance(job, Run):
            self._end_step(job.plan, took_s)
            return
        if isinstance(job, Close):
            self.is_closed = True
        elif isinstance(job, Spawn):
            self.device = self._new_device(job.epoch)
        elif isinstance(job, Switch):
            assert self.device is not None
            self.device.mode = job.mode
        answer = self.does(job)
        if isinstance(answer, JobDone) and self.device is not None:
            if isinstance(job, Load):
                self.device.load(answer.value["modes"][0])
            elif isinstance(job, Fit):
                self.device.fit(answer.value["num_blocks"])
            elif isinstance(job, Warm) and self._warms_with_less():
                self.counts["a cache that is fitted again with less"] += 1
                num_blocks = self.device.num_blocks - 1
                self.device.fit(num_blocks)
                self.reconfigurations.fitted_less(self.device.epoch, num_blocks)
                answer = msgspec.structs.replace(answer, value={**answer.value, "num_blocks": num_blocks})
        self.answer(answer)

    def _warms_with_less(self) -> bool:
        """Whether its first step finds no memory; a number of blocks that was asked for is not made less.

        By the device's epoch: a job may be one that it was given as a spare.
        """
        assert self.device is not None
        is_asked_for = self.worker._wanted is not None
        has_more = self.device.num_blocks > self.shape.num_blocks_least
        return self.shape.warms_with_less and self.device.epoch % 2 == 1 and has_more and not is_asked_for

    def _end_step(self, plan: StepPlan, took_s: float) -> None:
        device = self.device
        assert device is not None
        self.counts["steps"] += 1
        device.unstage(plan.step_id)
        if device.flown:
            found = device.flown.pop(0)
            outcome = msgspec.structs.replace(found, took_s=took_s)
        else:
            outcome = device.run(plan, took_s)
            if self.audit is not None:
                self.audit.degraded.computed(plan, device)
        self.answer(*device.flights.handle(Landed(outcome)))

    def worker_is(self, answer: JobDone | JobFailed) -> None:
        """The worker is told what its device has done, perhaps before it was asked for it."""
        if isinstance(answer, JobDone) and answer.job == "Load":
            self.modes = answer.value["modes"]
        elif isinstance(answer, JobDone) and answer.job in ("Fit", "Warm"):
            self.num_blocks = answer.value.get("num_blocks", self.num_blocks)

    def does(self, job: Any) -> JobDone | JobFailed:
        """What a device says to `job`, which is no step: what it has found out, or that there is no room for it."""
        shape, name = self.shape, type(job).__name__
        found = {
            "num_blocks": self.num_blocks,
            "max_model_len": shape.max_model_len,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": [EOS],
            "num_host_blocks": shape.num_host_blocks,
            "modes": self.modes,
            "kv_is_lazy": shape.kv_is_lazy,
        }
        if isinstance(job, Warm):
            del found["num_blocks"]
            if job.measures:
                found["step_costs"] = COSTS[shape.step_costs]
        elif isinstance(job, Load):
            found["modes"] = modes_in(job.precision, shape.modes)
        elif isinstance(job, Fit) and job.num_blocks is not None:
            found["num_blocks"] = job.num_blocks
            if not shape.num_blocks_least <= job.num_blocks <= shape.num_blocks_most:
                if not job.is_new:
                    raise Violation(f"{job} asks for what there cannot have been before")
                return JobFailed(name, f"there is no room for {job.num_blocks} blocks", job.epoch, self.now_s)
        elif isinstance(job, Fit) and job.epoch:  # a later process finds other free memory
            found["num_blocks"] = shape.num_blocks + 1
        return JobDone(name, found, job.epoch)

    def answer(self, *events: Any) -> None:
        """The device says `events`, and goes on with its next job."""
        for event in events:
            if isinstance(event, Send):
                event = event.event
            if isinstance(event, StepFailed) and self.device is not None:
                self.device.last_step_id = -1
            if isinstance(event, StepDone | StepFailed):
                self.grammars.landed(event.step_id, event.epoch)
            if self.processes is not None:
                self.processes.answered(event)
            else:
                self.worker_is(event)
                self.tell("device", "worker", event)
        self._begin_job()

    def end_device(self, epoch: int) -> bool:
        """The device's process of this epoch ends, if it is there; a Close waits for nobody."""
        is_coming = any(isinstance(job, Spawn) and job.epoch == epoch for job in self.jobs)
        if not is_coming and (self.device is None or self.device.epoch != epoch):
            return False
        self.device = None
        self.jobs = deque(job for job in self.jobs if isinstance(job, Close))
        self._begin_job()
        return True

    def lose_device(self) -> None:
        """The device's process is found dead; or has died, which is found later."""
        if self.processes is not None:
            self.processes.die(self.processes.current)
            return
        epoch = self.worker.epoch
        if self.end_device(epoch):
            self.tell("device", "worker", DeviceLost(epoch, "injected", self.now_s))

    def encode(self, stream_id: int) -> None:
        """The tokenizer answers one of its prompts."""
        event = self.encodings.pop(stream_id)
        assert isinstance(event.prompt, str)
        self.tell("tokenizer", "engine", Encoded(stream_id, [ord(c) for c in event.prompt]))

    def compile(self, thread: int) -> None:
        """The call of this thread returns, whoever waits for it."""
        del self.grammars.at_work[thread]
        self._compiler_does(self.grammars.compiling.handle(Compiled(thread)))

    def _to_grammars(self, event: Constrain | Advance | Release | CompileOver) -> None:
        if isinstance(event, CompileOver):
            self._compiler_does(self.grammars.compiling.handle(event))
            return
        wanted, effects = self.grammars.take(event)
        self._want_masks(wanted)
        self._compiler_does(effects)

    def _compiler_does(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._want_masks(self.grammars.compiled(effect))
            if isinstance(effect, Send):
                request = self.scheduler.requests.get(effect.event.request_id)
                if request is not None:  # else it has ended meanwhile
                    self.clients[request.stream_id].compile_errors.add(effect.event.code)
            if not isinstance(effect, Start):
                self.perform("grammars", [effect])
            elif isinstance(effect.job, Compile) and self._driver is not None:
                self._driver.compile_begun(effect.job.thread)
            self.counts[f"compiler: {type(effect.job if isinstance(effect, Start) else effect).__name__}"] += 1
        self._give_masks()

    def _want_masks(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids if self._driver is not None else ():
            self._driver.mask_wanted(request_id)  # type: ignore[union-attr]
        self._give_masks()

    def make_mask(self, request_id: int) -> None:
        """The mask that this request waits for is there, or cannot be made."""
        answer = self.grammars.answer(request_id)
        self.counts[f"grammar: {type(answer).__name__}"] += 1
        self.tell("grammars", "engine", answer)
        self._give_masks()

    def _give_masks(self) -> None:
        """What a step lacks goes to the device, and may come there too late."""
        given, self.grammars.given = self.grammars.given, []
        for masks in given:
            self.tell("grammars", "device", masks)

    def fire_timer(self, timer: Timer) -> None:
        """A timer runs out."""
        event = self.timers.pop(timer)
        self.checks.timer(event)
        if self.audit is not None:
            self.audit.deadlines.fired(event)
        self.tell(TIMERS, timer[0], event, urgent=True)

    # ---- clients -------------------------------------------------------------------------------------------------

    def arrive(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        seed: int = 1,
        tenant: Tenant = ANYONE,
        num_committed: Sequence[int] = (),
    ) -> None:
        """A client asks for something, or goes on with so many tokens of each choice. The gate answers at once."""
        stream_id = len(self.clients)
        num_tokens = len(prompt) if isinstance(prompt, list) else len(prompt) // 2 + 1  # of a text it is a guess
        arrive = Arrive(
            stream_id=stream_id, prompt=prompt, params=params, seed=seed, num_tokens=num_tokens, tenant=tenant
        )
        if num_committed:
            arrive = going_on(arrive, num_committed, self.shape.context_len)
            self.counts["clients that go on"] += 1
        client = self.clients[stream_id] = Client(arrive, self.shape.context_len)
        shape = self.shape
        stream = self.streams[stream_id] = Stream(
            stream_id,
            str(stream_id),
            params.n,
            stall_high=shape.stall_high,
            stall_low=shape.stall_low,
            stall_timeout_s=shape.stall_timeout_s,
        )
        stream.observer = self.watcher
        if self.is_stopped:
            client.causes.add(Cause.DRAIN)
        waiting, tokens = self.gate.num_queued + params.n, self.gate.num_queued_tokens + num_tokens
        was_full = waiting > shape.max_num_queued_reqs or tokens > shape.max_num_queued_tokens
        was_full = was_full or bool(self.gate.overflow)
        if self.audit is not None:
            self.audit.retry.arrives()
        self.handle("gate", self.gate, arrive)
        self.checks.answered()
        link = ("gate", "client", False)
        if self.links.get(link):
            rejected: Rejected = self.links[link].popleft()
            self.busy.remove(link)
            client.end = rejected
            self.counts[f"rejected: {rejected.reason}"] += 1
            self.checks.rejection(rejected, was_full)
            if self.audit is not None and rejected.reason == "overloaded":
                self.audit.retry.refused()
        else:
            client.was_let_in = True
            if self.audit is not None:
                self.audit.deadlines.arrived(stream_id)

    def abandon(self, stream_id: int) -> None:
        """A client goes away without reading on: its stream is forgotten."""
        self.clients[stream_id].end = End(cause=Cause.DISCONNECT)
        del self.streams[stream_id]

    def reconfigure(self, num_blocks: int | None, precision: str | None) -> None:
        """The owner wants another KV cache, or other weights."""
        self.tell("owner", "engine", self.reconfigurations.ask(num_blocks, precision))

    def end_session(self, tenant: str, session_id: str) -> None:
        """The shell calls the scheduler for a client that ends its conversation."""
        self.arrives("scheduler", EndSession(tenant, session_id))

    def ask_gate(self, event: Any) -> None:
        """The shell calls the gate for whoever is outside."""
        self.handle("gate", self.gate, event)

    def stopped(self) -> None:
        """The engine stops, or will: every client may be told so from now on."""
        self.is_stopped = True
        self.everybody(Cause.DRAIN)

    def everybody(self, cause: Cause, stream_ids: Iterable[int] | None = None) -> None:
        """Every client (or each of these) may be told so from now on."""
        for stream_id in self.clients if stream_ids is None else stream_ids:
            self.clients[stream_id].causes.add(cause)

    def news(self) -> list[int]:
        """Streams that a read would give something."""
        clients = self.clients
        return [s for s, stream in self.streams.items() if clients[s].end is None and stream.has_news]

    def read(self, stream_id: int) -> None:
        """A client takes what is there, and checks it."""
        client, stream = self.clients[stream_id], self.streams[stream_id]
        client.num_reads += 1
        before = stream.state
        effects = stream.handle(Read())
        check_stall(before, stream.state, Read(), effects)
        if not effects:
            raise Violation(f"stream {stream_id} had news, and a read gave nothing")
        for effect in effects:
            if not isinstance(effect, Send) or effect.to != "reader":
                self.perform("streams", [effect])
            elif isinstance(effect.event, Delta):
                client.take(effect.event)
                if self.audit is not None:
                    self.audit.deadlines.read(stream_id, effect.event)
                    self.audit.rungs.read(stream_id, effect.event)
            else:
                assert isinstance(effect.event, End | Finished)
                client.take_end(effect.event)
