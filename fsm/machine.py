"""The core that all machines share: a table as data, one way in, and effects as the only way out.

A machine is a synchronous object. `handle(event)` looks `(state, type of event)` up in the table, calls the row's
action, checks that the state the action answers with is one the row allows, and returns the effects. The table is
total: every pair has a row, and "ignored, because …" or "cannot happen, because …" are rows too. An event that
cannot happen raises `IllegalEvent`, and the machine is unchanged.

    state × event ──row──▶ action ──▶ next state
                             └──────▶ effects: Send(to, event) · Start(job) · After(delay_s, event)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias, TypeVar

import msgspec


class Send(msgspec.Struct, frozen=True):
    """Effect: put `event` into the mailbox of the actor `to`; `urgent` takes the control lane."""

    to: str
    event: Any
    urgent: bool = False


class Start(msgspec.Struct, frozen=True):
    """Effect: do `job` off the loop; its result comes back as an event."""

    job: Any


class After(msgspec.Struct, frozen=True):
    """Effect: `event` comes back to this machine after `delay_s` seconds; a late one is dropped by state."""

    delay_s: float
    event: Any


Effect: TypeAlias = Send | Start | After


class IllegalEvent(Exception):
    """A machine was given an event that its table says cannot happen: a bug in the sender. Nothing changed."""


class Row(msgspec.Struct, frozen=True):
    """One row of a table: the action's method name ("" = ignored), the states that may follow, and why."""

    action: str
    follows: frozenset[str]
    why: str = ""
    impossible: bool = False


Table: TypeAlias = Mapping[tuple[StrEnum, type], Row]
Rows: TypeAlias = dict[tuple[StrEnum, type], Row]


def on(states: StrEnum | Iterable[StrEnum], event: type, action: str, *follows: StrEnum) -> Rows:
    """Rows: in any of `states`, `event` runs `action`, after which the machine is in one of `follows`."""
    return {(s, event): Row(action, frozenset(follows)) for s in _each(states)}


def stay(states: StrEnum | Iterable[StrEnum], event: type, action: str) -> Rows:
    """Rows: in any of `states`, `event` runs `action`, and the state remains what it is."""
    return {(s, event): Row(action, frozenset([s])) for s in _each(states)}


def ignore(states: StrEnum | Iterable[StrEnum], event: type, why: str) -> Rows:
    """Rows: in any of `states`, `event` may come and changes nothing."""
    return {(s, event): Row("", frozenset([s]), why) for s in _each(states)}


def never(states: StrEnum | Iterable[StrEnum], event: type, why: str) -> Rows:
    """Rows: in any of `states`, `event` cannot come; if it does, `handle` raises `IllegalEvent`."""
    return {(s, event): Row("", frozenset(), why, impossible=True) for s in _each(states)}


def table(states: type[StrEnum], events: Iterable[type], *parts: Rows) -> Table:
    """Join rows to a table and check, at import, that it is total and that no pair has two rows."""
    rows: Rows = {}
    for part in parts:
        for key, row in part.items():
            if key in rows:
                raise TypeError(f"two rows for ({key[0]}, {key[1].__name__})")
            rows[key] = row
    wanted = {(state, event) for state in states for event in events}
    if missing := wanted - rows.keys():
        raise TypeError("no row for " + ", ".join(sorted(f"({s}, {e.__name__})" for s, e in missing)))
    if unknown := rows.keys() - wanted:
        raise TypeError("rows for unknown pairs " + ", ".join(sorted(f"({s}, {e.__name__})" for s, e in unknown)))
    return rows


def _each(states: StrEnum | Iterable[StrEnum]) -> Iterable[StrEnum]:
    return [states] if isinstance(states, StrEnum) else states


class Observer:
    """Hears what the machines do whose `observer` it is, and what their nested machines do; a base to build on."""

    def takes(self, machine: Machine, event: Any, row: Row) -> None:
        """`machine` is about to take `event`, by `row`."""

    def took(self, machine: Machine, before: StrEnum, event: Any) -> None:
        """`machine` has taken `event` in the state `before`; it was not ignored."""


_Nested = TypeVar("_Nested", bound="Machine")


class Machine:
    """Base of all machines; subclasses give `TABLE` and one method per action: `action(event) -> next state`."""

    TABLE: ClassVar[Table]
    __slots__ = ("_effects", "observer", "state")
    state: StrEnum

    def __init__(self, state: StrEnum) -> None:
        self.state = state
        self.observer: Observer | None = None
        self._effects: list[Effect] = []

    def handle(self, event: Any) -> list[Effect]:
        """Take `event`; return its effects in order. Raises `IllegalEvent`, changing nothing, if it cannot come."""
        state = self.state
        row = self.TABLE.get((state, type(event)))
        if row is None:
            raise IllegalEvent(f"{type(self).__name__} knows no event {type(event).__name__}")
        if row.impossible:
            raise IllegalEvent(f"{type(self).__name__} in {state}: {type(event).__name__} cannot come: {row.why}")
        observer = self.observer
        if observer is not None:
            observer.takes(self, event, row)
        if not row.action:
            return []
        self._effects = []
        follows = getattr(self, row.action)(event)
        assert follows in row.follows, f"{type(self).__name__}.{row.action}: {state} -> {follows} is not in the table"
        self.state = follows
        if observer is not None:
            observer.took(self, state, event)
        return self._effects

    def _nest(self, machine: _Nested) -> _Nested:
        """`machine`, which is a part of this one: what observes this one observes it too."""
        machine.observer = self.observer
        return machine

    def _send(self, to: str, event: Any, *, urgent: bool = False) -> None:
        self._effects.append(Send(to, event, urgent))

    def _start(self, job: Any) -> None:
        self._effects.append(Start(job))

    def _after(self, delay_s: float, event: Any) -> None:
        self._effects.append(After(delay_s, event))
