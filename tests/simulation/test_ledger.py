"""What the account of blocks and slots finds alone: without the check of the scheduler, and that of the pool."""

import pytest

from novainfer.fsm.kv.blocks import BlockPool
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import planted
from novainfer.fsm.simulation.bugs.planted import MUTANTS
from novainfer.fsm.simulation.checks.checks import Checks
from novainfer.fsm.simulation.checks.ledger import Ledger
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.swarm.swarm import Seed

pytestmark = pytest.mark.timeout(600)
SEEDS = 60
WRONG = [
    "a rollback keeps the slot",
    "a rollback keeps the blocks of the cancelled",
    "a cancel frees blocks of the step on the device",
    "blocks of the cancelled stay when their step is done",
    "blocks are released twice",
    "a slot is not given back",
]


class Found(Exception):
    """By the ledger."""


@pytest.fixture
def ledger_alone(monkeypatch):
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    monkeypatch.setattr(BlockPool, "check", lambda self, owned: None)
    monkeypatch.setattr(Checks, "_look_closely", lambda self, event: None)
    after = Ledger.after

    def watched(self, event, effects):
        try:
            after(self, event, effects)
        except Violation as violation:
            raise Found from violation

    monkeypatch.setattr(Ledger, "after", watched)


def found_by_ledger() -> bool:
    for seed in range(SEEDS):
        try:
            Seed(seed).run()
        except Found:
            return True
        except Exception:  # another check was faster in this seed
            continue
    return False


@pytest.mark.parametrize("name", WRONG)
def test_the_ledger_finds_a_wrong_owner_without_the_schedulers_own_check(name, ledger_alone):
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    with planted(mutant):
        assert found_by_ledger()


def test_the_ledger_has_nothing_to_say_of_a_right_scheduler(ledger_alone):
    for seed in range(6):
        Seed(seed).run()
