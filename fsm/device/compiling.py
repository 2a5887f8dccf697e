"""Grammars on their way through the compiler: one at a time, and each for so long at most; then it is left behind.

    IDLE ──Wanted──▶ COMPILING ──Compiled: no other waits──▶ IDLE
                      │     ▲
            CompileOver     └── Compiled, CompileOver: the next one begins
                      ▼
                   CROWDED: as many are left behind as may be ──Compiled, by one of them──▶ IDLE

A call into the compiler cannot be ended. What takes longer than `COMPILE_LIMIT_S` ends those who wait for it, and its
thread is left behind: another one takes over. As long as that is at work, nobody is given a thread for the same grammar
again; when `LEFT_BEHIND_MAX` threads are, no grammar is begun at all, and who wants one hears so at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import Dwell, any_time
from novainfer.fsm.core.machine import Guard, Machine, Table, ignore, never, on, stay, table
from novainfer.fsm.messages.events import GrammarFailed

COMPILE_LIMIT_S = 10.0  # the costliest grammar that all other limits let through took 4 s
LEFT_BEHIND_MAX = 2  # each may keep a core busy
TOO_LONG = (
    f"the grammar takes more than it may, by compile_limit_s ({COMPILE_LIMIT_S:g}): it was not compiled within so many "
    "seconds"
)
TOO_MANY = (
    f"no grammar can be compiled now: {LEFT_BEHIND_MAX} that take too long are still at work, and no more may be; what "
    "has no grammar, or one that was compiled before, is served"
)
LIMIT, OVERLOADED = "grammar_limit", "server_is_overloaded"
Key = tuple[str, ...]  # equal for equal grammars


class CompilingState(StrEnum):
    """Whether a grammar is compiled that somebody may get."""

    IDLE = "IDLE"
    COMPILING = "COMPILING"
    CROWDED = "CROWDED"


S = CompilingState


class Wanted(msgspec.Struct, frozen=True):
    """This request wants a grammar that is not there."""

    request_id: int
    grammar: Key


class Unwanted(msgspec.Struct, frozen=True):
    """This request has ended, whatever it wanted."""

    request_id: int


class Compiled(msgspec.Struct, frozen=True):
    """This thread is through with its grammar, well or not."""

    thread: int


class CompileOver(msgspec.Struct, frozen=True):
    """Timer: this thread has been at its grammar for too long."""

    thread: int


class Compile(msgspec.Struct, frozen=True):
    """Job: this thread compiles what this request wants."""

    thread: int
    request_id: int


class Share(msgspec.Struct, frozen=True):
    """Job: what was compiled, a grammar or an error, goes to these requests."""

    grammar: Key
    request_ids: list[int]


class LeaveBehind(msgspec.Struct, frozen=True):
    """Job: nobody waits for this thread any more; another one takes over."""

    thread: int


class OfThread(Guard):
    """The thread is the one whose grammar is waited for."""

    name = "of this thread"
    why = "it was left behind"

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """As `Guard.holds`."""
        return event.thread == machine.thread  # type: ignore[no-any-return]


class Compiling(Machine):
    """See the module."""

    TABLE: ClassVar[Table] = table(
        S,
        (Wanted, Unwanted, Compiled, CompileOver),
        on((S.IDLE, S.COMPILING), Wanted, "_want", S.IDLE, S.COMPILING),
        stay(S.CROWDED, Wanted, "_refuse"),
        ignore((S.IDLE, S.CROWDED), Unwanted, "nobody waits"),
        stay(S.COMPILING, Unwanted, "_forget"),
        on(S.COMPILING, Compiled, "_compiled", S.IDLE, S.COMPILING, only=OfThread),
        stay((S.IDLE, S.COMPILING), Compiled, "_returned"),
        on(S.CROWDED, Compiled, "_returned", S.IDLE),
        on(S.COMPILING, CompileOver, "_leave_behind", S.IDLE, S.COMPILING, S.CROWDED),
        never((S.IDLE, S.CROWDED), CompileOver, "it is dropped when its thread is through"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.IDLE: any_time("it waits for a request"),
        S.COMPILING: any_time("each grammar has a time of its own"),
        S.CROWDED: any_time("it waits for calls that cannot be ended; nobody waits with it"),
    }

    def __init__(self) -> None:
        super().__init__(S.IDLE)
        self.thread = 0  # the one that compiles, or will
        self.wanted: dict[Key, list[int]] = {}  # grammars, oldest first: the first one is compiled; and who waits
        self.left_behind: dict[int, Key] = {}  # threads, and what they are at

    def _want(self, event: Wanted) -> CompilingState:
        if event.grammar in self.left_behind.values():
            self._fail([event.request_id], TOO_LONG, LIMIT)
            return S.COMPILING if self.wanted else S.IDLE
        is_first = not self.wanted
        self.wanted.setdefault(event.grammar, []).append(event.request_id)
        return self._go_on() if is_first else S.COMPILING

    def _refuse(self, event: Wanted) -> StrEnum:
        is_known = event.grammar in self.left_behind.values()
        self._fail([event.request_id], *((TOO_LONG, LIMIT) if is_known else (TOO_MANY, OVERLOADED)))
        return self.state

    def _forget(self, event: Unwanted) -> StrEnum:
        first = next(iter(self.wanted))
        for grammar, request_ids in list(self.wanted.items()):
            if event.request_id in request_ids:
                request_ids.remove(event.request_id)
                if not request_ids and grammar != first:  # that one is compiled to its end, for whoever comes
                    del self.wanted[grammar]
        return self.state

    def _compiled(self, event: Compiled) -> CompilingState:
        self._drop(CompileOver(event.thread))
        grammar = next(iter(self.wanted))
        self._start(Share(grammar, self.wanted.pop(grammar)))
        return self._go_on()

    def _returned(self, event: Compiled) -> CompilingState:
        del self.left_behind[event.thread]
        return S.COMPILING if self.wanted else S.IDLE

    def _leave_behind(self, event: CompileOver) -> CompilingState:
        grammar = next(iter(self.wanted))
        self.left_behind[event.thread] = grammar
        self._start(LeaveBehind(event.thread))
        self._fail(self.wanted.pop(grammar), TOO_LONG, LIMIT)
        self.thread += 1
        if len(self.left_behind) < LEFT_BEHIND_MAX:
            return self._go_on()
        for request_ids in self.wanted.values():
            self._fail(request_ids, TOO_MANY, OVERLOADED)
        self.wanted.clear()
        return S.CROWDED

    def _go_on(self) -> CompilingState:
        """With the oldest grammar, if there is one."""
        if not self.wanted:
            return S.IDLE
        request_ids = next(iter(self.wanted.values()))
        self._start(Compile(self.thread, request_ids[0]))
        self._after(COMPILE_LIMIT_S, CompileOver(self.thread))
        return S.COMPILING

    def _fail(self, request_ids: Iterable[int], message: str, code: str) -> None:
        for request_id in request_ids:
            self._send("engine", GrammarFailed(request_id, message, code))
