"""The scheduler: owns the requests and the KV accounting, plans steps, and commits or takes back what they did.

    STARTING ──Configure──▶ EMPTY ──MakeBatch: something to run──▶ PARTIAL ──MakeBatch: and behind it──▶ FULL
                              ▲ ◀──MakeBatch(outcome): nothing more ──┘ ◀──MakeBatch(outcome): nothing more──┘ ↺
    EMPTY, PARTIAL, FULL ──WorkerLost──▶ RECOVERING ──Configure──▶ EMPTY ──Configure──▶ EMPTY

EMPTY, PARTIAL and FULL say how many steps are in flight: none, some, or as many as may be (`max_in_flight`: one, which
knows no PARTIAL, or two). It has three layers, each of which knows nothing of those above it: how requests come, wait
and end (`lifetimes`), what becomes of a step that has ended (`outcomes`), and here the table, the worker and what is
planned.

A step that is planned while another one is in flight is planned *ahead*: its rows go on from tokens that only the
device knows yet (`SAMPLED`), and a request that turns out to have ended is computed once for nothing. Nothing is
decided ahead that could not be undone: no request is preempted, and neither mode nor suspects are tried.

A failed step is taken back, and the one that was planned behind it before it; what is tried then is for `FailurePolicy`
to say. When the worker is lost, all that it held is computed again, from each request's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import COMES_UP, COMES_UP_AGAIN, Dwell, any_time
from novainfer.fsm.core.machine import Guard, Table, never, on, stay, table
from novainfer.fsm.kv.blocks import PoolStatistics
from novainfer.fsm.messages.events import (
    Advance,
    AgeOver,
    Batch,
    CancelRequest,
    Configure,
    EndSession,
    GrammarFailed,
    KeepOver,
    MakeBatch,
    Masked,
    Output,
    Outputs,
    PauseRequest,
    Quiet,
    ResumeRequest,
    SessionOver,
    Submit,
    WorkerLost,
)
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.schedule import costs
from novainfer.fsm.schedule.batching import Flight
from novainfer.fsm.schedule.costs import StepCosts
from novainfer.fsm.schedule.ladder import FIRST_MODE, Offered, Rung
from novainfer.fsm.schedule.outcomes import Outcomes
from novainfer.fsm.schedule.planner import Limits, Planner
from novainfer.fsm.schedule.recovery import FailurePolicy, Trial
from novainfer.fsm.schedule.request import RequestState
from novainfer.fsm.schedule.speculation import Speculation, SpeculationStatistics
from novainfer.fsm.text import Vocabulary


class SchedulerState(StrEnum):
    """How many steps are in flight."""

    STARTING = "STARTING"
    EMPTY = "EMPTY"
    PARTIAL = "PARTIAL"
    FULL = "FULL"
    RECOVERING = "RECOVERING"


S = SchedulerState
UP = (S.EMPTY, S.PARTIAL, S.FULL)
KNOWS_REQUESTS = (*UP, S.RECOVERING)
WAITS_TO_RUN = (RequestState.WAITING, RequestState.PREEMPTED)
CLOSED_GATE = "the gate opens when the worker is warm"


class SchedulerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, in requests, blocks, tokens and steps; `*_total` only grow."""

    num_waiting: int
    num_running: int
    num_paused: int
    blocks: PoolStatistics
    steps_total: int
    step_failures_total: int
    preemptions_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    finished_total: dict[str, int]
    num_deferred: int = 0  # of those that wait, the ones whose mask has not come
    rollbacks_total: dict[str, int] = {}  # steps that were taken back, by cause
    worker_losses_total: int = 0
    swapped_out_blocks_total: int = 0
    swapped_in_blocks_total: int = 0
    copied_blocks_total: int = 0
    num_host_blocks: int = 0
    num_host_blocks_free: int = 0
    rung: str = Rung.FULL
    speculation: SpeculationStatistics | None = None  # where the engine speculates
    rungs: tuple[str, ...] = tuple(FIRST_MODE)  # all that it may be, best first
    mode: Mode = Mode()  # that the next step asks for


class WithOutcome(Guard):
    """The oldest step in flight has ended; else the engine asks for one behind it."""

    name = "with an outcome"
    why = "it is for the engine to say how a step has ended"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return event.outcome is not None


