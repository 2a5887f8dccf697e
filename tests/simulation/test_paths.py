from pathlib import Path as FilePath

import pytest

from novainfer.fsm.simulation.bugs.mutants import planted
from novainfer.fsm.simulation.bugs.planted import MUTANTS
from novainfer.fsm.simulation.swarm.report import run_seeds
from novainfer.fsm.simulation.swarm.swarm import Seed
from novainfer.fsm.simulation.world.moves import is_possible, make
from novainfer.fsm.simulation.world.paths import Path, condense, explain, from_line, path_of, replay, shorten, to_line
from novainfer.fsm.simulation.world.world import World

LINES = FilePath(__file__).with_name("regressions.jsonl").read_text().splitlines()
PATHS = [pytest.param(from_line(line), id=f"{at}: {from_line(line).bug or 'fixed'}") for at, line in enumerate(LINES)]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_once_led_to_a_violation_leads_to_none(path):
    assert replay(path) is None, "\n".join(explain(path))


@pytest.mark.parametrize("path", [path for path in PATHS if path.values[0].bug])
def test_a_path_still_leads_to_its_violation_when_the_bug_is_planted_again(path):
    (mutant,) = [m for m in MUTANTS if m.name == path.bug]
    with planted(mutant):
        assert replay(path) is not None


def test_a_seed_that_fails_gives_a_path_that_can_be_cut_kept_and_read():
    (mutant,) = [m for m in MUTANTS if m.name == "prefixes outlive the worker that held them"]
    with planted(mutant):
        seeds = run_seeds(range(60)).failing_seeds
        paths = [path for path in map(path_of, seeds) if path is not None]
        path = min(paths, key=lambda path: len(path.moves))
        shorter = condense(shorten(path))
        assert len(shorter.moves) < len(path.moves) / 2
        assert replay(from_line(to_line(shorter))) == shorter.violation
        assert explain(shorter)[-1].startswith("!!!")
    assert replay(shorter) is None


def test_a_seed_that_passes_gives_no_path():
    assert path_of(0) is None


def test_a_spare_that_hangs_does_so_again_when_the_path_is_made_again():
    drawn = next(d for d in (Seed(seed, keeps_path=True) for seed in range(300)) if hangs_a_spare(d))
    assert drawn.path is not None
    world = World(drawn.mix.shape)
    for move in drawn.path:
        make(world, move)
        if move[0] == "hang_spare":
            break
    assert not is_possible(world, ("spare_job", move[1]))
    assert replay(Path(violation="", shape=drawn.mix.shape, moves=drawn.path)) is None


def hangs_a_spare(drawn: Seed) -> bool:
    if not drawn.mix.shape.warm_spare:
        return False
    drawn.run()
    return bool(drawn.world.counts["spare hangs"])
