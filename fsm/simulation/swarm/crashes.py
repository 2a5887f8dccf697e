"""Worlds whose processes are lost again and again, about as often as the limits of the worker and of the roster allow.

Between two losses nothing is computed, mostly: a good step would give the worker its whole restart budget back.
"""

from __future__ import annotations

import random

import msgspec

from novainfer.fsm.simulation.world.shape import Shape

SPARES_LOST, SPARES_WITHIN_S = 3, 600.0  # so many are too many
AT_ONCE_S = 1.0  # the second loss comes while what the first one began is under way


class Plague(msgspec.Struct, frozen=True):
    """What is lost in one world: several of `kinds`, so many times each; one thing alone, or the budget hides it."""

    kinds: tuple[str, ...]
    times: tuple[int, int]  # at least and at most
    has_spare: bool = True
    job_odds: float = 0.0  # that a job of the worker fails
    spare_odds: float = 0.0  # that one of a spare does
    step_odds: float = 0.0  # that a step does; clients come one by one then, as often as processes are lost
    jobs_s: tuple[float, ...] = (0.02, 0.1, 0.5, 1.0)  # how long jobs take, as a share of the longest
    window_s: tuple[float, ...] = (10.0, 60.0)  # of the restart budget


PLAGUES = (
    Plague(("spares", "spares", "once"), (3, 5)),
    Plague(("twice",), (4, 8), jobs_s=(0.02, 0.1)),
    Plague(("apart",), (2, 3), spare_odds=0.2, jobs_s=(0.02, 0.1)),
    Plague(("in a row", "both in a row"), (3, 6)),
    Plague(("in a row",), (2, 4), has_spare=False, step_odds=0.95),
    Plague(("once",), (6, 10), has_spare=False, job_odds=0.4, jobs_s=(1.0,), window_s=(10.0,)),
)


def crashing_shape(rng: random.Random, plague: Plague, shape: Shape) -> Shape:
    """`shape` with a restart budget that is soon spent."""
    return msgspec.structs.replace(
        shape,
        max_restarts=rng.choice([2, 2, 5]),
        restart_window_s=rng.choice(plague.window_s),
        processes=plague.has_spare or rng.random() < 0.5,
        warm_spare=plague.has_spare,
        kv_is_lazy=shape.kv_is_lazy or plague.spare_odds > 0,
        shows_death=shape.shows_death or plague.spare_odds > 0,
    )


def draw_crashes(
    rng: random.Random, plague: Plague, shape: Shape, from_s: float, until_s: float
) -> list[tuple[float, str]]:
    """When which move of `faults` is made: "die", "die_spare" or "die_both"."""
    crashes: list[tuple[float, str]] = []
    for _ in range(rng.randint(*plague.times)):
        crashes += _crashes(rng, shape, rng.choice(plague.kinds), rng.uniform(from_s, until_s))
    return crashes


def _crashes(rng: random.Random, shape: Shape, kind: str, at_s: float) -> list[tuple[float, str]]:
    """Losses of one kind, one after the other."""
    if kind in ("once", "twice"):
        return [(at_s, "die"), (at_s + AT_ONCE_S * rng.random(), "die")][: 1 + (kind == "twice")]
    what, num, between_s = "die", shape.max_restarts + 2, shape.restart_window_s / shape.max_restarts
    if kind == "spares":
        what, num, between_s = "die_spare", 8, SPARES_WITHIN_S / SPARES_LOST
        between_s *= rng.uniform(1.0, 2.5)
    elif kind == "apart":
        num, between_s = 8, 2 * shape.restart_window_s
    else:
        what = "die" if kind == "in a row" else "die_both"
        between_s *= rng.uniform(0.5, 1.2)
    times = [at_s]
    while len(times) < num:
        times.append(times[-1] + between_s * rng.uniform(0.6, 1.4))
    return [(time_s, what) for time_s in times]
