"""The gate lets streams in, lets them wait, or says why not: at once, before anything is tokenised.

    STARTING ──Open──▶ OPEN ──Drain──▶ DRAINING ──▶ CLOSED   (Stop closes it from any state)

    a stream, while the gate is open    ──room in the queue──▶ queued ──runs, or ends──▶ departed
                                        ──no room, and it set max_queue_s──▶ OVERFLOW ──credits come back──▶ queued
                                        ──no room, or no room to wait in──▶ Rejected

A queued stream holds credits, one for each of its choices and one for each token of its prompt, until it runs for the
first time or ends. No stream overtakes: while one is in OVERFLOW, others wait behind it or are refused. Every cancel
and every deadline comes here first: who is in OVERFLOW is ended here, the rest is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

from novainfer.fsm.core.dwell import COMES_UP, ENDED, Dwell, any_time
from novainfer.fsm.core.machine import Machine, Table, ignore, never, on, stay, table
from novainfer.fsm.messages.events import (
    Arrive,
    Cancel,
    CancelAll,
    Cause,
    Departed,
    Drain,
    End,
    Open,
    QueueOver,
    Rejected,
    Settled,
    Stop,
    ended_early,
)


class GateState(StrEnum):
    """Whether streams are let in."""

    STARTING = "STARTING"
    OPEN = "OPEN"
    DRAINING = "DRAINING"
    CLOSED = "CLOSED"


S = GateState
MAX_NUM_OVERFLOW_REQS = 1024


class Gate(Machine):
    """Lets at most `max_num_queued_reqs` choices of `max_num_queued_tokens` prompt tokens wait to run.

    On the overflow list there may be `max_num_overflow_reqs` choices, and again as many tokens as in the queue.
    """

    TABLE: ClassVar[Table] = table(
        S,
        (Open, Arrive, Departed, Settled, Cancel, CancelAll, QueueOver, Drain, Stop),
        on(S.STARTING, Open, "_open", S.OPEN),
        never((S.OPEN, S.DRAINING), Open, "the engine opens it once, when the first worker is up"),
        ignore(S.CLOSED, Open, "the engine was stopped while it came up"),
        on(S.OPEN, Arrive, "_arrive", S.OPEN),
        stay((S.STARTING, S.CLOSED), Arrive, "_refuse_closed"),
        on(S.DRAINING, Arrive, "_refuse_draining", S.DRAINING),
        stay((S.OPEN, S.DRAINING), Departed, "_departed"),
        never(S.STARTING, Departed, "nothing was let in"),
        ignore(S.CLOSED, Departed, "no stream waits for credits"),
        stay((S.OPEN, S.DRAINING), Settled, "_settled"),
        never(S.STARTING, Settled, "nothing was let in"),
        ignore(S.CLOSED, Settled, "no stream waits for credits"),
        stay((S.OPEN, S.DRAINING), Cancel, "_cancel"),
        ignore(S.STARTING, Cancel, "nothing was let in"),
        ignore(S.CLOSED, Cancel, "every stream hears of the stop"),
        stay((S.OPEN, S.DRAINING), CancelAll, "_cancel_all"),
        ignore(S.STARTING, CancelAll, "nothing was let in"),
        ignore(S.CLOSED, CancelAll, "every stream hears of the stop"),
        stay((S.OPEN, S.DRAINING), QueueOver, "_queue_over"),
        never(S.STARTING, QueueOver, "nothing was let in"),
        ignore(S.CLOSED, QueueOver, "every stream hears of the stop"),
        on(S.OPEN, Drain, "_drain", S.DRAINING),
        on(S.STARTING, Drain, "_close", S.CLOSED),
        ignore((S.DRAINING, S.CLOSED), Drain, "draining twice is draining once"),
        on((S.STARTING, S.OPEN, S.DRAINING), Stop, "_close", S.CLOSED),
        ignore(S.CLOSED, Stop, "it is closed"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.STARTING: COMES_UP,
        S.OPEN: any_time("it waits for clients"),
        S.DRAINING: any_time("the requests here have as long as the owner that drains gives them"),
        S.CLOSED: ENDED,
    }

    def __init__(
        self,
        max_num_queued_reqs: int,
        max_num_queued_tokens: int,
        max_num_overflow_reqs: int = MAX_NUM_OVERFLOW_REQS,
    ) -> None:
        super().__init__(S.STARTING)
        self._queue = _Room(max_num_queued_reqs, max_num_queued_tokens)
        self._waiting_room = _Room(max_num_overflow_reqs, max_num_queued_tokens)
        self._overflow: dict[int, Arrive] = {}  # who waits there, in order of arrival
        self._num_arrived = 0  # Arrives sent to the engine

    @property
    def num_queued(self) -> int:
        """Choices that hold credits."""
        return self._queue.num_reqs

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that they reserve."""
        return self._queue.num_tokens

    @property
    def num_overflow(self) -> int:
        """Choices on the overflow list."""
        return self._waiting_room.num_reqs

    @property
    def num_overflow_tokens(self) -> int:
        """Prompt tokens of those."""
        return self._waiting_room.num_tokens

    @property
    def overflow(self) -> list[int]:
        """Streams on the overflow list, the next one first."""
        return list(self._overflow)

    @property
    def queued(self) -> list[int]:
        """Streams that hold credits."""
        return list(self._queue.held)

    def num_credits(self, stream_id: int) -> int:
        """The choices of this stream that wait in the queue: all of them, or none."""
        return self._queue.held.get(stream_id, (0, 0))[0]

    def is_overflowed(self, stream_id: int) -> bool:
        """True while the stream is in OVERFLOW."""
        return stream_id in self._overflow

    # ---- who comes -------------------------------------------------------------------------------------------------

    def _open(self, _: Open) -> GateState:
        return S.OPEN

    def _arrive(self, event: Arrive) -> GateState:
        params, wanted = event.params, (event.params.n, event.num_tokens)
        if not self._overflow and self._queue.has_room(wanted):
            self._let_in(event)
        elif params.max_queue_s is None:
            self._reject(event, "overloaded", *self._why_full(wanted))
            return S.OPEN
        elif not self._waiting_room.has_room(wanted):
            num_waiting = self._waiting_room.num_reqs
            message = f"the queue is full, and so is the list of those who wait for it: {num_waiting} requests"
            self._reject(event, "overloaded", message, "overflow")
            return S.OPEN
        else:
            self._overflow[event.stream_id] = event
            self._waiting_room.take(event.stream_id, wanted)
        if params.max_queue_s is not None:
            self._after(params.max_queue_s, QueueOver(event.stream_id))
        if params.timeout_s is not None:
            self._after(params.timeout_s, Cancel(event.stream_id, Cause.TIMEOUT))
        return S.OPEN

    def _let_in(self, event: Arrive) -> None:
        self._queue.take(event.stream_id, (event.params.n, event.num_tokens))
        self._num_arrived += 1
        self._send("engine", event)

    def _why_full(self, wanted: tuple[int, int]) -> tuple[str, str]:
        queue = self._queue
        if queue.has_choices_for(wanted) and not queue.has_room(wanted):
            return f"the queue is full: {queue.num_tokens} prompt tokens are waiting", "tokens"
        return f"the queue is full: {queue.num_reqs + self.num_overflow} requests are waiting", "requests"

    def _refuse_closed(self, event: Arrive) -> StrEnum:
        self._reject(event, "closed", "the engine is not running")
        return self.state

    def _refuse_draining(self, event: Arrive) -> GateState:
        self._reject(event, "draining", "the engine is shutting down and takes no new requests")
        return S.DRAINING

    def _reject(self, event: Arrive, reason: str, message: str, limit: str = "") -> None:
        self._send("client", Rejected(event.stream_id, reason, message, limit))

    # ---- who goes --------------------------------------------------------------------------------------------------

    def _departed(self, event: Departed) -> StrEnum:
        for stream_id in event.stream_ids:
            self._queue.give_back(stream_id)
        return self._let_in_who_fits()

    def _settled(self, event: Settled) -> StrEnum:
        if num_reqs := self.num_credits(event.stream_id):
            self._queue.give_back(event.stream_id)
            self._queue.take(event.stream_id, (num_reqs, event.num_tokens))
        return self._let_in_who_fits()

    def _let_in_who_fits(self) -> StrEnum:
        """The streams in OVERFLOW, in order, until one does not fit."""
        while self._overflow:
            stream_id = next(iter(self._overflow))
            if not self._queue.has_room(self._waiting_room.held[stream_id]):
                break
            self._waiting_room.give_back(stream_id)
            self._let_in(self._overflow.pop(stream_id))
        return self.state

    def _cancel(self, event: Cancel) -> StrEnum:
        if event.stream_id in self._overflow:
            self._turn_away(event.stream_id, End(cause=event.cause))
            return self._let_in_who_fits()  # the next one may be smaller
        self._send("engine", Cancel(event.stream_id, event.cause, self._num_arrived), urgent=True)
        return self.state

    def _cancel_all(self, event: CancelAll) -> StrEnum:
        self._turn_all_away(End(cause=event.cause))
        self._send("engine", CancelAll(event.cause, self._num_arrived), urgent=True)
        return self.state

    def _queue_over(self, event: QueueOver) -> StrEnum:
        return self._cancel(Cancel(event.stream_id, Cause.QUEUE))  # the scheduler knows whether it has its first token

    def _turn_away(self, stream_id: int, end: End) -> None:
        del self._overflow[stream_id]
        self._waiting_room.give_back(stream_id)
        self._send("streams", ended_early(stream_id, end))

    def _turn_all_away(self, end: End) -> None:
        for stream_id in list(self._overflow):
            self._turn_away(stream_id, end)

    # ---- going down ------------------------------------------------------------------------------------------------

    def _drain(self, _: Drain) -> GateState:
        self._turn_all_away(End(cause=Cause.DRAIN))
        return S.DRAINING

    def _close(self, event: Drain | Stop) -> GateState:
        error = event.error if isinstance(event, Stop) else None
        self._turn_all_away(End(error=error, code="engine_dead") if error else End(cause=Cause.DRAIN))
        self._queue.clear()
        return S.CLOSED


