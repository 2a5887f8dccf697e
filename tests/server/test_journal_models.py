"""The journal beside several models: each answer goes on when its model is there, and its client can wait for that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from novainfer import EngineDead, ModelLoadError
from novainfer.fsm.parsing.formats import Formats
from novainfer.fsm.text import Vocabulary
from novainfer.models import Models
from novainfer.server.journal.records import Stored
from novainfer.server.serve import Server
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.stable import ADMIN, Stable, ask
from tests.server.test_journal import Spelled, blocks, last_id

WORDS = (" and", " so", " on")
TEXT = "I am large and so on"
COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
LIVELY = {"sse_keep_alive_interval_s": 0.02}


class Tokens:
    """The tokenizer alone of a model; `failure` is what loading it ends with."""

    failure: ModelLoadError | None = None
    formats = Formats()
    max_model_len = 64

    def __init__(self, config: Any) -> None:
        words = (f"I am {config.served_model_name}", *WORDS)
        self.vocabulary = Vocabulary.build([word.encode() for word in words], frozenset())

    async def start(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def aclose(self) -> None:
        pass


def stable(*, is_paced: bool = True) -> Stable:
    found = Stable()
    found.kind, found.words, found.is_paced = Spelled, WORDS, is_paced
    return found


def client_of(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S)


async def ended(server: Server) -> None:
    """As its end leaves the journal, however that came."""
    server.stop.set()
    models, journal = server.service.models, server.service.journal
    assert models is not None
    assert journal is not None
    await eventually(lambda: not models.is_ready)
    await asyncio.to_thread(journal._thread.join)


async def begun(server: Server, engines: Stable, name: str, *, stream: bool = True) -> list[str]:
    """A stream of this model, of which its client has two tokens."""
    [engine] = engines.made[name]
    async with client_of(server) as client:
        headers = {"x-request-id": name}
        asking = client.stream("POST", COMPLETIONS, json=ask(name, stream=stream), headers=headers)
        releasing = asyncio.create_task(_release(engine, 2))
        async with asking as reply:
            found = ""
            async for text in reply.aiter_text():
                found += text
                if len(blocks(found)) == 2:
                    await releasing
                    return blocks(found)
    raise AssertionError("it ended")


async def _release(engine: Any, num_tokens: int) -> None:
    await engine.wait_until(lambda: engine.active)
    engine.release(num_tokens)


@asynccontextmanager
async def again(serve: Serve, engines: Stable, path: Path, **settings: Any) -> AsyncIterator[tuple[Server, Models]]:
    """A server with room for one model, which is the small one at first, and goes on with the journal at `path`."""
    models = engines.models("small", "large", max_loaded=1, make_tokens=Tokens)
    server = await serve(models, journal=path, resume=True, **LIVELY | settings)
    yield server, models


async def left_by_a_server(serve: Serve, path: Path) -> dict[str, list[str]]:
    """What the clients of two streams have, one of each model, when their server ends."""
    engines = stable()
    server = await serve(engines.models("small", "large"), journal=path)
    found = {name: await begun(server, engines, name) for name in ("small", "large")}
    await ended(server)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def test_each_answer_goes_on_when_its_model_is_there_and_its_client_waits_with_signs_of_life(
    serve: Serve, path: Path
) -> None:
    had = await left_by_a_server(serve, path)
    engines = stable()
    async with again(serve, engines, path) as (server, models), client_of(server) as client:
        [small] = engines.made["small"]
        await small.wait_until(lambda: small.active)
        assert [one.token_ids for one in small.committed[0]] == [[0, 1]]
        [listed] = [one for one in (await client.get("/v1/requests")).json()["data"] if one["model"] == "large"]
        assert (listed["id"], listed["state"], listed["reason"]) == ("cmpl-large", "WAITING", "model")
        headers = {"last-event-id": last_id(had["large"])}
        async with client.stream("POST", COMPLETIONS, json=ask("large"), headers=headers) as reply:
            lines = (line async for line in reply.aiter_lines() if line)
            seen = [await anext(lines) for _ in range(3)]
            assert seen == [": waiting for the model to be loaded", ": keep-alive", ": keep-alive"]
            small.release(9)  # and makes room when it has said all
            await eventually(lambda: engines.made["large"])
            [large] = engines.made["large"]
            await _release(large, 9)
            rest = [line async for line in lines if not line.startswith(":")]
        assert [one.token_ids for one in large.committed[0]] == [[0, 1]]
        data = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in data) == " so on"
        assert next(line for line in rest if line.startswith("id: ")) == f"id: {last_id(had['large'])[:-1]}3"
        assert rest[-1] == "data: [DONE]"
        told = await client.get(f"{COMPLETIONS}/cmpl-small", headers={"last-event-id": last_id(had["small"])})
        assert " so" in told.text
        await eventually(lambda: not any(record.num_live + record.num_waiting for record in models.models()))
        assert not server.service.returning
        assert not server.service.kept


async def test_answers_that_ended_are_told_by_the_tokenizer_of_their_model_alone(serve: Serve, path: Path) -> None:
    engines = stable(is_paced=False)
    server = await serve(engines.models("small", "large"), journal=path)
    async with client_of(server) as client:
        keyed = {"idempotency-key": "a"}
        right = await client.post(COMPLETIONS, json=ask("large"), headers=keyed)
        response = (await client.post(RESPONSES, json={"model": "large", "input": "Who?"}, headers=keyed)).json()
    await ended(server)
    engines = stable()
    async with again(serve, engines, path) as (server, _), client_of(server) as client:
        assert (await client.post(COMPLETIONS, json=ask("large"), headers=keyed)).content == right.content
        assert (await client.get(f"{COMPLETIONS}/{right.json()['id']}")).content == right.content
        kept = (await client.get(f"{RESPONSES}/{response['id']}")).json()
        assert kept["output"] == response["output"]
        assert not engines.made["large"], "no model is loaded for it"


async def test_an_answer_of_another_model_under_the_same_name_does_not_go_on(serve: Serve, path: Path) -> None:
    had = await left_by_a_server(serve, path)
    engines = stable(is_paced=False)
    engines.print = "another"
    async with again(serve, engines, path) as (server, models), client_of(server) as client:
        for name in ("small", "large"):
            told = await client.post(COMPLETIONS, json={}, headers={"last-event-id": last_id(had[name])})
            [error] = [line for line in told.text.splitlines() if line.startswith("data: ")]
            assert json.loads(error[6:])["error"]["code"] == "not_resumed"
        assert not any(engine.seen for engine in engines.made["small"] + engines.made["large"])
        await eventually(lambda: not any(record.num_live for record in models.models()))


async def test_answers_of_a_model_that_cannot_be_loaded_end_with_the_reason_and_harm_no_other(
    serve: Serve, path: Path
) -> None:
    had = await left_by_a_server(serve, path)
    engines = stable(is_paced=False)
    engines.failing = {"large"}
    async with again(serve, engines, path, model_wait_timeout_s=0.1) as (server, _), client_of(server) as client:
        async with client.stream("POST", COMPLETIONS, json={}, headers={"last-event-id": last_id(had["large"])}) as it:
            told = [line async for line in it.aiter_lines() if line.startswith("data: ")]
        [error] = [json.loads(line[6:])["error"] for line in told]
        assert error["code"] == "model_unavailable"
        assert "config.json" not in error["message"], "that is the operator's"
        rest = await client.post(COMPLETIONS, json={}, headers={"last-event-id": last_id(had["small"])})
        assert " so" in rest.text
        assert rest.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("keyed", [False, True], ids=["by its last event", "by its key"])
async def test_an_answer_whose_model_was_unloaded_goes_on_when_its_client_comes_back(
    serve: Serve, path: Path, keyed: bool
) -> None:
    engines = stable()
    keys = ("a", "b")
    server = await serve(engines.models("small", "large"), journal=path, admin_key="admin-key", api_keys=keys)
    own, other = ({"authorization": f"Bearer {key}", "x-request-id": "one"} for key in keys)
    own |= {"idempotency-key": "again"} if keyed else {}
    left_open = server.service.left_open
    async with client_of(server) as client:
        asking = asyncio.create_task(client.post(COMPLETIONS, json=ask("large", stream=True), headers=own))
        await _release(engines.made["large"][0], 2)
        await eventually(lambda: server.service.journal.tokens_total == 2)
        unloaded = await client.post("/models/unload", json={"model": "large", "timeout": 0}, headers=ADMIN)
        assert unloaded.status_code == 200
        had = blocks((await asking).text)
        assert '"draining"' in had[-1]
        name = json.loads(had[0].split("data: ")[1])["id"]
        await eventually(lambda: engines.made["large"][0].is_closed)
        for theirs in (other, other | {"last-event-id": last_id(had[:2])}):
            assert (await client.get(f"{COMPLETIONS}/{name}", headers=theirs)).status_code == 404
        assert len(engines.made["large"]) == len(left_open) == 1
        if not keyed:
            own |= {"last-event-id": last_id(had[:2])}
        coming = [
            asyncio.create_task(client.post(COMPLETIONS, json=ask("large", stream=True), headers=own)) for _ in "ab"
        ]
        await eventually(lambda: len(engines.made["large"]) == 2)
        again = engines.made["large"][1]
        await _release(again, 9)
        replies = [await one for one in coming]
        assert [reply.status_code for reply in replies] == [200, 200]
        told = [reply.text for reply in replies]
        assert [one.token_ids for one in again.committed[0]] == [[0, 1]]
        assert len(again.seen) == 1, "it is computed once"
        for text in told:
            data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert "".join(chunk["choices"][0]["text"] for chunk in data) == (TEXT if keyed else " so on")
            assert text.endswith("data: [DONE]\n\n")
        assert not len(left_open)
        assert not await server.service.journal.unended()


async def test_a_look_from_before_an_answer_went_on_does_not_let_it_go_on_from_there(
    serve: Serve, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = stable()
    server = await serve(engines.models("small", "large"), journal=path, admin_key="admin-key")
    service = server.service
    journal = service.journal
    assert journal is not None
    async with client_of(server) as client:

        async def unloaded(asking: asyncio.Task[httpx.Response], num_tokens: int) -> list[str]:
            """What the client has got of an answer that had so many tokens when its model was unloaded."""
            await _release(engines.made["large"][-1], num_tokens)  # it begins with those that there were
            await eventually(lambda: journal.tokens_total == num_tokens)
            await client.post("/models/unload", json={"model": "large", "timeout": 0}, headers=ADMIN)
            had = blocks((await asking).text)
            await eventually(lambda: engines.made["large"][-1].is_closed)
            return had[:-1]  # but for the error

        def again(had: list[str]) -> asyncio.Task[httpx.Response]:
            headers = {"last-event-id": last_id(had)}
            return asyncio.create_task(client.post(COMPLETIONS, json=ask("large", stream=True), headers=headers))

        asking = asyncio.create_task(client.post(COMPLETIONS, json=ask("large", stream=True)))
        first = await unloaded(asking, 2)
        find, name = journal.find, last_id(first).split(":")[0]
        looks = [await find(name, None)]
        going_on = again(first)
        await eventually(lambda: len(engines.made["large"]) == 2)
        second = await unloaded(going_on, 3)

        async def late(name: str, sees: str | None) -> Stored | None:
            return looks.pop() if looks else await find(name, sees)

        monkeypatch.setattr(journal, "find", late)
        going_on = again(second)
        await eventually(lambda: len(engines.made["large"]) == 3)
        assert not looks
        await _release(engines.made["large"][-1], 9)
        third = blocks((await going_on).text)
        assert [one.token_ids for one in engines.made["large"][-1].committed[0]] == [[0, 1, 2]]
        whole = blocks((await client.get(f"{COMPLETIONS}/{name}")).text)
        assert whole == [*first, *second, *third]


async def test_an_answer_whose_engine_died_goes_on_with_the_next_engine_of_its_model(serve: Serve, path: Path) -> None:
    engines = stable()
    server = await serve(engines.models("small", "large"), journal=path)
    async with client_of(server) as client:
        [dead] = engines.made["large"]
        asking = asyncio.create_task(client.post(COMPLETIONS, json=ask("large", stream=True)))
        await _release(dead, 2)
        await eventually(lambda: server.service.journal.tokens_total == 2)
        dead.is_ready = False
        for active in dead.active.values():
            active.error = EngineDead("The engine has died")
            active.changed.set()
        had = blocks((await asking).text)
        assert '"engine_dead"' in had[-1]
        await eventually(lambda: dead.is_closed)  # the router has seen that it died
        headers = {"last-event-id": last_id(had[:2])}
        coming = asyncio.create_task(client.post(COMPLETIONS, json={}, headers=headers))
        await eventually(lambda: len(engines.made["large"]) == 2)
        again = engines.made["large"][1]
        await _release(again, 9)
        assert '" so"' in (await coming).text
        assert [one.token_ids for one in again.committed[0]] == [[0, 1]]


async def test_what_nobody_comes_back_for_leaves_the_journal_and_the_server(serve: Serve, path: Path) -> None:
    engines = stable()
    server = await serve(engines.models("small", "large"), journal=path, admin_key="admin-key", journal_ttl_s=0.2)
    journal, left_open = server.service.journal, server.service.left_open
    assert journal is not None
    async with client_of(server) as client:
        for num_loaded, name in enumerate(("one", "two"), 1):
            headers = {"x-request-id": name}
            asking = asyncio.create_task(client.post(COMPLETIONS, json=ask("large", stream=True), headers=headers))
            await eventually(lambda at=num_loaded: len(engines.made["large"]) == at)
            await _release(engines.made["large"][-1], 2)
            await eventually(lambda num=2 * num_loaded: journal.tokens_total == num)
            await client.post("/models/unload", json={"model": "large", "timeout": 0}, headers=ADMIN)
            await asking
            await asyncio.sleep(0.25)
            assert len(left_open) == 1
            assert [one.asked.id for one in await journal.unended()] == [f"cmpl-{name}"]


async def test_an_answer_that_waits_for_its_model_can_be_cancelled_and_is_over_then(serve: Serve, path: Path) -> None:
    had = await left_by_a_server(serve, path)
    engines = stable()
    async with again(serve, engines, path) as (server, models), client_of(server) as client:
        assert (await client.post("/v1/requests/cmpl-large/cancel")).json()["status"] == "cancelled"
        told = await client.post(COMPLETIONS, json={}, headers={"last-event-id": last_id(had["large"])})
        assert "request_cancelled" in told.text
        assert models.models()[1].num_waiting == 0
        assert server.service.journal is not None
        assert [one.asked.model for one in await server.service.journal.unended()] == ["small"]


async def test_a_server_that_stops_leaves_what_waits_for_its_model_to_the_next_one(serve: Serve, path: Path) -> None:
    had = await left_by_a_server(serve, path)
    async with again(serve, stable(), path) as (server, _), client_of(server) as client:
        headers = {"last-event-id": last_id(had["large"])}
        waiting = asyncio.create_task(client.post(COMPLETIONS, json={}, headers=headers))
        await eventually(lambda: server.service.returning)
        await asyncio.sleep(0.05)
        await ended(server)
        assert "draining" in (await waiting).text
    engines = stable(is_paced=False)
    async with again(serve, engines, path) as (server, _), client_of(server) as client:
        told = await client.post(COMPLETIONS, json={}, headers=headers)
        assert '" on"' in told.text


@pytest.mark.parametrize("ends", ["goes on", "has a reader", "is cancelled", "cannot"])
async def test_a_response_that_waits_for_its_model_can_be_looked_at_followed_and_cancelled(
    serve: Serve, path: Path, ends: str
) -> None:
    engines = stable()
    server = await serve(engines.models("small", "large"), journal=path)
    await begun(server, engines, "small")  # the first to go on, so that it has the place
    async with client_of(server) as client:
        body = {"model": "large", "input": "Who?", "background": ends != "has a reader", "stream": True}
        releasing = asyncio.create_task(_release(engines.made["large"][0], 2))
        async with client.stream("POST", RESPONSES, json=body) as reply:
            had = []
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    had.append(json.loads(line[6:]))
                    if had[-1].get("delta") == " and":
                        break
        await releasing
    await ended(server)
    name = had[0]["response"]["id"]
    engines = stable()
    engines.print = "another" if ends == "cannot" else "fake"
    grace_s = 0.1 if ends == "has a reader" else 60.0  # the other answer has none, and ends with that
    async with again(serve, engines, path, journal_grace_s=grace_s) as (server, _), client_of(server) as client:
        if ends != "cannot":  # which is found out as soon as it is looked at
            status = "in_progress" if ends == "has a reader" else "queued"
            assert (await client.get(f"{RESPONSES}/{name}")).json()["status"] == status
        query = {"stream": "true", "starting_after": had[-1]["sequence_number"]}
        following = asyncio.create_task(client.get(f"{RESPONSES}/{name}", params=query))
        if ends == "is cancelled":
            found = (await client.post(f"{RESPONSES}/{name}/cancel")).json()
            assert found["status"] == "cancelled"
            assert found["output"][0]["content"][0]["text"] == "I am large and"
        elif ends != "cannot":
            engines.made["small"][0].release(9)
            await eventually(lambda: engines.made["large"])
            [large] = engines.made["large"]
            await large.wait_until(lambda: large.active)
            await asyncio.sleep(0.2)  # it would be given up by now, if nobody read it
            large.release(9)
        events = [json.loads(line[6:]) for line in (await following).text.splitlines() if line.startswith("data: ")]
        first = had[-1]["sequence_number"] + 1
        assert [one["sequence_number"] for one in events] == list(range(first, first + len(events)))
        last = events[-1]["response"]
        if last["status"] == "completed":
            assert last["output"][0]["content"][0]["text"] == TEXT
        assert last["status"] == {"is cancelled": "cancelled", "cannot": "failed"}.get(ends, "completed")
