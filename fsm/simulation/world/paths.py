"""Paths: the moves of a world as data. A failing seed gives one; cut short, it is what a regression is kept as.

A seed means something only as long as nothing is drawn differently. A path goes on to mean the same: moves that a
changed machine no longer allows are passed over, and whatever is left to do in the end is done in plain order.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from novainfer.fsm.messages.events import Cause, Fault
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.tenant import Tenant
from novainfer.fsm.simulation.swarm.swarm import Seed
from novainfer.fsm.simulation.world.moves import Move, describe, is_possible, make, next_moves
from novainfer.fsm.simulation.world.shape import Shape
from novainfer.fsm.simulation.world.world import World

REPLAYS_MAX = 2000  # while a path is cut: about half a minute
MOVES_MAX = 20_000  # after the path, before the world must have ended


class Path(msgspec.Struct, frozen=True, kw_only=True):
    """A world, and the moves that lead to `violation` (or did once); `bug` names the mutant that brings it back."""

    bug: str = ""
    violation: str
    shape: Shape
    moves: list[Move]


class _Kept(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A path as one line of JSON, in which tuples are lists and enumerations are words."""

    bug: str = ""
    violation: str
    shape: Shape
    moves: list[list[Any]]


def replay(path: Path) -> str | None:
    """Make all moves, and then whatever is left to do; the violation that this meets, if any."""
    world = World(path.shape)
    try:
        for move in path.moves:
            _check_if_quiet(world, move)
            if is_possible(world, move):
                make(world, move)
        _finish(world)
    except Exception as error:  # whatever a machine raises is a finding
        return f"{type(error).__name__}: {error}"
    return None


def explain(path: Path) -> list[str]:
    """One line for each move, up to the violation."""
    world = World(path.shape)
    lines = []
    try:
        for move in path.moves:
            _check_if_quiet(world, move)
            if is_possible(world, move):
                lines.append(describe(world, move))
                make(world, move)
        lines.append("and so on, to the end")
        _finish(world)
    except Exception as error:
        lines.append(f"!!! {type(error).__name__}: {error}")
    return lines


def path_of(seed: int) -> Path | None:
    """The moves of a seed that fails; None if it does not, or not without its clock."""
    drawn = Seed(seed, keeps_path=True)
    assert drawn.path is not None
    try:
        drawn.run()
    except Exception as error:
        path = Path(violation=f"{type(error).__name__}: {error}", shape=drawn.mix.shape, moves=drawn.path)
        return path if _is_same(replay(path), path.violation) else None
    return None


def shorten(path: Path) -> Path:
    """Leave out what the violation does not need: halves first, then ever smaller parts."""
    moves, replays = path.moves, 0
    size = len(moves) // 2
    while size and replays < REPLAYS_MAX:
        at, was = 0, len(moves)
        while at < len(moves) and replays < REPLAYS_MAX:
            fewer = moves[:at] + moves[at + size :]
            replays += 1
            if _is_same(replay(Path(violation="", shape=path.shape, moves=fewer)), path.violation):
                moves = fewer
            else:
                at += size
        if size == 1 and len(moves) == was:
            break
        size = max(size // 2, 1)
    shorter = Path(violation="", shape=path.shape, moves=moves)
    return Path(violation=replay(shorter) or "", shape=path.shape, moves=moves)


def condense(path: Path) -> Path:
    """The same path, with ("go", n) for n moves in plain order: what is left to read is what matters."""
    world = World(path.shape)
    moves: list[Move] = []
    try:
        for move in path.moves:
            if not is_possible(world, move):
                continue
            is_plain = next_moves(world)[:1] == [move]
            if is_plain and moves and moves[-1][0] == "go":
                moves[-1] = ("go", moves[-1][1] + 1)
            else:
                moves.append(("go", 1) if is_plain else move)
            make(world, move)
    except Exception:  # the violation itself; a step that goes on after it would be one too many
        pass
    shorter = Path(violation=path.violation, shape=path.shape, moves=moves)
    return shorter if _is_same(replay(shorter), path.violation) else path


def to_line(path: Path) -> str:
    """`path` as one line of JSON."""
    kept = _Kept(bug=path.bug, violation=path.violation, shape=path.shape, moves=list(map(list, path.moves)))
    return msgspec.json.encode(kept).decode()


def from_line(line: str) -> Path:
    """What `to_line` gave."""
    kept = msgspec.json.decode(line, type=_Kept)
    moves = [_move(*move) for move in kept.moves]
    return Path(bug=kept.bug, violation=kept.violation, shape=kept.shape, moves=moves)


def _move(kind: str, *args: Any) -> Move:
    if kind == "arrive":
        prompt, params, *more = args
        tenants = [msgspec.convert(tenant, Tenant) for tenant in more[1:2]]
        counts = [tuple(one) for one in more[2:]]
        return kind, prompt, msgspec.convert(params, SamplingParams, str_keys=True), *more[:1], *tenants, *counts
    if kind == "fail_step":
        return kind, Fault(args[0]), args[1]
    if kind == "cancel":
        return kind, args[0], Cause(args[1])
    return kind, *(tuple(arg) if isinstance(arg, list) else arg for arg in args)


def _check_if_quiet(world: World, move: Move) -> None:
    if move[0] == "wait" and not next_moves(world) and not world.jobs:
        world.checks.quiet()


def _finish(world: World) -> None:
    """No more faults: what the machine room can do, then what can be read, then what is due."""
    for _ in range(MOVES_MAX):
        if found := next_moves(world):
            make(world, found[0])
        elif news := world.news():
            make(world, ("read", news[0]))
        elif world.processes is not None and world.processes.is_hung:
            make(world, ("give_up",) if world.is_stopped else ("overdue",))
        elif world.timers:
            world.checks.quiet()
            make(world, ("fire_timer", next(iter(world.timers))))
        elif world.processes is not None and world.processes.timers:
            event = world.processes.timers[0]
            make(world, ("roster_timer", type(event).__name__))
        elif world.late:
            make(world, ("come_late", 0))
        elif world.is_draining and not world.is_stopped:
            world.checks.drained()
            make(world, ("stop", None))
        else:
            world.checks.end()
            return
    raise AssertionError(f"{MOVES_MAX} moves did not end it: the engine is {world.engine.state}")


def _is_same(found: str | None, wanted: str) -> bool:
    """Numbers may differ in two reports of one fault."""
    return found is not None and re.sub(r"[^A-Za-z]+", " ", found)[:80] == re.sub(r"[^A-Za-z]+", " ", wanted)[:80]
