from enum import StrEnum
from typing import ClassVar

import msgspec
import pytest

from novainfer.fsm.core.machine import (
    After,
    Drop,
    Guard,
    IllegalEvent,
    Machine,
    Observer,
    Row,
    Send,
    Start,
    Table,
    each_row,
    ignore,
    never,
    on,
    stay,
    table,
    timer,
)


class S(StrEnum):
    OFF = "OFF"
    ON = "ON"


class Push(msgspec.Struct, frozen=True):
    pass


class Look(msgspec.Struct, frozen=True):
    pass


class Smash(msgspec.Struct, frozen=True):
    pass


class Lamp(Machine):
    TABLE: ClassVar[Table] = table(
        S,
        (Push, Look, Smash),
        on(S.OFF, Push, "_push", S.ON),
        on(S.ON, Push, "_push", S.ON),  # wrong on purpose: the second push switches it off
        stay(S, Look, "_look"),
        ignore(S.OFF, Smash, "it is dark"),
        never(S.ON, Smash, "it is too hot"),
    )

    def __init__(self) -> None:
        super().__init__(S.OFF)
        self.pushes = 0

    def _push(self, event: Push) -> S:
        self.pushes += 1
        self._send("room", event)
        self._start("current")
        self._after(1.5, event)
        return S.ON if self.state is S.OFF else S.OFF

    def _look(self, _: Look) -> StrEnum:
        return self.state


def test_an_event_moves_the_machine_and_its_effects_come_in_order():
    lamp = Lamp()
    assert lamp.handle(Push()) == [Send("room", Push()), Start("current"), After(1.5, Push())]
    assert lamp.state is S.ON
    assert lamp.handle(Look()) == []


def test_an_event_that_cannot_come_raises_and_changes_nothing():
    lamp = Lamp()
    lamp.handle(Push())
    before = (lamp.state, lamp.pushes)
    with pytest.raises(IllegalEvent, match="Lamp in ON: Smash cannot come: it is too hot"):
        lamp.handle(Smash())
    assert (lamp.state, lamp.pushes) == before


def test_an_event_nobody_knows_raises_and_changes_nothing():
    lamp = Lamp()
    with pytest.raises(IllegalEvent, match="Lamp knows no event str"):
        lamp.handle("push")
    assert lamp.state is S.OFF


def test_an_ignored_event_has_no_effects():
    lamp = Lamp()
    assert lamp.handle(Smash()) == []
    assert lamp.state is S.OFF


def test_a_state_that_the_row_does_not_allow_is_a_programmers_error():
    lamp = Lamp()
    lamp.handle(Push())
    with pytest.raises(AssertionError, match=r"Lamp\._push: ON -> OFF is not in the table"):
        lamp.handle(Push())
    assert lamp.state is S.ON


def test_a_table_with_a_pair_missing_is_refused():
    with pytest.raises(TypeError, match=r"no row for \(OFF, Look\), \(ON, Look\)"):
        table(S, (Push, Look), stay(S, Push, "_push"))


def test_a_table_with_two_rows_for_a_pair_is_refused():
    with pytest.raises(TypeError, match=r"two rows for \(OFF, Push\)"):
        table(S, (Push,), stay(S, Push, "_push"), ignore(S.OFF, Push, "because"))


def test_a_table_with_a_row_for_an_unknown_event_is_refused():
    with pytest.raises(TypeError, match=r"unknown pairs \(OFF, Look\), \(ON, Look\)"):
        table(S, (Push,), stay(S, Push, "_push"), stay(S, Look, "_look"))


class Round(Machine):
    """A machine that begins something new in the state that it is in, or looks on."""

    TABLE: ClassVar[Table] = table(
        S,
        (Push, Look),
        on(S.OFF, Push, "_push", S.ON, renews=True),
        on(S.ON, Push, "_push", S.ON, renews=True),
        stay(S, Look, "_look"),
    )

    def __init__(self) -> None:
        super().__init__(S.OFF)

    def _push(self, _: Push) -> S:
        return S.ON

    def _look(self, _: Look) -> StrEnum:
        return self.state


def test_a_state_that_is_entered_from_itself_is_renewed_where_the_row_says_so():
    machine = Round()
    machine.handle(Push())
    assert machine.num_renewals == 0  # the state is another one, which says it
    machine.handle(Push())
    assert machine.num_renewals == 1
    machine.handle(Look())
    assert machine.num_renewals == 1


class Turn(msgspec.Struct, frozen=True):
    number: int


class OfLock(Guard):
    name = "of this lock"
    why = "the key is another lock's"

    @staticmethod
    def holds(machine: Machine, event: Turn) -> bool:
        return event.number == machine.number