class _Room:
    """Room for a number of choices and of prompt tokens; one stream has room in an empty one, however large it is."""

    __slots__ = ("_max_reqs", "_max_tokens", "held", "num_reqs", "num_tokens")

    def __init__(self, max_reqs: int, max_tokens: int) -> None:
        self._max_reqs = max_reqs
        self._max_tokens = max_tokens
        self.held: dict[int, tuple[int, int]] = {}  # stream -> its choices and tokens
        self.num_reqs = 0
        self.num_tokens = 0

    def has_choices_for(self, wanted: tuple[int, int]) -> bool:
        return self.num_reqs + wanted[0] <= self._max_reqs

    def has_room(self, wanted: tuple[int, int]) -> bool:
        if not self.held:
            return self._max_reqs > 0
        return self.has_choices_for(wanted) and self.num_tokens + wanted[1] <= self._max_tokens

    def take(self, stream_id: int, wanted: tuple[int, int]) -> None:
        self.held[stream_id] = wanted
        self.num_reqs += wanted[0]
        self.num_tokens += wanted[1]

    def give_back(self, stream_id: int) -> None:
        num_reqs, num_tokens = self.held.pop(stream_id, (0, 0))
        self.num_reqs -= num_reqs
        self.num_tokens -= num_tokens

    def clear(self) -> None:
        for stream_id in list(self.held):
            self.give_back(stream_id)
