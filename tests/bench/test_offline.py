"""`bench offline` with systems that need no model: what is reported of them, and what becomes of one that fails."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from novainfer import SamplingParams
from novainfer.bench import busy, offline, sampling, speculative, startup
from novainfer.bench.ideal import Roof
from novainfer.bench.resident import resident_bytes
from novainfer.bench.worker import Child, ChildError, Task
from novainfer.bench.workload import PREFIX, WORKLOADS, scaled
from novainfer.kernels.memory import lazy_zeros

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
FAKE = Path(__file__).with_name("fake_system.py")


def command(token_s: float, *extra: str) -> list[str]:
    return [sys.executable, str(FAKE), str(token_s), *extra]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(model_dir: Path, **commands: list[str]) -> tuple[dict[str, Any], str]:
    return offline.run(
        model_dir,
        commands,
        measure_roof=lambda: Roof(bytes_per_s=1e9, flops_per_s=1e9),
        workloads=[scaled(work, 8) for work in WORKLOADS],
        prefix=scaled(PREFIX, 8),
        repeat=2,
    )


def test_the_report_holds_rates_ratios_memory_and_the_share_of_the_roofline(model_dir: Path) -> None:
    report, text = run(model_dir, novainfer=command(0.5), transformers=command(1.0))
    assert list(report["workloads"]) == ["W1", "W2", "W3", "W4"]
    for found in report["workloads"].values():
        own, peer = found["novainfer"], found["transformers"]
        # the fake's clock is its own: a token takes exactly what it was told
        assert own["ttft_ms"]["p50"] == pytest.approx(500)
        assert own["itl_ms"]["p95"] == pytest.approx(500)
        assert peer["itl_ms"]["p50"] == pytest.approx(1000)
        assert len(own["runs"]) == len(peer["runs"]) == 2
        assert own["ratio"] == own["cpu_ratio"] == 1.0
        cpu = [b["cpu_s"] / a["cpu_s"] for a, b in zip(own["runs"], peer["runs"], strict=True)]
        assert peer["cpu_ratio"] == pytest.approx(sum(cpu) / 2)
        rates = zip(own["runs"], peer["runs"], strict=True)
        ratios = sorted(a["output_tok_s"] / b["output_tok_s"] for a, b in rates)
        assert peer["ratio"] == pytest.approx(sum(ratios) / 2)
        assert own["share_of_roofline"] > 0
    assert report["prefix"]["ratio"] == pytest.approx(1.0)
    memory = report["memory"]["novainfer"]
    assert memory["rest_mb"] == pytest.approx(memory["peak_mb"] - memory["weights_mb"] - memory["kv_mb"])
    assert report["targets"] == {}, "the targets are written for one shape only"
    assert "transformers" in text


def test_a_peer_that_does_not_start_is_left_out_with_its_reason(model_dir: Path) -> None:
    report, text = run(model_dir, novainfer=command(0.5), vllm=command(0.5, "fail"))
    assert "this peer is not installed" in report["skipped"]["vllm"]
    assert "vllm was left out" in text
    assert list(report["systems"]) == ["novainfer"]


def test_a_child_that_dies_tells_its_last_words() -> None:
    with Child(command(0.5)) as child, pytest.raises(ChildError, match="a prompt of 0 tokens"):
        child.run(Task(prompts=[[]], max_tokens=1))


def test_one_by_one_is_one_call_a_prompt() -> None:
    with Child(command(0.5)) as child:
        together = child.run(Task(prompts=[[1], [2]], max_tokens=3))
        apart = child.run(Task(prompts=[[1], [2]], max_tokens=3, at_once=1))
    assert [line.num_prompt_tokens for line in together.timelines] == [2, 2], "the fake tells its batch's size"
    assert [line.num_prompt_tokens for line in apart.timelines] == [1, 1]


def test_the_roof_of_a_run_is_how_fast_the_weights_were_read_around_it(model_dir: Path) -> None:
    report, text = run(model_dir, novainfer=command(0.5, "packed"), transformers=command(1.0))
    num_reads = 2 * offline.NUM_READS
    seen = 0
    for repetition in range(2):
        for found in report["workloads"].values():
            seen += num_reads  # each reading doubles: the last one before the next task is the best
            assert found["roofs"][repetition]["bytes_per_s"] == 0.5e6 * 2**seen
            assert found["roofs"][repetition]["flops_per_s"] == 1e9
    for found in report["workloads"].values():
        for system in ("novainfer", "transformers"):
            low, high = found[system]["share_spread"]
            assert low <= found[system]["share_of_roofline"] <= high
            low, high = found[system]["ratio_spread"]
            assert low <= found[system]["ratio"] <= high
    assert "1.00 (1.00-1.00)" in text


def test_without_readings_the_roof_is_what_was_measured_around_the_repetition(model_dir: Path) -> None:
    report, _ = run(model_dir, novainfer=command(0.5))
    assert report["workloads"]["W1"]["roofs"] == [{"bytes_per_s": 1e9, "flops_per_s": 1e9}] * 2


def test_sampling_is_set_beside_greedy_within_each_repetition() -> None:
    report, text = sampling.run(command(0.5), workload=scaled(sampling.BATCH, 8), repeat=3)
    ways = report["ways"]
    assert list(ways) == [*sampling.WAYS]
    assert ways["greedy"]["step_ms"] == pytest.approx(500)
    for name in ("temperature 1", "Qwen's defaults", "top_p .95"):
        assert ways[name]["ratio_to_greedy"] == pytest.approx(2.0)
        assert ways[name]["ratio_spread"] == pytest.approx([2.0, 2.0])
        assert ways[name]["added_ms"] == pytest.approx(500)
        assert len(ways[name]["runs_ms"]) == 3
    assert ways["greedy, 5 log probabilities"]["ratio_to_greedy"] == pytest.approx(1.0)
    assert "more than greedy" in text

    assert report["targets"]["Qwen's defaults, a step of 4 over greedy"]["met"] is False


def test_of_memory_the_pages_that_are_there_count() -> None:
    megabyte = 1 << 20
    cache = lazy_zeros((16, megabyte), torch.uint8, torch.device("cpu"))
    assert resident_bytes(cache) == 0
    cache[5, :100] = 1
    assert 0 < resident_bytes(cache) <= 4 * megabyte  # a huge page, or a small one
    cache[:] = 1
    assert resident_bytes(cache) == 16 * megabyte


def test_a_busy_process_spins_on_one_core_while_it_is_wanted() -> None:
    with busy.busy_process() as pid:
        if hasattr(os, "sched_getaffinity"):
            assert os.sched_getaffinity(pid) == {min(os.sched_getaffinity(0))}
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("spin", "words"),
    [("raise SystemExit(3)", "does not spin .exit code 3"), ("print('spinning', flush=True)", "ended before the work")],
)
def test_beside_a_busy_process_that_does_not_spin_nothing_is_measured(
    spin: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy, "SPIN", spin)
    with pytest.raises(ChildError, match=words), busy.busy_process() as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_a_busy_process_ends_with_the_one_that_started_it() -> None:
    code = "import os; from novainfer.bench.busy import busy_process as b; c = b(); c.__enter__(); os._exit(0)"
    # It holds stderr, too: this returns when both have ended.
    subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=True, timeout=60)


def test_beside_a_busy_process_each_workload_is_set_beside_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_busy = tmp_path / "busy"

    @contextmanager
    def marked() -> Iterator[int]:
        is_busy.touch()
        yield 0
        is_busy.unlink()

    monkeypatch.setattr(busy, "busy_process", marked)
    work = [scaled(work, 8) for work in WORKLOADS[:2]]
    report, text = busy.run(command(0.5, f"sleep-beside={is_busy}"), workloads=work, repeat=2)
    assert list(report["workloads"]) == ["W1", "W2"]
    for found in report["workloads"].values():
        assert all(run["wall_s"] > 0.2 for run in found["runs"][busy.BESIDE])
        ratios = [b["wall_s"] / a["wall_s"] for a, b in zip(*found["runs"].values(), strict=True)]
        assert found["slower"] == pytest.approx(sum(ratios) / 2)
    assert "x slower" in text


def test_starts_from_kept_weights_are_counted_after_the_one_that_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Mapping[str, Any]] = []

    def ours(model: str, options: Mapping[str, Any]) -> list[str]:
        asked.append(options)
        return command(0.5)

    monkeypatch.setattr(startup, "ours", ours)
    report, _ = startup.run("m", 2, quantizations=["none", "int8"], cached=True)
    assert [options["quantization"] for options in asked] == ["none", "int8"] * 3
    assert len({options["weight_cache_dir"] for options in asked}) == 1
    assert not Path(asked[0]["weight_cache_dir"]).exists()
    assert {name: len(start["runs"]) for name, start in report["starts"].items()} == {"none": 2, "int8": 2}
    assert {target["wanted"] for target in report["targets"].values()} == {startup.READY_CACHED_S_MAX}


def test_the_ways_to_sample_are_ones_that_requests_may_ask_for() -> None:
    for way in sampling.WAYS.values():
        SamplingParams(**way)


def test_speculation_is_set_beside_plain_decoding_within_each_repetition() -> None:
    report, text = speculative.run(command(1.0), command(0.5), batches=[1, 4], repeat=2, max_tokens=8)
    assert [(run["workload"], run["batch"]) for run in report["runs"]] == [
        (name, batch) for name in speculative.WORKLOADS for batch in (1, 4)
    ]
    for run in report["runs"]:
        assert run["ratio"] == pytest.approx(2.0)
        assert run["acceptance"] == pytest.approx(0.75)
        assert run["is_equal"]
    assert "same tokens" in text


def test_speculation_that_changes_an_answer_is_told() -> None:
    report, text = speculative.run(command(1.0), command(0.5, "other"), batches=[1], repeat=1, max_tokens=8)
    assert not any(run["is_equal"] for run in report["runs"])
    assert "NO" in text
