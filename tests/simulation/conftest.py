import pytest

from novainfer.fsm.simulation.swarm.report import Report, run_seeds

NUM_SEEDS = 1000  # two to five minutes of one core; with fewer, not every kind of fault comes often enough


@pytest.fixture(scope="session")
def sample() -> Report:
    """The swarm's first seeds, run once for all tests that look at them."""
    return run_seeds(range(NUM_SEEDS))
