"""What the server says at its start, and of its throughput."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest

from novainfer.fsm.messages.mode import Mode
from novainfer.server import serve as server_of
from novainfer.server.engine import weights_in
from novainfer.server.operate.said import INTERVAL_S, Throughput, about
from tests.server.conftest import Serve, eventually
from tests.server.fakes import FakeEngine, FakeModelInfo, FakeStatistics


def test_the_start_says_memory_limits_kernels_threads_the_worker_and_where_recordings_go() -> None:
    engine = FakeEngine()
    engine.recorder_dir = Path("/var/recordings")
    assert about(engine).splitlines() == [
        "  model     float32 on cpu, 2 threads; kernels: linear native, ops native, attention torch; "
        "the worker's process is 4711",
        "  memory    3.0 GiB weights, 100 MiB KV: 100 blocks of 16, 1600 tokens",
        "  limits    64 tokens of context; 8 requests at once, 8 of them if each fills its context",
        "  recorder  writes to /var/recordings when something goes wrong",
    ]
    engine.recorder_dir = None
    assert "it has no folder" in about(engine)
    engine.model_info = FakeModelInfo(precision="int4 (gptq)")
    assert about(engine).startswith("  model     float32, weights in int4 (gptq), on cpu, 2 threads; kernels: ")
    engine.model_info = FakeModelInfo(weight_bytes=300_000)
    assert "\n  memory    0.3 MiB weights, 100 MiB KV: " in about(engine)
    engine.model_info = FakeModelInfo(failed_kernels={"attention native": "is off by 2e-1 of the largest value"})
    failed = "  FAILED    attention native: self-test is off by 2e-1 of the largest value"
    assert about(engine).splitlines()[-1] == failed


def test_weights_are_named_by_what_the_checkpoint_holds_unless_they_are_rounded_now() -> None:
    info = FakeModelInfo(precision="Q4_K+Q6_K (gguf)")
    assert weights_in(info, Mode()) == "Q4_K+Q6_K (gguf)"
    assert weights_in(FakeModelInfo(precision="bfloat16"), Mode(precision="int8")) == "int8"
    assert weights_in(FakeModelInfo(precision="", dtype="float32"), Mode()) == "float32"


def test_a_worker_that_is_a_thread_of_the_server_is_no_process_to_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    worker = msgspec.structs.replace(engine.actors()[0], pid=os.getpid())
    monkeypatch.setattr(engine, "actors", lambda: [worker])
    assert "process" not in about(engine)


@pytest.mark.parametrize("is_disabled", [False, True])
async def test_the_line_of_throughput_can_be_switched_off(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_disabled: bool
) -> None:
    caplog.set_level(logging.INFO, "novainfer.server")
    monkeypatch.setattr(server_of, "ALIVE_CHECK_S", 0.001)
    monkeypatch.setattr(Throughput, "line", lambda *_: "so many tokens")
    server = await serve(FakeEngine(), disable_log_stats=is_disabled)
    num_looks = 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1

    monkeypatch.setattr(server.service.store, "sweep", look)  # once each time
    await eventually(lambda: num_looks > 2)
    assert ("so many tokens" not in caplog.messages) is is_disabled


def test_throughput_is_said_now_and_then_and_only_when_there_was_work() -> None:
    throughput = Throughput(100.0)

    def at(seconds: float, prompt: int, generated: int, rung: str = "FULL") -> str | None:
        found = FakeStatistics(
            prompt_tokens_total=prompt, generation_tokens_total=generated, num_running=3, num_waiting=1, rung=rung
        )
        return throughput.line(lambda: found, seconds)

    assert at(100.0 + INTERVAL_S - 0.5, 90, 9) is None
    said = "10.0 prompt and 2.0 generated tokens/s; 3 running, 1 waiting; KV 4% used"
    assert at(100.0 + INTERVAL_S, 100, 20) == said
    assert at(100.0 + 2 * INTERVAL_S, 100, 20) is None
    assert at(100.0 + 3 * INTERVAL_S, 100, 21, "INT8") == (
        "0.0 prompt and 0.1 generated tokens/s; 3 running, 1 waiting; KV 4% used, degraded to INT8"
    )
