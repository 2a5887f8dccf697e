import pytest

from novainfer.fsm.simulation.bugs import MUTANTS
from novainfer.fsm.simulation.coverage import ARGUED, MACHINES
from novainfer.fsm.simulation.mutants import planted, row_changed
from novainfer.fsm.simulation.report import run_seeds

pytestmark = pytest.mark.timeout(1800)  # a busy machine may take many times what a quiet one does
SEEDS_QUICK_MAX = 1000  # what needs more is left to `make test-long`


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, id=m.name, marks=[pytest.mark.long] if m.seeds > SEEDS_QUICK_MAX else []) for m in MUTANTS],
)
def test_the_swarm_finds_the_planted_bug(mutant):
    with planted(mutant):
        report = run_seeds(range(mutant.seeds), stop_at_first=True)
    assert report.violations, f"{mutant.seeds} seeds did not find that {mutant.name}"


def test_a_planted_bug_is_gone_afterwards():
    with planted(MUTANTS[0]):
        assert run_seeds(range(5), stop_at_first=True).violations
    assert run_seeds(range(5)).violations == []


@pytest.mark.long
def test_the_swarm_finds_nine_of_ten_rows_that_are_wrong():
    survived = []
    total = 0
    for machine in MACHINES:
        for (state, event), row in list(machine.TABLE.items()):
            if row.impossible or (machine.__name__, str(state), event.__name__) in ARGUED:
                continue
            total += 1
            with row_changed(machine, state, event):
                if not run_seeds(range(600), stop_at_first=True).violations:
                    survived.append((machine.__name__, str(state), event.__name__))
    assert len(survived) <= total / 10, survived  # mostly rows so rare that 600 seeds do not take them