class Lock(Machine):
    TABLE: ClassVar[Table] = table(
        S,
        (Turn,),
        on(S.OFF, Turn, "_turn", S.ON, only=OfLock),
        on(S.ON, Turn, "_turn", S.OFF, only=OfLock),
        stay(S.ON, Turn, "_ring"),
    )

    def __init__(self) -> None:
        super().__init__(S.OFF)
        self.number = 7

    def _turn(self, _: Turn) -> S:
        return S.ON if self.state is S.OFF else S.OFF

    def _ring(self, event: Turn) -> StrEnum:
        self._send("alarm", event)
        return self.state


def test_an_event_that_the_guard_refuses_is_for_the_next_row_or_ignored():
    lock = Lock()
    assert lock.handle(Turn(6)) == []
    assert lock.state is S.OFF
    lock.handle(Turn(7))
    assert lock.state is S.ON
    assert lock.handle(Turn(6)) == [Send("alarm", Turn(6))]
    assert lock.state is S.ON
    lock.handle(Turn(7))
    assert lock.state is S.OFF


def test_each_row_of_a_pair_is_drawn_and_says_which_events_it_is_for():
    found = [(str(state), row.of, row.action, row.why) for state, _, row in each_row(Lock.TABLE)]
    assert found == [
        ("OFF", "of this lock", "_turn", ""),
        ("OFF", "any other", "", "the key is another lock's"),
        ("ON", "of this lock", "_turn", ""),
        ("ON", "any other", "_ring", ""),
    ]


def test_a_row_behind_one_that_takes_all_events_is_refused():
    with pytest.raises(TypeError, match=r"two rows for \(OFF, Turn\)"):
        table(S, (Turn,), stay(S, Turn, "_ring"), on(S.OFF, Turn, "_turn", S.ON, only=OfLock))


class Case(Machine):
    """A machine with a lamp in it."""

    TABLE: ClassVar[Table] = table(S, (Push,), stay(S, Push, "_push"))

    def __init__(self) -> None:
        super().__init__(S.OFF)
        self.lamp: Lamp | None = None

    def _push(self, event: Push) -> StrEnum:
        self.lamp = self._nest(Lamp())
        self._effects += self.lamp.handle(event)
        return self.state


class Notes(Observer):
    def __init__(self) -> None:
        self.taken: list[tuple[str, StrEnum, str, str]] = []
        self.gone: list[tuple[str, StrEnum, StrEnum]] = []

    def takes(self, machine: Machine, event: object, row: Row) -> None:
        self.taken.append((type(machine).__name__, machine.state, type(event).__name__, row.action))

    def took(self, machine: Machine, before: StrEnum, event: object) -> None:
        self.gone.append((type(machine).__name__, before, machine.state))


def test_an_observer_hears_before_and_after_and_of_nested_machines_too():
    case, notes = Case(), Notes()
    case.observer = notes
    case.handle(Push())
    assert notes.taken == [("Case", S.OFF, "Push", "_push"), ("Lamp", S.OFF, "Push", "_push")]
    assert notes.gone == [("Lamp", S.OFF, S.ON), ("Case", S.OFF, S.OFF)]


def test_an_observer_hears_what_is_ignored_and_nothing_of_what_cannot_come():
    lamp, notes = Lamp(), Notes()
    lamp.observer = notes
    lamp.handle(Smash())
    assert (notes.taken, notes.gone) == ([("Lamp", S.OFF, "Smash", "")], [])
    lamp.handle(Push())
    notes.taken.clear()
    with pytest.raises(IllegalEvent):
        lamp.handle(Smash())
    assert notes.taken == []


class Over(msgspec.Struct, frozen=True):
    pass


class Boil(Machine):
    """Hot for three seconds after the last push."""

    TABLE: ClassVar[Table] = table(
        S,
        (Push, Look, Over),
        on(S, Push, "_push", S.ON),
        on(S, Look, "_look", S.OFF),
        timer(S.ON, Over, "_over", S.OFF),
    )

    def __init__(self) -> None:
        super().__init__(S.OFF)

    def _push(self, _: Push) -> S:
        self._until_left(3.0, Over())
        return S.ON

    def _look(self, _: Look) -> S:
        return S.OFF

    def _over(self, _: Over) -> S:
        return S.OFF


def test_a_timer_ends_with_its_state_and_is_dropped_once():
    boil = Boil()
    assert boil.handle(Push()) == [After(3.0, Over())]
    assert boil.handle(Push()) == [After(3.0, Over())]  # set anew: the one before is gone by that
    assert boil.handle(Look()) == [Drop(Over())]
    assert boil.handle(Look()) == []


def test_a_timer_that_has_run_out_is_not_dropped():
    boil = Boil()
    boil.handle(Push())
    assert boil.handle(Over()) == []
    assert boil.state is S.OFF
    assert boil.handle(Push()) == [After(3.0, Over())]


def test_a_timer_cannot_run_out_where_it_does_not_belong():
    with pytest.raises(IllegalEvent, match="Boil in OFF: Over cannot come: the timer ends with ON"):
        Boil().handle(Over())
