"""Requests whose model is not loaded: what they count for, what their clients see, and how they are ended."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from novainfer import EngineConfig
from novainfer.models import Models
from novainfer.server.keys.record import KeyRecord, digest
from novainfer.server.keys.store import KeyStore
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.stable import ADMIN, Stable, ask

SAYS_NOTHING_OF = "/models/"  # paths of the operator's folders
CHAT = [{"role": "user", "content": "Who are you?"}]
STREAMS = [
    ("/v1/completions", {"prompt": "Who?"}, {"error"}),
    ("/v1/chat/completions", {"messages": CHAT}, {"error"}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 9}, {"type", "error", "request_id"}),
    ("/v1/responses", {"input": "Who?"}, {"type", "sequence_number", "code", "message", "param"}),
]


@pytest.fixture
def stable() -> Stable:
    return Stable()


async def clients_of(serve: Serve, stable: Stable, **settings: object) -> tuple[httpx.AsyncClient, Models]:
    """A client of a server whose model "large" comes up when the gate is opened, with one place."""
    server = await serve(stable.models("small", "large", max_loaded=1), **settings)
    stable.gate = asyncio.Event()
    models = server.service.models
    assert models is not None
    return httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S), models


def num_waiting(models: Models) -> int:
    return models.models()[1].num_waiting


async def lines_of(reply: httpx.Response) -> list[str]:
    return [line async for line in reply.aiter_lines() if line]


async def test_requests_that_wait_for_a_model_are_live_choices_of_their_client(serve, stable):
    client, models = await clients_of(serve, stable, max_client_reqs=2)
    async with client:
        waiting = [asyncio.create_task(client.post("/v1/completions", json=ask("large"))) for _ in range(2)]
        await eventually(lambda: num_waiting(models) == 2)
        refused = await client.post("/v1/completions", json=ask("large"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        other = await client.post("/v1/completions", json=ask("small"))  # all that a client may have
        assert other.status_code == 429
        waiting.pop().cancel()
        await eventually(lambda: num_waiting(models) == 1)
        waiting.append(asyncio.create_task(client.post("/v1/completions", json=ask("large"))))
        await eventually(lambda: num_waiting(models) == 2)
        stable.gate.set()
        assert [(await one).status_code for one in waiting] == [200, 200]
        again = [client.post("/v1/completions", json=ask("large")) for _ in range(2)]
        assert [one.status_code for one in await asyncio.gather(*again)] == [200, 200]


async def test_requests_that_wait_for_a_model_count_with_their_key_and_once(serve, stable, tmp_path):
    file = tmp_path / "keys.yaml"
    key = KeyRecord(name="guest", hash=digest(b"guest-key"), max_concurrent=1, requests_per_min=3)
    KeyStore.at(file).add(key)
    client, models = await clients_of(serve, stable, keys_file=file)
    client.headers["authorization"] = "Bearer guest-key"
    async with client:
        waiting = asyncio.create_task(client.post("/v1/completions", json=ask("large")))
        await eventually(lambda: num_waiting(models) == 1)
        refused = await client.post("/v1/completions", json=ask("large"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        stable.gate.set()
        reply = await waiting
        assert (reply.status_code, reply.headers["x-ratelimit-remaining-requests"]) == (200, "2")


@pytest.mark.parametrize(("path", "body", "_"), STREAMS, ids=[path for path, *_ in STREAMS])
async def test_a_stream_that_waits_for_its_model_shows_signs_of_life(serve, stable, path, body, _):
    client, _models = await clients_of(serve, stable, sse_keep_alive_interval_s=0.02)
    async with client, client.stream("POST", path, json=body | {"model": "large", "stream": True}) as reply:
        assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        lines = (line async for line in reply.aiter_lines() if line)
        seen = [await anext(lines) for _ in range(3)]
        assert seen == [": waiting for the model to be loaded", ": keep-alive", ": keep-alive"]
        stable.gate.set()
        said = [line async for line in lines if not line.startswith(":")]
    told = "".join(said)
    assert "I am large" in told
    assert "error" not in told.replace('"error":null', "")
    assert told.count("[DONE]") + told.count("event: message_stop") + told.count("event: response.completed") == 1


@pytest.mark.parametrize(("path", "body", "fields"), STREAMS, ids=[path for path, *_ in STREAMS])
async def test_a_stream_whose_model_cannot_be_loaded_ends_with_one_error_event(serve, stable, path, body, fields):
    server = await serve(stable.models("small", "broken", max_loaded=1), sse_keep_alive_interval_s=0.02)
    stable.gate = asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client,
        client.stream("POST", path, json=body | {"model": "broken", "stream": True}) as reply,
    ):
        assert reply.status_code == 200
        stable.gate.set()
        said = [line async for line in reply.aiter_lines() if line and not line.startswith(":")]
    [data] = [line.removeprefix("data: ") for line in said if line.startswith("data: ")]
    assert set(json.loads(data)) == fields
    assert "could not be loaded" in data
    assert "config.json" not in data
    assert [line for line in said if line.startswith("event: ")] == ["event: error"] * (len(said) - 1)


async def test_what_cannot_be_asked_of_a_model_that_was_waited_for_is_an_error_event(serve, stable):
    client, _ = await clients_of(serve, stable, sse_keep_alive_interval_s=0.02)
    async with client, client.stream("POST", "/v1/completions", json=ask("large", stream=True, n=0)) as reply:
        assert reply.status_code == 200
        stable.gate.set()
        said = [line async for line in reply.aiter_lines() if line.startswith("data: ")]
    [error] = [json.loads(line.removeprefix("data: "))["error"] for line in said]
    assert error["param"] == "n"


async def test_a_client_that_leaves_its_stream_waits_no_more(serve, stable):
    client, models = await clients_of(serve, stable, sse_keep_alive_interval_s=0.02)
    async with client:
        async with client.stream("POST", "/v1/completions", json=ask("large", stream=True)):
            assert num_waiting(models) == 1
        await eventually(lambda: num_waiting(models) == 0)
        stable.gate.set()
        assert (await client.post("/v1/completions", json=ask("large"))).status_code == 200
        await eventually(lambda: models.models()[1].num_live == 0)


async def test_a_request_that_waits_for_its_model_is_listed_and_can_be_cancelled(serve, stable):
    client, models = await clients_of(serve, stable)
    async with client:
        waiting = asyncio.create_task(client.post("/v1/completions", json=ask("large", request_id="mine")))
        await eventually(lambda: num_waiting(models) == 1)
        [listed] = (await client.get("/v1/requests")).json()["data"]
        assert (listed["id"], listed["model"], listed["state"]) == ("cmpl-mine", "large", "WAITING")
        assert listed["reason"] == "model"
        assert (await client.get("/v1/requests/mine")).json()["id"] == "cmpl-mine"
        cancelled = await client.post("/v1/requests/mine/cancel")
        assert cancelled.json()["status"] == "cancelled"
        reply = await waiting
        assert (reply.status_code, reply.json()["error"]["code"]) == (499, "request_cancelled")
        assert num_waiting(models) == 0
        assert (await client.get("/v1/requests")).json()["data"] == []
        assert (await client.post("/v1/requests/mine/cancel")).json()["status"] == "finished"


async def test_a_stream_that_is_cancelled_while_it_waits_ends_with_an_error_event(serve, stable):
    client, _ = await clients_of(serve, stable, sse_keep_alive_interval_s=0.02)
    body = ask("large", stream=True, request_id="mine")
    async with client, client.stream("POST", "/v1/completions", json=body) as reply:
        await client.post("/v1/requests/cmpl-mine/cancel")
        said = [line async for line in reply.aiter_lines() if line.startswith("data: ")]
    assert [json.loads(line[6:])["error"]["code"] for line in said] == ["request_cancelled"]


@pytest.fixture
async def guest(serve: Serve, stable: Stable, tmp_path) -> AsyncIterator[httpx.AsyncClient]:
    """Of a key that may use "small", of two models that are loaded."""
    file = tmp_path / "keys.yaml"
    KeyStore.at(file).add(KeyRecord(name="guest", hash=digest(b"guest-key"), models=("small",)))
    server = await serve(stable.models("small", "large"), keys_file=file, admin_key="admin-key")
    headers = {"authorization": "Bearer guest-key"}
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, headers=headers) as client:
        yield client


@pytest.mark.parametrize("path", ["/server_info", "/v1/actors", "/v1/kv", "/v1/steps", "/v1/sessions", "/v1/events"])
async def test_a_key_looks_at_the_models_that_it_may_use(guest, path):
    refused = await guest.get(path, params={"model": "large"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    unknown = await guest.get(path, params={"model": "other"})
    assert unknown.status_code == 403  # whether there is one it does not hear
    async with guest.stream("GET", path, params={"model": "small"}) as own, guest.stream("GET", path) as only:
        assert (own.status_code, only.status_code) == (200, 200)
    async with guest.stream("GET", path, params={"model": "large"}, headers=ADMIN) as operator:
        assert operator.status_code == 200


async def test_what_is_not_said_of_models_that_a_key_may_not_use(guest):
    await guest.post("/models/unload", json={"model": "small"}, headers=ADMIN)
    await eventually_not_loaded(guest)
    asked = await guest.get("/server_info")
    assert (asked.status_code, asked.json()["error"]["message"]) == (400, "model must say which one, of small")


async def eventually_not_loaded(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await client.get("/v1/models/small")).json()["status"]["value"] != "unloaded":
            pass


async def test_tokens_of_a_model_that_is_not_loaded_need_its_tokenizer_only(serve, stable):
    configs = {name: EngineConfig(model="demo") for name in ("small", "large")}
    server = await serve(Models(configs, stable.make, max_loaded=1))
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        of_text = (await client.post("/tokenize", json={"model": "large", "prompt": "Who are you?"})).json()
        assert of_text["count"] == len(of_text["tokens"]) > 1
        assert of_text["max_model_len"] > 100
        back = await client.post("/detokenize", json={"model": "large", "tokens": of_text["tokens"]})
        assert "Who are you?" in back.json()["prompt"]
        counted = await client.post("/v1/messages/count_tokens", json={"model": "large", "messages": CHAT})
        assert counted.json()["input_tokens"] > of_text["count"]
        info = await client.get("/tokenizer_info", params={"model": "large"})
        assert info.json()["chat_template"]
        rendered = await client.post("/v1/completions/render", json=ask("large"))
        assert (rendered.status_code, rendered.json()["error"]["code"]) == (503, "model_unavailable")
        assert stable.made["large"] == []
        assert [one.state for one in server.service.models.models()] == ["IDLE", "ABSENT"]


async def test_a_tokenizer_that_cannot_be_loaded_is_503_and_its_path_is_not_told(serve, stable):
    server = await serve(stable.models("small", "large", max_loaded=1))
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as client:
        for _ in range(2):
            reply = await client.post("/tokenize", json={"model": "large", "prompt": "a"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_unavailable")
            assert SAYS_NOTHING_OF not in reply.text
