import json

from click.testing import CliRunner

from novainfer.fsm.simulation.bugs import MUTANTS
from novainfer.fsm.simulation.mutants import planted
from novainfer.fsm.simulation.report import run_seeds
from novainfer.server.simulate import simulate


def test_the_last_line_is_one_json_object():
    result = CliRunner().invoke(simulate, ["--seeds", "20", "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["violations"] == []
    assert said["seeds"] == 20
    assert said["simulated_s"] > 1000
    assert {"requests", "faults", "trace_hash", "moves", "tokens", "rows_missing", "cpu_s"} <= said.keys()


def test_a_failing_seed_is_printed_with_the_command_that_reproduces_it():
    with planted(MUTANTS[0]):
        failing = run_seeds(range(50), stop_at_first=True).failing_seeds[0]
        result = CliRunner().invoke(simulate, ["--seed", str(failing)])
    assert result.exit_code == 1
    assert f"reproduce it with: novainfer simulate --seed {failing}" in result.stdout


def test_the_same_seeds_give_the_same_hash_from_any_starting_point():
    def trace(*args: str) -> str:
        return json.loads(CliRunner().invoke(simulate, [*args, "--json"]).stdout.splitlines()[-1])["trace_hash"]

    assert trace("--seed", "7") == trace("--first", "7", "--seeds", "1")
    assert trace("--seed", "7") != trace("--seed", "8")
