"""One engine's actors: made, connected, supervised, and taken down.

    gate ──Arrive──▶ engine ⇄ scheduler        tokenizer, grammars: threads, batched
                       │  └──▶ streams ──▶ readers            routers: told of prefixes, by a thread
                       └──▶ worker ⇄ device: a thread, or a process

The tokenizer's thread and the link to the device live as tasks of one anyio task group, inside a root task, so that
`aclose` may come from any task. An actor that raises is dead: every stream is told exactly once, and the system stops
with the error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec

from novainfer.actors.admission import Admission, AdmissionStatistics
from novainfer.actors.core.mailbox import Actor, ActorStatistics
from novainfer.actors.core.streams import StreamHandle, Streams
from novainfer.actors.core.turns import MESSAGES_MAX, Turns
from novainfer.actors.core.watchdog import Watchdog
from novainfer.actors.device.device import sentence_of, with_limit
from novainfer.actors.device.link import DeviceLink, MakeLink
from novainfer.actors.grammar.grammars import Grammars
from novainfer.actors.inspection.frames import ActorNow, StepLimits
from novainfer.actors.inspection.incidents import Incidents
from novainfer.actors.inspection.inspector import Inspector
from novainfer.actors.inspection.overview import FREEZE_ACTOR, THAW_ACTOR, Overview
from novainfer.actors.inspection.recorder import Recorder
from novainfer.actors.inspection.records import HealthRecord, SessionRecord
from novainfer.actors.inspection.steps import StepLog, StepRecord
from novainfer.actors.inspection.watch import Sources, Watch
from novainfer.actors.routers.publisher import KvEventPublisher
from novainfer.actors.tokenizer.threads import TokenizerThreads
from novainfer.actors.tokenizer.tokenizer import Tokenizer
from novainfer.fsm.client.gate import Gate, GateState
from novainfer.fsm.client.stream import STALL_TIMEOUT_S, Stream
from novainfer.fsm.core.machine import Machine
from novainfer.fsm.device.worker import RestartPolicy, Worker, WorkerState
from novainfer.fsm.engine import Engine, EngineState
from novainfer.fsm.kv.blocks import tokens_in
from novainfer.fsm.kv.cache import Kept
from novainfer.fsm.messages.errors import (
    EngineClosed,
    EngineDead,
    EngineDraining,
    ModelLoadError,
    NovaInferError,
    ReconfigureInProgress,
)
from novainfer.fsm.messages.events import (
    Begin,
    Cause,
    Chat,
    Committed,
    Departed,
    DeviceLost,
    Drain,
    Encoded,
    EncodeFailed,
    EndSession,
    Fault,
    Incident,
    JobDone,
    JobFailed,
    Launch,
    MakeBatch,
    Outputs,
    Prompt,
    PromptKind,
    Reconfigure,
    Reconfigured,
    Rejected,
    Run,
    SessionOver,
    StepFailed,
    Stop,
    WorkerFailed,
    WorkerReady,
)
from novainfer.fsm.messages.params import NUM_CHOICES_MAX, SamplingParams
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.messages.tenant import ANYONE, Tenant
from novainfer.fsm.parsing.formats import Formats
from novainfer.fsm.schedule.lifetimes import PARKED_PER_SLOT
from novainfer.fsm.schedule.planner import Limits
from novainfer.fsm.schedule.scheduler import Scheduler, SchedulerStatistics
from novainfer.fsm.schedule.session import Session
from novainfer.fsm.schedule.speculation import Speculation
from novainfer.fsm.text import TokenizerInfo, Vocabulary

logger = logging.getLogger(__name__)

DEVICE_WORD_S = 5.0  # for the device to say what is wrong with a model whose tokenizer cannot be loaded
DRAIN_GRACE_S = 10.0  # for cancels to reach everything: two turns, or a step where an actor is slow
STEP_ENDS = (StepDone, StepFailed)
WORKER_INCIDENTS = (Fault.LOST, Fault.TIMEOUT, "gave_up")
MAILBOX_SPARE = 1024  # messages that belong to no stream: steps, drain, stop, cancels sent twice


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """How long what may take, in seconds; `EngineConfig` says what each means."""

    step_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 5.0
    stall_keep_s: float = 10.0
    stall_timeout_s: float = STALL_TIMEOUT_S
    ladder_quiet_s: float = 60.0


class Runtime:
    """The actors of one engine, on the running loop."""

    def __init__(
        self,
        *,
        make_link: MakeLink,
        load_tokenizer: Callable[[], Tokenizer],
        limits: Limits,
        max_queue: tuple[int, ...],
        restarts: RestartPolicy | None = None,
        timeouts: Timeouts | None = None,
        speculation: Speculation | None = None,
        max_in_flight: int = 1,
        recorder: Recorder | None = None,
        publisher: KvEventPublisher | None = None,
    ) -> None:
        self._timeouts = timeouts = timeouts or Timeouts()
        self.recorder = recorder or Recorder(is_enabled=False)
        self._undelivered: deque[Any] = deque()  # on its way to the streams
        self._limits = limits
        self._speculation = speculation
        self._max_in_flight = max_in_flight
        # Admission bounds what is in flight, so a full mailbox is a bug: every choice of every stream let in may send
        # its Submit and its cancel in one turn: those queued, those that run, and those parked, some more of which
        # there may be until the next step.
        num_requests = max_queue[0] + (2 + PARKED_PER_SLOT) * limits.max_num_seqs
        self._mailbox_limit = MAILBOX_SPARE + 2 * NUM_CHOICES_MAX * num_requests
        self._gate = Gate(*max_queue)
        self._engine = Engine()
        self._scheduler: Scheduler | None = None
        self._worker = Worker(restarts)
        self._streams = Streams(
            self._route,
            gone=self._forgotten,
            died=partial(self._died, "streams"),
            moved=lambda stream, before, event: self.inspector.rows.took(stream, before, event),
            stall_timeout_s=timeouts.stall_timeout_s,
        )
        self._actors = {
            "gate": self._make_actor("gate", self._gate),
            "engine": self._make_actor("engine", self._engine),
            "worker": self._make_actor("worker", self._worker),
        }
        self.incidents = Incidents(lambda stream_id: self.inspector.who(stream_id))
        self.incidents.subscribe(self.recorder.on_incident)
        self.steps = StepLog()
        self.inspector = Inspector(
            self._gate, self._engine, self._streams, self.incidents, self._actors, plans=self.steps.plans
        )
        self._admission = Admission(
            self._gate, self._streams, ask=self._actors["gate"].handle, expected_s=self._expected_s
        )
        self._link = make_link(self._from_device)
        self._threads = TokenizerThreads(
            load_tokenizer, loaded=self._has_vocabulary, deliver=partial(self._tell, "engine")
        )
        self._grammars = Grammars(
            self._threads.grammar_source, tell=partial(self._tell, "engine"), give=self._link.give
        )
        self.watchdog = Watchdog(
            self._actors,
            more=lambda: [
                self._threads.sighting(),
                *self._grammars.sightings(),
                *self._link.sightings(timeouts.heartbeat_timeout_s),
            ],
            silence_s=self._link.silence_s,
            num_signs=self._link.num_signs,
            rescue=self._link.overdue,
            epoch=lambda: self._worker.epoch,
            overdue=partial(self._tell, "worker"),
            report=self.incidents.take,
            step_timeout_s=timeouts.step_timeout_s,
            heartbeat_timeout_s=timeouts.heartbeat_timeout_s,
        )
        self.overview = Overview(
            self._actors,
            self.watchdog,
            threads=self._threads,
            grammars=self._grammars,
            worker_pid=lambda: self._link.pid,
        )
        self.inspector.observe(
            self._gate, self._engine, self._worker, *self._link.machines(), *self._grammars.machines()
        )
        self.watch = Watch(
            Sources(
                inspector=self.inspector,
                steps=self.steps,
                incidents=self.incidents,
                streams=self._streams,
                actors=self._actors_now,
                machines=self._machines,
                planner=lambda: self.inspector.planner,
                generated=lambda: self._scheduler.num_generated if self._scheduler is not None else 0,
                limits=self._step_limits,
                is_running=lambda: self._worker.state is WorkerState.RUNNING,
            )
        )
        self._others: dict[str, Callable[[Any], None]] = {  # that machines speak to, and that have no mailbox
            "streams": self._to_streams,
            "tokenizer": self._threads.put,
            "grammars": self._grammars.put,
            "client": self._to_client,
            "incidents": self._to_incidents,
        }
        self.publisher = publisher
        if publisher is not None:
            self._others["routers"] = publisher.put
        self._notes: dict[type, Callable[[Any], None]] = {  # what is done besides, when one of these is sent
            MakeBatch: self.steps.asked,
            Launch: self.steps.planned,
            Departed: self._note_departed,
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns: Turns  # from the start on
        self._root: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[WorkerReady] | None = None
        self._stopping: anyio.Event | None = None
        self._idle: asyncio.Event | None = None
        self._vocabulary: asyncio.Future[Vocabulary | None] | None = None  # None: stopped before it was there
        self._reconfiguring: asyncio.Future[Reconfigured] | None = None  # until it is answered
        self._num_reconfigurations = 0
        self._device_error: str | None = None  # the first job that the device failed
        self._loaded = anyio.Event()  # the device has loaded the model, or said why not
        self.error: str | None = None  # what it died of

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> WorkerReady:
        """Load tokenizer and model, fit and warm; raises `ModelLoadError` with one clear sentence.

        Raises `InvalidParameter` where routers cannot be told what they should be.
        """
        if self.publisher is not None:
            self.publisher.start()
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(self._loop)
        self._ready = self._loop.create_future()
        self._stopping = anyio.Event()
        self._idle = asyncio.Event()
        self._vocabulary = self._loop.create_future()
        self._root = self._loop.create_task(self._live(), name="novainfer")
        try:
            return await asyncio.shield(self._ready)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End everything that still runs; streams hear of it. From any task, any number of times."""
        if self._root is None:
            return
        self._stop()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._root])
        if self._ready is not None and self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen: nothing else will look

    async def drain(self, timeout_s: float) -> None:
        """Take no new streams; wait until those here have ended, `timeout_s` at most; end the rest.

        It returns `DRAIN_GRACE_S` later at the latest, whatever has not ended by then; `aclose` ends that too.
        """
        if self._root is None:
            return
        self._actors["gate"].handle(Drain())
        with anyio.move_on_after(timeout_s):
            await self._wait_idle()
            return
        self._admission.cancel_all(Cause.DRAIN)
        with anyio.move_on_after(DRAIN_GRACE_S):  # an actor that is stuck ends nothing
            await self._wait_idle()

    def check_reconfigurable(self) -> None:
        """Raise `ReconfigureInProgress`, `EngineDraining` or `EngineClosed` when it is not the time for it."""
        if self._stopping is None or self._stopping.is_set():
            raise EngineClosed(self.error or "the engine is not running")
        if self._gate.state is not GateState.OPEN:
            raise EngineDraining("the engine shuts down, and is not reconfigured any more")
        if self._reconfiguring is not None:
            raise ReconfigureInProgress("another reconfiguration is under way: try again when it has ended")

    def reconfigure(self, num_blocks: int | None, precision: str | None) -> asyncio.Future[Reconfigured]:
        """Go on with so many KV blocks, and with weights in this precision (None: as it is); gives the answer to come.

        Raises as `check_reconfigurable`. If the engine ends first, the answer is an `EngineClosed` or an `EngineDead`.
        """
        self.check_reconfigurable()
        assert self._loop is not None
        self._num_reconfigurations += 1
        self._reconfiguring = self._loop.create_future()
        self._tell("engine", Reconfigure(self._num_reconfigurations, num_blocks, precision))
        return self._reconfiguring

    def _note_reconfigured(self, event: Reconfigured) -> None:
        if self._engine.state is EngineState.STOPPED:
            self._end_reconfiguration()
            return
        answer, self._reconfiguring = self._reconfiguring, None
        assert answer is not None, "one is asked for at a time, and answered once"
        answer.set_result(event)

    def _end_reconfiguration(self) -> None:
        """The engine has stopped: the answer, if one is owed, is that."""
        answer, self._reconfiguring = self._reconfiguring, None
        if answer is not None:
            error = (
                EngineDead(self.error) if self.error is not None else EngineClosed("the engine was closed meanwhile")
            )
            answer.set_exception(error)
            answer.exception()  # seen: the one who asked may have left

    async def _live(self) -> None:
        """The root task: owns the task group, and ends when everything has ended."""
        assert self._loop is not None
        assert self._stopping is not None
        assert self._vocabulary is not None
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch, "device", self._link)
                group.start_soon(self._watch, "tokenizer thread", self._threads)
                group.start_soon(self._watch, "grammar thread", self._grammars)
                self._actors["worker"].open(self._turns)
                self._tell("worker", Begin())
                self.watchdog.start(self._loop)
                self._threads.begin()
                try:
                    if (vocabulary := await self._tokens()) is not None:
                        self._open(vocabulary)
                    await self._stopping.wait()
                finally:
                    self._shut()
        except Exception as error:
            self._fail(error)
        finally:
            with anyio.CancelScope(shield=True):
                await self.recorder.wait_written()
            if self._ready is not None and not self._ready.done():
                closed = EngineClosed("the engine was closed while it was starting")
                self._ready.set_exception(ModelLoadError(self.error) if self.error else closed)
                self._ready.exception()  # seen: the caller that started it may have left

    async def _tokens(self) -> Vocabulary | None:
        """The tokenizer's vocabulary; when it has none, the device may know better why."""
        assert self._vocabulary is not None
        try:
            return await self._vocabulary
        except Exception:
            with anyio.move_on_after(DEVICE_WORD_S):
                await self._loaded.wait()
            raise

    async def _watch(self, name: str, thread: TokenizerThreads | Grammars | DeviceLink) -> None:
        """Live as long as `thread`; its death is an actor's death."""
        try:
            await thread.run()
        except Exception as error:
            self._died(name, error)

    def _stop(self) -> None:
        """Let the root task go on to its end."""
        assert self._stopping is not None
        self._stopping.set()
        self._loaded.set()
        if self._vocabulary is not None and not self._vocabulary.done():
            self._vocabulary.set_result(None)

    def _open(self, vocabulary: Vocabulary) -> None:
        """Everything is there: the actors that waited for the vocabulary may take their turns."""
        assert self._loop is not None
        timeouts = self._timeouts
        self._scheduler = Scheduler(
            self._limits,
            vocabulary,
            stall_keep_s=timeouts.stall_keep_s,
            ladder_quiet_s=timeouts.ladder_quiet_s,
            step_timeout_s=timeouts.step_timeout_s,
            speculation=self._speculation,
            max_in_flight=self._max_in_flight,
        )
        self._actors["scheduler"] = self._make_actor("scheduler", self._scheduler)
        self.inspector.watch(self._scheduler)
        self.recorder.begin(self._actors, self._streams, self._undelivered, vocabulary, self._loop)
        for name in ("scheduler", "gate", "engine"):
            self._actors[name].open(self._turns)

    def _shut(self) -> None:
        """Stop every actor, also when some of them are broken; what streams are left hear why."""
        self.watchdog.stop()
        self.inspector.feed.close()
        self.watch.close()
        self.recorder.close()
        stop = Stop(self.error)
        takers: list[Callable[[Any], None]] = [self._actors[name].handle for name in ("engine", "gate")]
        # The worker's last effect closes the device.
        for take in (*takers, self._streams.take, self._actors["worker"].handle):
            try:
                take(stop)
            except Exception as error:
                self._report("an actor could not be stopped", error)
        for actor in self._actors.values():
            actor.close()
        self._end_reconfiguration()
        self._link.stop()
        self._threads.stop()
        self._grammars.stop()
        if self.publisher is not None:
            self.publisher.stop()
        if self._idle is not None:
            self._idle.set()

    def _fail(self, error: BaseException) -> None:
        """The start failed by `error`: the callers that wait for it are told."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        # A damaged folder fails tokenizer and device alike, and the device's reader says more exactly what is wrong.
        if self._device_error is not None:
            error = ModelLoadError(with_limit(self._device_error))
        elif not isinstance(error, NovaInferError):
            error = ModelLoadError(with_limit(f"cannot start: {sentence_of(error)}"))
        wrapped = error
        self.error = wrapped.message
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(wrapped)

    def _died(self, name: str, error: BaseException) -> None:
        """An actor raised: a bug. Its streams end with an error, and the system stops."""
        if self.error is None:
            self.error = f"the {name} died: {sentence_of(error)}"
        self.recorder.dump_soon("died", self.error)
        self._report(self.error, error)
        self._stop()

    def _report(self, message: str, error: BaseException) -> None:
        if self._loop is not None:
            self._loop.call_exception_handler({"message": f"novainfer: {message}", "exception": error})

    @property
    def prompt_kind(self) -> PromptKind:
        """The most that a prompt can be; known when the engine has started."""
        return self._threads.prompt_kind

    @property
    def formats(self) -> Formats:
        """How the model calls tools and reasons; known when the engine has started."""
        return self._threads.formats

    @property
    def vocabulary(self) -> Vocabulary:
        """The bytes of each token; known when the engine has started."""
        assert self._vocabulary is not None, "nothing is let in before it is there"
        found = self._vocabulary.result()
        assert found is not None, "the engine was stopped before it was there"
        return found

    # ---- requests ------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        owner: str = "",
        tenant: Tenant = ANYONE,
        committed: Sequence[Committed] = (),
    ) -> StreamHandle:
        """Ask for admission; raises `EngineOverloaded`, `EngineDraining` or `EngineClosed` when it is refused."""
        if self._stopping is not None and self._stopping.is_set():
            raise EngineClosed(self.error or "the engine is not running")
        if params.truncate_prompt_tokens is None:
            self._threads.check_length(prompt)
        handle = self._admission.add(name, prompt, params, seed, tenant, committed)
        self.inspector.arrived(handle.stream_id, name, owner, params)
        assert self._idle is not None
        self._idle.clear()
        return handle

    async def tokenize(self, prompt: str | Chat) -> Encoded | EncodeFailed:
        """The tokens of a prompt that nothing is to be generated for; raises `EngineOverloaded` or `EngineClosed`."""
        if self._stopping is None or self._stopping.is_set():
            raise EngineClosed(self.error or "the engine is not running")
        return await self._threads.ask(prompt)

    def tokenizer_info(self) -> TokenizerInfo:
        """What the tokenizer is, when the engine has started."""
        return self._threads.info()

    def cancel(self, stream_id: int, cause: Cause) -> None:
        """End this stream; harmless when it has ended."""
        self._admission.cancel(stream_id, cause)

    def abandon(self, stream_id: int) -> None:
        """Its reader has left: cancel it, and drop what it may still say."""
        self._admission.abandon(stream_id)

    def retry_after_s(self) -> float:
        """Seconds until the queue will have drained, at the rate it drains now."""
        return self._admission.retry_after_s()

    def _expected_s(self, num_waiting: int, num_prompt_tokens: int) -> float | None:
        return self._scheduler.wait_s(num_waiting, num_prompt_tokens) if self._scheduler is not None else None

    async def _wait_idle(self) -> None:
        assert self._idle is not None
        assert self._stopping is not None
        while (self._engine.num_streams or self._gate.num_queued) and not self._stopping.is_set():
            self._idle.clear()
            await self._idle.wait()

    def _forgotten(self, stream: Stream) -> None:
        """This stream is not read any more."""
        self._actors["gate"].drop_timers(stream.stream_id)
        self.inspector.forgotten(stream)

    # ---- what actors see of each other ---------------------------------------------------------------------------

    def _make_actor(self, name: str, machine: Any) -> Actor:
        limit = self._mailbox_limit
        return Actor(name, machine, route=self._route, start=self._start_job, died=self._died, limit=limit)

    def _route(self, to: str, event: Any, urgent: bool) -> None:
        actor = self._actors.get(to)
        if actor is None:
            self._others[to](event)
            return
        note = self._notes.get(type(event))
        if note is not None:
            note(event)
        if not actor.tell(event, urgent):
            _must_be_dead(actor)

    def _to_streams(self, event: Any) -> None:
        """Not a mailbox but a call, once per step; after the turn of the worker, so that the device starts first."""
        self._undelivered.append(event)
        self.steps.handed_on()
        self._turns.ask(self._deliver)

    def _to_incidents(self, event: Incident) -> None:
        if event.kind in WORKER_INCIDENTS and not event.stream_ids:  # it concerns all that the worker computes
            event = msgspec.structs.replace(event, stream_ids=self._engine.live_streams)
        is_up = self._ready is not None and self._ready.done()
        self.incidents.take(event, is_logged=is_up or event.kind != "gave_up")  # a failed start is told by `start`

    def _note_departed(self, event: Departed) -> None:
        self._admission.note_departed(event)
        self._threads.forget(event.stream_ids)  # credits come back, so nothing of theirs may wait
        if self._idle is not None and self._loop is not None:
            self._loop.call_soon(self._idle.set)

    def _tell(self, to: str, event: Any, urgent: bool = False) -> None:
        """Put what comes from outside the machines into an actor's mailbox; it is recorded in full."""
        actor = self._actors[to]
        if not actor.told(event, urgent):
            _must_be_dead(actor)

    def _deliver(self) -> int:
        started_s = time.perf_counter()
        try:
            outputs = self._undelivered.popleft()
            self._streams.take(outputs)
            self.steps.delivered(time.perf_counter() - started_s)
            if self.watch.is_watched and type(outputs) is Outputs:
                self.watch.delivered(outputs.outputs)
        except Exception as error:
            self._died("streams", error)
        return MESSAGES_MAX  # readers are next

    def _start_job(self, job: Any) -> None:
        if type(job) is Run:
            self.steps.launched(job.plan)
        has_masks = type(job) is Run and job.plan.mask_ids
        self._link.put(Run(self._grammars.launched(job.plan)) if has_masks else job)
        if type(job) is Run:  # the device has begun: this costs the step no time
            self.recorder.launched(job.plan)

    def _from_device(self, event: Any) -> None:
        if isinstance(event, STEP_ENDS):
            self._grammars.landed(event)
            self.steps.returned(event)
        elif isinstance(event, Incident):
            self.incidents.take(event)
            return
        else:
            self._note_job(event)
        self._tell("worker", event)

    def _note_job(self, event: Any) -> None:
        if isinstance(event, JobFailed):
            self._device_error = self._device_error or event.message
            if event.job == "Close":  # nothing waits for it, but the operator should know
                logger.warning("the device could not be closed: %s", event.message)
        if isinstance(event, JobFailed | DeviceLost) or (isinstance(event, JobDone) and event.job == "Load"):
            self._loaded.set()

    def _has_vocabulary(self, found: Vocabulary | Exception) -> None:
        assert self._vocabulary is not None
        if self._vocabulary.done():  # closed, or cancelled, while the tokenizer loaded
            return
        if isinstance(found, Vocabulary):
            self._vocabulary.set_result(found)
        else:
            self._vocabulary.set_exception(found)

    def _to_client(self, event: Any) -> None:
        if isinstance(event, Rejected):
            self._admission.note_rejected(event)
            return
        assert self._ready is not None
        if isinstance(event, Reconfigured):
            self._note_reconfigured(event)
        elif isinstance(event, WorkerReady) and not self._ready.done():
            assert self._vocabulary is not None
            self._limit_prompts(event)
            self.recorder.came_up()
            self._ready.set_result(event)
        elif isinstance(event, WorkerFailed):
            self.error = event.message if self._ready.done() else with_limit(event.message)
            self.recorder.dump_soon("failed", self.error)
            if not self._ready.done():
                self._ready.set_exception(ModelLoadError(self.error))
            self._stop()

    def _limit_prompts(self, ready: WorkerReady) -> None:
        """No prompt has more tokens than the context and the KV cache hold."""
        max_tokens = min(ready.max_model_len, tokens_in(ready.num_blocks, self._limits.block_size))
        self._threads.limit(num_ids=ready.vocab_size, max_tokens=max_tokens)
        self._grammars.limit(vocab_size=ready.vocab_size, eos_token_ids=ready.eos_token_ids)

    # ---- looking in ----------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True while streams are let in."""
        return self._gate.state is GateState.OPEN and self._stopping is not None and not self._stopping.is_set()

    @property
    def has_ended(self) -> bool:
        """True when nothing runs: it was never started, or everything has ended."""
        return self._root is None or self._root.done()

    @property
    def engine_state(self) -> EngineState:
        """What the engine waits for."""
        return self._engine.state

    def scheduler_statistics(self) -> SchedulerStatistics | None:
        """Counts of the scheduler; None before it is there."""
        return self._scheduler.statistics() if self._scheduler else None

    @property
    def num_queued(self) -> int:
        """Choices that have been let in and have not run yet."""
        return self._gate.num_queued

    def is_overflowed(self, stream_id: int) -> bool:
        """True while this stream waits for room in the queue."""
        return self._gate.is_overflowed(stream_id)

    def admission_statistics(self) -> AdmissionStatistics:
        """Counts of the queue, of who waits for it, who was refused, and of slow readers."""
        return self._admission.statistics()

    def sessions(self, tenant: str | None = None) -> list[SessionRecord]:
        """The conversations that are kept, of one tenant or of all."""
        if self._scheduler is None:
            return []
        cache, timers = self._scheduler.planner.cache, self._actors["scheduler"]
        sessions = [s for s in self._scheduler.sessions.values() if tenant is None or s.tenant == tenant]
        return [_session_record(s, cache.kept(s.names), timers.left_s(SessionOver(s.number))) for s in sessions]

    def end_session(self, tenant: str, session_id: str) -> bool:
        """Keep nothing more of this conversation; False if there is none. What runs of it runs on."""
        if self._scheduler is None or (tenant, session_id) not in self._scheduler.sessions:
            return False
        self._actors["scheduler"].handle(EndSession(tenant, session_id))
        return True

    def actors(self) -> list[ActorStatistics]:
        """Each actor's state, dwell time and mailbox depth."""
        return [actor.statistics() for actor in self._actors.values()]

    def _actors_now(self) -> list[ActorNow]:
        scheduler = self._scheduler
        if scheduler is None or self.inspector.planner is None:
            return self.overview.now(restarts=0, rung=None)
        return self.overview.now(restarts=scheduler.num_losses, rung=scheduler.recovery.ladder.rung)

    def _machines(self) -> Iterator[Machine]:
        """All but requests and streams, which are many."""
        for actor in self._actors.values():
            if actor.machine is not None:
                yield actor.machine
        scheduler = self._scheduler
        if scheduler is not None and self.inspector.planner is not None:
            yield scheduler.recovery.ladder
            yield from scheduler.sessions.values()
        yield from self._link.machines()
        yield from self._grammars.machines()

    def _step_limits(self) -> StepLimits:
        ready = self._ready
        is_up = ready is not None and ready.done() and not ready.cancelled() and ready.exception() is None
        return StepLimits(
            max_num_seqs=self._limits.max_num_seqs,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            max_model_len=ready.result().max_model_len if ready is not None and is_up else 0,
        )

    def last_steps(self, last: int) -> list[StepRecord]:
        """The newest `last` steps by phase."""
        return self.steps.records(last, is_running=self._worker.state is WorkerState.RUNNING)

    def health(self) -> HealthRecord:
        """Whether everything moves, and whether a stream would be let in."""
        return self.overview.health(state=str(self._engine.state), is_ready=self.is_ready, why_not=self.error)

    def inject(self, kind: str, **how: Any) -> None:
        """Let something fail, for a drill; raises `InvalidParameter` when it cannot. `request` becomes its slot."""
        if kind in (FREEZE_ACTOR, THAW_ACTOR):
            self.overview.freeze(kind, **how)
        else:
            if (name := how.pop("request", None)) is not None:
                how["slot"] = self.inspector.slot_of(name)
            self._link.inject(kind, **how)


def _session_record(session: Session, kept: Kept, ttl_left_s: float | None) -> SessionRecord:
    return SessionRecord(
        session_id=session.session_id,
        tenant=session.tenant,
        state=str(session.state),
        num_tokens=kept.num_tokens,
        num_on_device=kept.num_on_device,
        num_on_host=kept.num_on_host,
        ttl_left_s=ttl_left_s,
    )


def _must_be_dead(actor: Actor) -> None:
    state = actor.statistics().state
    assert state == "DEAD", f"the mailbox of {actor.name} is full: admission should have seen to it"
