"""Every order of events in a small world: breadth first, each state once; the first counterexample is a shortest one.

What only a stream and its reader see commutes with everything else, so it is done at once; reads of a slow reader, and
all other moves, are tried in every order. (The shell, too, hands outputs to the streams by a call, not by a mailbox.)
Clients, cancels and faults are moves with a budget. Wherever the machine room has nothing left to do, whatever the
budgets still allow, `Checks.end` must hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from novainfer.fsm.messages.events import Cause, Departed, Fault, JobDone, Run, Settled
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.tenant import Tenant
from novainfer.fsm.simulation.explore.snapshot import Saved, has_changed, load, save
from novainfer.fsm.simulation.world import faults
from novainfer.fsm.simulation.world.moves import Move, describe, is_possible, make, next_moves
from novainfer.fsm.simulation.world.process import Processes
from novainfer.fsm.simulation.world.process import next_moves as next_of_processes
from novainfer.fsm.simulation.world.shape import Shape
from novainfer.fsm.simulation.world.world import TO_WORKER, Rows, World

EVERYBODY = ("engine", "gate", "streams", "worker")
STATES_MAX = 400_000  # a world with more is not small


class SmallWorld(msgspec.Struct, frozen=True, kw_only=True):
    """What is explored: `clients` come one after the other, at any moment; `budget` says how often what may happen."""

    name: str
    shape: Shape
    clients: Sequence[tuple[str | list[int], SamplingParams] | tuple[list[int], SamplingParams, int, Tenant]]
    budget: dict[str, int]
    from_start: bool = False  # also explore how the worker comes up
    slow_readers: frozenset[int] = frozenset()  # streams whose reads are moves of their own
    opening: tuple[Fault, ...] = ()  # how the first steps of the first client fail, before anything else is tried
    prelude: tuple[Move, ...] = ()  # what happens before that, one after the other
    wishes: tuple[tuple[int | None, str | None], ...] = ()  # blocks and precisions that the owner may want


class Exploration(msgspec.Struct, kw_only=True):
    """What was found. `complete`: every state was visited. `path` leads to the violation, if there is one."""

    name: str
    states: int
    edges: int
    depth: int
    complete: bool
    rows: dict[tuple[str, str, str], int]
    violation: str | None = None
    path: list[str] = []


def explore(small: SmallWorld, *, states_max: int = STATES_MAX) -> Exploration:
    """Visit every state of `small`, or stop at the first violation, or at `states_max`."""
    first = World(small.shape)
    first.budget = dict(small.budget)
    _come_up(first, small)
    rows: Rows = first.taken
    parents: list[tuple[int, Move]] = [(-1, ())]  # of each state: the state it was first reached from, and how
    begin = save(first)
    seen = {begin.key}
    frontier: deque[tuple[int, int, Saved]] = deque([(0, 0, begin)])
    edges = depth = 0
    while frontier:
        at, depth, saved = frontier.popleft()
        world = load(saved, first)
        for number, move in enumerate(moves(world, small)):
            edges += 1
            if number:  # the first one may have the world itself
                world = load(saved, first)
            try:
                _make(world, move)
                _settle(world, small)
                _check_rest(world)
            except Exception as error:  # whatever a machine raises is a finding
                path = _path(parents, at, move, small)
                return Exploration(
                    name=small.name,
                    states=len(seen),
                    edges=edges,
                    depth=depth + 1,
                    complete=False,
                    rows=dict(rows),
                    violation=f"{type(error).__name__}: {error}",
                    path=path,
                )
            found = save(world)
            if found.key not in seen:
                seen.add(found.key)
                parents.append((at, move))
                frontier.append((len(parents) - 1, depth + 1, found))
        if len(seen) > states_max:
            break
    return Exploration(
        name=small.name, states=len(seen), edges=edges, depth=depth, complete=not frontier, rows=dict(rows)
    )


def _come_up(world: World, small: SmallWorld) -> None:
    """To where the world begins: a worker that is ready, mostly."""
    while not small.from_start and (found := next_moves(world)):
        make(world, found[0])
    for move in small.prelude:
        make(world, move)
    if small.opening:
        make(world, ("arrive", *small.clients[0]))
    for fault in small.opening:
        while not (world.jobs and isinstance(world.jobs[0], Run)):
            make(world, next_moves(world)[0])
        make(world, ("fail_step", fault, True))
    _settle(world, small)


def _check_rest(world: World) -> None:
    """What must hold when only time can pass, and when not even that."""
    if next_moves(world):
        return
    world.checks.quiet()
    if not world.news() and not world.timers and not (world.processes and world.processes.timers):
        world.checks.end()


def moves(world: World, small: SmallWorld) -> list[Move]:
    """Everything that may happen next in `world`: a timer fires when nothing else can be done, or early."""
    found = next_moves(world)
    is_at_rest = not found
    budget = world.budget
    job = world.jobs[0] if world.jobs else None
    if isinstance(job, Run):
        for fault in (Fault.OOM, Fault.EXCEPTION):
            if budget.get(fault):
                found.append(("fail_step", fault, True))
        if budget.get("unsend"):
            found.append(("unsend",))
        if budget.get("fail_launch") and world.launchable is not None:
            found.append(("fail_launch", Fault.OOM))
        if budget.get("unlaunched"):
            found.append(("fail_step", Fault.EXCEPTION, False))
    elif job is not None and budget.get("fail_job"):
        found.append(("fail_job",))
    if budget.get("fail_encode"):
        found += [("fail_encode", stream_id) for stream_id in world.encodings]
    found += [(kind,) for kind in ("die", "overdue") if budget.get(kind) and world.has_begun]
    if len(world.clients) < len(small.clients):
        found.append(("arrive", *small.clients[len(world.clients)]))
    if budget.get("cancel"):
        found += [("cancel", s, Cause.CLIENT) for s, client in world.clients.items() if client.was_let_in]
    if budget.get("duplicate"):
        found += [("duplicate", link) for link in faults.repeatable(world)]
    if budget.get("contradict") and isinstance((world.links.get(TO_WORKER) or [None])[0], JobDone):
        found.append(("contradict",))
    found += [("come_late", at) for at in range(len(world.late))]
    if is_at_rest:
        found += [("fire_timer", timer) for timer in world.timers]
    elif budget.get("fire_early"):
        found += [("fire_early", timer) for timer in world.timers]
    found += [(kind,) for kind in ("cancel_all", "drain") if budget.get(kind)]
    if budget.get("end_session"):
        found += [("end_session", *key) for key in world.scheduler.sessions]
    if budget.get("reconfigure") and is_possible(world, ("reconfigure",)):
        found += [("reconfigure", *wish) for wish in small.wishes]
    if budget.get("stop"):
        found.append(("stop", "injected"))
    if budget.get("stop_all"):
        found.append(("stop", "injected", EVERYBODY))
    if world.shape.processes and world.processes is not None:
        found += _of_processes(world.processes, budget, is_at_rest=is_at_rest)
    if is_at_rest or budget.get("read", 1):  # once the budget is spent, a slow reader comes when all else rests
        found += [("read", stream_id) for stream_id in world.news()]
    return found


def _of_processes(processes: Processes, budget: dict[str, int], *, is_at_rest: bool) -> list[Move]:
    """What may happen to the processes of a world, beside what they do."""
    found: list[Move] = [
        (kind,) for kind in ("die_spare", "die_both", "freeze_spare") if budget.get(kind) and processes.spare >= 0
    ]
    if budget.get("spare_overdue") and processes.spare >= 0:
        found.append(("spare_overdue",))
    if budget.get("fail_spare_job"):
        found += [("fail_spare_job", *move[1:]) for move in next_of_processes(processes) if move[0] == "spare_job"]
    if budget.get("echo"):
        found += [("echo", kind) for kind in processes.said]
    if budget.get("give_up") and processes.world.is_stopped:
        found.append(("give_up",))
    if is_at_rest or budget.get("fire_early"):
        found += [("roster_timer", type(event).__name__) for event in processes.timers]
    return found


def _make(world: World, move: Move) -> None:
    kind = move[0]
    if kind == "fail_step":
        kind = move[1] if move[2] else "unlaunched"
    elif kind == "stop" and len(move) == 3:
        kind = "stop_all"
    if world.budget.get(kind):
        world.budget[kind] -= 1
    make(world, move)


def _settle(world: World, small: SmallWorld) -> None:
    """Do at once what commutes with all else: deliveries to streams and clients, reads, credits going back."""
    again = True
    while again:
        again = False
        for link in list(world.busy):
            queue = world.links[link]
            while queue and (link[1] in ("client", "streams", "incidents") or isinstance(queue[0], Departed | Settled)):
                world.deliver(link)
                again = True
        for stream_id in world.news() if has_changed(world, "streams") else ():
            if stream_id not in small.slow_readers:
                world.read(stream_id)
                again = True


def _path(parents: list[tuple[int, Move]], at: int, last: Move, small: SmallWorld) -> list[str]:
    """The moves that lead to a violation, one line each."""
    moves_back = [last]
    while at > 0:
        at, move = parents[at]
        moves_back.append(move)
    world = World(small.shape)
    world.budget = dict(small.budget)
    _come_up(world, small)
    lines = []
    for move in reversed(moves_back):
        lines.append(describe(world, move))
        try:
            _make(world, move)
            _settle(world, small)
        except Exception as error:
            lines.append(f"!!! {type(error).__name__}: {error}")
    return lines
