"""How requests come, wait for their readers and their masks, age, and end.

Every end of a request is decided by a caller and carried out by `_end`, whatever brought it: what the request owns goes
back now, or with its step if that is on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from novainfer.fsm.core.machine import Machine
from novainfer.fsm.kv.blocks import space_name
from novainfer.fsm.messages.events import (
    AgeOver,
    CancelRequest,
    Cause,
    Constrain,
    End,
    EndSession,
    GrammarFailed,
    Incident,
    KeepOver,
    Masked,
    Output,
    Outputs,
    PauseRequest,
    Release,
    ResumeRequest,
    SessionOver,
    Submit,
)
from novainfer.fsm.schedule import answer
from novainfer.fsm.schedule.batching import Flight
from novainfer.fsm.schedule.costs import ANSWER_TOKENS, ANSWER_WEIGHT
from novainfer.fsm.schedule.planner import Limits, Planner
from novainfer.fsm.schedule.recovery import Doomed, FailurePolicy
from novainfer.fsm.schedule.request import ENDED, READY, UNCONSTRAINED, Finish, Request, RequestState
from novainfer.fsm.schedule.session import JOIN, LEAVE, Session, SessionState
from novainfer.fsm.schedule.speculation import Speculation
from novainfer.fsm.text import Vocabulary

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


class Lifetimes(Machine):
    """The part of the scheduler that knows the requests from their submission to their end; it plans nothing."""

    def __init__(
        self,
        state: StrEnum,
        limits: Limits,
        vocabulary: Vocabulary,
        *,
        stall_keep_s: float,
        speculation: Speculation | None,
    ) -> None:
        super().__init__(state)
        self._speculation = speculation
        self._stall_keep_s = stall_keep_s
        self._limits = limits
        self._parked_max = PARKED_PER_SLOT * limits.max_num_seqs  # without an end
        self._vocabulary = vocabulary
        self._eos_token_ids: Sequence[int] = ()
        self._max_len = 0
        self.planner = Planner(limits, 0)
        self.recovery = FailurePolicy(self.planner)
        self.requests: dict[int, Request] = {}
        self.flights: list[Flight] = []  # oldest first
        self._last_submitted = -1
        self._tombstones: dict[int, Cause] = {}
        self._work_seen = 0
        self._pauses = 0
        self._hurried: set[int] = set()  # streams whose first token has a deadline, and has not come
        self.sessions: dict[tuple[str, str], Session] = {}  # by tenant and name
        self.kept: dict[int, Session] = {}  # of those, the ones of which no request is here, least recently used first
        self._num_sessions = 0  # that there ever were
        self._ages: AgeOver | None = None  # the timer after which requests are aged, while it runs
        self.answer_tokens = ANSWER_TOKENS  # of an answer, the latest count most
        self._finished: dict[str, int] = dict.fromkeys(sorted(ENDED), 0)

    # ---- they come -----------------------------------------------------------------------------------------------

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
        elif not self._goes_on(request, event):
            if event.params.max_queue_s is not None and event.committed is None:
                self._hurried.add(event.stream_id)
            self.requests[request.request_id] = request
            self.planner.order.arrives(request)
            self.planner.enqueue(request)
            if event.params.session_id is not None:
                self._join(request, event.params.session_id)
            if self._limits.scheduling_policy == "priority" and self._ages is None:
                self._let_age()
            if request.mask != UNCONSTRAINED:
                self._constrain(request)
        return self.state

    def _goes_on(self, request: Request, event: Submit) -> bool:
        """Tell what it had got before it came here; True where that is all."""
        if event.committed is None:
            return False
        found = answer.outputs_again(request, event.committed, self._vocabulary, self._eos_token_ids)
        end = found[-1].end if found else None
        if end is not None and end.finish_reason is not None:
            self._end(request, answer.ENDED_AS[end.finish_reason], end)
        if found:
            self._send("engine", Outputs(found))
        return end is not None

    def _constrain(self, request: Request) -> None:
        """Hold it to its grammar, behind its thoughts if it may have any."""
        grammar, thoughts, is_thinking = request.params.structured_outputs, request.params.thoughts, False
        if thoughts is not None:
            prompt = request.token_ids[: request.num_prompt]
            are_open = thoughts.are_open(prompt, self._vocabulary.special_ids)
            thoughts, is_thinking = (None, False) if are_open is None else (thoughts, are_open)
        if grammar is None and thoughts is None:
            request.mask = UNCONSTRAINED
            return
        self.planner.num_constrained += 1
        self.planner.awaited[request.request_id] = request
        committed = request.token_ids[request.num_prompt :]
        self._send("grammars", Constrain(request.request_id, grammar, committed, thoughts, is_thinking))

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

    # ---- they wait ----------------------------------------------------------------------------------------------

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
        forced = dict(event.forced)
        for request_id, num_tokens in event.masks:
            request = self.requests.get(request_id)
            if request is not None and num_tokens == request.num_generated:  # else it has ended, or gone on
                request.mask = READY
                del self.planner.awaited[request_id]
                if request_id in forced:
                    request.forced, request.forced_at = forced[request_id], len(request.token_ids)
        return self.state

    def _grammar_failed(self, event: GrammarFailed) -> StrEnum:
        self._work_seen += 1
        if (request := self.requests.get(event.request_id)) is not None:
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

    # ---- what conversations keep of them -------------------------------------------------------------------------

    def _join(self, request: Request, session_id: str) -> None:
        key = request.tenant.id, session_id
        session = self.sessions.get(key)
        if session is None:
            self._num_sessions += 1
            session = self._nest(Session(self._num_sessions, *key, self._limits.session_ttl_s))
            self.sessions[key] = session
        else:
            self._effects += session.handle(JOIN)
            self.kept.pop(session.number, None)
        request.session = session

    def _leave(self, request: Request, session: Session) -> None:
        """What `request` has computed is what is kept from now on, if it has computed anything."""
        request.session = None
        was_ended = session.state is SessionState.ENDED
        self._effects += session.handle(LEAVE)
        if was_ended:
            return
        cache = self.planner.cache
        if session.ttl_s and (names := cache.names_of(request)):
            cache.keep(names)
            cache.unkeep(session.names)
            session.names = names
        if session.state is SessionState.ENDED:
            self._forget(session)
        elif session.state is SessionState.KEPT:
            self.kept[session.number] = session
            while len(self.kept) > self._limits.max_sessions:
                oldest = next(iter(self.kept.values()))
                self._end_session(EndSession(oldest.tenant, oldest.session_id))

    def _end_session(self, event: EndSession) -> StrEnum:
        session = self.sessions.get((event.tenant, event.session_id))
        if session is not None:  # else it has ended meanwhile
            self._effects += session.handle(event)
            self._forget(session)
        return self.state

    def _session_over(self, event: SessionOver) -> StrEnum:
        session = self.kept[event.number]
        self._effects += session.handle(event)
        self._forget(session)
        return self.state

    def _forget(self, session: Session) -> None:
        del self.sessions[session.tenant, session.session_id]
        self.kept.pop(session.number, None)
        self.planner.cache.unkeep(session.names)
        session.names = ()

    # ---- they end -----------------------------------------------------------------------------------------------

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
            if request.mask:
                self._release(request)
            if request.session is not None:
                self._leave(request, request.session)
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
        self.planner.advanced.pop(request.request_id, None)
        self._send("grammars", Release(request.request_id))

    def _end_doomed(self, doomed: Doomed) -> list[Output]:
        state = RequestState.FINISHED_ERROR
        return [self._end(request, state, End(error=sentence)) for request, sentence in doomed]
