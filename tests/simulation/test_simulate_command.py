import json

from click.testing import CliRunner

import novainfer.server.cli.simulate as simulate_module
from novainfer.fsm.simulation.bugs.mutants import planted
from novainfer.fsm.simulation.bugs.planted import MUTANTS, SURVIVORS
from novainfer.fsm.simulation.explore.small import SMALL_WORLDS
from novainfer.fsm.simulation.swarm.report import run_seeds

simulate = simulate_module.simulate


def test_the_last_line_is_one_json_object():
    result = CliRunner().invoke(simulate, ["--seeds", "20", "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["violations"] == []
    assert said["seeds"] == 20
    assert said["simulated_s"] > 1000
    assert {"requests", "faults", "trace_hash", "moves", "tokens", "rows_missing", "cpu_s"} <= said.keys()


def test_rows_that_were_not_taken_are_counted_and_listed_when_asked_for():
    plain = CliRunner().invoke(simulate, ["--seeds", "2"]).stdout
    assert " rows were not taken: --rows lists them" in plain
    assert " x " not in plain
    listed = CliRunner().invoke(simulate, ["--seeds", "2", "--rows", "--json"]).stdout.splitlines()
    missing = json.loads(listed[-1])["rows_missing"]
    assert sum(" x " in line for line in listed) == len(missing) > 0
    assert f"{len(missing)} rows were not taken" in plain


def test_a_failing_seed_is_printed_with_the_command_that_reproduces_it():
    with planted(MUTANTS[0]):
        failing = run_seeds(range(50), stop_at_first=True).failing_seeds[0]
        result = CliRunner().invoke(simulate, ["--seed", str(failing)])
    assert result.exit_code == 1
    assert f"reproduce it with: novainfer simulate --seed {failing}" in result.stdout
    assert "append this line to tests/simulation/regressions.jsonl" in result.stdout


def test_the_same_seeds_give_the_same_hash_from_any_starting_point():
    def trace(*args: str) -> str:
        return json.loads(CliRunner().invoke(simulate, [*args, "--json"]).stdout.splitlines()[-1])["trace_hash"]

    assert trace("--seed", "7") == trace("--first", "7", "--seeds", "1")
    assert trace("--seed", "7") != trace("--seed", "8")


def test_planted_bugs_are_hunted_and_those_that_survive_are_named(monkeypatch):
    found, survivor = MUTANTS[0], next(m for m in MUTANTS if m.name in SURVIVORS)
    monkeypatch.setattr(simulate_module, "MUTANTS", [found, survivor])
    monkeypatch.setattr("novainfer.fsm.simulation.bugs.mutants.SEEDS", 20)
    monkeypatch.setattr("novainfer.fsm.simulation.bugs.mutants.STATES_MAX", 10)
    result = CliRunner().invoke(simulate, ["--mutants", "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout.splitlines()[-1])
    assert (said["planted"], said["found"], said["survivors"]) == (2, 1, [survivor.name])
    assert SURVIVORS[survivor.name] in result.stdout


def test_a_survivor_that_nobody_has_argued_is_a_failure(monkeypatch):
    survivor = next(m for m in MUTANTS if m.name in SURVIVORS)
    monkeypatch.setattr(simulate_module, "MUTANTS", [survivor])
    monkeypatch.setattr(simulate_module, "SURVIVORS", {})
    monkeypatch.setattr("novainfer.fsm.simulation.bugs.mutants.SEEDS", 1)
    monkeypatch.setattr("novainfer.fsm.simulation.bugs.mutants.STATES_MAX", 1)
    assert CliRunner().invoke(simulate, ["--mutants"]).exit_code == 1


def test_small_worlds_say_how_many_rows_of_the_tables_they_reach(monkeypatch):
    monkeypatch.setattr(
        simulate_module, "SMALL_WORLDS", [w for w in SMALL_WORLDS if w.name == "a switch of mode, and a stop"]
    )
    result = CliRunner().invoke(simulate, ["--exhaustive", "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["complete"]
    assert said["states"] < said["edges"]
    assert said["rows_reached"] + len(said["rows_missing"]) == said["rows_total"]


def test_a_small_world_is_left_after_so_many_states_as_asked_for(monkeypatch):
    monkeypatch.setattr(simulate_module, "SMALL_WORLDS", [w for w in SMALL_WORLDS if w.name == "readers that stall"])
    result = CliRunner().invoke(simulate, ["--exhaustive", "--states", "50", "--json"])
    assert result.exit_code == 0
    assert "NOT every state" in result.stdout
    said = json.loads(result.stdout.splitlines()[-1])
    assert not said["complete"]
    assert 50 < said["states"] < 100
    with planted(next(m for m in MUTANTS if m.name == "a stream forgets to resume")):
        result = CliRunner().invoke(simulate, ["--exhaustive", "--states", "2000"])
    assert result.exit_code == 1
    assert "stream 0 never ended" in result.stdout


def test_a_number_of_states_is_for_small_worlds_of_an_engine():
    for wrong in ([], ["--exhaustive", "--models"]):
        result = CliRunner().invoke(simulate, ["--states", "50", *wrong])
        assert result.exit_code == 2
        assert "--states is for --exhaustive without --models" in result.output


def test_the_router_of_several_models_has_worlds_of_its_own():
    result = CliRunner().invoke(simulate, ["--models", "--seeds", "20", "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout.splitlines()[-1])
    assert (said["seeds"], said["violations"]) == (20, [])
    assert set(said["rows"]) == {"Router", "Model"}
