"""The gate lets streams in, or says why not: at once, before anything is tokenised; a full queue is an answer.

    STARTING ──Open──▶ OPEN ──Drain──▶ DRAINING ──▶ CLOSED   (Stop closes it from any state)

A stream holds credits (one request, and its tokens) from its admission until it runs for the first time or ends.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from novainfer.fsm.events import Arrive, Departed, Drain, Open, Rejected, Stop
from novainfer.fsm.machine import Machine, Table, ignore, never, on, stay, table


class GateState(StrEnum):
    """Whether streams are let in."""

    STARTING = "STARTING"
    OPEN = "OPEN"
    DRAINING = "DRAINING"
    CLOSED = "CLOSED"


S = GateState


class Gate(Machine):
    """Lets at most `max_num_queued_reqs` streams of `max_num_queued_tokens` prompt tokens wait."""

    TABLE: ClassVar[Table] = table(
        S,
        (Open, Arrive, Departed, Drain, Stop),
        on(S.STARTING, Open, "_open", S.OPEN),
        never((S.OPEN, S.DRAINING), Open, "the worker comes up once"),
        ignore(S.CLOSED, Open, "the engine was stopped while it came up"),
        on(S.OPEN, Arrive, "_arrive", S.OPEN),
        stay((S.STARTING, S.CLOSED), Arrive, "_refuse_closed"),
        on(S.DRAINING, Arrive, "_refuse_draining", S.DRAINING),
        stay((S.OPEN, S.DRAINING), Departed, "_departed"),
        never(S.STARTING, Departed, "nothing was let in"),
        ignore(S.CLOSED, Departed, "nobody waits for credits"),
        on(S.OPEN, Drain, "_drain", S.DRAINING),
        on(S.STARTING, Drain, "_close", S.CLOSED),
        ignore((S.DRAINING, S.CLOSED), Drain, "draining twice is draining once"),
        on((S.STARTING, S.OPEN, S.DRAINING), Stop, "_close", S.CLOSED),
        ignore(S.CLOSED, Stop, "it is closed"),
    )

    def __init__(self, max_num_queued_reqs: int, max_num_queued_tokens: int) -> None:
        super().__init__(S.STARTING)
        self._max_reqs = max_num_queued_reqs
        self._max_tokens = max_num_queued_tokens
        self._queued: dict[int, int] = {}  # stream -> the tokens it reserves
        self._tokens = 0

    @property
    def num_queued(self) -> int:
        """Streams that hold credits."""
        return len(self._queued)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that those streams reserve."""
        return self._tokens

    def holds(self, stream_id: int) -> bool:
        """True while the stream waits in the queue."""
        return stream_id in self._queued

    def _open(self, _: Open) -> GateState:
        return S.OPEN

    def _arrive(self, event: Arrive) -> GateState:
        if len(self._queued) >= self._max_reqs:
            self._reject(event, "overloaded", f"the queue is full: {self._max_reqs} requests are waiting")
        elif self._queued and self._tokens + event.num_tokens > self._max_tokens:
            self._reject(event, "overloaded", f"the queue is full: {self._tokens} prompt tokens are waiting")
        else:
            self._queued[event.stream_id] = event.num_tokens
            self._tokens += event.num_tokens
            self._send("engine", event)
        return S.OPEN

    def _refuse_closed(self, event: Arrive) -> StrEnum:
        self._reject(event, "closed", "the engine is not running")
        return self.state

    def _refuse_draining(self, event: Arrive) -> GateState:
        self._reject(event, "draining", "the engine is shutting down and takes no new requests")
        return S.DRAINING

    def _reject(self, event: Arrive, reason: str, message: str) -> None:
        self._send("client", Rejected(event.stream_id, reason, message))

    def _departed(self, event: Departed) -> StrEnum:
        for stream_id in event.stream_ids:
            self._tokens -= self._queued.pop(stream_id, 0)
        return self.state

    def _drain(self, _: Drain) -> GateState:
        return S.DRAINING

    def _close(self, _: Drain | Stop) -> GateState:
        self._queued.clear()
        self._tokens = 0
        return S.CLOSED
