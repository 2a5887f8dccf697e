"""`GET /v1/inspector` over HTTP: who may see what, by which names, and how it ends; the last times of a row."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from novainfer.inspection import Frame, Snapshot
from novainfer.server.keys.record import KeyRecord, digest
from novainfer.server.keys.store import KeyStore
from tests.server.conftest import TIMEOUT_S, Serve
from tests.server.test_bad_input import error_of
from tests.server.test_inspection import ADMIN, Held

FEED = "/v1/inspector"
ROW = {"state": "PREFILL", "event": "Prefilled", "to": "DECODE"}


@pytest.fixture
async def held(serve: Serve) -> AsyncIterator[Held]:
    world = Held(max_num_seqs=1)
    yield world
    await world.finish()
    await world.client.aclose()


async def watch(client: httpx.AsyncClient, **headers: str) -> AsyncIterator[dict[str, Any]]:
    """What one watcher is told; each of it is as the records of the library say."""
    async with client.stream("GET", FEED, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                msgspec.json.decode(line[6:], type=Snapshot | Frame)
                yield json.loads(line[6:])


async def test_a_snapshot_and_frames_by_the_names_that_clients_know(held: Held, serve: Serve) -> None:
    await held.serve(serve)
    await held.ask("one")
    await held.valve.step_arrived()
    feed = watch(held.client)
    first = await anext(feed)
    assert (first["type"], first["model"], first["can_inject"]) == ("snapshot", held.engine.model_info.name, False)
    (request,) = first["requests"]
    assert (request["id"], request["state"], request["owner"], request["prompt_tokens"]) == (
        "cmpl-one",
        "PREFILL",
        "",
        8,
    )
    assert first["limits"]["max_num_seqs"] == 1
    assert first["limits"]["max_model_len"] == held.engine.model_info.max_model_len
    assert {actor["name"] for actor in first["actors"]} >= {"gate", "engine", "scheduler", "worker-0", "tokenizer"}
    assert len(first["kv"]["owner"]) == (first["kv"]["total"] + 2) // 3 * 4, "a byte a block, in base64"
    await held.finish()
    seen: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    while seen.get("state") != "FINISHED_LENGTH" or not steps:
        frame = await anext(feed)
        assert frame["type"] == "frame"
        steps += frame["steps"]
        seen |= next((one for one in frame["requests"] if one["key"] == request["key"]), {})
    assert (seen["id"], seen["output_tokens"], seen["blocks"]) == ("cmpl-one", 4, 0)
    assert steps[0]["outcome"] == "done"
    assert [phase["name"] for phase in steps[0]["phases"]][:2] == ["schedule", "kernel"]
    await feed.aclose()  # type: ignore[attr-defined]


async def test_a_key_sees_its_own_requests_and_only_the_admin_key_may_inject(held: Held, serve: Serve) -> None:
    await held.serve(serve, api_keys=("alice", "bob"), admin_key="boss")
    alice, bob = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
    await held.ask("one", **alice)
    await held.ask("two", **bob)
    for headers, ids, may in ((alice, ["cmpl-one"], False), (ADMIN, ["cmpl-one", "cmpl-two"], True)):
        feed = watch(held.client, **headers)
        first = await anext(feed)
        assert [request["id"] for request in first["requests"]] == ids
        assert first["can_inject"] is may
        assert all(request["owner"] for request in first["requests"])
        assert not any(request["owner"] == "alice" for request in first["requests"]), "a name, and not the key itself"
        await feed.aclose()  # type: ignore[attr-defined]
    assert (await held.client.get(FEED)).status_code == 401


@pytest.mark.parametrize("path", [FEED, "/v1/events"])
@pytest.mark.parametrize("change", ["revoked", "no admin any more"])
async def test_the_feed_ends_with_its_key(held: Held, serve: Serve, tmp_path: Path, path: str, change: str) -> None:
    key = "nova-alice-key-of-some-length"
    record = KeyRecord(name="alice", hash=digest(key.encode()), is_admin=True)
    store = KeyStore.at(tmp_path / "keys.yaml")
    store.add(record)
    await held.serve(serve, keys_file=store.path, sse_keep_alive_interval_s=0.02)
    headers = {"authorization": f"Bearer {key}"}
    async with asyncio.timeout(TIMEOUT_S), held.client.stream("GET", path, headers=headers) as response:
        lines = response.aiter_lines()
        while not (await anext(lines)).startswith(":"):
            pass
        await asyncio.sleep(0.1)
        assert (await anext(lines)) == "", "it goes on while nothing changes"
        store.remove("alice")
        if change != "revoked":
            store.add(msgspec.structs.replace(record, is_admin=False))
        async for _ in lines:
            pass
    status = 401 if change == "revoked" else 200
    async with held.client.stream("GET", path, headers=headers) as response:
        assert response.status_code == status


async def test_the_feed_ends_with_the_engine_and_there_are_not_too_many(
    held: Held, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("novainfer.server.operate.frames.LISTENERS_MAX", 1)
    await held.serve(serve)
    feed = watch(held.client)
    await anext(feed)
    refused = await held.client.get(FEED)
    assert refused.status_code == 503 or refused.status_code == 429
    assert "watch" in error_of(refused)["message"]
    await held.engine.aclose()
    async with asyncio.timeout(TIMEOUT_S):
        assert all([one["type"] == "frame" async for one in feed])


async def test_a_feed_of_which_nothing_is_told_shows_that_it_lives_and_goes_on(held: Held, serve: Serve) -> None:
    await held.serve(serve, sse_keep_alive_interval_s=0.01)
    async with asyncio.timeout(TIMEOUT_S), held.client.stream("GET", FEED) as response:
        lines = response.aiter_lines()
        while not (await anext(lines)).startswith(":"):
            pass
        asking = asyncio.create_task(held.ask("one"))
        while "cmpl-one" not in await anext(lines):
            pass
        await asking


async def test_who_leaves_makes_room_for_another(held: Held, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("novainfer.server.operate.frames.LISTENERS_MAX", 1)
    await held.serve(serve)
    for _ in range(3):
        async with asyncio.timeout(TIMEOUT_S):
            while True:  # that a client has gone is known a moment later
                async with held.client.stream("GET", FEED) as response:
                    if response.status_code == 200:
                        assert (await anext(response.aiter_lines())).startswith("data: ")
                        break
                await asyncio.sleep(0.01)


async def test_the_last_times_of_a_row_are_found_by_it_and_what_is_no_row_is_refused_by_its_name(
    held: Held, serve: Serve
) -> None:
    await held.serve(serve, api_keys=("alice", "bob"), admin_key="boss")
    path, alice = "/v1/machines/Request/taken", {"authorization": "Bearer alice"}
    assert (await held.client.get(path, params=ROW, headers=ADMIN)).json() == {"object": "list", "data": []}
    await held.ask("one", **alice)
    await held.ask("two", authorization="Bearer bob")
    await held.finish()
    found = (await held.client.get(path, params=ROW, headers=ADMIN)).json()["data"]
    assert [(one["of"], one["state"], one["event"], one["to"]) for one in found] == [
        ("cmpl-one", *ROW.values()),
        ("cmpl-two", *ROW.values()),
    ]
    found = (await held.client.get(path, params=ROW, headers=alice)).json()["data"]
    assert [one["of"] for one in found] == ["cmpl-one", ""]
    for asked, params, said in (
        ("/v1/machines/Requests/taken", ROW, "Requests"),
        (path, {"state": "PREFILL", "to": "DECODE"}, "event"),
    ):
        response = await held.client.get(asked, params=params, headers=ADMIN)
        assert response.status_code == 400
        assert said in error_of(response)["message"]
