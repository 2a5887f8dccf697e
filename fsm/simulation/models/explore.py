"""Every order of moves in a small world of models, each state once; the first counterexample is a shortest one."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from typing import Any

import msgspec

from novainfer.fsm.core.machine import Machine
from novainfer.fsm.core.state import attributes_of
from novainfer.fsm.models.model import Patience
from novainfer.fsm.simulation.explore.coverage import RowId
from novainfer.fsm.simulation.models.world import Move, RoutedWorld, Rows, Shape, finish, moves

STATES_MAX = 200_000  # a world with more is not small
ASK_S = 30.0


class SmallRouted(msgspec.Struct, frozen=True, kw_only=True):
    """What is explored: clients ask for `asks`, one after the other at any moment; `budget` says how often what may be.

    Timers run out in any order.
    """

    name: str
    shape: Shape
    asks: tuple[str, ...]
    budget: tuple[tuple[str, int], ...] = ()
    hands: frozenset[int] = frozenset()  # which of the asks are by hand


class Explored(msgspec.Struct, kw_only=True):
    """What was found; `path` leads to the violation, if there is one."""

    name: str
    states: int
    complete: bool
    rows: Counter[RowId]
    violation: str | None = None
    path: list[Move] = []


def explore_routed(small: SmallRouted, *, states_max: int = STATES_MAX) -> Explored:
    """Visit every state of `small`, or stop at the first violation, or at `states_max`."""
    first, rows = RoutedWorld(small.shape, has_any_order=True), Rows()
    begin = (first, dict(small.budget))
    parents: list[tuple[int, Move]] = [(-1, ())]
    seen = {_key(*begin)}
    frontier: deque[tuple[int, bytes]] = deque([(0, pickle.dumps(begin))])
    while frontier and len(seen) <= states_max:
        at, saved = frontier.popleft()
        world, budget = pickle.loads(saved)
        for move in _moves(world, budget, small):
            world, budget = pickle.loads(saved)
            rows.watch(world)
            try:
                if budget.get(move[0]):
                    budget[move[0]] -= 1
                world.make(move)
                _check_end(world, rows)
            except Exception as error:  # whatever a machine raises is a finding
                path = [*_path(parents, at), move]
                violation = f"{type(error).__name__}: {error}"
                return Explored(
                    name=small.name, states=len(seen), complete=False, rows=rows.taken, violation=violation, path=path
                )
            key = _key(world, budget)
            if key not in seen:
                seen.add(key)
                parents.append((at, move))
                frontier.append((len(parents) - 1, _saved(world, budget)))
    return Explored(name=small.name, states=len(seen), complete=not frontier, rows=rows.taken)


def _moves(world: RoutedWorld, budget: dict[str, int], small: SmallRouted) -> list[Move]:
    found = moves(world)
    if world.num_clients < len(small.asks):
        at = world.num_clients
        found.append(("ask", small.asks[at], ASK_S, at in small.hands))
    found += [("gone", one) for one in (*world.granted, *world.asked)]
    found += [("fire", event) for event in world.timers]
    if budget.get("flaw"):
        found += [("flaw", at) for at in range(len(world.looks))]
    for kind, state in (("fail", "COMING"), ("die", "UP")):
        found += [(kind, at) for at, one in enumerate(world.engines) if one.state == state and budget.get(kind)]
    if budget.get("unload"):
        found += [("unload", name, timeout_s) for name in world.shape.models for timeout_s in (0.0, 2.0)]
    if budget.get("drain"):
        found.append(("drain", 2.0))
    return found


def _check_end(world: RoutedWorld, rows: Rows) -> None:
    """Where only time can pass, all ends well from here."""
    if not moves(world):
        copy, _ = pickle.loads(_saved(world, {}))
        rows.watch(copy)
        finish(copy)


def _saved(world: RoutedWorld, budget: dict[str, int]) -> bytes:
    for machine in (world.router, *world.router.models.values()):
        machine.observer = None
    return pickle.dumps((world, budget))


def _path(parents: list[tuple[int, Move]], at: int) -> list[Move]:
    found = []
    while at > 0:
        at, move = parents[at]
        found.append(move)
    return found[::-1]


def _key(world: RoutedWorld, budget: dict[str, int]) -> int:
    """All that can matter later: not the time that has passed, nor what was counted."""
    what = {
        name: value
        for name, value in vars(world).items()
        if name not in ("shape", "now_s", "heard", "refusals", "checks")
    }
    return hash((_plain(what), _plain(budget)))


def _plain(thing: Any) -> Any:
    """`thing` as something that is equal to its like."""
    if isinstance(thing, msgspec.Struct | Machine):
        return (type(thing).__name__, *(_plain(getattr(thing, name, None)) for name in attributes_of(thing)))
    if isinstance(thing, dict):
        return tuple((_plain(key), _plain(value)) for key, value in thing.items())
    if isinstance(thing, list | tuple | deque):
        return tuple(map(_plain, thing))
    return thing


NEVER_IDLE = Patience(wait_s=10.0)

SMALL_ROUTED = [
    SmallRouted(
        name="two models, one place, and a request more than there is room to wait in",
        shape=Shape(max_waiting=1),
        asks=("a", "b", "a"),
    ),
    SmallRouted(
        name="two models, one place, a load that fails, and one that is asked for by hand all the same",
        shape=Shape(patience=NEVER_IDLE),
        asks=("a", "a", "b"),
        budget=(("fail", 1),),
        hands=frozenset([1]),
    ),
    SmallRouted(
        name="two models, one place, and files that cannot be loaded",
        shape=Shape(patience=NEVER_IDLE),
        asks=("a", "b", "b"),
        budget=(("flaw", 1), ("drain", 1)),
        hands=frozenset([2]),
    ),
    SmallRouted(
        name="two models, one place, and an engine that dies",
        shape=Shape(patience=NEVER_IDLE),
        asks=("a", "b"),
        budget=(("die", 1), ("drain", 1)),
    ),
    SmallRouted(
        name="one model that is unloaded by hand while requests want it",
        shape=Shape(models=("a",)),
        asks=("a", "a"),
        budget=(("unload", 2), ("drain", 1)),
    ),
    SmallRouted(
        name="three models, two places",
        shape=Shape(models=("a", "b", "c"), max_loaded=2, patience=NEVER_IDLE, looks_take_time=False),
        asks=("a", "b", "c"),
    ),
]
