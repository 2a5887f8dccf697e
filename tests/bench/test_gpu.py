"""What a check of a GPU measures, as far as that can be seen without one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from novainfer.bench.cli import bench
from novainfer.bench.gpu import check as checking
from novainfer.bench.gpu import serving
from novainfer.bench.gpu.attention import DECODES, PREFILLS, Case
from novainfer.bench.gpu.check import SECTIONS, GpuCheck
from novainfer.bench.gpu.clock import Clock
from novainfer.bench.gpu.roof import GpuRoof
from novainfer.bench.gpu.sampling import WAYS
from novainfer.bench.gpu.serving import measure_serving, requests
from novainfer.bench.gpu.steps import Steps, idle_share, other_kernels, plans
from novainfer.bench.machine import make_checkpoint
from novainfer.fsm.messages.step import SAMPLED

CPU = torch.device("cpu")
ROOF = GpuRoof(1e12, 1e12, 1e14)
KERNELS = {"forward": "triton-graphs-bias", "attention": "triton", "ops": "triton", "sampler": "triton"}


def test_idle_is_what_no_span_covers() -> None:
    assert idle_share([]) is None
    assert idle_share([(0, 10)]) == 0
    assert idle_share([(0, 4), (5, 10)]) == pytest.approx(0.1)
    assert idle_share([(0, 8), (2, 3), (7, 9), (10, 20)]) == pytest.approx(0.05)


def test_every_step_after_the_first_leaves_its_tokens_to_the_device() -> None:
    found = list(plans(Steps("tiny", 3, 30), 4, block_size=16))
    assert [plan.input_ids[0] == SAMPLED for plan in found] == [False, True, True, True]
    assert [plan.context_lens for plan in found] == [[31] * 3, [32] * 3, [33] * 3, [34] * 3]
    assert [plan.after for plan in found] == [0, 1, 2, 3]
    assert sorted(found[0].table_blocks) == list(range(9)), "34 tokens are three blocks each"


def test_the_workload_is_that_of_nano_vllm() -> None:
    """256 requests and 133,966 output tokens, as its README has them."""
    prompts, lengths = requests()
    assert (len(prompts), sum(lengths)) == (256, 133_966)
    assert {len(prompt) for prompt in prompts} <= set(range(100, 1025))
    assert random.Random(0).random() == pytest.approx(0.8444218515250481)


def test_bytes_and_operations_of_a_case() -> None:
    decode = Case("x", 14, 2, 64, batch=2, context=100)
    assert decode.num_bytes == 2 * 100 * (2 * 2 * 64) * 2 + 2 * (2 * 2 * 14 * 64)
    assert decode.flops == 4 * 2 * 100 * 14 * 64
    quantised = Case("x", 14, 2, 64, batch=2, context=100, kv_dtype="int8")
    assert quantised.num_bytes == 2 * 100 * (2 * 2 * 64 + 2 * 2 * 4) + 2 * (2 * 2 * 14 * 64)
    prefill = Case("x", 1, 1, 1, batch=1, context=4, query=2)
    assert prefill.flops == 4 * (3 + 4), "the rows see three tokens and four"
    assert len(set(DECODES + PREFILLS)) == len(DECODES + PREFILLS)


def test_the_clock_divides_by_the_sets() -> None:
    counts = [0, 0]

    def work(which: int) -> None:
        counts[which] += 1

    spread = Clock(CPU, num_replays=5).measure([lambda: work(0), lambda: work(1)])
    assert counts[0] == counts[1] > 5
    assert 0 < spread.low_s <= spread.median_s <= spread.high_s


def test_a_check_is_refused_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = CliRunner().invoke(bench, ["gpu-check", "--out", str(tmp_path)])
    assert found.exit_code == 1
    assert "there is no GPU here" in found.output
    assert "--rehearse" in found.output
    found = CliRunner().invoke(bench, ["gpu-check", "--only", "atention", "--rehearse"])
    assert found.exit_code == 2
    assert "must be one of" in found.output


def test_a_section_that_fails_is_written_and_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(check: GpuCheck) -> dict[str, object]:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(SECTIONS, "attention", broken)
    check = GpuCheck(tmp_path, checkout=tmp_path, rehearse=True, say=lambda _: None)
    assert not check.run(["attention", "roof"])
    report = json.loads(check.file.read_text())
    assert report["rehearsal"] is True
    assert report["sections"]["attention"]["error"] == "RuntimeError: an illegal memory access"
    assert report["sections"]["roof"]["took_s"] >= 0
    assert report["roof"]["read_bytes_per_s"] > 0
    assert report["targets"]
    again = GpuCheck(tmp_path, checkout=tmp_path, rehearse=True, say=lambda _: None)
    assert again.run(["roof"]), "what went wrong before does not count against this run"
    assert set(json.loads(check.file.read_text())["sections"]) == {"attention", "roof"}


def test_sections_are_done_apart_and_one_that_dies_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def process(command: list[str], **options: Any) -> Any:
        name = command[command.index("--only") + 1]
        started.append(name)
        if name == "attention":
            return subprocess.CompletedProcess(command, -11)
        GpuCheck(tmp_path, checkout=tmp_path, rehearse=True, say=lambda _: None).run([name])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", process)
    monkeypatch.setitem(SECTIONS, "roof", lambda check: {"text": f"{check.roof}"})
    monkeypatch.setattr(checking, "measure_roof", lambda clock, **scale: ROOF)
    check = GpuCheck(tmp_path, checkout=tmp_path, rehearse=True, say=lambda _: None)
    assert not check.run_apart(["attention", "roof"])
    assert started == ["attention", "roof"]
    report = json.loads(check.file.read_text())
    assert report["sections"]["attention"] == {"ok": False, "error": "its process ended with exit code -11"}
    assert "took_s" in report["sections"]["roof"]
    monkeypatch.setattr(checking, "measure_roof", lambda clock, **scale: pytest.fail("it was measured before"))
    assert GpuCheck(tmp_path, checkout=tmp_path, rehearse=True, say=lambda _: None).roof == ROOF
    assert check.run_apart(["roof"]), "what went wrong before does not count against this run"


def test_figures_of_other_kernels_are_told() -> None:
    assert other_kernels(KERNELS, graphs=True) == []
    assert other_kernels(KERNELS | {"forward": "triton-bias", "attention": "triton-invariant"}, graphs=False) == []
    assert other_kernels(KERNELS | {"forward": "triton-bias"}, graphs=True) == ["forward by triton-bias"]
    assert other_kernels(KERNELS, graphs=False) == ["forward by triton-graphs-bias"]
    others = {"forward": "op-by-op", "attention": "torch", "ops": "torch", "sampler": "rows"}
    assert other_kernels(others, graphs=True) == [f"{operation} by {kernel}" for operation, kernel in others.items()]


def test_steps_by_other_kernels_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Steps("tiny", 2, 16, 1.0)
    record = {"like": "tiny", "batch": 2, "context": 16, "ms": 1.0, "roof_ms": 1.0, "share_of_roof": 1.0}
    record |= {"idle_share": None, "tokens_per_s": 2.0, "wanted_ms": 1.0}
    sampler, fails = "triton", False

    def measure(*arguments: Any, **options: Any) -> dict[str, Any]:
        forward = "triton-bias" if "enforce_eager" in options else "triton-graphs-bias"
        kernels = KERNELS | {"forward": forward, "sampler": sampler}
        return record | {"kernels": kernels, "failed_kernels": {"ops triton": "is off"} if fails else {}}

    monkeypatch.setattr(checking, "STEPS", [step])
    monkeypatch.setattr(checking, "measure_steps", measure)
    said: list[str] = []
    check = GpuCheck(tmp_path, checkout=tmp_path, rehearse=True, say=said.append)
    check.rehearse, check._roof = False, ROOF
    monkeypatch.setattr(check, "model", lambda like: tmp_path)
    assert check.run(["steps"])
    sampler = "rows"
    assert not check.run(["steps"])
    section = json.loads(check.file.read_text())["sections"]["steps"]
    assert section["other_kernels"] == [
        f"tiny, batch 2, {variant}: sampler by rows" for variant in ("as served", "no graphs")
    ]
    assert any("WRONG: tiny, batch 2, as served: sampler by rows" in line for line in said)
    sampler, fails = "triton", True
    assert not check.run(["steps"])
    assert any("WRONG: tiny, batch 2, no graphs: ops triton failed its self-test: is off" in line for line in said)


def test_systems_are_served_one_after_the_other_and_a_peer_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, program = tmp_path / "log", Path(__file__).parent / "fake_batching.py"
    make_checkpoint("tiny", tmp_path / "model", 0)
    monkeypatch.setattr(
        serving, "command_of", lambda name, folder, arguments: [sys.executable, str(program), name, str(log)]
    )
    few: dict[str, Any] = {"device": "cpu", "num_requests": 3, "tokens_max": 8}
    found = measure_serving(tmp_path / "model", ROOF, peers=("good", "short"), repeat=2, **few)
    assert {name: len(rates) for name, rates in found["runs"].items()} == {"novainfer": 2, "good": 2}
    wanted = found["output_tokens"]
    assert found["skipped"] == {"short": f"short made {wanted - 3} tokens of {wanted}"}
    assert set(found["tokens_per_s"]) == set(found["versions"]) == {"novainfer", "good"}
    turns = ["novainfer", "good", "short", "good", "novainfer"]
    assert log.read_text().split() == [word for name in turns for word in (name, "begins", name, "ends")]
    monkeypatch.setattr(serving, "PEER_TIMEOUT_S", 1.0)
    found = measure_serving(tmp_path / "model", ROOF, peers=("slow",), repeat=1, **few)
    assert set(found["runs"]) == {"novainfer"}
    assert found["skipped"] == {"slow": "it took longer than 1 s"}


@pytest.mark.slow
def test_a_rehearsal_goes_through_every_section(tmp_path: Path) -> None:
    check = GpuCheck(tmp_path, checkout=tmp_path, rehearse=True, say=lambda _: None)
    assert check.run(tuple(SECTIONS)), json.dumps(check.report["sections"], indent=1)[:4000]
    sections = json.loads(check.file.read_text())["sections"]
    assert sections["answers"]["cases"]["as it is served"] == {"ok": True, "answers": 72, "different": 0}
    assert {record["backend"] for record in sections["attention"]["found"]["decode"]} >= {"triton", "torch"}
    assert {record["way"]: record["us"] > 0 for record in sections["sampling"]["found"]} == dict.fromkeys(WAYS, True)
    assert sections["steps"]["found"][0]["ms"] > 0
    assert sections["serving"]["tokens_per_s"]["novainfer"] > 0
