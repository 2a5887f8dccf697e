"""The core that all machines share: a table as data, one way in, and effects as the only way out.

A machine is a synchronous object. `handle(event)` looks its type and the state up in the table, calls the row's
action, checks that the state the action answers with is one the row allows, and returns the effects. The table is
total: every pair has a row, and "ignored, because …" or "cannot happen, because …" are rows too. An event that
cannot happen raises `IllegalEvent`, and the machine is unchanged. Where a state waits for one answer and others may
come, the row has a guard, and the next row of the pair is for those that it refuses.

    state × event ──row──▶ action ──▶ next state
                             └──────▶ effects: Send(to, event) · Start(job) · After(delay_s, event) · Drop(event)

A timer is known by its event: set again, it begins anew, and what was dropped does not come, even if it had run out and
waited in the mailbox. So a machine never hears of an old timer, and needs no number to tell it from a new one. Where
the table gives an event to some states by `timer`, the core drops it when they are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias, TypeVar

import msgspec

from novainfer.fsm.core.dwell import Dwell


class Send(msgspec.Struct, frozen=True):
    """Effect: put `event` into the mailbox of the actor `to`; `urgent` takes the control lane."""

    to: str
    event: Any
    urgent: bool = False


class Start(msgspec.Struct, frozen=True):
    """Effect: do `job` off the loop; its result comes back as an event."""

    job: Any


class After(msgspec.Struct, frozen=True):
    """Effect: `event` comes back to this machine after `delay_s` seconds, instead of when it was to come before."""

    delay_s: float
    event: Any


class Drop(msgspec.Struct, frozen=True):
    """Effect: the timer for `event` is stopped; if it has run out, and `event` waits, it is taken away."""

    event: Any


Effect: TypeAlias = Send | Start | After | Drop


class IllegalEvent(Exception):
    """A machine was given an event that its table says cannot happen: a bug in the sender. Nothing changed."""


class Guard:
    """Which events a row is for, by what identifies them; `why` is the reason to ignore every other one."""

    name: ClassVar[str]
    why: ClassVar[str]

    @staticmethod
    def holds(machine: Any, event: Any) -> bool:
        """Whether `event` is meant by the row; looks, and changes nothing."""
        raise NotImplementedError


class Row(msgspec.Struct, frozen=True):
    """One row of a table: the action's method name ("" = ignored), the states that may follow, and why.

    A row with a guard is `only` for the events that it holds for; `otherwise` is the row for the others.
    """

    action: str
    follows: frozenset[str]
    why: str = ""
    impossible: bool = False
    only: type[Guard] | None = None
    otherwise: Row | None = None
    is_timer: bool = False  # the event is that of a timer, which ends with the states that have such a row
    renews: bool = False  # the state is entered anew, even from itself: its dwell begins again
    of: str = ""  # which of the events, where a guard tells them apart
    is_plain: bool = False  # it has an action, and no guard: no other row is looked for


Table: TypeAlias = Mapping[type, Mapping[StrEnum, Row]]  # by event and state: a pair as a key costs twice as much
Rows: TypeAlias = dict[tuple[StrEnum, type], Row]


def on(
    states: StrEnum | Iterable[StrEnum],
    event: type,
    action: str,
    *follows: StrEnum,
    only: type[Guard] | None = None,
    renews: bool = False,
) -> Rows:
    """Rows: in any of `states`, `event` runs `action`, after which the machine is in one of `follows`.

    With `only`, an event that the guard refuses is for the next row of the pair; where there is none, it is ignored.
    A row that `renews` its state begins something new in it: the state has its whole time again.
    """
    return {(s, event): Row(action, frozenset(follows), only=only, renews=renews) for s in _each(states)}


def stay(states: StrEnum | Iterable[StrEnum], event: type, action: str, *, only: type[Guard] | None = None) -> Rows:
    """Rows: in any of `states`, `event` runs `action`, and the state remains what it is; `only` as in `on`."""
    return {(s, event): Row(action, frozenset([s]), only=only) for s in _each(states)}


def ignore(states: StrEnum | Iterable[StrEnum], event: type, why: str) -> Rows:
    """Rows: in any of `states`, `event` may come and changes nothing."""
    return {(s, event): Row("", frozenset([s]), why) for s in _each(states)}


def never(states: StrEnum | Iterable[StrEnum], event: type, why: str) -> Rows:
    """Rows: in any of `states`, `event` cannot come; if it does, `handle` raises `IllegalEvent`."""
    return {(s, event): Row("", frozenset(), why, impossible=True) for s in _each(states)}


def timer(states: StrEnum | Iterable[StrEnum], event: type, action: str, *follows: StrEnum) -> Rows:
    """Rows: in any of `states`, a timer that belongs to them runs out; `table` adds that it cannot in any other."""
    return {(s, event): Row(action, frozenset(follows), is_timer=True) for s in _each(states)}


def table(states: type[StrEnum], events: Iterable[type], *parts: Rows) -> Table:
    """Join rows to a table and check, at import, that it is total and that no pair has two rows without a guard."""
    found: dict[tuple[StrEnum, type], list[Row]] = {}
    for part in parts:
        for key, row in part.items():
            found.setdefault(key, []).append(row)
    for event in dict.fromkeys(event for (_, event), chain in found.items() if chain[0].is_timer):
        its = [state for state in states if (state, event) in found]
        elsewhere = never((s for s in states if s not in its), event, f"the timer ends with {', '.join(its)}")
        found.update({key: [row] for key, row in elsewhere.items()})
    wanted = {(state, event) for state in states for event in events}
    if missing := wanted - found.keys():
        raise TypeError("no row for " + ", ".join(sorted(f"({s}, {e.__name__})" for s, e in missing)))
    if unknown := found.keys() - wanted:
        raise TypeError("rows for unknown pairs " + ", ".join(sorted(f"({s}, {e.__name__})" for s, e in unknown)))
    rows: dict[type, dict[StrEnum, Row]] = {event: {} for _, event in found}
    for (state, event), chain in found.items():
        rows[event][state] = _chain(state, event, chain)
    return rows


def _chain(state: StrEnum, event: type, rows: list[Row]) -> Row:
    """The rows of one pair: each but the last has a guard, and is for what the guards before it refuse."""
    if any(row.only is None for row in rows[:-1]):
        raise TypeError(f"two rows for ({state}, {event.__name__})")
    if (only := rows[-1].only) is not None:
        rows.append(Row("", frozenset([state]), only.why))
    found: Row | None = None
    for row in reversed(rows):
        of = "" if len(rows) == 1 else row.only.name if row.only is not None else "any other"
        is_plain = bool(row.action) and row.only is None
        found = msgspec.structs.replace(row, otherwise=found, of=of, is_plain=is_plain)
    assert found is not None
    return found


def each_row(table: Table) -> Iterator[tuple[StrEnum, type, Row]]:
    """All rows of `table`, with state and event."""
    for event, rows in table.items():
        for state, first in rows.items():
            row: Row | None = first
            while row is not None:
                yield state, event, row
                row = row.otherwise


def _each(states: StrEnum | Iterable[StrEnum]) -> Iterable[StrEnum]:
    return [states] if isinstance(states, StrEnum) else states


class Observer:
    """Hears what the machines do whose `observer` it is, and what their nested machines do; a base to build on."""

    def takes(self, machine: Machine, event: Any, row: Row) -> None:
        """`machine` is about to take `event`, by `row`."""

    def took(self, machine: Machine, before: StrEnum, event: Any) -> None:
        """`machine` has taken `event` in the state `before`; it was not ignored."""

    def plans(self) -> None:
        """The scheduler has taken in how a step ended, and now plans what follows."""


_Nested = TypeVar("_Nested", bound="Machine")


class Machine:
    """Base of all machines; subclasses give `TABLE` and one method per action: `action(event) -> next state`.

    `DWELLS` says how long each state may last, or why it may last for ever. `num_renewals` counts the times when a
    state was entered from itself, by a row that `renews` it.
    """

    TABLE: ClassVar[Table]
    DWELLS: ClassVar[Mapping[Any, Dwell]]
    __slots__ = ("_effects", "_timer", "num_renewals", "observer", "state")
    state: StrEnum

    def __init__(self, state: StrEnum) -> None:
        self.state = state
        self.observer: Observer | None = None
        self.num_renewals = 0
        self._timer: Any = None  # the event of the timer that ends with this state
        self._effects: list[Effect] = []

    def handle(self, event: Any) -> list[Effect]:
        """Take `event`; return its effects in order. Raises `IllegalEvent`, changing nothing, if it cannot come."""
        state = self.state
        try:
            row = self.TABLE[type(event)][state]
        except KeyError:
            raise IllegalEvent(f"{type(self).__name__} knows no event {type(event).__name__}") from None
        if not row.is_plain and (row.only is None or not row.only.holds(self, event)):
            row = self._row_for(event, row)
        observer = self.observer
        if observer is not None:
            observer.takes(self, event, row)
        if not row.action:
            return []
        timer, self._effects = self._timer, []
        follows = getattr(self, row.action)(event)
        assert follows in row.follows, f"{type(self).__name__}.{row.action}: {state} -> {follows} is not in the table"
        if timer is not None and (follows is not state or type(event) is type(timer)):
            self._end_timer(timer, event)
        if follows is not state:
            self.state = follows
        elif row.renews:
            self.num_renewals += 1
        if observer is not None:
            observer.took(self, state, event)
        return self._effects

    def _row_for(self, event: Any, row: Row) -> Row:
        """The first of the chain that begins with `row` whose guard holds for `event`, which it says can come."""
        while row.only is not None and not row.only.holds(self, event):
            assert row.otherwise is not None
            row = row.otherwise
        if row.impossible:
            raise IllegalEvent(f"{type(self).__name__} in {self.state}: {type(event).__name__} cannot come: {row.why}")
        return row

    def _nest(self, machine: _Nested) -> _Nested:
        """`machine`, which is a part of this one: what observes this one observes it too."""
        machine.observer = self.observer
        return machine

    def _send(self, to: str, event: Any, *, urgent: bool = False) -> None:
        self._effects.append(Send(to, event, urgent))

    def _start(self, job: Any) -> None:
        self._effects.append(Start(job))

    def _after(self, delay_s: float, event: Any) -> None:
        """Set a timer that outlasts this state."""
        self._effects.append(After(delay_s, event))

    def _until_left(self, delay_s: float, event: Any) -> None:
        """Set the timer of the state that follows: it ends when that is left."""
        self._timer = event
        # A copy: snapshots tell one object from two, and what comes from outside is never the object that was set.
        self._effects.append(After(delay_s, msgspec.structs.replace(event)))

    def _drop(self, event: Any) -> None:
        self._effects.append(Drop(event))

    def _end_timer(self, timer: Any, event: Any) -> None:
        """`timer` was set before `event` came: it has run out with it, or its state is left."""
        if self._timer is timer:
            self._timer = None
        if type(event) is not type(timer) and self._timer != timer:
            self._drop(timer)
