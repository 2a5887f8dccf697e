"""Many routers, each with clients, faults and an order of moves of its own, all drawn from one seed."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec

from novainfer.fsm.models.model import LEAVING, Patience
from novainfer.fsm.models.router import RouterState
from novainfer.fsm.simulation.explore.coverage import RowId
from novainfer.fsm.simulation.models.world import Move, RoutedWorld, Rows, Shape, finish, moves

MOVES_MAX = 320  # of clients, engines and time, before everything must end


class RoutedReport(msgspec.Struct, kw_only=True):
    """What many seeds came to."""

    seeds: int = 0
    moves: int = 0
    requests: int = 0
    granted: int = 0
    refusals: Counter[str] = msgspec.field(default_factory=Counter)
    rows: Counter[RowId] = msgspec.field(default_factory=Counter)
    violations: dict[int, str] = {}


def run_seed(seed: int, report: RoutedReport) -> None:
    """One world, to its end; what is wrong goes into `report`."""
    random = Random(seed)
    world = RoutedWorld(_shape(random))
    rows = Rows()
    rows.watch(world)
    chances = _chances(random)
    try:
        for _ in range(random.randrange(1, MOVES_MAX)):
            found = _next(world, random, chances)
            weights = [chances.get(move[0], 1.0) for move in found]
            world.make(random.choices(found, weights)[0])
            report.moves += 1
        finish(world)
    except Exception as error:  # whatever a machine raises is a finding
        report.violations[seed] = f"{type(error).__name__}: {error}"
    report.seeds += 1
    report.requests += world.num_clients
    report.granted += world.num_granted
    report.refusals += world.refusals
    report.rows += rows.taken


def run_routers(seeds: range) -> RoutedReport:
    """All of these seeds."""
    report = RoutedReport()
    for seed in seeds:
        run_seed(seed, report)
    return report


def _shape(random: Random) -> Shape:
    models = tuple("abcd"[: random.randint(1, 4)])
    return Shape(
        models=models,
        max_loaded=random.randint(1, len(models)),
        max_waiting=random.randint(1, 4),
        patience=Patience(wait_s=random.choice([0.3, 1.0, 10.0]), idle_s=random.choice([None, 3.0, 30.0])),
    )


def _chances(random: Random) -> dict[str, float]:
    """How likely each kind of move is beside others; most worlds are free of most faults."""
    often = {"ask": [0.3, 1.0, 3.0], "gone": [0.03, 0.1, 1.0], "fire": [0.2, 0.5, 2.0]}
    rare = {"flaw": 0.5, "fail": 0.7, "die": 0.5, "unload": 0.3, "drain": 0.01, "hand": 0.3, "echo": 2.0}
    chances = {kind: random.choice(values) for kind, values in often.items()}
    return chances | {kind: chance if random.random() < 0.4 else 0.0 for kind, chance in rare.items()}


def _next(world: RoutedWorld, random: Random, chances: dict[str, float]) -> list[Move]:
    """What may happen next; of the timers only the one that is due first."""
    found = moves(world)
    model = random.choice(world.shape.models)
    by_hand = random.random() < chances["hand"]
    found.append(("ask", model, random.choice([0.5, 5.0, 60.0, 60.0]), by_hand))
    found += [("gone", one) for one in (*world.granted, *world.asked)]
    found += [("flaw", at) for at in range(len(world.looks)) if chances["flaw"]]
    found += [("fail", at) for at, engine in enumerate(world.engines) if engine.state == "COMING" and chances["fail"]]
    found += [("die", at) for at, engine in enumerate(world.engines) if engine.state == "UP" and chances["die"]]
    if world.timers:
        found.append(("fire", min(world.timers, key=world.timers.__getitem__)))
    if chances["unload"]:
        found.append(("unload", model, random.choice([0.0, 2.0])))
    if chances["echo"] and world.heard:
        found.append(("echo", random.randrange(len(world.heard))))
        leaving = [one.name for one in world.router.models.values() if one.state in LEAVING]  # for a moment only
        said = {(one.model, type(one)): at for at, one in enumerate(world.heard) if one.model in leaving}
        found += [("echo", at) for at in said.values()]
    if chances["drain"]:
        found.append(("drain", random.choice([0.0, 2.0, 9.0] if world.router.state is RouterState.OPEN else [0.0])))
    return found
