"""Embeddings: OpenAI's four forms of input, both forms of vectors, and one sentence for what is wrong."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import httpx
import msgspec
import pytest

from novainfer import EngineOverloaded
from novainfer.fsm.messages.pooling import ModelPooling, Pooling
from novainfer.server.openai import embeddings
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import error_of


async def embed(client: httpx.AsyncClient, given: Any, **body: Any) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"input": given, **body})


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("Say hello", ["Say hello"]),
        (["a", "bb"], ["a", "bb"]),
        ([1, 2, 3], [{"prompt_token_ids": [1, 2, 3]}]),
        ([[1, 2], [3]], [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]),
    ],
)
async def test_every_form_of_input_gives_a_vector_each(
    client: httpx.AsyncClient, engine: FakeEngine, given: Any, seen: list[Any]
) -> None:
    reply = (await embed(client, given)).json()
    assert [prompt for prompt, _, _ in engine.seen] == seen
    lengths = [len(one) if isinstance(one, str) else 7 for one in seen]
    assert reply["object"] == "list"
    assert reply["model"] == "fake"
    assert reply["id"].startswith("embd-")
    assert reply["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert [item["object"] for item in reply["data"]] == ["embedding"] * len(seen)
    assert [item["index"] for item in reply["data"]] == list(range(len(seen)))
    assert [item["embedding"][:3] for item in reply["data"]] == [[float(length), 0.0, 1.0] for length in lengths]


async def test_base64_holds_the_same_floats(client: httpx.AsyncClient) -> None:
    numbers = (await embed(client, "Say hello", encoding_format="float")).json()["data"][0]["embedding"]
    text = (await embed(client, "Say hello", encoding_format="base64")).json()["data"][0]["embedding"]
    assert list(struct.unpack("<4f", base64.b64decode(text))) == numbers


async def test_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await embed(
        client,
        "Say hello",
        model="fake",
        dimensions=2,
        pooling="mean",
        normalize=False,
        truncate_prompt_tokens=5,
        timeout=9,
        max_queue_ms=1500,
        user="me",
        request_id="mine",
        add_special_tokens=True,
        nonsense=1,
    )
    assert response.json()["data"][0]["embedding"] == [9.0, 1.0]
    assert response.json()["id"] == "embd-mine"
    assert response.headers["x-nova-ignored-fields"] == "nonsense"
    _, params, _ = engine.seen[0]
    assert params.pooling == Pooling(kind="mean", dimensions=2, normalize=False)
    assert (params.truncate_prompt_tokens, params.timeout_s, params.max_queue_s) == (5, 9.0, 1.5)


async def test_priority_and_salt_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await embed(client, "Say hello", priority=3, cache_salt="mine")
    assert response.status_code == 200
    assert "x-nova-ignored-fields" not in response.headers
    [(_, params, _)] = engine.seen
    assert (params.priority, params.cache_salt) == (3, "mine")
    salted = await embed(client, "Say hello", cache_salt="")
    assert (salted.status_code, salted.json()["error"]["param"]) == (400, "cache_salt")


async def test_what_a_request_leaves_open_is_as_the_model_says(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.model_info = msgspec.structs.replace(engine.model_info, pooling=ModelPooling(kind="mean", normalize=False))
    assert (await embed(client, "a")).json()["data"][0]["embedding"][1:3] == [1.0, 0.0]
    own = ModelPooling(refusal="1_Pooling/config.json pools by cls_token, and this server by lasttoken or mean only")
    engine.model_info = msgspec.structs.replace(engine.model_info, pooling=own)
    response = await embed(client, "a")
    assert response.status_code == 400
    assert error_of(response)["param"] == "pooling"
    assert "cls_token" in error_of(response)["message"]
    assert (await embed(client, "a", pooling="last")).status_code == 200


async def test_without_special_tokens_a_text_has_none(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await embed(client, ["ab", "c"], add_special_tokens=False)
    assert [prompt for prompt, _, _ in engine.seen] == [{"prompt_token_ids": [97, 98]}, {"prompt_token_ids": [99]}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input is required"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "input must hold at least one string or token id"),
        ({"input": ["a", ""]}, "input[1]", "input[1] must not be empty"),
        ({"input": ["a", 1]}, "input[1]", "input must not mix"),
        ({"input": [[1], []]}, "input[1]", "input[1] must hold at least one token id"),
        ({"input": [[1, "a"]]}, "input[0][1]", "int"),
        ({"input": {"a": 1}}, "input", "input"),
        ({"input": ["a"] * 2049}, "input", "input takes at most 2048 inputs, not 2049"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions must be between 1 and"),
        ({"input": "a", "dimensions": 5}, "dimensions", "dimensions must be between 1 and 4, not 5"),
        ({"input": "a", "dimensions": "2"}, "dimensions", "dimensions"),
        ({"input": "a", "pooling": "cls"}, "pooling", "pooling"),
        ({"input": "a", "normalize": 1}, "normalize", "normalize"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens must be"),
        ({"input": "a", "timeout": -1}, "timeout", "timeout must be more than 0"),
        ({"input": "a", "max_queue_ms": 0}, "max_queue_ms", "max_queue_ms must be more than 0"),
        ({"input": "a", "model": "other"}, "model", "other"),
        ({"input": "a", "request_id": "a b"}, "request_id", "request_id"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, body: dict[str, Any], param: str, words: str) -> None:
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == (404 if param == "model" else 400)
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]


async def test_what_the_engine_says_of_a_prompt_names_the_input(client: httpx.AsyncClient) -> None:
    response = await embed(client, ["a", "x" * 100])
    assert response.status_code == 400
    assert (error_of(response)["param"], error_of(response)["code"]) == ("input", "context_length_exceeded")


async def test_a_full_queue_is_503_and_leaves_nothing_behind(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.overloaded = True
    response = await embed(client, ["a", "b"])
    assert response.status_code == 503
    assert error_of(response)["code"] == EngineOverloaded.code
    assert "retry-after" in response.headers
    engine.overloaded = False
    assert (await embed(client, ["a", "b"])).status_code == 200
    assert not engine.active


async def test_a_failure_of_one_input_ends_the_others(serve: Serve) -> None:
    engine = FakeEngine()
    engine.fail_at = 0
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        response = await embed(client, ["a", "b", "c"])
    assert response.status_code == 500
    assert "secret" not in response.text
    assert not engine.active


async def test_many_vectors_leave_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    async def sleep(delay: float) -> None:
        turns.append(delay)

    monkeypatch.setattr(embeddings.asyncio, "sleep", sleep)
    vectors = [struct.pack("<1024f", *[0.25] * 1024)] * 64
    written = await embeddings._written(vectors, as_base64=False)
    assert len(turns) == 4
    assert [json.loads(one)["index"] for one in map(bytes, written)] == list(range(64))
