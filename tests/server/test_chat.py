"""Chat completions: what OpenAI's clients rely on, field by field."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from novainfer import Delta, FinishReason
from novainfer.server.directory import shown_id
from novainfer.server.openai.replies import Tally
from tests.server.conftest import Serve
from tests.server.fakes import FakeEngine
from tests.server.test_bad_input import error_of

USER = [{"role": "user", "content": "hi"}]


def events(text: str) -> list[Any]:
    """The data of each SSE event, decoded; `[DONE]` as it is."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def chat(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": USER, **body})


async def test_an_answer_has_openais_shape(client: httpx.AsyncClient) -> None:
    response = await chat(client, model="fake")
    assert response.status_code == 200, response.text
    reply = response.json()
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "fake"
    [choice] = reply["choices"]
    assert choice["message"] == {"content": "Hello, world!", "role": "assistant", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["seed"] == 1234
    assert reply["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert int(response.headers["openai-processing-ms"]) >= 0


async def test_a_stream_is_role_content_finish_done(client: httpx.AsyncClient) -> None:
    response = await chat(client, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:-1]] == ["Hello", ",", " wor", "ld", "!"]
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_in_a_chunk_of_its_own_before_done(client: httpx.AsyncClient) -> None:
    response = await chat(client, stream=True, stream_options={"include_usage": True})
    *chunks, last, _ = events(response.text)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_continuous_usage_counts_up(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _, _ = events((await chat(client, stream=True, stream_options=options)).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 4, 5, 5]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {7}


@pytest.mark.parametrize("by", ["request", "operator"])
async def test_a_stream_may_have_fewer_events_of_more_tokens(serve: Serve, by: str) -> None:
    engine = FakeEngine()
    server = await serve(engine, stream_interval=3 if by == "operator" else 2)
    asked = {"stream": True, "n": 2, "stream_options": {"continuous_usage_stats": True}}
    asked |= {"stream_interval": 3} if by == "request" else {}
    async with httpx.AsyncClient(base_url=server.url) as client:
        *chunks, done = events((await chat(client, **asked)).text)
        assert done == "[DONE]"
        for index in (0, 1):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            said = [choice["delta"].get("content") for choice in mine]
            assert said == ["", "Hello", ", world", "!", None]  # the first at once, and no end waits
        assert chunks[-1]["usage"]["completion_tokens"] == 10
        text = (await client.post("/v1/completions", json={"prompt": "a", "logprobs": 0, **asked, "n": 1})).text
        told = [chunk["choices"][0] for chunk in events(text)[:-1]]
        assert [len(choice["logprobs"]["tokens"]) for choice in told] == [1, 3, 1]
        engine.fail_at = 3
        *chunks, error = events((await chat(client, stream=True, stream_interval=100)).text)
        assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["", "Hello", ", wor"]
        assert "error" in error


async def test_several_choices_come_by_index(client: httpx.AsyncClient) -> None:
    reply = (await chat(client, n=3)).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert all(choice["message"]["content"] == "Hello, world!" for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 15
    *chunks, _ = events((await chat(client, n=2, stream=True)).text)
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello, world!"
        assert mine[-1]["finish_reason"] == "stop"


async def test_logprobs_give_bytes_and_no_infinity(client: httpx.AsyncClient) -> None:
    reply = (await chat(client, logprobs=True, top_logprobs=2)).json()
    first = reply["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("Hello", -0.5, list(b"Hello"))
    assert first["top_logprobs"][1] == {"token": "\ufffd", "logprob": -9999.0, "bytes": [255]}
    *chunks, _ = events((await chat(client, logprobs=True, stream=True)).text)
    tokens = [item["token"] for chunk in chunks for item in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert tokens == ["Hello", ",", " wor", "ld", "!"]


async def test_token_ids_come_when_asked_for(client: httpx.AsyncClient) -> None:
    reply = (await chat(client, return_token_ids=True)).json()
    assert reply["prompt_token_ids"] == [1, 2, 3]
    assert reply["choices"][0]["token_ids"] == [0, 1, 2, 3, 4]
    *chunks, _ = events((await chat(client, return_token_ids=True, stream=True)).text)
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == [0, 1, 2, 3, 4]
    assert chunks[1]["choices"][0]["prompt_token_ids"] == [1, 2, 3]
    assert "token_ids" not in (await chat(client)).json()["choices"][0]


async def test_sampling_fields_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": 7,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "n": 2,
        "min_tokens": 2,
        "ignore_eos": True,
        "logit_bias": {"5": -100},
        "allowed_token_ids": [1, 5],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    response = await chat(client, max_tokens=3, max_completion_tokens=9, timeout=5, **fields)
    assert response.status_code == 200, response.text
    params = engine.seen[-1][1]
    assert params.max_tokens == 9
    assert params.timeout_s == 5
    assert {name: getattr(params, name) for name in fields} == {**fields, "logit_bias": {5: -100}}


async def test_chat_fills_the_context_unless_told_otherwise(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await chat(client)
    assert engine.seen[-1][1].max_tokens is None


async def test_null_means_the_default(client: httpx.AsyncClient) -> None:
    fields = ("temperature", "n", "stop", "max_tokens", "logit_bias", "tools", "stream_options", "response_format")
    assert (await chat(client, **dict.fromkeys(fields))).status_code == 200


async def test_text_parts_are_joined_and_developer_is_system(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    assert (await chat(client, messages=messages)).status_code == 200
    prompt = engine.seen[-1][0]
    assert prompt.messages == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "one\ntwo"}]
    assert prompt.add_generation_prompt


async def test_an_assistants_null_content_and_its_refusals_are_taken(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """OpenAI's own answers are sent back like this."""
    said = [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "But."}]},
    ]
    assert (await chat(client, messages=[*USER, *said])).status_code == 200
    [(prompt, _, _)] = engine.seen
    assert [message["content"] for message in prompt.messages[1:]] == ["", "I cannot.", "No.\nBut."]
    for role in ("user", "system"):
        assert (await chat(client, messages=[{"role": role, "content": None}])).status_code == 400


async def test_a_final_message_can_be_continued(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well,"}]
    assert (await chat(client, messages=messages, continue_final_message=True)).status_code == 200
    assert engine.seen[-1][0].continue_final_message
    assert not engine.seen[-1][0].add_generation_prompt


async def test_ids_are_the_clients_where_it_has_one(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": USER}, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "chatcmpl-mine-1"
    assert shown_id(engine.seen[-1][2]) == "chatcmpl-mine-1"
    assert (await chat(client, request_id="body-1")).json()["id"] == "chatcmpl-body-1"
    assert len((await chat(client)).headers["x-request-id"]) == 32


async def test_effort_is_told_to_the_template(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for effort, told in [("none", {"enable_thinking": False}), ("low", {"reasoning_effort": "low"}), (None, {})]:
        response = await chat(client, reasoning_effort=effort, chat_template_kwargs={"a": 1})
        assert response.is_success
        assert "x-nova-ignored-fields" not in response.headers
        assert engine.seen[-1][0].template_kwargs == {**told, "a": 1}
    response = await chat(client, reasoning_effort="much")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "reasoning_effort")


async def test_ignored_fields_are_named(client: httpx.AsyncClient) -> None:
    response = await chat(client, user="u", verbosity="low", my_field=1, service_tier="auto")
    assert response.headers["x-nova-ignored-fields"] == "verbosity, my_field, service_tier"
    assert "x-nova-ignored-fields" not in (await chat(client, user="u")).headers


async def test_fields_without_effect_are_refused_where_the_server_is_strict(serve: Serve, engine: FakeEngine) -> None:
    server = await serve(engine, strict_fields=True)
    async with httpx.AsyncClient(base_url=server.url) as client:
        for name, more in [("temprature", "did you mean temperature?"), ("service_tier", "leave it out")]:
            response = await chat(client, **{name: 1})
            assert response.status_code == 400
            error = error_of(response)
            assert (error["param"], error["code"]) == (name, "invalid_value")
            assert error["message"].startswith(f"{name} has no effect")
            assert error["message"].endswith(more)
        assert error_of(await chat(client, **{"a\nb": 1}))["param"] == "a\\nb"
        assert error_of(await chat(client, **{"é" * 99: 1}))["param"]
        assert not engine.seen
        response = await chat(client, user="u", metadata={"a": "b"}, top_k=3, cache_salt=None)
        assert response.status_code == 200
        assert "x-nova-ignored-fields" not in response.headers
        response = await chat(client, priority=-3, cache_salt="s")
        assert response.status_code == 200
        assert "x-nova-ignored-fields" not in response.headers
        params = engine.seen[-1][1]
        assert (params.priority, params.cache_salt) == (-3, "s")


def test_usage_tells_of_guesses_where_any_were_verified() -> None:
    tally = Tally(num_prompts=1, n=2)
    tally.add(Delta(request_id="r", token_ids=[1, 2], num_prompt_tokens=3, num_generated_tokens=2))
    assert tally.usage().completion_tokens_details is None
    last = Delta(request_id="r", token_ids=[3], num_generated_tokens=3, finish_reason=FinishReason.STOP)
    for index in (0, 1):
        tally.add(msgspec.structs.replace(last, index=index, num_draft_tokens=4, num_accepted_tokens=3))
    found = msgspec.to_builtins(tally.usage())["completion_tokens_details"]
    assert found == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}
