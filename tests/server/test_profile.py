"""Profiles: one at a time, only for the admin, and files that say where the time went."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from novainfer import Engine, EngineConfig
from novainfer.server.operate import profile
from novainfer.testing import ByteTokenizer, FakeDevice
from tests.server.conftest import Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import error_of

ADMIN = {"authorization": "Bearer boss"}


@pytest.fixture
async def client(serve: Serve, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig(max_num_seqs=4, recorder_dir=tmp_path)
    engine = Engine(config, device=FakeDevice(num_blocks=64), tokenizer=ByteTokenizer())
    server = await serve(engine, admin_key="boss")
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        yield client


async def test_a_profile_has_the_steps_and_the_stacks_of_the_loop(
    client: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "LOOK_EACH_S", 0.0001)
    await client.post("/v1/completions", json={"prompt": "before", "max_tokens": 3, "ignore_eos": True})
    assert (await client.post("/start_profile", headers=ADMIN)).json()["state"] == "running"
    again = await client.post("/start_profile", headers=ADMIN)
    assert (again.status_code, error_of(again)["code"]) == (409, "profile_conflict")
    for _ in range(3):
        await client.post("/v1/completions", json={"prompt": "meanwhile", "max_tokens": 5, "ignore_eos": True})
    found = (await client.post("/stop_profile", headers=ADMIN)).json()
    assert (found["state"], found["num_steps"]) == ("written", 15)  # five of each: a prefill and four decodes
    assert found["num_looks"] > 0
    trace_file, folded_file = (tmp_path / name for name in found["files"])
    events = [event for event in json.loads(trace_file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sum(event["tid"] == 2 for event in events) == 15
    assert all(event["ts"] > -1e6 and event["dur"] >= 0 for event in events)
    assert {event["args"]["requests"] for event in events} == {1}
    for line in folded_file.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        assert int(count) > 0
        assert ":" in stack.split(";")[-1]
    over = await client.post("/stop_profile", headers=ADMIN)
    assert (over.status_code, error_of(over)["code"]) == (409, "profile_conflict")
    assert (await client.post("/start_profile", headers=ADMIN)).status_code == 200  # another one
    assert (await client.post("/stop_profile", headers=ADMIN)).status_code == 200


async def test_only_the_admin_may(client: httpx.AsyncClient, serve: Serve) -> None:
    for path in ("/start_profile", "/stop_profile"):
        assert (await client.post(path)).status_code == 403
    engine = FakeEngine()
    engine.recorder_dir = None
    server = await serve(engine, admin_key="boss")
    async with httpx.AsyncClient(base_url=server.url, headers=ADMIN) as other:
        refused = await other.post("/start_profile")
        assert (refused.status_code, error_of(refused)["code"]) == (503, "recorder_unavailable")
        assert "--recorder-dir" in error_of(refused)["message"]


async def test_one_that_is_forgotten_ends_by_itself_and_can_still_be_written(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profile, "DURATION_S_MAX", 0.01)
    monkeypatch.setattr(profile, "COLLECT_EACH_S", 0.001)
    await client.post("/start_profile", headers=ADMIN)
    await eventually(lambda: "has ended by itself" in caplog.text)
    found = (await client.post("/stop_profile", headers=ADMIN)).json()
    assert 0.01 <= found["duration_s"] < 5
