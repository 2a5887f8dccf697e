"""The router of several models: under seeds, in every order of events of small worlds, and with bugs planted in it."""

from collections import Counter
from functools import cache

import pytest

from novainfer.fsm.machines import OF_MODELS
from novainfer.fsm.simulation.explore.coverage import coverage
from novainfer.fsm.simulation.models.bugs import ROUTER_MUTANTS, hunt_routed
from novainfer.fsm.simulation.models.explore import SMALL_ROUTED, Explored, SmallRouted, explore_routed
from novainfer.fsm.simulation.models.swarm import RoutedReport, run_routers

SEEDS = range(3000)


@cache
def swarm() -> RoutedReport:
    return run_routers(SEEDS)


@cache
def explored(small: SmallRouted) -> Explored:
    return explore_routed(small)


def test_seeds_full_of_failures_find_nothing():
    report = swarm()
    assert report.violations == {}
    assert report.granted > report.seeds
    assert set(report.refusals) == {"failed", "full", "timeout", "unloaded", "draining"}


@pytest.mark.parametrize("small", SMALL_ROUTED, ids=lambda small: small.name)
def test_a_small_world_is_explored_completely(small: SmallRouted):
    found = explored(small)
    assert (found.violation, found.path) == (None, [])
    assert found.complete
    assert found.states > 100


def test_every_row_that_can_be_taken_is_taken():
    taken = sum((explored(small).rows for small in SMALL_ROUTED), Counter(swarm().rows))
    missing = [row for one in coverage(taken, OF_MODELS) for row in one.missing]
    assert missing == []


@pytest.mark.parametrize("mutant", ROUTER_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant):
    assert hunt_routed(mutant) is not None
