"""The scheduler: owns the requests and the KV accounting, plans steps, and commits or takes back what they did.

    STARTING ──Configure──▶ EMPTY ──MakeBatch: something to run──▶ PARTIAL ──MakeBatch: and behind it──▶ FULL
                              ▲ ◀──MakeBatch(outcome): nothing more ──┘ ◀──MakeBatch(outcome): nothing more──┘ ↺
    EMPTY, PARTIAL, FULL ──WorkerLost──▶ RECOVERING ──Configure──▶ EMPTY ──Configure──▶ EMPTY

EMPTY, PARTIAL and FULL say how many steps are in flight: none, some, or as many as may be (`max_in_flight`: one, which
knows no PARTIAL, or two). Every end of a request is decided here, as soon as the step is known that brings it:
by a token (`answer`), a cancel or a failure.

A step that is planned while another one is in flight is planned *ahead*: its rows go on from tokens that only the
device knows yet (`SAMPLED`), and a request that turns out to have ended is computed once for nothing. Nothing is
decided ahead that could not be undone: no request is preempted, and neither mode nor suspects are tried.

A failed step is taken back, and the one that was planned behind it before it; what is tried then is for `FailurePolicy`
to say. When the worker is lost, all that it held is computed again, from each request's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import COMES_UP, COMES_UP_AGAIN, Dwell, any_time
from novainfer.fsm.core.machine import Guard, Machine, Table, never, on, stay, table
from novainfer.fsm.kv.blocks import PoolStatistics, space_name
from novainfer.fsm.messages.events import (
    Advance,
    AgeOver,
    Batch,
    CancelRequest,
    Cause,
    Configure,
    Constrain,
    End,
    Fault,
    GrammarFailed,
    Incident,
    KeepOver,
    MakeBatch,
    Masked,
    Output,
    Outputs,
    PauseRequest,
    Quiet,
    Release,
    ResumeRequest,
    StepFailed,
    Submit,
    WorkerLost,
)
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.pooling import vector
from novainfer.fsm.messages.step import NONE_ALLOWED, StepDone, StepPlan
from novainfer.fsm.schedule import answer, costs
from novainfer.fsm.schedule.batching import Flight
from novainfer.fsm.schedule.costs import ANSWER_TOKENS, ANSWER_WEIGHT, StepCosts
from novainfer.fsm.schedule.ladder import FIRST_MODE, Offered, Rung
from novainfer.fsm.schedule.planner import Limits, Planner
from novainfer.fsm.schedule.recovery import Doomed, FailurePolicy, Trial
from novainfer.fsm.schedule.request import AWAITED, ENDED, PREFILLED, Finish, Request, RequestState
from novainfer.fsm.schedule.speculation import Speculation, SpeculationStatistics
from novainfer.fsm.text import Vocabulary

NOT_A_NUMBER = "the model's output for this request is not a number: no token can be drawn from it"
NO_VECTOR = "the model's output for this request is not a number: it has no vector"
NONE_LEFT = (
    "no token is left for this request: its grammar allows none of those that allowed_token_ids and banned_token_ids "
    "have left"
)
NO_TOKEN_ALLOWED = "no_token_allowed"  # the code of that error: what the request asks for excludes itself
NO_NUMBERS = "the model's output for tokens of no request is not a number either"


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
CLOSED_GATE = "the gate opens when the worker is warm"

# Slow readers cost no step anything, but each holds up to 0.25 MiB of unread text. With more than so many parked for
# every slot, the one that has been paused longest ends.
PARKED_PER_SLOT = 2

STATE_OF_CAUSE = {
    Cause.CLIENT: RequestState.FINISHED_ABORTED,
    Cause.DISCONNECT: RequestState.FINISHED_ABORTED,
    Cause.SIBLING: RequestState.FINISHED_ABORTED,
    Cause.DRAIN: RequestState.FINISHED_ABORTED,
    Cause.TIMEOUT: RequestState.FINISHED_TIMEOUT,
    Cause.QUEUE: RequestState.FINISHED_TIMEOUT,
    Cause.STALLED: RequestState.FINISHED_ERROR,
}


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


class Scheduler(Machine):
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
        super().__init__(S.STARTING)
        assert max_in_flight == 1 or speculation is None, "what to guess next depends on the tokens of the step before"
        self._max_in_flight = max_in_flight
        self._speculation = speculation
        self._stall_keep_s = stall_keep_s
        self._ladder_quiet_s = ladder_quiet_s
        self._step_timeout_s = step_timeout_s
        self._epoch = 0
        self._limits = limits
        self._parked_max = PARKED_PER_SLOT * limits.max_num_seqs  # without an end
        self._vocabulary = vocabulary
        self._eos_token_ids: Sequence[int] = ()
        self._max_len = 0
        self.planner = Planner(limits, 0)
        self.recovery = FailurePolicy(self.planner)
        self.requests: dict[int, Request] = {}
        self._last_submitted = -1
        self._tombstones: dict[int, Cause] = {}
        self._work_seen = 0
        self._pauses = 0
        self._hurried: set[int] = set()  # streams whose first token has a deadline, and has not come
        self._late: set[int] = set()  # requests whose masks were waited for in vain
        self._ages: AgeOver | None = None  # the timer after which requests are aged, while it runs
        self.flights: list[Flight] = []  # oldest first
        self._step_id = 0
        self._steps = self._failures = self._prompt_tokens = self._generated = self._losses = 0
        self._queried = self._hit = 0
        self._swapped_out = self._swapped_in = self._copied = 0  # blocks
        self.costs = StepCosts()
        self.answer_tokens = ANSWER_TOKENS  # of an answer, the latest count most
        self._finished: dict[str, int] = dict.fromkeys(sorted(ENDED), 0)

    def statistics(self) -> SchedulerStatistics:
        """An immutable record of the moment."""
        paused = sum(r.state is RequestState.PAUSED for r in self.planner.running.values())
        return SchedulerStatistics(
            num_waiting=len(self.planner.waiting),
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

    # ---- requests come and go ------------------------------------------------------------------------------------

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

    def _submit(self, event: Submit) -> StrEnum:
        self._last_submitted = event.request_id
        self._work_seen += 1
        max_len = self._max_len
        if event.params.pooling is not None:
            max_len = len(event.token_ids) + 1  # nothing is written that could come so far
        elif event.params.max_tokens is not None:
            max_len = min(max_len, len(event.token_ids) + event.params.max_tokens)
        request = self._nest(Request(event, self._vocabulary, self._eos_token_ids, max_len))
        tenant = "" if self._limits.share_prefix_cache else event.tenant.id
        request.kv.space = space_name(tenant, event.params.cache_salt or "")
        if self._speculation is not None and self._speculation.is_on_device:
            request.tells_tokens = True
        cause = self._tombstones.pop(event.request_id, None)
        if cause is not None:
            end = End(cause=cause)
            self._send("engine", Outputs([self._end(request, STATE_OF_CAUSE[cause], end)]))
        elif error := answer.refusal(event, self._max_len):
            self._send("engine", Outputs([self._end(request, RequestState.FINISHED_IGNORED, error)]))
        else:
            if event.params.max_queue_s is not None:
                self._hurried.add(event.stream_id)
            self.requests[request.request_id] = request
            self.planner.order.arrives(request)
            self.planner.enqueue(request)
            if self._limits.scheduling_policy == "priority" and self._ages is None:
                self._let_age()
            if event.params.structured_outputs is not None:
                self.planner.num_constrained += 1
                self.planner.awaited[request.request_id] = request
                self._send("grammars", Constrain(request.request_id, event.params.structured_outputs))
        return self.state

    def _cancel(self, event: CancelRequest) -> StrEnum:
        request = self.requests.get(event.request_id)
        if request is None:
            if event.request_id > self._last_submitted:  # it overtook its own Submit
                self._tombstones[event.request_id] = event.cause
            return self.state
        ending = [request]
        if event.cause is Cause.QUEUE:
            ending = self._siblings(request) if request.stream_id in self._hurried else []
        state, end = STATE_OF_CAUSE[event.cause], End(cause=event.cause)
        wakes = any(request.request_id in self.planner.awaited for request in ending)
        if outputs := [self._end(request, state, end) for request in ending]:
            self._send("engine", Outputs(outputs, wakes))
        return self.state

    def _siblings(self, request: Request) -> list[Request]:
        """The choices of its stream that have not ended, itself included: their ids follow each other."""
        first = request.request_id - request.choice
        return [r for i in range(first, first + request.params.n) if (r := self.requests.get(i)) is not None]

    def _pause(self, event: PauseRequest) -> StrEnum:
        if (request := self.requests.get(event.request_id)) is not None:
            was_paused = request.state is RequestState.PAUSED
            request.handle(event)
            if request.state is RequestState.PAUSED and not was_paused:
                request.paused_as = self._pauses
                self._pauses += 1
                self._after(self._stall_keep_s, KeepOver(request.request_id))
        return self.state

    def _resume(self, event: ResumeRequest) -> StrEnum:
        self._work_seen += 1
        if (request := self.requests.get(event.request_id)) is not None:
            if request.state is RequestState.PAUSED:
                self._drop(KeepOver(request.request_id))
            request.handle(event)
            self.planner.overstayed.discard(request.request_id)  # its next pause has a time of its own
            if request.request_id in self.planner.parked:
                self.planner.unpark(request)
        return self.state

    def _masked(self, event: Masked) -> StrEnum:
        self._work_seen += 1
        for mask in event.masks:
            request = self.planner.awaited.pop(mask.request_id, None)
            if request is not None:  # else it has ended meanwhile
                assert mask.num_tokens == request.num_generated, "a mask is for what follows the tokens so far"
                request.mask_id = mask.mask_id
                self._late.discard(mask.request_id)
        return self.state

    def _grammar_failed(self, event: GrammarFailed) -> StrEnum:
        self._work_seen += 1
        if (request := self.planner.awaited.get(event.request_id)) is not None:
            state = RequestState.FINISHED_IGNORED if request.is_first_output else RequestState.FINISHED_ERROR
            end = End(error=event.message, code=event.code, param="structured_outputs")
            self._send("engine", Outputs([self._end(request, state, end)]))
        return self.state

    def _keep_over(self, event: KeepOver) -> StrEnum:
        """A reader has been away for long: what it keeps on the device is given to others."""
        request = self.planner.running.get(event.request_id)
        if request is None:  # it was parked before, for want of room
            return self.state
        assert request.state is RequestState.PAUSED, "the timer is dropped when a pause ends"
        if request.is_in_flight:
            self.planner.overstayed.add(request.request_id)
        else:
            self.planner.preempt(request)
            if outputs := self._end_longest_paused():
                self._send("engine", Outputs(outputs))
        return self.state

    def _let_age(self) -> None:
        """What is here now lets others go before it for so long at most; what comes meanwhile, twice as long."""
        self._ages = AgeOver(self._last_submitted)
        self._after(self._limits.priority_wait_s, self._ages)

    def _age_over(self, event: AgeOver) -> StrEnum:
        self.planner.order.age(event.request_id)
        self._ages = None
        if event.request_id < self._last_submitted:
            self._let_age()
        return self.state

    def _end_longest_paused(self) -> list[Output]:
        """Where more requests are parked than may be, those that were paused first end."""
        parked, outputs = self.planner.parked, []
        while len(parked) > self._parked_max:
            request = min(parked.values(), key=lambda r: r.paused_as)
            message = (
                f"too many streams wait for slow readers, and this one has waited longest: {len(parked)} are parked"
            )
            outputs.append(self._end(request, RequestState.FINISHED_ERROR, End(error=message, code="stalled")))
            action = "the request that was paused first was ended"
            incident = Incident(kind="stall", message=message, action=action, stream_ids=[request.stream_id])
            self._send("incidents", incident)
        self._parked_max = max(PARKED_PER_SLOT * self._limits.max_num_seqs, len(parked))
        return outputs

    def _keep_parked(self) -> None:
        """All had to leave their slots, and no reader was slower for it: none of those that are paused ends."""
        self._parked_max = max(self._parked_max, len(self.planner.parked))

    def _end(self, request: Request, state: RequestState, end: End) -> Output:
        """End `request`; what it owns goes back now, or with its step if that is on the device."""
        if request.state is RequestState.PAUSED:
            self._drop(KeepOver(request.request_id))
        request.handle(Finish(state))
        self._finished[state] += 1
        if not request.is_first_output:
            num_tokens = len(request.token_ids) - request.num_prompt
            self.answer_tokens += ANSWER_WEIGHT * (num_tokens - self.answer_tokens)
        if self.requests.pop(request.request_id, None) is not None:
            self.planner.order.leaves(request)
            if request.mask_id:
                self._release(request)
        if not self.requests:
            self.recovery.none_left(self._effects)
            if self._ages is not None:
                self._drop(self._ages)
                self._ages = None
        if request.stream_id in self._hurried and not self._siblings(request):
            self._hurried.discard(request.stream_id)
        if self.flights and request.is_in_flight:
            del self.planner.running[request.request_id]
            self.planner.cache.abandon(request)
            oldest, *others = self.flights
            next((flight for flight in reversed(others) if flight.holds(request)), oldest).departed.append(request)
        else:
            self.planner.remove(request)
        return Output(request.request_id, request.stream_id, request.choice, [], "", end=end)

    def _release(self, request: Request) -> None:
        self.planner.num_constrained -= 1
        self.planner.awaited.pop(request.request_id, None)
        self._late.discard(request.request_id)
        self._send("grammars", Release(request.request_id))

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _more(self, event: MakeBatch) -> SchedulerState:
        assert event.outcome is None, "no step has ended that the engine could tell of"
        return self._plan([], event)

    def _next(self, event: MakeBatch) -> SchedulerState:
        flight, outcome = self.flights.pop(0), event.outcome
        assert outcome is not None
        assert outcome.step_id == flight.step_id, "the engine answers for the oldest step in flight"
        if flight.is_vacating:
            return self._plan(self._end_vacating(flight, outcome), event)
        if flight.canary:
            return self._plan(self._end_canary(flight, outcome), event)
        if isinstance(outcome, StepDone):
            return self._plan(self._commit(flight, outcome), event)
        return self._plan(self._roll_back(flight, outcome), event)

    def _plan(self, outputs: list[Output], asked: MakeBatch) -> SchedulerState:
        outputs += self._end_longest_paused()
        if asked.is_late:
            self._late.update(self._awaited())
        if not self.flights and not asked.vacates and self._awaited():
            self._send("engine", Batch(None, outputs, [], self._work_seen, self._epoch, awaits_masks=True))
            return S.EMPTY
        if asked.vacates:
            planned = None if self.flights else self._try_vacate()
        else:
            planned = self._try_ahead() if self.flights else self._try_all(outputs)
        if planned is None:
            is_vacant = asked.vacates and not self.flights
            is_idle = not self.planner.waiting or bool(self.planner.awaited)
            assert self.flights or is_vacant or is_idle, "a waiting request was neither planned nor made room for"
            self._send("engine", Batch(None, outputs, [], self._work_seen, self._epoch, is_vacant=is_vacant))
            return self._filled()
        plan, flight = planned
        self.flights.append(flight)
        plan.mode = flight.mode = self.recovery.ladder.device_mode if flight.is_vacating else self.planner.mode
        started = [r.stream_id for r in flight.admitted if r.is_first_output]
        may_follow = self._may_plan_ahead()
        self._send("engine", Batch(plan, outputs, started, self._work_seen, self._epoch, may_follow))
        return self._filled()

    def _awaited(self) -> list[int]:
        """The requests whose masks are about to come, and with them their next tokens: a step without them is a waste.

        Those whose prompt has not been computed wait longer, for a grammar to be compiled, and hold up nothing.
        """
        late, decode = self._late, RequestState.DECODE
        return [i for i, r in self.planner.awaited.items() if r.state is decode and i not in late]

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
        if len(self.flights) >= self._max_in_flight or newest.canary or newest.is_vacating or newest.has_masks:
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

    def _end_vacating(self, flight: Flight, outcome: StepDone | StepFailed) -> list[Output]:
        """What has left the KV cache is on the host; or it is computed again, where the step has failed."""
        if isinstance(outcome, StepDone):
            self._steps += 1
            self._swapped_out += flight.journal.num_blocks_out
            self.planner.commit(flight)
            return []
        self._failures += 1
        self.planner.rollback(flight, launched=outcome.launched)
        self.planner.stay_behind()
        incident = Incident(
            kind=outcome.fault,
            message=outcome.message,
            action="nothing is copied to the host before the KV cache is another one: it is computed again",
            step_id=outcome.step_id,
            epoch=outcome.epoch,
        )
        self._send("incidents", incident)
        return []

    def _end_canary(self, flight: Flight, outcome: StepDone | StepFailed) -> list[Output]:
        """What the canary says of the request that is on trial."""
        if isinstance(outcome, StepDone) and outcome.token_ids[0] < 0:
            outcome = StepFailed(flight.step_id, outcome.epoch, Fault.EXCEPTION, NO_NUMBERS)
        if isinstance(outcome, StepDone):
            self._steps += 1
            self._swapped_out += flight.journal.num_blocks_out
            self.planner.dismiss(flight)
            return self._end_doomed(self.recovery.convict(self.requests, self._effects))
        self._failures += 1
        self.planner.rollback(flight, launched=outcome.launched)
        self.recovery.canary_failed(flight, outcome, self._effects)
        return []

    def _commit(self, flight: Flight, outcome: StepDone) -> list[Output]:
        """Append what was sampled, end what has ended, and say what is new."""
        self._steps += 1
        self._swapped_out += flight.journal.num_blocks_out
        self._swapped_in += flight.journal.num_blocks_in
        self._copied += len(flight.journal.copies)
        self.planner.commit(flight)
        logprobs, samples = outcome.logprobs, flight.samples
        if outcome.num_tokens:
            samples = [r for r, count in zip(samples, outcome.num_tokens, strict=True) for _ in range(count)]
        assert len(outcome.token_ids) == len(samples), "one token per sampled row, or as many as the outcome says"
        if not flight.mode.computes_as(self.recovery.ladder.exact_mode):
            for request, _, _ in flight.rows:
                request.is_degraded = True
        if flight.scored:
            _note_scores(flight, outcome)
        prefill, finished = RequestState.PREFILL, ENDED
        outputs: list[Output] = []
        advanced: list[tuple[int, int]] = []  # requests whose next mask depends on these tokens
        num_generated = 0
        drafts, was = flight.drafts, None
        if drafts:
            self._note_drafts(flight, outcome)
        for at, (request, token_id) in enumerate(zip(samples, outcome.token_ids, strict=True)):
            state = request.state
            if state in finished:  # before the step returned, or by an earlier one of its tokens
                continue
            if drafts:
                if request is was:
                    self.planner.commit_draft(request)
                was = request
            if token_id == NONE_ALLOWED:
                none_left = End(error=NONE_LEFT, code=NO_TOKEN_ALLOWED, param="structured_outputs")
                outputs.append(self._end(request, RequestState.FINISHED_ERROR, none_left))
                continue
            if token_id < 0 or answer.has_no_number(request):
                outputs.append(self._end_not_a_number(request, outcome))
                continue
            if state is prefill:
                request.handle(PREFILLED)
            if request.is_first_output:
                self._note_first(request)
            logprob = logprobs[at] if logprobs else None
            output = answer.next_output(request, token_id, logprob, self._vocabulary, self._eos_token_ids)
            if (end := output.end) is not None and end.finish_reason is not None:
                self._end(request, answer.ENDED_AS[end.finish_reason], end)
            elif request.mask_id:
                request.mask_id = AWAITED
                self.planner.awaited[request.request_id] = request
                advanced.append((request.request_id, token_id))
            outputs.append(output)
            num_generated += 1
        if flight.pooled:
            outputs += self._note_pooled(flight, outcome)
        if advanced:
            self._send("grammars", Advance(advanced))
        self._generated += num_generated
        if flight.num_prompt_tokens:
            self.planner.chunks.took(sum(count for _, count, _ in flight.rows), 1e3 * outcome.took_s)
        if flight.is_noted:
            self._note_speed(flight, outcome)
        if drafts:
            for request in flight.samples:
                if request.request_id in drafts and not request.ended:
                    self.planner.drop_drafts(request)
        if outcome.draft_error is not None:
            self._report_draft_model(outcome, outcome.draft_error)
        self.planner.settle(flight)
        self.recovery.step_done(flight, outcome.took_s, self.requests, self._effects)
        return outputs

    def _note_first(self, request: Request) -> None:
        """Its first token is there: its prompt counts, and the deadline of a first token is over."""
        self._hurried.discard(request.stream_id)
        self._prompt_tokens += request.num_prompt
        self._queried += request.num_prompt
        self._hit += request.num_cached

    def _note_pooled(self, flight: Flight, outcome: StepDone) -> list[Output]:
        """What the step has summed of prompts, to the requests that want a vector; the ends of those that have it."""
        outputs: list[Output] = []
        for (request, first, count), found in zip(flight.pooled, outcome.pooled, strict=True):
            if request.ended:
                continue
            request.note_pooled(first, count, found)
            if request.num_pooled < request.num_prompt:
                continue
            pooling = request.pooling
            assert pooling is not None, "it wants a vector"
            embedding = vector(pooling, request.pool_sum, 1 if pooling.kind == "last" else request.num_prompt)
            if embedding is None:
                outputs.append(self._end_not_a_number(request, outcome))
                continue
            self._note_first(request)
            output = answer.pooled_output(request, embedding)
            assert output.end is not None, "it has no more to give"
            self._end(request, RequestState.FINISHED_STOPPED, output.end)
            outputs.append(output)
        return outputs

    def _note_drafts(self, flight: Flight, outcome: StepDone) -> None:
        """What the step has verified counts for what is guessed next."""
        speculation = self.planner.speculation
        assert speculation is not None
        for request, count in zip(flight.samples, outcome.num_tokens, strict=True):
            num_drafts = flight.drafts.get(request.request_id)
            if num_drafts is None or request in flight.departed:
                continue
            speculation.verified(request, num_drafts, count - 1)

    def _note_speed(self, flight: Flight, outcome: StepDone) -> None:
        """What the step took says whether guesses pay; and it may have brought some for the next one."""
        speculation = self.planner.speculation
        assert speculation is not None
        if flight.num_prompt_tokens:
            num_more = len(outcome.token_ids) - len(flight.samples)
            speculation.took_beside_prompt(outcome, sum(flight.drafts.values()), num_more, flight.num_passes)
        elif flight.samples:
            num_tokens = sum(count for _, count, _ in flight.rows)
            speculation.took(outcome, num_tokens, len(flight.rows), flight.num_passes)
        speculation.proposed(flight.samples, outcome)

    def _report_draft_model(self, outcome: StepDone, error: str) -> None:
        incident = Incident(
            kind="draft_model",
            message=f"the draft model has failed: {error}",
            action="the step's tokens are kept, and the next one verifies no guesses",
            step_id=outcome.step_id,
            epoch=outcome.epoch,
        )
        self._send("incidents", incident)

    def _end_not_a_number(self, request: Request, outcome: StepDone) -> Output:
        """A fault of this request: the step was good for all others, and what it has computed is of no use to them."""
        message = NOT_A_NUMBER if request.pooling is None else NO_VECTOR
        incident = Incident(
            kind="not_a_number",
            message=message,
            action="the request ended with an error",
            step_id=outcome.step_id,
            epoch=outcome.epoch,
            stream_ids=[request.stream_id],
        )
        self._send("incidents", incident)
        self.planner.cache.distrust(request)
        return self._end(request, RequestState.FINISHED_ERROR, End(error=message))

    # ---- what breaks ---------------------------------------------------------------------------------------------

    def _roll_back(self, flight: Flight, outcome: StepFailed) -> list[Output]:
        self._failures += 1
        behind = {other.step_id for other in self.flights} if outcome.launched_behind else set[int]()
        self._discard_behind(flight, behind)
        self.planner.rollback(flight, launched=outcome.launched)
        return self._end_doomed(self.recovery.step_failed(flight, outcome, self._effects))

    def _lost(self, event: WorkerLost) -> SchedulerState:
        self._losses += 1
        lost = next((flight for flight in self.flights if flight.step_id == event.step_id), None)
        if self.flights:
            first = self.flights.pop(0)
            self._discard_behind(first, {event.step_id})
            self.planner.rollback(first, launched=first is lost)
        if lost is not None and not lost.is_vacating:  # else nothing was computed, and no request is to blame
            self._failures += 1
            if outputs := self._end_doomed(self.recovery.worker_lost(lost, event, self._effects)):
                self._send("engine", Outputs(outputs))
        self.planner.lose()
        self._keep_parked()
        return S.RECOVERING

    def _discard_behind(self, first: Flight, launched: set[int]) -> None:
        """Take back what was planned behind `first`, latest first; what departed leaves with `first`, which is next."""
        while self.flights:
            flight = self.flights.pop()
            first.departed += flight.departed
            flight.departed = []
            self.planner.rollback(flight, launched=flight.step_id in launched)

    def _end_doomed(self, doomed: Doomed) -> list[Output]:
        state = RequestState.FINISHED_ERROR
        return [self._end(request, state, End(error=sentence)) for request, sentence in doomed]

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


def _note_scores(flight: Flight, outcome: StepDone) -> None:
    """What the step has scored of prompts, to the requests that asked."""
    at = 0
    for request, first, count in flight.scored:
        if not request.ended:
            request.note_scores(first, outcome.scores[at : at + count])
        at += count
    assert at == len(outcome.scores), "one score for each that was planned"