class Scheduler(Outcomes):
    """See the module; `vocabulary` gives the bytes of each token."""

    TABLE: ClassVar[Table] = table(
        S,
        (
            Configure,
            Submit,
            CancelRequest,
            PauseRequest,
            ResumeRequest,
            Masked,
            GrammarFailed,
            MakeBatch,
            WorkerLost,
            KeepOver,
            AgeOver,
            SessionOver,
            EndSession,
            Quiet,
        ),
        on(S.STARTING, Configure, "_configure", S.EMPTY),
        on(S.RECOVERING, Configure, "_recover", S.EMPTY),
        on(S.EMPTY, Configure, "_reconfigure", S.EMPTY),
        never((S.PARTIAL, S.FULL), Configure, "the worker is what it is while steps are in flight"),
        stay(KNOWS_REQUESTS, Submit, "_submit"),
        stay(S, CancelRequest, "_cancel"),  # in STARTING: on the control lane it overtakes Configure and its Submit
        stay(KNOWS_REQUESTS, PauseRequest, "_pause"),
        stay(KNOWS_REQUESTS, ResumeRequest, "_resume"),
        stay(KNOWS_REQUESTS, Masked, "_masked"),
        stay(KNOWS_REQUESTS, GrammarFailed, "_grammar_failed"),
        on(S.EMPTY, MakeBatch, "_more", *UP),
        on(S.PARTIAL, MakeBatch, "_next", S.EMPTY, S.PARTIAL, only=WithOutcome),
        on(S.PARTIAL, MakeBatch, "_more", S.PARTIAL, S.FULL),
        on(S.FULL, MakeBatch, "_next", *UP),
        never(S.RECOVERING, MakeBatch, "the engine waits for the next worker"),
        on(UP, WorkerLost, "_lost", S.RECOVERING),
        never(S.RECOVERING, WorkerLost, "a worker that is lost while it comes up was never said to be ready"),
        stay(KNOWS_REQUESTS, KeepOver, "_keep_over"),
        stay(KNOWS_REQUESTS, AgeOver, "_age_over"),
        stay(KNOWS_REQUESTS, SessionOver, "_session_over"),
        stay(KNOWS_REQUESTS, EndSession, "_end_session"),
        stay(KNOWS_REQUESTS, Quiet, "_quiet"),
        never(S.STARTING, Submit, CLOSED_GATE),
        never(S.STARTING, PauseRequest, CLOSED_GATE),
        never(S.STARTING, ResumeRequest, CLOSED_GATE),
        never(S.STARTING, Masked, CLOSED_GATE),
        never(S.STARTING, GrammarFailed, CLOSED_GATE),
        never(S.STARTING, MakeBatch, "the engine waits for the worker"),
        never(S.STARTING, WorkerLost, "a worker that never came up has failed"),
        never(S.STARTING, KeepOver, CLOSED_GATE),
        never(S.STARTING, AgeOver, CLOSED_GATE),
        never(S.STARTING, SessionOver, CLOSED_GATE),
        never(S.STARTING, EndSession, CLOSED_GATE),
        never(S.STARTING, Quiet, CLOSED_GATE),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.STARTING: COMES_UP,
        S.EMPTY: any_time("nothing is to be run"),
        S.PARTIAL: any_time("steps follow each other; the engine's states say how long each may take"),
        S.FULL: any_time("steps follow each other; the engine's states say how long each may take"),
        S.RECOVERING: COMES_UP_AGAIN,
    }

    def __init__(
        self,
        limits: Limits,
        vocabulary: Vocabulary,
        *,
        stall_keep_s: float = 10.0,
        ladder_quiet_s: float = 60.0,
        step_timeout_s: float = 60.0,
        speculation: Speculation | None = None,
        max_in_flight: int = 1,
    ) -> None:
        super().__init__(S.STARTING, limits, vocabulary, stall_keep_s=stall_keep_s, speculation=speculation)
        assert max_in_flight == 1 or speculation is None, "what to guess next depends on the tokens of the step before"
        self._max_in_flight = max_in_flight
        self._ladder_quiet_s = ladder_quiet_s
        self._step_timeout_s = step_timeout_s
        self._epoch = 0
        self._step_id = 0
        self._losses = 0
        self.costs = StepCosts()

    @property
    def num_losses(self) -> int:
        """How often the worker was lost."""
        return self._losses

    @property
    def num_generated(self) -> int:
        """Tokens that were committed, since the start."""
        return self._generated

    def statistics(self) -> SchedulerStatistics:
        """An immutable record of the moment."""
        paused = sum(r.state is RequestState.PAUSED for r in self.planner.running.values())
        return SchedulerStatistics(
            num_waiting=len(self.planner.waiting),
            num_deferred=sum(r.state in WAITS_TO_RUN for r in self.planner.awaited.values()),
            num_running=len(self.planner.running) - paused,
            num_paused=paused + len(self.planner.parked),
            blocks=self.planner.cache.statistics(),
            steps_total=self._steps,
            step_failures_total=self._failures,
            preemptions_total=self.planner.num_preemptions,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated,
            prefix_query_tokens_total=self._queried,
            prefix_hit_tokens_total=self._hit,
            finished_total=dict(self._finished),
            rollbacks_total=dict(self._rollbacks),
            worker_losses_total=self._losses,
            swapped_out_blocks_total=self._swapped_out,
            swapped_in_blocks_total=self._swapped_in,
            copied_blocks_total=self._copied,
            num_host_blocks=self.planner.cache.num_host_blocks,
            num_host_blocks_free=self.planner.cache.num_host_blocks_free,
            rung=self.recovery.ladder.rung,
            rungs=self.recovery.ladder.rungs,
            mode=self.recovery.ladder.mode,
            speculation=self._speculation.statistics() if self._speculation is not None else None,
        )

    def wait_s(self, num_waiting: int, num_prompt_tokens: int) -> float | None:
        """Seconds until so many requests run, which wait with so many prompt tokens; None where costs are unknown.

        By the costs of steps, and by what answers were long: for a queue that nothing has left yet.
        """
        if not self.costs.is_measured:
            return None
        return costs.wait_s(
            self.costs,
            num_waiting=num_waiting,
            num_prompt_tokens=num_prompt_tokens,
            num_running=len(self.planner.running),
            num_slots=self._limits.max_num_seqs,
            answer_tokens=self.answer_tokens,
            chunk=self._limits.prefill_chunk_tokens,
        )

    # ---- the worker ----------------------------------------------------------------------------------------------

    def _configure(self, event: Configure) -> SchedulerState:
        self.planner = Planner(self._limits, event.num_blocks, event.num_host_blocks, self._speculation)
        self.planner.mode = event.modes[0]
        self.recovery = FailurePolicy(
            self.planner, event.modes, ladder_quiet_s=self._ladder_quiet_s, step_timeout_s=self._step_timeout_s
        )
        self._nest(self.recovery.ladder)
        self._epoch = event.epoch
        self._measured(event)
        self._eos_token_ids = event.eos_token_ids
        self._max_len = min(event.max_model_len, self.planner.cache.num_tokens_max)
        self._tell_routers()
        return S.EMPTY

    def _recover(self, event: Configure) -> SchedulerState:
        """There is a worker again: as large as the one before, or as large as it was asked to be."""
        planner = self.planner
        self._epoch = event.epoch
        self._measured(event)
        planner.refit(event.num_blocks, event.num_host_blocks, keeps_host=event.keeps_host)
        assert self._max_len <= planner.cache.num_tokens_max, "no worker comes up that cannot hold the longest request"
        self.recovery.climb(Offered(event.modes), self._effects)
        planner.recover()
        self._tell_routers()
        return S.EMPTY

    def _reconfigure(self, event: Configure) -> SchedulerState:
        assert not self.planner.running, "the engine waits until the KV cache is vacant"
        self.planner.cache.forget()
        return self._recover(event)

    def _measured(self, event: Configure) -> None:
        """The worker has measured what its steps cost, or could not: then nothing is decided by it."""
        self.costs = StepCosts(event.step_costs)
        self.planner.chunks.measured(event.step_costs)
        if self._speculation is not None:
            self._speculation.measured(self.costs)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _more(self, event: MakeBatch) -> SchedulerState:
        assert event.outcome is None, "no step has ended that the engine could tell of"
        state = self._plan([], event)
        self._tell_routers()
        return state

    def _next(self, event: MakeBatch) -> SchedulerState:
        flight, outcome = self.flights.pop(0), event.outcome
        assert outcome is not None
        assert outcome.step_id == flight.step_id, "the engine answers for the oldest step in flight"
        if flight.is_vacating:
            outputs = self._end_vacating(flight, outcome)
        elif flight.canary:
            outputs = self._end_canary(flight, outcome)
        elif isinstance(outcome, StepDone):
            outputs = self._commit(flight, outcome)
        else:
            outputs = self._roll_back(flight, outcome)
        if self.observer is not None:
            self.observer.plans()
        state = self._plan(outputs, event)
        self._tell_routers()
        return state

    def _tell_routers(self) -> None:
        """What has changed in the prefixes that can be found, where somebody wants to know."""
        if (changed := self.planner.cache.changed()) is not None:
            self._send("routers", changed)

    def _plan(self, outputs: list[Output], asked: MakeBatch) -> SchedulerState:
        outputs += self._end_longest_paused()
        if asked.vacates:
            planned = None if self.flights else self._try_vacate()
        else:
            planned = self._try_ahead() if self.flights else self._try_all(outputs)
        if self.planner.advanced:
            self._tell_grammars(None if planned is None else planned[1])
        if planned is None:
            is_vacant = asked.vacates and not self.flights
            is_idle = not self.planner.waiting or bool(self.planner.awaited)
            assert self.flights or is_vacant or is_idle, "a waiting request was neither planned nor made room for"
            self._send("engine", Batch(None, outputs, [], self._work_seen, self._epoch, is_vacant=is_vacant))
            return self._filled()
        plan, flight = planned
        self.flights.append(flight)
        plan.mode = flight.mode = self.recovery.ladder.device_mode if flight.is_vacating else self.planner.mode
        started = [r.stream_id for r in flight.admitted if r.awaits_first]
        may_follow = self._may_plan_ahead()
        self._send("engine", Batch(plan, outputs, started, self._work_seen, self._epoch, may_follow))
        return self._filled()

    def _tell_grammars(self, planned: Flight | None) -> None:
        """What requests have got in this turn, and what the step that was just planned guesses to follow."""
        advanced = self.planner.advanced
        tokens = [(request_id, token_id) for request_id, found in advanced.items() for token_id in found]
        drafts = [] if planned is None else list(planned.guesses.items())
        self._send("grammars", Advance(tokens, drafts, planned is not None and planned.is_noted))
        advanced.clear()

    def _filled(self) -> SchedulerState:
        num_flights = len(self.flights)
        return S.EMPTY if not num_flights else S.FULL if num_flights == self._max_in_flight else S.PARTIAL

    def _try_all(self, outputs: list[Output]) -> tuple[StepPlan, Flight] | None:
        """The next step, when none is in flight; what ends for it goes to `outputs`."""
        planned, recovery = None, self.recovery
        if recovery.ladder.mode != self.planner.mode:
            self.planner.change_mode(recovery.ladder.mode)
        if (trial := recovery.next_trial(self.requests)) is not None:
            planned = self._try_canary(trial)
            if planned is None:
                outputs += self._end_doomed(recovery.convict(self.requests, self._effects))
        while planned is None and (group := recovery.next_group(self.requests)):
            planned = self._try_plan(group)
            if planned is None and self.planner.has_awaited:
                return None
            if planned is None:
                recovery.skip_group()
        return planned or self._try_plan(None)

    def _may_plan_ahead(self) -> bool:
        """Whether another step may follow those in flight before one of them has ended."""
        newest = self.flights[-1]
        if len(self.flights) >= self._max_in_flight or newest.canary or newest.is_vacating:
            return False
        return not self.recovery.is_searching and self.recovery.ladder.mode == self.planner.mode

    def _try_ahead(self) -> tuple[StepPlan, Flight] | None:
        if not self._may_plan_ahead():
            return None
        self._step_id += 1
        planned = self.planner.plan_ahead(self._step_id, self._epoch, self.recovery.chunk)
        if planned is not None:
            planned[0].after = self.flights[-1].step_id
        return planned

    def _try_plan(self, only: list[int] | None) -> tuple[StepPlan, Flight] | None:
        self._step_id += 1
        return self.planner.plan(self._step_id, self._epoch, self.recovery.chunk, only)

    def _try_canary(self, trial: Trial) -> tuple[StepPlan, Flight] | None:
        self._step_id += 1
        return self.planner.plan_canary(self._step_id, self._epoch, trial.num_tokens)

    def _try_vacate(self) -> tuple[StepPlan, Flight] | None:
        self._step_id += 1
        planned = self.planner.vacate(self._step_id, self._epoch)
        self._keep_parked()
        return planned

    # ---- what breaks ---------------------------------------------------------------------------------------------

    def _lost(self, event: WorkerLost) -> SchedulerState:
        self._losses += 1
        lost = next((flight for flight in self.flights if flight.step_id == event.step_id), None)
        if self.flights:
            first = self.flights.pop(0)
            self._discard_behind(first, {event.step_id})
            self._note_rollback(event.fault)
            self.planner.rollback(first, launched=first is lost)
        if lost is not None and not lost.is_vacating:  # else nothing was computed, and no request is to blame
            self._failures += 1
            if outputs := self._end_doomed(self.recovery.worker_lost(lost, event, self._effects)):
                self._send("engine", Outputs(outputs))
        self.planner.lose()
        self._keep_parked()
        self._tell_routers()
        return S.RECOVERING

    def _quiet(self, event: Quiet) -> StrEnum:
        self.recovery.quiet(event, self.requests, self._effects)
        return self.state

    # ---- for checkers --------------------------------------------------------------------------------------------

    @property
    def oldest_flight(self) -> Flight | None:
        """The step whose outcome is next."""
        return self.flights[0] if self.flights else None

    @property
    def newest_flight(self) -> Flight | None:
        """The step that was planned last."""
        return self.flights[-1] if self.flights else None

    def fingerprint(self) -> tuple[object, ...]:
        """All that a rollback of a step that was never launched must give back."""
        planner = self.planner
        return (
            *planner.cache.fingerprint(),
            tuple(r.request_id for r in planner.waiting),
            planner.order.fingerprint(),
            tuple(sorted(planner.running)),
            tuple(planner.free_slots),
            tuple(
                (
                    (r.request_id, r.state, r.num_computed, r.num_planned, r.slot),
                    (tuple(planner.cache.table_of(r)), tuple(r.token_ids)),
                )
                for r in self.requests.values()
            ),
        )

    def check(self) -> None:
        """Assert that every block and slot has exactly the owners it should have; for tests, slow."""
        planner = self.planner
        departed = [request for flight in self.flights for request in flight.departed]
        owners = [*self.requests.values(), *departed]
        canary = [block for flight in self.flights for block in flight.canary]
        planner.cache.check(owners, canary)
        slots = sorted([*planner.free_slots, *(r.slot for r in owners if r.slot >= 0)])
        assert slots == list(range(self._limits.max_num_seqs)), "a slot has two owners, or none"
        assert all(r.ended for r in departed), "a departed request is not ended"
        queued = {RequestState.WAITING, RequestState.PREEMPTED, RequestState.RECOVERING}
        held = {request.request_id for flight in self.flights for request in flight.held()}
        waiting = {request.request_id for request in planner.waiting}
        planner.order.check(planner.waiting)
        for request in self.requests.values():
            assert not request.ended, f"ended request {request.request_id} is still known"
            is_parked = request.request_id in planner.parked
            is_running = request.state not in queued and not is_parked
            assert request.state is RequestState.PAUSED or not is_parked
            assert is_running == (request.request_id in planner.running)
            assert (request.state in queued) == (request.request_id in waiting)
            if not is_running:
                assert not request.kv.capacity, f"waiting request {request.request_id} owns blocks"
                assert request.slot < 0, f"waiting request {request.request_id} owns a slot"
            is_held = request.request_id in held
            assert request.is_in_flight == is_held, f"request {request.request_id} is in no step, or in one"
