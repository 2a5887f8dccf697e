import pytest

from novainfer.fsm.simulation.bugs.mutants import planted
from novainfer.fsm.simulation.bugs.planted import MUTANTS
from novainfer.fsm.simulation.checks.oracle import is_refused
from novainfer.fsm.simulation.explore.explore import explore
from novainfer.fsm.simulation.explore.small import SMALL_WORLDS
from novainfer.fsm.simulation.explore.snapshot import fingerprint, load, save
from novainfer.fsm.simulation.swarm.swarm import Seed
from novainfer.fsm.simulation.world.moves import make, next_moves
from novainfer.fsm.simulation.world.world import World

pytestmark = pytest.mark.timeout(1800)  # a busy machine may take many times what a quiet one does
QUICK = {"coming up, draining and stopping"}


@pytest.mark.parametrize(
    "small",
    [
        pytest.param(w, id=w.name, marks=[pytest.mark.slow if w.name in QUICK else pytest.mark.long])
        for w in SMALL_WORLDS
    ],
)
def test_every_order_of_events_in_a_small_world_keeps_every_rule(small):
    found = explore(small)
    assert found.violation is None, "\n".join(found.path)
    assert found.complete
    assert found.states > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "bug"),
    [
        ("readers that stall", "a stream forgets to resume"),
        ("readers that stall", "a wake-up is lost when work comes while the scheduler plans"),
        ("cancelled before it begins", "a cancel that overtakes its Arrive is lost"),
        ("completions that come twice, at any time", "the worker takes a late StepDone for the current one"),
    ],
)
def test_a_planted_bug_gives_a_shortest_counterexample(world, bug):
    (small,) = [w for w in SMALL_WORLDS if w.name == world]
    (mutant,) = [m for m in MUTANTS if m.name == bug]
    with planted(mutant):
        found = explore(small, states_max=20_000)
    assert found.violation is not None
    assert len(found.path) == found.depth + ("!!!" in found.path[-1])


def test_no_small_world_is_about_requests_that_are_refused():
    for small in SMALL_WORLDS:
        for prompt, params, *_ in small.clients:
            assert not is_refused(len(prompt), params, small.shape.context_len), small.name


def test_a_world_goes_on_from_a_snapshot_as_it_would_have_without():
    def run(world: World, moves: int) -> tuple[object, ...]:
        for _ in range(moves):
            if found := next_moves(world):
                make(world, found[len(found) // 2])
        return fingerprint(world)

    seed = Seed(2)
    seed.world._trace = seed.world._driver = None  # neither a hash nor a clock can be copied
    for _ in range(12):
        seed._arrive()
        run(seed.world, 12)
        copy = load(save(seed.world), seed.world)
        assert fingerprint(copy) == fingerprint(seed.world)
        assert run(load(save(seed.world), seed.world), 30) == run(copy, 30)


def test_a_fingerprint_tells_worlds_apart_that_differ_in_one_token():
    world = World(SMALL_WORLDS[0].shape)
    before = fingerprint(world)
    assert world.device is not None
    world.device._kv[0][0] = 7
    assert fingerprint(world) != before
