from __future__ import annotations

from collections import Counter

import pytest

from novainfer.fsm.simulation.explore.coverage import ARGUED, RowId, coverage
from novainfer.fsm.simulation.explore.explore import explore
from novainfer.fsm.simulation.explore.small import SMALL_WORLDS
from novainfer.fsm.simulation.swarm.report import run_seeds

SEEDS_MAX = 6000  # the rarest row that no small world has needs about two thousand
SEEDS_AT_ONCE = 250


def missing(rows: Counter[RowId]) -> set[RowId]:
    return {row for part in coverage(rows) for row in part.missing} - set(ARGUED)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_small_worlds_and_seeds_take_every_row_that_is_not_argued_to_be_out_of_reach():
    rows: Counter[RowId] = Counter()
    for small in SMALL_WORLDS:
        rows.update(explore(small).rows)
    for first in range(0, SEEDS_MAX, SEEDS_AT_ONCE):
        if not missing(rows):
            break
        rows.update(run_seeds(range(first, first + SEEDS_AT_ONCE)).rows)
    assert missing(rows) == set()


def test_a_row_that_is_argued_to_be_out_of_reach_is_in_a_table_and_could_be_taken():
    possible = {row for part in coverage(Counter()) for row in part.missing}
    assert set(ARGUED) <= possible
