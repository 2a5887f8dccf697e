"""One conversation, of which the KV is kept after each answer, for the next question.

    BUSY ──Leave: the last request of it has ended──▶ KEPT ──Join──▶ BUSY
    KEPT ──SessionOver──▶ ENDED;  BUSY, KEPT ──EndSession──▶ ENDED

What is kept is a set of names in the KV cache (`names`), and not blocks: those are evicted last, and copied to the host
then, so no request ever waits for what a conversation keeps. An ended one keeps nothing, and is forgotten; where its
requests run on, nothing is kept of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core import dwell
from novainfer.fsm.core.dwell import Dwell, any_time
from novainfer.fsm.core.machine import Machine, Table, ignore, never, on, stay, table, timer
from novainfer.fsm.messages.events import EndSession, SessionOver


class SessionState(StrEnum):
    """Whether requests of it are here."""

    BUSY = "BUSY"
    KEPT = "KEPT"
    ENDED = "ENDED"


S = SessionState


class Join(msgspec.Struct, frozen=True):
    """One more request of it is here."""


class Leave(msgspec.Struct, frozen=True):
    """A request of it has ended."""


JOIN, LEAVE = Join(), Leave()


class Session(Machine):
    """See the module; `ttl_s` is for how long it is kept while nothing of it comes."""

    TABLE: ClassVar[Table] = table(
        S,
        (Join, Leave, SessionOver, EndSession),
        stay(S.BUSY, Join, "_join"),
        on(S.KEPT, Join, "_join_again", S.BUSY),
        never(S.ENDED, Join, "the scheduler forgets it, and begins another one of its name"),
        on(S.BUSY, Leave, "_leave", S.BUSY, S.KEPT, S.ENDED),
        never(S.KEPT, Leave, "no request of it is here"),
        ignore(S.ENDED, Leave, "it was ended while its requests ran"),
        timer(S.KEPT, SessionOver, "_end", S.ENDED),
        on((S.BUSY, S.KEPT), EndSession, "_end", S.ENDED),
        never(S.ENDED, EndSession, "the scheduler forgets it"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.BUSY: any_time("its requests have deadlines of their own"),
        S.KEPT: any_time("its timer ends it"),
        S.ENDED: dwell.ENDED,
    }
    __slots__ = ("names", "num_requests", "number", "session_id", "tenant", "ttl_s")
    state: SessionState

    def __init__(self, number: int, tenant: str, session_id: str, ttl_s: float) -> None:
        super().__init__(S.BUSY)
        self.number = number
        self.tenant = tenant
        self.session_id = session_id
        self.ttl_s = ttl_s
        self.num_requests = 1
        self.names: tuple[bytes, ...] = ()  # of what its last request has computed

    def _join(self, _: Join) -> SessionState:
        self.num_requests += 1
        return S.BUSY

    def _join_again(self, _: Join) -> SessionState:
        self.num_requests = 1
        return S.BUSY

    def _leave(self, _: Leave) -> SessionState:
        self.num_requests -= 1
        if self.num_requests:
            return S.BUSY
        if not self.ttl_s:
            return S.ENDED
        self._until_left(self.ttl_s, SessionOver(self.number))
        return S.KEPT

    def _end(self, _: SessionOver | EndSession) -> SessionState:
        return S.ENDED
