"""One place of an API process, seen from the engine's: whether a process is there, and when the next one may start.

    NEW ──Begin──▶ CONNECTING ──Connected──▶ OPEN ──Drain──▶ DRAINING ──Lost──▶ CLOSED
                     ▲      └──Lost──▶ LOST ◀──Lost──┘                            ▲
                     └──RestartDue──────┘ └──lost too often, or Drain─────────────┘

A process that is lost takes its connections along, and nothing else: its requests are cancelled as those of clients
that leave, and the next process takes the same listening socket, in which connections wait meanwhile. Losses in a row
are answered ever later; after `LOSSES_MAX` within `WINDOW_S` the place is given up, and its socket is closed, so that
connections come to the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import BACKOFF_LIMIT_S, ENDED, Dwell, any_time
from novainfer.fsm.core.machine import Machine, Table, ignore, never, on, stay, table, timer

CONNECT_LIMIT_S = 60.0  # to start an interpreter and import HTTP: 0.4 s, and several where many processes compute
LOSSES_MAX = 5  # within
WINDOW_S = 60.0  # seconds, as a worker's restarts by default
BACKOFF_MIN_S = 0.1  # before the second restart in a row; the first is at once
BACKOFF_MAX_S = 5.0


class ApiProcessState(StrEnum):
    """Whether the place has a process, and what that does."""

    NEW = "NEW"  # it has had none
    CONNECTING = "CONNECTING"  # it was started, and does not listen yet
    OPEN = "OPEN"  # it takes connections
    DRAINING = "DRAINING"  # it takes no more, and its answers end
    LOST = "LOST"  # it is gone, and the next one is to start
    CLOSED = "CLOSED"  # it is gone, and none is to start


S = ApiProcessState
UP = (S.CONNECTING, S.OPEN)


class Begin(msgspec.Struct, frozen=True):
    """Start the first process."""


class Connected(msgspec.Struct, frozen=True):
    """The process listens."""


class Lost(msgspec.Struct, frozen=True):
    """The process is gone, or could not be started; exactly one for each Spawn."""

    at_s: float


class Overdue(msgspec.Struct, frozen=True):
    """The watchdog: the process gives no sign of life, or does not come up."""


class RestartDue(msgspec.Struct, frozen=True):
    """Timer: the next process may start."""


class Drain(msgspec.Struct, frozen=True):
    """The server stops."""


class Spawn(msgspec.Struct, frozen=True):
    """Effect: start a process; Connected comes back once it listens, and Lost when it is gone."""


class Shut(msgspec.Struct, frozen=True):
    """Effect: tell the process to take no more connections, and to end when those that it has are done."""


class End(msgspec.Struct, frozen=True):
    """Effect: end the process at once; Lost comes back."""


class GiveUp(msgspec.Struct, frozen=True):
    """Effect: close the place's listening socket; no process will take from it."""


class ApiProcess(Machine):
    """See the module."""

    TABLE: ClassVar[Table] = table(
        S,
        (Begin, Connected, Lost, Overdue, RestartDue, Drain),
        on(S.NEW, Begin, "_spawn", S.CONNECTING),
        never((*UP, S.DRAINING, S.LOST), Begin, "it has begun"),
        ignore(S.CLOSED, Begin, "the server stopped before it began"),
        on(S.CONNECTING, Connected, "_connected", S.OPEN),
        ignore(S.DRAINING, Connected, "it hears right behind that it is to end"),
        never((S.NEW, S.LOST, S.CLOSED), Connected, "there is no process"),
        never(S.OPEN, Connected, "a process connects once"),
        on(UP, Lost, "_lost", S.LOST, S.CLOSED),
        on(S.DRAINING, Lost, "_closed", S.CLOSED),
        never((S.NEW, S.LOST, S.CLOSED), Lost, "there is no process, or its loss was told"),
        stay((*UP, S.DRAINING), Overdue, "_end"),
        ignore((S.NEW, S.LOST, S.CLOSED), Overdue, "there is no process"),
        timer(S.LOST, RestartDue, "_spawn", S.CONNECTING),
        on(UP, Drain, "_drain", S.DRAINING),
        on((S.NEW, S.LOST), Drain, "_closed", S.CLOSED),
        ignore((S.DRAINING, S.CLOSED), Drain, "draining twice is draining once"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.NEW: any_time("it is begun when the server listens"),
        S.CONNECTING: Dwell(CONNECT_LIMIT_S, "starting an interpreter"),
        S.OPEN: any_time("it waits for clients"),
        S.DRAINING: any_time("its answers have as long as the server that stops gives them"),
        S.LOST: Dwell(BACKOFF_LIMIT_S, "the pause before a restart"),
        S.CLOSED: ENDED,
    }
    __slots__ = ("_lost_s", "num_losses")
    state: ApiProcessState

    def __init__(self) -> None:
        super().__init__(S.NEW)
        self.num_losses = 0  # in all
        self._lost_s: deque[float] = deque(maxlen=LOSSES_MAX)  # when, of the latest

    def _spawn(self, event: Begin | RestartDue) -> ApiProcessState:
        self._start(Spawn())
        return S.CONNECTING

    def _connected(self, event: Connected) -> ApiProcessState:
        return S.OPEN

    def _lost(self, event: Lost) -> ApiProcessState:
        self.num_losses += 1
        while self._lost_s and self._lost_s[0] <= event.at_s - WINDOW_S:
            self._lost_s.popleft()
        num_before = len(self._lost_s)
        if num_before == LOSSES_MAX:
            self._start(GiveUp())
            return S.CLOSED
        self._lost_s.append(event.at_s)
        delay_s = min(BACKOFF_MIN_S * 2 ** (num_before - 1), BACKOFF_MAX_S) if num_before else 0.0
        self._until_left(delay_s, RestartDue())
        return S.LOST

    def _end(self, event: Overdue) -> ApiProcessState:
        self._start(End())
        return self.state

    def _drain(self, event: Drain) -> ApiProcessState:
        self._start(Shut())
        return S.DRAINING

    def _closed(self, event: Drain | Lost) -> ApiProcessState:
        return S.CLOSED
