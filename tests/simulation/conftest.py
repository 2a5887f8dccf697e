import pytest

from novainfer.fsm.simulation.swarm.report import Report, run_seeds

NUM_SEEDS = 1000  # about twenty seconds of one core


@pytest.fixture(scope="session")
def sample() -> Report:
    """The swarm's first seeds, run once for all tests that look at them."""
    return run_seeds(range(NUM_SEEDS))
