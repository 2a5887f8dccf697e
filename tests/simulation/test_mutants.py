import pytest

from novainfer.fsm.simulation.mutants import MUTANTS, planted
from novainfer.fsm.simulation.swarm import run_seeds

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
