"""The engine is the hub: it drives the step cycle, and knows which requests each stream stands for.

                               |  nothing is asked   |  the scheduler is asked for a step
    ---------------------------+---------------------+------------------------------------
    nothing is at the worker   |  IDLE               |  SCHEDULING; ROLLBACK, after a step that failed
    one step is, or two are    |  WAITING_WORKER     |  AHEAD

    STARTING ──WorkerReady──▶ IDLE ──work arrives──▶ SCHEDULING ──Batch──▶ WAITING_WORKER ──StepDone──▶ SCHEDULING
    SCHEDULING ──Batch, which another may follow──▶ AHEAD ──Batch──▶ WAITING_WORKER ──StepDone──▶ AHEAD
    WAITING_WORKER, AHEAD ──StepFailed──▶ ROLLBACK ──Batch: a smaller step──▶ WAITING_WORKER, AHEAD
    all of these ──WorkerLost──▶ RECOVERING ──WorkerReady──▶ SCHEDULING
    SCHEDULING, ROLLBACK ──Batch: the KV cache is vacant──▶ RECONFIGURING ──WorkerReady──▶ SCHEDULING

How a step has ended is told to the scheduler with the question for the next one, when it has answered the one before.
With a step that fails, the one behind it is of no use: the worker begins none whose predecessor did not end well.

In RECOVERING the worker is gone and another one comes up: streams stay open, and requests may come and go. So they do
in RECONFIGURING, where the worker is made another one on purpose. That is asked for at any time and waits for its
moment: no step is planned any more, those in flight end, and the scheduler has all requests leave the KV cache.

One step is four messages, whatever its size: MakeBatch, Batch, Launch, StepDone. A plan is launched before the outputs
of the step before it are handed on, so that the device never waits for readers. Any state goes to STOPPED.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import (
    ANSWER_LIMIT_S,
    COMES_UP,
    COMES_UP_AGAIN,
    ENDED,
    RECLAIM_LIMIT_S,
    SWITCH_LIMIT_S,
    Dwell,
    any_time,
)
from novainfer.fsm.core.guards import OfEpoch, OfStep
from novainfer.fsm.core.machine import Guard, Machine, Table, ignore, never, on, stay, table
from novainfer.fsm.messages.events import (
    Arrive,
    Batch,
    Cancel,
    CancelAll,
    CancelRequest,
    Cause,
    Configure,
    Departed,
    Encode,
    Encoded,
    EncodeFailed,
    End,
    GrammarFailed,
    Launch,
    MakeBatch,
    Masked,
    Open,
    Output,
    Outputs,
    Pause,
    PauseRequest,
    Reconfigure,
    Reconfigured,
    Resume,
    ResumeRequest,
    Settled,
    StepFailed,
    Stop,
    Submit,
    WorkerFailed,
    WorkerLost,
    WorkerReady,
    ended_early,
)
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone


class EngineState(StrEnum):
    """Whom the engine waits for."""

    STARTING = "STARTING"
    IDLE = "IDLE"
    SCHEDULING = "SCHEDULING"
    AHEAD = "AHEAD"
    WAITING_WORKER = "WAITING_WORKER"
    ROLLBACK = "ROLLBACK"
    RECOVERING = "RECOVERING"
    RECONFIGURING = "RECONFIGURING"
    STOPPED = "STOPPED"


S = EngineState
STEPPING = (S.SCHEDULING, S.AHEAD, S.WAITING_WORKER, S.ROLLBACK)
AFTER_BATCH = (S.IDLE, S.WAITING_WORKER, S.AHEAD)
DEVICELESS = (S.RECOVERING, S.RECONFIGURING)
BUSY = (*STEPPING, *DEVICELESS)
CYCLE = (S.IDLE, *BUSY)
SEED_MASK = 2**64 - 1  # the seed of a stream is that of its first choice, and they count on from there, as vLLM's do
CLOSED_GATE = "the gate opens when the worker is warm"
ONE_AT_A_TIME = "another reconfiguration is under way"
LOST = "the worker was lost while it was reconfigured, and comes up again as it was before"


class OfPrompt(Guard):
    """The prompt is still wanted."""

    name = "of a stream that waits for it"
    why = "its stream was cancelled meanwhile"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return machine.is_encoding(event.stream_id)  # type: ignore[no-any-return]


class Engine(Machine):
    """See the module."""

    TABLE: ClassVar[Table] = table(
        S,
        (
            Arrive,
            Encoded,
            EncodeFailed,
            Cancel,
            CancelAll,
            Pause,
            Resume,
            Masked,
            GrammarFailed,
            Batch,
            Outputs,
            StepDone,
            StepFailed,
            WorkerReady,
            WorkerLost,
            WorkerFailed,
            Reconfigure,
            Stop,
        ),
        on(S.STARTING, WorkerReady, "_ready", S.IDLE),
        on(S.RECOVERING, WorkerReady, "_recovered", S.SCHEDULING),
        on(S.RECONFIGURING, WorkerReady, "_reconfigured", S.SCHEDULING),
        never((S.IDLE, *STEPPING), WorkerReady, "it comes up once, and once after each loss or reconfiguration"),
        ignore(S.STOPPED, WorkerReady, "it was stopped while the worker came up"),
        on((S.IDLE, *STEPPING), WorkerLost, "_lost", S.RECOVERING),
        on(S.RECONFIGURING, WorkerLost, "_lost_meanwhile", S.RECOVERING),
        never(S.STARTING, WorkerLost, "a worker that never came up has failed"),
        never(S.RECOVERING, WorkerLost, "what is lost while it comes up again was never said to be ready"),
        ignore(S.STOPPED, WorkerLost, "its streams have ended"),
        on((S.STARTING, *CYCLE), WorkerFailed, "_worker_failed", S.STOPPED),
        ignore(S.STOPPED, WorkerFailed, "everything has ended already"),
        on(S.IDLE, Arrive, "_arrive", S.IDLE, S.SCHEDULING),
        stay(BUSY, Arrive, "_arrive"),
        never(S.STARTING, Arrive, CLOSED_GATE),
        on(S.STOPPED, Arrive, "_too_late", S.STOPPED),
        on(S.IDLE, Encoded, "_encoded", S.IDLE, S.SCHEDULING, only=OfPrompt),
        stay(BUSY, Encoded, "_encoded", only=OfPrompt),
        never(S.STARTING, Encoded, CLOSED_GATE),
        ignore(S.STOPPED, Encoded, "its stream has ended"),
        stay(CYCLE, EncodeFailed, "_encode_failed", only=OfPrompt),
        never(S.STARTING, EncodeFailed, CLOSED_GATE),
        ignore(S.STOPPED, EncodeFailed, "its stream has ended"),
        stay(CYCLE, Cancel, "_cancel"),
        never(S.STARTING, Cancel, CLOSED_GATE),
        ignore(S.STOPPED, Cancel, "its stream has ended"),
        stay(CYCLE, CancelAll, "_cancel_all"),
        never(S.STARTING, CancelAll, CLOSED_GATE),
        ignore(S.STOPPED, CancelAll, "every stream has ended"),
        stay(CYCLE, Pause, "_pause"),
        never(S.STARTING, Pause, CLOSED_GATE),
        ignore(S.STOPPED, Pause, "its stream has ended"),
        on(S.IDLE, Resume, "_resume", S.SCHEDULING),
        stay(BUSY, Resume, "_resume"),
        never(S.STARTING, Resume, CLOSED_GATE),
        ignore(S.STOPPED, Resume, "its stream has ended"),
        on(S.IDLE, Masked, "_masked", S.SCHEDULING),
        stay(BUSY, Masked, "_masked"),
        never(S.STARTING, Masked, CLOSED_GATE),
        ignore(S.STOPPED, Masked, "its stream has ended"),
        on(S.IDLE, GrammarFailed, "_masked", S.SCHEDULING),
        stay(BUSY, GrammarFailed, "_masked"),
        never(S.STARTING, GrammarFailed, CLOSED_GATE),
        ignore(S.STOPPED, GrammarFailed, "its stream has ended"),
        on(S.SCHEDULING, Batch, "_batch", *AFTER_BATCH, S.SCHEDULING, S.RECONFIGURING, only=OfEpoch, renews=True),
        on(S.AHEAD, Batch, "_batch", S.WAITING_WORKER, only=OfEpoch),
        on(
            *(S.ROLLBACK, Batch, "_batch", *AFTER_BATCH, S.SCHEDULING, S.ROLLBACK, S.RECONFIGURING),
            only=OfEpoch,
            renews=True,
        ),
        stay((S.SCHEDULING, S.RECOVERING), Batch, "_stale_batch"),
        never((S.AHEAD, S.ROLLBACK), Batch, "a plan for a worker that is lost comes before any step of the next one"),
        never((S.STARTING, S.IDLE, S.WAITING_WORKER), Batch, "the scheduler answers MakeBatch, once"),
        never(S.RECONFIGURING, Batch, "the scheduler is asked for none"),
        ignore(S.STOPPED, Batch, "its streams have ended"),
        on(S.IDLE, Outputs, "_outputs", S.IDLE, S.SCHEDULING),
        stay(BUSY, Outputs, "_outputs"),
        never(S.STARTING, Outputs, CLOSED_GATE),
        ignore(S.STOPPED, Outputs, "its streams have ended"),
        on(S.WAITING_WORKER, StepDone, "_step_done", S.SCHEDULING, S.AHEAD, only=OfStep),
        on(S.AHEAD, StepDone, "_done_early", S.SCHEDULING, only=OfStep),
        ignore((S.IDLE, S.SCHEDULING, S.ROLLBACK), StepDone, "it came twice"),
        ignore(DEVICELESS, StepDone, "it came twice: the step was settled before"),
        never(S.STARTING, StepDone, CLOSED_GATE),
        ignore(S.STOPPED, StepDone, "its streams have ended"),
        on(S.WAITING_WORKER, StepFailed, "_step_failed", S.ROLLBACK, only=OfStep),
        on(S.AHEAD, StepFailed, "_failed_early", S.ROLLBACK, only=OfStep),
        ignore((S.IDLE, S.SCHEDULING, S.ROLLBACK), StepFailed, "it came twice"),
        ignore(DEVICELESS, StepFailed, "it came twice: the step was settled before"),
        never(S.STARTING, StepFailed, CLOSED_GATE),
        ignore(S.STOPPED, StepFailed, "its streams have ended"),
        on(S.IDLE, Reconfigure, "_reconfigure", S.SCHEDULING),
        stay(BUSY, Reconfigure, "_reconfigure"),
        never(S.STARTING, Reconfigure, CLOSED_GATE),
        stay(S.STOPPED, Reconfigure, "_reconfigure_too_late"),
        on((S.STARTING, *CYCLE), Stop, "_stop", S.STOPPED),
        ignore(S.STOPPED, Stop, "stopping twice is stopping once"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.STARTING: COMES_UP,
        S.IDLE: any_time("it waits for clients"),
        S.SCHEDULING: Dwell(ANSWER_LIMIT_S, "the scheduler answers within a turn"),
        S.AHEAD: Dwell(ANSWER_LIMIT_S, "the scheduler answers within a turn"),
        S.WAITING_WORKER: Dwell(
            SWITCH_LIMIT_S + RECLAIM_LIMIT_S + ANSWER_LIMIT_S, "a switch, a step and a reclaim at the worker", True
        ),
        S.ROLLBACK: Dwell(ANSWER_LIMIT_S, "the scheduler answers within a turn"),
        S.RECOVERING: COMES_UP_AGAIN,
        S.RECONFIGURING: COMES_UP_AGAIN,
        S.STOPPED: ENDED,
    }

    state: EngineState

    def __init__(self) -> None:
        super().__init__(S.STARTING)
        self._encoding: dict[int, Arrive] = {}  # streams at the tokenizer
        self._live: dict[int, dict[int, int]] = {}  # stream -> its requests that have not ended, and their choices
        self._num_arrived = 0
        # Cancels that overtook their Arrive, each with the number of Arrives by which it must have come, and the same
        # of the last CancelAll.
        self._tombstones: dict[int, tuple[Cause, int]] = {}
        self._cancelled_all: tuple[Cause, int] | None = None
        self._next_request_id = 0
        self._work_sent = 0  # Submit and Resume messages sent to the scheduler
        self.steps: list[tuple[int, int]] = []  # (step_id, epoch) of those at the worker, oldest first
        self._outcome: StepDone | StepFailed | None = None  # of the oldest step, until the scheduler can be told
        self.epoch = 0  # of the worker that is up, or was last
        self._wanted: Reconfigure | None = None  # that was not answered yet

    @property
    def num_streams(self) -> int:
        """Streams that have arrived and not ended."""
        return len(self._encoding) + len(self._live)

    @property
    def live_streams(self) -> list[int]:
        """Streams whose requests are with the scheduler."""
        return list(self._live)

    @property
    def step(self) -> tuple[int, int]:
        """(step_id, epoch) of the step whose outcome is next."""
        return self.steps[0] if self.steps else (-1, -1)

    def is_encoding(self, stream_id: int) -> bool:
        """True while the stream's prompt is at the tokenizer."""
        return stream_id in self._encoding

    # ---- coming up and going down --------------------------------------------------------------------------------

    def _ready(self, event: WorkerReady) -> EngineState:
        self._configure(event)
        self._send("gate", Open())
        self._send("client", event)
        return S.IDLE

    def _recovered(self, event: WorkerReady) -> EngineState:
        self._configure(event)
        self._ask_for_batch()
        return S.SCHEDULING

    def _configure(self, event: WorkerReady) -> None:
        self.epoch = event.epoch
        configure = Configure(
            event.num_blocks,
            event.max_model_len,
            event.vocab_size,
            event.eos_token_ids,
            event.epoch,
            event.num_host_blocks,
            event.modes,
            event.step_costs,
            event.keeps_host,
        )
        self._send("scheduler", configure)

    def _lost(self, event: WorkerLost) -> EngineState:
        self._send("scheduler", event)
        self.steps.clear()
        self._outcome = None
        return S.RECOVERING

    def _worker_failed(self, event: WorkerFailed) -> EngineState:
        self._send("client", event)
        return self._stop(Stop(event.message))

    def _stop(self, event: Stop) -> EngineState:
        self._send("gate", event)
        self._send("streams", event)
        self._send("worker", event, urgent=True)
        self._encoding.clear()
        self._live.clear()
        self._tombstones.clear()
        self.steps.clear()
        self._outcome = None
        if self._wanted is not None:
            self._answer(event.error or "the engine stops")
        return S.STOPPED

    def _too_late(self, event: Arrive) -> EngineState:
        self._send("streams", ended_early(event.stream_id, End(cause=Cause.DRAIN)))
        return S.STOPPED

    # ---- streams -------------------------------------------------------------------------------------------------

    def _arrive(self, event: Arrive) -> StrEnum:
        self._num_arrived += 1
        cause = self._cancelled_before(event.stream_id)
        if cause is not None:
            return self._end_unsubmitted(event.stream_id, End(cause=cause))
        if isinstance(event.prompt, list) and not event.params.bad_words:
            return self._submit(event, event.prompt, event.params)
        self._encoding[event.stream_id] = event
        self._send("tokenizer", Encode(event.stream_id, event.prompt, event.params.bad_words))
        return self.state

    def _cancelled_before(self, stream_id: int) -> Cause | None:
        """Why the stream that has just arrived was cancelled on its way, if it was."""
        found = self._tombstones.get(stream_id) or self._cancelled_all
        num_arrived = self._num_arrived
        if self._tombstones:  # of streams that had ended already: what they waited for does not come
            self._tombstones = {s: t for s, t in self._tombstones.items() if s != stream_id and t[1] > num_arrived}
        if self._cancelled_all is not None and self._cancelled_all[1] <= num_arrived:
            self._cancelled_all = None
        return found[0] if found is not None else None

    def _encoded(self, event: Encoded) -> StrEnum:
        arrival = self._encoding.pop(event.stream_id)
        token_ids = arrival.params.truncated(event.token_ids)
        self._send("gate", Settled(event.stream_id, len(token_ids)))
        return self._submit(arrival, token_ids, arrival.params.with_banned(event.bad_word_ids))

    def _encode_failed(self, event: EncodeFailed) -> StrEnum:
        del self._encoding[event.stream_id]
        end = End(error=event.message, code=event.code, param=event.param)
        return self._end_unsubmitted(event.stream_id, end)

    def _submit(self, arrival: Arrive, token_ids: list[int], params: SamplingParams) -> StrEnum:
        live = self._live[arrival.stream_id] = {}
        goes_on = any(committed.token_ids for committed in arrival.committed)
        for choice in range(arrival.params.n):
            request_id = self._next_request_id
            self._next_request_id += 1
            live[request_id] = choice
            submit = Submit(
                request_id=request_id,
                stream_id=arrival.stream_id,
                choice=choice,
                token_ids=token_ids,
                params=params,
                seed=(arrival.seed + choice) & SEED_MASK,
                tenant=arrival.tenant,
                committed=arrival.committed[choice] if goes_on else None,
            )
            self._send("scheduler", submit)
            self._work_sent += 1
        return self._wake()

    def _cancel(self, event: Cancel) -> StrEnum:
        if event.stream_id in self._live:
            for request_id in self._live[event.stream_id]:
                self._send("scheduler", CancelRequest(request_id, event.cause), urgent=True)
        elif self._encoding.pop(event.stream_id, None) is not None:
            return self._end_unsubmitted(event.stream_id, End(cause=event.cause))
        elif event.arrived > self._num_arrived:
            self._tombstones.setdefault(event.stream_id, (event.cause, event.arrived))
        return self.state

    def _cancel_all(self, event: CancelAll) -> StrEnum:
        for stream_id in list(self._encoding):
            self._cancel(Cancel(stream_id, event.cause))
        for live in self._live.values():
            for request_id in live:
                self._send("scheduler", CancelRequest(request_id, event.cause), urgent=True)
        if event.arrived > self._num_arrived:
            self._cancelled_all = (event.cause, event.arrived)
        return self.state

    def _pause(self, event: Pause) -> StrEnum:
        for request_id, choice in self._live.get(event.stream_id, {}).items():
            if event.choice in (None, choice):
                self._send("scheduler", PauseRequest(request_id))
        return self.state

    def _resume(self, event: Resume) -> StrEnum:
        for request_id in self._live.get(event.stream_id, ()):
            self._send("scheduler", ResumeRequest(request_id))
            self._work_sent += 1
        return self._wake()

    def _end_unsubmitted(self, stream_id: int, end: End) -> StrEnum:
        self._send("streams", ended_early(stream_id, end))
        self._send("gate", Departed([stream_id]))
        return self.state

    def _masked(self, event: Masked | GrammarFailed) -> StrEnum:
        self._send("scheduler", event)
        self._work_sent += 1
        return self._wake()

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _wake(self) -> StrEnum:
        """There is work for the scheduler: ask now if the engine is idle; else the next answer tells."""
        if self.state is S.IDLE:
            self._ask_for_batch()
            return S.SCHEDULING
        return self.state

    def _ask_for_batch(self, outcome: StepDone | StepFailed | None = None) -> None:
        self._send("scheduler", MakeBatch(outcome, vacates=self._wanted is not None))

    def _batch(self, event: Batch) -> EngineState:
        outcome, self._outcome = self._outcome, None
        if event.plan is not None and not isinstance(outcome, StepFailed):
            self.steps.append((event.plan.step_id, event.plan.epoch))
            self._send("worker", Launch(event.plan))
        self._hand_on(event)
        if outcome is not None:
            return self._ask(outcome)
        if event.may_follow and self._wanted is None:
            self._ask_for_batch()
            return S.AHEAD
        if self.steps:
            return S.WAITING_WORKER
        if self._wanted is not None and event.is_vacant:
            self._send("worker", msgspec.structs.replace(self._wanted, epoch=self.epoch))
            return S.RECONFIGURING
        if self._wanted is not None or event.work_seen != self._work_sent:  # more came while the scheduler planned
            self._ask_for_batch()
            return S.SCHEDULING
        return S.IDLE

    def _stale_batch(self, event: Batch) -> StrEnum:
        """It was asked for before the worker was lost: its plan is of no use any more."""
        self._hand_on(event)
        return self.state

    def _hand_on(self, batch: Batch) -> None:
        """What a batch brings besides its plan."""
        if batch.outputs:
            self._send("streams", Outputs(batch.outputs))
            self._settle(batch.outputs)
        if batch.started:
            self._send("gate", Departed(batch.started))

    def _outputs(self, event: Outputs) -> StrEnum:
        self._send("streams", event)
        self._settle(event.outputs)
        return self._wake() if event.wakes else self.state

    def _settle(self, outputs: list[Output]) -> None:
        """Forget the requests that have ended; one that ended badly takes its siblings along."""
        over: list[int] = []
        for output in outputs:
            end = output.end
            if end is None:
                continue
            live = self._live.get(output.stream_id)
            if live is None or live.pop(output.request_id, None) is None:
                continue
            if end.error is not None:  # a cancel goes to every choice anyway
                for sibling in live:
                    self._send("scheduler", CancelRequest(sibling, Cause.SIBLING), urgent=True)
                live.clear()
            if not live:
                del self._live[output.stream_id]
                over.append(output.stream_id)
        if over:
            self._send("gate", Departed(over))

    def _ask(self, outcome: StepDone | StepFailed) -> EngineState:
        """Tell the scheduler how the oldest step has ended, and ask for one behind those at the worker."""
        self._ask_for_batch(outcome)
        if isinstance(outcome, StepFailed):
            return S.ROLLBACK
        return S.AHEAD if self.steps else S.SCHEDULING

    def _step_done(self, event: StepDone) -> EngineState:
        del self.steps[0]
        return self._ask(event)

    def _done_early(self, event: StepDone) -> EngineState:
        """The scheduler still plans what follows this step: it is told when it has."""
        del self.steps[0]
        self._outcome = event
        return S.SCHEDULING

    def _step_failed(self, event: StepFailed) -> EngineState:
        self.steps.clear()
        return self._ask(event)

    def _failed_early(self, event: StepFailed) -> EngineState:
        self.steps.clear()
        self._outcome = event
        return S.ROLLBACK

    # ---- another configuration -----------------------------------------------------------------------------------

    def _reconfigure(self, event: Reconfigure) -> StrEnum:
        if self._wanted is not None:
            self._send("client", Reconfigured(event.serial, ONE_AT_A_TIME))
            return self.state
        self._wanted = event
        return self._wake()

    def _reconfigure_too_late(self, event: Reconfigure) -> StrEnum:
        self._send("client", Reconfigured(event.serial, "the engine has stopped"))
        return self.state

    def _reconfigured(self, event: WorkerReady) -> EngineState:
        self._answer(event.error, event)
        return self._recovered(event)

    def _lost_meanwhile(self, event: WorkerLost) -> EngineState:
        self._answer(f"{LOST}: {event.message}")
        return self._lost(event)

    def _answer(self, error: str | None, ready: WorkerReady | None = None) -> None:
        assert self._wanted is not None
        self._send("client", Reconfigured(self._wanted.serial, error, ready))
        self._wanted = None
