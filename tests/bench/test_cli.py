"""`novainfer bench` from the command line: JSON last, one sentence for what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from novainfer.bench.cli import bench


def call(*arguments: str) -> Result:
    return CliRunner().invoke(bench, list(arguments))


def last_json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def test_control_separates_the_fixed_part_from_the_part_per_token() -> None:
    result = call("control", "--repeat", "1", "--steps", "20", "--batches", "2,8", "--json")
    found = last_json(result)
    assert found["benchmark"] == "control"
    assert set(found["batches"]) == {"2", "8"}
    two, eight = (found["batches"][batch]["loop_us_per_step"] for batch in ("2", "8"))
    assert found["us_per_token"] == pytest.approx((eight - two) / 6, rel=1e-3)
    assert found["us_per_step"] == pytest.approx(two - 2 * found["us_per_token"], rel=1e-2, abs=1e-2)
    assert found["machine"]["cores"] >= 1
    assert "loop CPU per token, us" in result.stdout


def test_recorder_sets_its_cost_against_a_step() -> None:
    found = last_json(
        call("recorder", "--repeat", "1", "--steps", "5", "--batches", "1,2", "--device-ms", "1", "--json")
    )
    assert set(found["batches"]) == {"1", "2"}
    assert all(row["wall_us"] > 0 for row in found["batches"].values())
    assert len(found["targets"]) == 2


@pytest.mark.slow
def test_fairness_times_one_key_alone_and_beside_another() -> None:
    options = ("--repeat", "1", "--requests", "2", "--open", "3", "--device-ms", "1", "--json")
    found = last_json(call("fairness", *options))
    assert found["errors"] == []
    assert found["rounds"][0]["other"]["answered"] >= 1
    assert found["ratio_p95"] == pytest.approx(
        found["ttft_ms"]["beside"]["p95"] / found["ttft_ms"]["alone"]["p95"], rel=0.01
    )
    assert len(found["targets"]) == 1


def test_control_over_a_device_in_a_process() -> None:
    found = last_json(
        call("control", "--repeat", "1", "--steps", "5", "--batches", "1,2", "--worker", "process", "--json")
    )
    assert found["worker"] == "process"
    assert found["batches"]["2"]["wall_us_per_step"] > 0


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_idle_notes_every_step_that_holds_all_requests(worker: str) -> None:
    options = ("--repeat", "1", "--steps", "20", "--requests", "3", "--device-ms", "2", "--worker", worker, "--json")
    found = last_json(call("idle", *options))
    assert found["worker"] == worker
    assert len(found["ways"]) == 2
    for row in found["ways"].values():
        assert row["steps"] >= 20
        assert row["step_ms"] >= 2
        assert 0 < row["idle_share"] < 1
        assert row["idle_us"] <= row["idle_us_p99"]
    assert list(last_json(call("idle", *options, "--no-async-scheduling"))["ways"]) == [*found["ways"]][:1]


def test_without_json_there_is_the_table_alone() -> None:
    result = call("control", "--repeat", "1", "--steps", "5", "--batches", "1,2")
    assert result.exit_code == 0
    assert "{" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["control", "--batches", "4"], "two different numbers"),
        (["control", "--batches", "4,x"], "not a list of numbers"),
        (["offline", "--workloads", "W9"], "there is no workload 'W9'"),
        (["serve", "nowhere"], "neither an http:// address nor a model's folder"),
        (["serve", "http://127.0.0.1:9"], "no server answers"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], words: str) -> None:
    result = call(*arguments, "--json")
    assert result.exit_code != 0
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_a_checkpoint_is_written_and_measured(tmp_path: Path) -> None:
    made = last_json(call("make-checkpoint", "--like", "tiny", str(tmp_path), "--json"))
    assert made["bytes"] > 100_000
    options = ("--model", str(tmp_path), "--scale", "8", "--repeat", "1", "--no-roofline", "--no-peers", "--json")
    found = last_json(call("offline", *options, "--against", "num_threads=1"))
    assert list(found["workloads"]) == ["W1", "W2", "W3", "W4"]
    assert list(found["systems"]) == ["novainfer", "novainfer num_threads=1"]
    for workload in found["workloads"].values():
        own = workload["novainfer"]
        assert own["output_tok_s"] > 0
        assert own["ttft_ms"]["p50"] <= own["ttft_ms"]["p95"]
    memory = found["memory"]["novainfer"]
    assert memory["weights_mb"] > 0
    assert memory["kv_mb"] > 0
    assert found["prefix"]["first_ttft_ms"] > 0
    assert found["systems"]["novainfer"]["kernels"]
    cached = ("--cached", "--quantizations", "none,int8")
    started = last_json(call("startup", "--model", str(tmp_path), "--repeat", "1", *cached, "--json"))
    assert list(started["starts"]) == ["none", "int8"]
    for start in started["starts"].values():
        assert start["ready_s"] > 0
        assert start["ready_cpu_s"] > 0
        assert start["first_token_s"] > 0
    assert len(started["targets"]) == 2


@pytest.mark.slow
def test_an_unknown_shape_names_the_known_ones(tmp_path: Path) -> None:
    result = call("make-checkpoint", "--like", "gpt-9", str(tmp_path))
    assert result.exit_code != 0
    assert "tiny" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--tls", "--http", "h2")], ids=["h1", "h2 over TLS"])
def test_http_counts_the_engines_process_apart_from_all(more: tuple[str, ...]) -> None:
    options = ("--repeat", "1", "--requests", "4", "--tokens", "30", "--device-ms", "2", "--api-processes", "0")
    found = last_json(call("http", *options, "--api-processes", "1", *more, "--json"))
    assert set(found["ways"]) == {"0", "1"}
    assert found["tls"] is bool(more)
    for way in found["ways"].values():
        assert way["all_us"] >= way["engine_us"]
        assert way["tokens_per_s"] > 0
    assert found["ways"]["0"]["all_us"] == found["ways"]["0"]["engine_us"]
