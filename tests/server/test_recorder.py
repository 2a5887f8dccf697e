"""The flight recorder from outside: who may have its file written, where it goes, and what is said."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import httpx
import pytest

from novainfer.server.operate.recorder import default_folder, dump_on_signal
from novainfer.server.service import Service
from novainfer.server.settings import ServerSettings
from tests.server.conftest import Serve, eventually
from tests.server.fakes import FakeEngine

DUMP = "/v1/recorder/dump"
FILE = Path("/somewhere/novainfer-20261120T130211007Z-asked.novarec")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_dump_is_answered_with_its_name_and_not_with_the_folder(serve: Serve, engine: FakeEngine) -> None:
    engine.recording = FILE
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post(DUMP)
    assert response.json() == {"object": "recorder.dump", "file": FILE.name}


async def test_a_recorder_that_is_off_is_503_in_a_sentence(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        response = await client.post(DUMP)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "recorder_unavailable")
        assert (await client.get(DUMP)).status_code == 405


async def test_with_an_admin_key_only_its_owner_may_dump(serve: Serve, engine: FakeEngine) -> None:
    engine.recording = FILE
    server = await serve(engine, api_keys=("alice-key",), admin_key="boss")
    async with httpx.AsyncClient(base_url=server.url) as client:
        statuses = [(await client.post(DUMP, headers=h)).status_code for h in ({}, bearer("alice-key"), bearer("boss"))]
    assert statuses == [401, 403, 200]


async def test_without_an_admin_key_any_key_will_do_and_none_will_not(serve: Serve, engine: FakeEngine) -> None:
    engine.recording = FILE
    server = await serve(engine, api_keys=("alice-key",))
    async with httpx.AsyncClient(base_url=server.url) as client:
        statuses = [(await client.post(DUMP, headers=h)).status_code for h in ({}, bearer("alice-key"))]
    assert statuses == [401, 200]


async def test_sigusr2_dumps_and_says_where_or_why_not(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    service, loop = Service(None, ServerSettings()), asyncio.get_running_loop()
    dump_on_signal(service, loop)
    try:
        with caplog.at_level(logging.WARNING, "novainfer.server"):
            for recording in (None, FILE):
                engine.recording = recording
                caplog.clear()
                os.kill(os.getpid(), signal.SIGUSR2)
                await eventually(lambda: caplog.messages)
                service.engine = engine
                said = caplog.messages
                assert "still loading" in said[0] if recording is None else str(FILE) in said[0]
    finally:
        loop.remove_signal_handler(signal.SIGUSR2)


def test_files_go_to_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "novainfer" / "recordings"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".local" / "state" / "novainfer" / "recordings"
