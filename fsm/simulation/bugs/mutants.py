"""Planting bugs, to see that the simulator finds them: each is a line or two of one method, written wrongly.

A mutant names the line as it stands, so a change of that line breaks the mutant's own test and not the net unseen.
"""

from __future__ import annotations

import inspect
import signal
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from types import ModuleType
from typing import Any, cast

import msgspec

from novainfer.fsm.core.machine import Machine, Row
from novainfer.fsm.simulation.explore.explore import explore
from novainfer.fsm.simulation.explore.small import SMALL_WORLDS
from novainfer.fsm.simulation.swarm.report import run_seeds

SEEDS = 1000  # what a hunt tries before it explores; most bugs need fewer than a hundred
SEED_S_MAX = 20.0  # CPU seconds: a thousand times what most need
STATES_MAX = 3000  # of each small world that a hunt explores; all of them take half a minute
TABLE = "TABLE"  # what an edit names that leaves out a guard
STATES_MAX_NAMED = 30_000  # of the one that the mutant names


class Edit(msgspec.Struct, frozen=True):
    """In `owner.method`, `line` reads `wrong`; or the rows of its `TABLE` for the event `line` have no guard."""

    owner: type | ModuleType
    method: str
    line: str
    wrong: str


def unguarded(name: str, machine: type[Machine], event: type, *, seeds: int = 300, small: str = "") -> Mutant:
    """The bug that a guard is left out of the rows for `event`: the action takes what should be refused."""
    return Mutant(name, machine, TABLE, event.__name__, "", seeds, small)


class Mutant(msgspec.Struct, frozen=True):
    """One bug; `seeds`: the swarm finds it within so many (0: only the explorer does, in the world named `small`)."""

    name: str
    owner: type | ModuleType
    method: str
    line: str
    wrong: str
    seeds: int = 300
    small: str = ""
    more: tuple[Edit, ...] = ()  # other lines that belong to the bug
    first: int = 0  # the seed that is tried before all others, for a bug that shows in few of them


class Hunt(msgspec.Struct, frozen=True):
    """Whether and how a planted bug was found, and after how many seconds."""

    name: str
    found: bool
    how: str
    seconds: float


def hunt(mutant: Mutant) -> Hunt:
    """Plant `mutant`, and look for it: with seeds first, then in the small worlds."""
    began_s = time.monotonic()

    def said(how: str, *, found: bool = True) -> Hunt:
        return Hunt(mutant.name, found, how, round(time.monotonic() - began_s, 2))

    with planted(mutant):
        for seed in (mutant.first, *range(SEEDS)) if mutant.seeds else ():
            with _broken_off():
                if run_seeds([seed]).violations:
                    return said(f"seed {seed}")
        for small in sorted(SMALL_WORLDS, key=lambda small: small.name != mutant.small):
            states_max = STATES_MAX_NAMED if small.name == mutant.small else STATES_MAX
            if (found := explore(small, states_max=states_max)).violation is not None:
                return said(f"{found.depth} moves into {small.name!r}")
    return said("neither by seeds nor in the small worlds", found=False)


@contextmanager
def _broken_off() -> Iterator[None]:
    """A bug may be a loop without end: what runs for too long is broken off, and that is a finding."""

    def break_off(*_: Any) -> None:
        raise AssertionError(f"this seed has not ended after {SEED_S_MAX:g} CPU seconds")

    before = signal.signal(signal.SIGVTALRM, break_off)
    signal.setitimer(signal.ITIMER_VIRTUAL, SEED_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """While this lasts, the bug is there."""
    with ExitStack() as stack:
        for edit in (Edit(mutant.owner, mutant.method, mutant.line, mutant.wrong), *mutant.more):
            stack.enter_context(_edited(mutant.name, edit))
        yield


@contextmanager
def _edited(name: str, edit: Edit) -> Iterator[None]:
    if edit.method == TABLE:
        assert isinstance(edit.owner, type)
        with _unguarded(name, edit.owner, edit.line):
            yield
        return
    original = inspect.getattr_static(edit.owner, edit.method)
    is_inherited = edit.method not in vars(edit.owner)
    function: Any = original.fget if isinstance(original, property) else original
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(edit.line) == 1, f"{name}: {edit.line!r} is not in {edit.method}, or twice"
    code = compile(
        source.replace(edit.line, edit.wrong),
        f"<mutant: {name}>",
        "exec",
        flags=annotations.compiler_flag,
        dont_inherit=True,
    )
    names: dict[str, Any] = {}
    exec(code, inspect.unwrap(function).__globals__, names)
    setattr(edit.owner, edit.method, names[edit.method])
    try:
        yield
    finally:
        if is_inherited:
            delattr(edit.owner, edit.method)
        else:
            setattr(edit.owner, edit.method, original)


@contextmanager
def _unguarded(name: str, machine: type[Any], event: str) -> Iterator[None]:
    rows = next((_rows(machine, kind) for kind in machine.TABLE if kind.__name__ == event), {})
    found = {state: row for state, row in rows.items() if row.only is not None}
    assert found, f"{name}: no row of {machine.__name__} for {event} has a guard"
    rows.update({state: msgspec.structs.replace(row, only=None, otherwise=None) for state, row in found.items()})
    try:
        yield
    finally:
        rows.update(found)


def _rows(machine: type[Machine], event: type) -> dict[StrEnum, Row]:
    """The rows of a table for one event, to be changed."""
    return cast("dict[StrEnum, Row]", machine.TABLE[event])


@contextmanager
def row_changed(machine: type[Machine], state: StrEnum, event: type) -> Iterator[None]:
    """While this lasts, one row of a table is wrong: what had an action is ignored, what was ignored cannot come."""
    rows = _rows(machine, event)
    original = rows[state]
    if original.action:
        rows[state] = Row("", frozenset([state]), "a mutant")
    else:
        rows[state] = Row("", frozenset(), "a mutant", impossible=True)
    try:
        yield
    finally:
        rows[state] = original
