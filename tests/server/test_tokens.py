"""Tokens without an answer: tokenize, detokenize, the tokenizer, rendered requests; load and what the server is."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from novainfer import Chat
from tests.server.conftest import Serve, eventually
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import error_of
from tests.server.test_chat import USER


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_text_and_messages_are_tokenised(client: httpx.AsyncClient) -> None:
    found = await post(client, "/tokenize", model="fake", prompt="hé")
    assert found == {"count": 4, "max_model_len": 64, "tokens": [1, 104, 195, 169], "token_strs": None}
    found = await post(client, "/tokenize", prompt="hé", add_special_tokens=False, return_token_strs=True)
    assert (found["tokens"], found["token_strs"]) == ([104, 195, 169], ["h", "bytes:\\xc3", "bytes:\\xa9"])
    assert (await post(client, "/tokenize", messages=USER))["tokens"] == [2, 104, 105]
    assert (await post(client, "/tokenize", prompt="")) == {
        "count": 0,
        "max_model_len": 64,
        "tokens": [],
        "token_strs": None,
    }
    assert (await post(client, "/tokenize", prompt="x" * 100))["count"] == 101  # beyond the context: to count them


async def test_a_conversation_is_tokenised_as_a_chat_would_begin(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    seen: list[Chat] = []

    async def tokenize(prompt: Any, *, add_special_tokens: bool = True) -> list[int]:
        seen.append(prompt)
        return [5]

    engine.tokenize = tokenize  # type: ignore[method-assign]
    said = [*USER, {"role": "assistant", "content": "yes"}]
    fields = {"messages": said, "continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    await post(client, "/tokenize", **fields)
    await post(client, "/v1/chat/completions/render", **fields)
    await post(client, "/v1/chat/completions", **fields)
    assert seen[0] == seen[1] == engine.seen[-1][0]
    assert seen[0].continue_final_message
    assert not seen[0].add_generation_prompt
    assert seen[0].template_kwargs == {"enable_thinking": False}


async def test_tokens_are_detokenised(client: httpx.AsyncClient) -> None:
    assert await post(client, "/detokenize", model="fake", tokens=[104, 195, 169, 195]) == {"prompt": "hé\ufffd"}
    assert await post(client, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_the_tokenizer_is_described(client: httpx.AsyncClient) -> None:
    found = (await client.get("/tokenizer_info")).json()
    assert (found["tokenizer_class"], found["eos_token"], found["bos_token"]) == ("Bytes", "<eos>", None)
    assert found["chat_template"] == "{{ messages }}"


async def test_requests_are_rendered_as_they_would_begin(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    headers = {"x-request-id": "mine"}
    response = await client.post(
        "/v1/chat/completions/render", json={"messages": USER, "top_k": 3, "odd": 1}, headers=headers
    )
    assert response.headers["x-nova-ignored-fields"] == "odd"
    found = response.json()
    assert (found["request_id"], found["model"], found["token_ids"]) == ("chatcmpl-mine", "fake", [2, 104, 105])
    assert found["sampling_params"]["top_k"] == 3
    body = {"prompt": ["ab", "c"], "truncate_prompt_tokens": 2, "request_id": "other", "n": 3}
    found = await post(client, "/v1/completions/render", **body)
    assert [(one["request_id"], one["token_ids"]) for one in found] == [
        ("cmpl-other-0", [97, 98]),
        ("cmpl-other-1", [1, 99]),
    ]
    assert found[0]["sampling_params"]["n"] == 3
    found = await post(client, "/v1/completions/render", prompt=[[7, 8], [9]])
    assert [one["token_ids"] for one in found] == [[7, 8], [9]]
    assert not engine.seen


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/v1/chat/completions/render", {"messages": USER, "temperature": -1}, "temperature"),
        ("/v1/completions/render", {"prompt": []}, "prompt"),
    ],
    ids=str,
)
async def test_a_faulty_field_is_named(client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert param.split("[")[0] in error_of(response)["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions/render"])
async def test_another_model_is_not_found(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={"model": "other", "prompt": "a", "tokens": []})
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


async def test_prompts_that_are_tokenised_count_as_their_clients_requests_until_they_are(serve: Serve) -> None:
    engine, go_on = FakeEngine(), asyncio.Event()

    async def tokenize(prompt: Any, *, add_special_tokens: bool = True) -> list[int]:
        await go_on.wait()
        return [1]

    engine.tokenize = tokenize  # type: ignore[method-assign]
    server = await serve(engine, max_client_reqs=2)
    async with httpx.AsyncClient(base_url=server.url) as client:
        tasks = [asyncio.create_task(client.post("/tokenize", json={"prompt": "a"})) for _ in range(2)]
        await eventually(lambda: server.service.clients.live.total() == 2)
        assert server.service.clients.waiting.total() == 2
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 429
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 429
        go_on.set()
        for task in tasks:
            assert (await task).is_success
        assert (await client.post("/v1/completions", json={"prompt": "a"})).is_success
    assert not server.service.clients.live
    assert not server.service.clients.waiting


async def test_load_counts_what_is_here(serve: Serve) -> None:
    engine = FakeEngine(is_paced=True)
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as client:
        idle = (await client.get("/load")).json()
        assert idle == {
            "server_load": 0,
            "num_running": 0,
            "num_waiting": 3,
            "max_num_seqs": 8,
            "kv_cache_usage": 0.04,
        }
        task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        await engine.wait_until(lambda: engine.active)
        found = (await client.get("/load")).json()
        assert (found["server_load"], found["num_running"]) == (1, 1)
        engine.release(99)
        await task
        assert (await client.get("/load")).json() == idle


async def test_what_the_server_is_shows_no_key_and_no_path(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, api_keys=("first-key",), admin_key="boss-key", max_client_reqs=5)
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": "Bearer first-key"}) as client:
        response = await client.get("/server_info")
        assert response.json()["model"]["name"] == "fake"
        assert response.json()["settings"]["max_client_reqs"] == 5
        assert "key" not in response.text
