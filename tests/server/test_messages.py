"""Anthropic's messages, as its own client reads them: every answer and every event is checked against its types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from novainfer import CallerError, Chat, ContextLengthExceeded, Delta, FinishReason, SamplingParams, StepFailedError
from novainfer.fsm.parsing.pieces import CallArguments, CallBegun, Content, Piece, Reasoning
from novainfer.prompt import to_prompt
from novainfer.server.anthropic.events import PING, MessageEvents
from novainfer.server.anthropic.protocol import MessagesRequest
from novainfer.server.anthropic.replies import INVALID_JSON, Shown, blocks_of
from novainfer.server.http.writer import KEEP_ALIVE
from novainfer.server.openai.decode import decode
from novainfer.server.openai.replies import Tally
from tests.server.conftest import TIMEOUT_S, Serve, eventually
from tests.server.fakes import FakeEngine, FakeModelInfo
from tests.server.test_tools import FORMATS, IDS, PARIS, ROME

PATH = "/v1/messages"
USER: Any = [{"role": "user", "content": "Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA}
THINKS = ("<think>", "Hm", ".", "</think>")
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
# Null, or what it always is: they count or name what only Anthropic's own servers have.
OF_ANTHROPICS_SERVICES = {
    "cache_creation": None,
    "inference_geo": None,
    "server_tool_use": None,
    "service_tier": "standard",
    "speed": "standard",
}


class StoppedEngine(FakeEngine):
    """Says where its answers stopped, and how much the context holds."""

    stopped_by: int | str | None = None
    room: int | None = None

    def _delta(
        self, request_id: str, index: int, position: int, num_prompt_tokens: int, params: SamplingParams
    ) -> Delta:
        if self.room is not None and (params.max_tokens or 1) > self.room:
            raise ContextLengthExceeded("plus max_tokens", param="max_tokens")
        delta = super()._delta(request_id, index, position, num_prompt_tokens, params)
        if delta.finish_reason is not None:
            delta.stop_reason = self.stopped_by
            if self.room is not None and params.max_tokens is None:
                delta.finish_reason = FinishReason.LENGTH
        return delta


@pytest.fixture
def engine() -> StoppedEngine:
    engine = StoppedEngine()
    engine.model_info = FakeModelInfo(formats=FORMATS)
    return engine


@pytest.fixture
async def claude(serve: Serve, engine: StoppedEngine) -> AsyncIterator[anthropic.AsyncAnthropic]:
    server = await serve(engine)
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 50, "messages": USER, **more}


async def both(claude: anthropic.AsyncAnthropic, **more: Any) -> anthropic.types.Message:
    """The answer, which is the same in one piece and from a stream, but for the ids of calls."""
    whole = await claude.messages.create(**asked(**more))
    async with claude.messages.stream(**asked(**more)) as stream:
        streamed = await stream.get_final_message()
    found = [json.loads(message.model_dump_json(exclude={"id"})) for message in (whole, streamed)]
    for message in found:
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_")
            block.pop("parsed_output", None)
    assert found[0] == found[1]
    return whole


async def events_of(claude: anthropic.AsyncAnthropic, **more: Any) -> list[dict[str, Any]]:
    """The events of a stream as they are on the wire, each valid and called by its own type."""
    async with httpx.AsyncClient(base_url=str(claude.base_url)) as http:
        response = await http.post(PATH, json=asked(stream=True, **more))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("error", "ping"):
            EVENT.validate_python(event)
        found.append(event)
    return found


async def test_an_answer_has_anthropics_shape(claude: anthropic.AsyncAnthropic, engine: StoppedEngine) -> None:
    async with httpx.AsyncClient(base_url=str(claude.base_url)) as http:
        response = await http.post(PATH, json=asked(), headers={"x-request-id": "mine"})
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
    assert response.json() == {
        "type": "message",
        "id": "msg-mine",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "Hello, world!", "citations": None}],
        "container": None,
        "diagnostics": None,
        "stop_details": None,
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            **OF_ANTHROPICS_SERVICES,
            "input_tokens": 4,
            "output_tokens": 5,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": 3,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    message = await both(claude)
    assert message._request_id is not None


async def test_a_stream_is_anthropics_events_in_their_order(claude: anthropic.AsyncAnthropic) -> None:
    start, block, *deltas, closed, ending, stop = await events_of(claude)
    assert start["message"] | {"id": ""} == {
        "type": "message",
        "id": "",
        "role": "assistant",
        "model": "fake",
        "content": [],
        "container": None,
        "diagnostics": None,
        "stop_details": None,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            **OF_ANTHROPICS_SERVICES,
            "input_tokens": 4,
            "output_tokens": 1,
            "cache_creation_input_tokens": None,
            "cache_read_input_tokens": 3,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert block["type"] == "content_block_start"
    assert (block["index"], block["content_block"]) == (0, {"type": "text", "text": "", "citations": None})
    assert [delta["delta"] for delta in deltas] == [
        {"type": "text_delta", "text": text} for text in ("Hello", ",", " wor", "ld", "!")
    ]
    assert {(delta["type"], delta["index"]) for delta in deltas} == {("content_block_delta", 0)}
    assert closed == {"type": "content_block_stop", "index": 0}
    nothing = {"container": None, "stop_details": None}
    assert ending["delta"] == {**nothing, "stop_reason": "end_turn", "stop_sequence": None}
    assert ending["usage"]["output_tokens"] == 5
    assert stop == {"type": "message_stop"}


async def test_thoughts_and_calls_are_blocks_of_their_own(
    claude: anthropic.AsyncAnthropic, engine: StoppedEngine
) -> None:
    engine.answer = (*THINKS, "Well", ".", "\n\n", *PARIS, "\n", *ROME)
    message = await both(claude, tools=[TOOL])
    thinking, text, paris, rome = message.content
    assert (thinking.type, text.type, paris.type, rome.type) == ("thinking", "text", "tool_use", "tool_use")
    assert (thinking.thinking, text.text) == ("Hm.", "Well.")
    assert thinking.signature
    assert [(call.name, call.input) for call in (paris, rome)] == [
        ("weather", {"city": "Paris"}),
        ("weather", {"city": "Rome"}),
    ]
    assert paris.id != rome.id
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == len(THINKS)

    events = await events_of(claude, tools=[TOOL])
    order = [
        (event["type"].removeprefix("content_block_"), event["index"], event.get("delta", {}).get("type"))
        for event in events
        if "index" in event
    ]
    assert order == [
        ("start", 0, None),
        *[("delta", 0, "thinking_delta")] * 2,
        ("delta", 0, "signature_delta"),
        ("stop", 0, None),
        ("start", 1, None),
        *[("delta", 1, "text_delta")] * 2,
        ("stop", 1, None),
        ("start", 2, None),
        *[("delta", 2, "input_json_delta")] * 4,
        ("stop", 2, None),
        ("start", 3, None),
        ("delta", 3, "input_json_delta"),
        ("stop", 3, None),
    ], "arguments come while they are written"
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start | {"id": ""} for start in starts[2:]] == [
        {"type": "tool_use", "id": "", "name": "weather", "input": {}, "caller": {"type": "direct"}}
    ] * 2


@pytest.mark.parametrize(
    ("thinking", "thoughts", "kwargs"),
    [
        (None, ["Hm."], {}),
        ({"type": "adaptive"}, ["Hm."], {"enable_thinking": True}),
        ({"type": "enabled", "budget_tokens": 20}, ["Hm."], {"enable_thinking": True}),
        ({"type": "enabled", "budget_tokens": 20, "display": "omitted"}, [""], {"enable_thinking": True}),
        ({"type": "disabled"}, [], {"enable_thinking": False}),
    ],
)
async def test_thoughts_are_shown_as_they_were_asked_for(
    claude: anthropic.AsyncAnthropic, engine: StoppedEngine, thinking: Any, thoughts: list[str], kwargs: dict[str, bool]
) -> None:
    engine.answer = (*THINKS, "Yes")
    message = await both(claude, **({} if thinking is None else {"thinking": thinking}))
    found = [block for block in message.content if block.type == "thinking"]
    assert [block.thinking for block in found] == thoughts
    assert all(block.signature for block in found)
    assert [block.text for block in message.content if block.type == "text"] == ["Yes"]
    assert engine.seen[-1][0].template_kwargs == kwargs


@pytest.mark.parametrize(
    ("stopped_by", "max_tokens", "reason", "sequence"),
    [
        (None, 50, "end_turn", None),
        (7, 50, "end_turn", None),
        ("##", 50, "stop_sequence", "##"),
        (None, 3, "max_tokens", None),
    ],
)
async def test_it_says_why_it_stopped(
    claude: anthropic.AsyncAnthropic,
    engine: StoppedEngine,
    stopped_by: int | str | None,
    max_tokens: int,
    reason: str,
    sequence: str | None,
) -> None:
    engine.stopped_by = stopped_by
    message = await both(claude, max_tokens=max_tokens, stop_sequences=["##"])
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert engine.seen[-1][1].stop_strings == ["##"]


async def test_max_tokens_beyond_the_context_is_a_bound(
    claude: anthropic.AsyncAnthropic, engine: StoppedEngine
) -> None:
    engine.room = 40
    message = await both(claude, max_tokens=50)
    assert message.stop_reason == "model_context_window_exceeded"
    assert [params.max_tokens for _, params, _ in engine.seen] == [50, None] * 2
    assert (await both(claude, max_tokens=40)).stop_reason == "end_turn"


async def test_what_is_asked_for_reaches_the_engine(claude: anthropic.AsyncAnthropic, engine: StoppedEngine) -> None:
    await claude.messages.create(
        **asked(
            extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
            stop_sequences=["a", "b"],
            metadata={"user_id": "u"},
        )
    )
    params = engine.seen[-1][1]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 50)
    assert params.stop == ["a", "b"]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await claude.messages.create(**asked(output_config={"format": {"type": "json_schema", "schema": schema}}))
    held = engine.seen[-1][1].structured_outputs
    assert held is not None
    assert held.json == schema


async def test_a_conversation_reaches_the_template_in_its_own_words(
    claude: anthropic.AsyncAnthropic, engine: StoppedEngine
) -> None:
    engine.answer = (*THINKS, "Well", *PARIS)
    first = await claude.messages.create(**asked(tools=[TOOL], system=[{"type": "text", "text": "Be brief."}]))
    use = first.content[-1]
    assert use.type == "tool_use"
    said: Any = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "Rain"}]},
            {"type": "tool_result", "tool_use_id": "other", "is_error": True},
            {"type": "text", "text": "And", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Rome?"},
        ],
    }
    messages = [*USER, first.to_param(), said]
    await claude.messages.create(**asked(messages=messages, tools=[TOOL], system="Be brief."))
    called = {"name": "weather", "arguments": {"city": "Paris"}}
    assert engine.seen[-1][0] == Chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            *USER,
            {
                "role": "assistant",
                "content": "Well",
                "tool_calls": [{"id": use.id, "type": "function", "function": called}],
                "reasoning_content": "Hm.",
            },
            {"role": "tool", "tool_call_id": use.id, "content": "Rain"},
            {"role": "tool", "tool_call_id": "other", "content": ""},
            {"role": "user", "content": "And\nRome?"},
        ],
        tools=[
            {
                "type": "function",
                "function": {"name": "weather", "description": "The weather of a city", "parameters": SCHEMA},
            }
        ],
    )


async def test_an_answer_that_was_begun_is_gone_on_with(
    claude: anthropic.AsyncAnthropic, engine: StoppedEngine
) -> None:
    await both(claude, messages=[*USER, {"role": "assistant", "content": "It is"}])
    prompt = engine.seen[-1][0]
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)


async def test_the_choice_of_tools(claude: anthropic.AsyncAnthropic, engine: StoppedEngine) -> None:
    engine.answer = (*PARIS, "\n", *ROME)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    message = await both(claude, tools=[TOOL], tool_choice=one)
    assert [block.type for block in message.content] == ["tool_use"]
    await eventually(lambda: len(engine.left_early) == 2)  # no more is computed
    await both(claude, tools=[TOOL], tool_choice={"type": "none"})
    assert engine.seen[-1][1].banned_token_ids == [IDS["<tool_call>"]]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        await both(claude, tools=[TOOL], tool_choice=choice)
        held = engine.seen[-1][1].structured_outputs
        assert held is not None
        assert "weather" in (held.grammar or "")
    await both(claude, tools=[{**TOOL, "strict": True}])
    assert engine.seen[-1][1].structured_outputs is not None
    await both(claude, tools=[TOOL])
    assert engine.seen[-1][1].structured_outputs is None


async def test_input_that_is_no_json_is_not_lost(claude: anthropic.AsyncAnthropic, engine: StoppedEngine) -> None:
    engine.answer = PARIS[:6]
    message = await claude.messages.create(**asked(tools=[TOOL], max_tokens=3))
    [use] = message.content
    assert use.type == "tool_use"
    assert (use.input, message.stop_reason) == ({INVALID_JSON: '{"city": "Par'}, "max_tokens")
    events = await events_of(claude, tools=[TOOL], max_tokens=3)
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(parts) == '{"city": "Par'


@pytest.mark.parametrize("arguments", ["[1]", '"a"', "{", '{"a": \\ud800}', "null", "[" * 5000])
def test_input_is_an_object_whatever_was_written(arguments: str) -> None:
    [use] = msgspec.json.decode(
        msgspec.json.encode(blocks_of([CallBegun(0, "f"), CallArguments(0, arguments)], thoughts="shown"))
    )
    assert use["input"] == {INVALID_JSON: arguments}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            'messages[0].content[0].type: content of type "image"',
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
            "messages[1].content[0].input",
        ),
        (
            {
                "messages": [
                    *USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},
                ]
            },
            "messages[1] ends with tool_use",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"properties": []}}]}, "tools[0].input_schema.properties"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 'tools[0].type "bash_20250124"'),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "rain"}}, "tool_choice"),
        ({"tools": [TOOL], "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": "9"}, "top_k"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_done_is_refused_by_name(
    claude: anthropic.AsyncAnthropic, engine: StoppedEngine, more: dict[str, Any], field: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await claude.post(PATH, body=asked(**more, stream=stream), cast_to=object)
    assert caught.value.type == "invalid_request_error"
    body: Any = caught.value.body
    assert (body["type"], body["request_id"]) == ("error", caught.value.request_id)
    assert field in body["error"]["message"]
    assert engine.seen == []


async def test_a_model_without_tools_and_thoughts_says_so(serve: Serve) -> None:
    server = await serve(FakeEngine())
    calls = [*USER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]
    thinking = {"type": "enabled", "budget_tokens": 5}
    async with httpx.AsyncClient(base_url=server.url) as http:
        for more, field in (({"tools": [TOOL]}, "tools"), ({"messages": calls}, "messages[1].content[0].type")):
            refused = await http.post(PATH, json=asked(**more))
            assert refused.status_code == 400
            assert refused.json()["error"]["message"].startswith(field)
        taken = await http.post(PATH, json=asked(thinking=thinking, service_tier="auto"))
    assert taken.headers["x-nova-ignored-fields"] == "service_tier, thinking"
    assert [block["type"] for block in taken.json()["content"]] == ["text"]


async def test_a_budget_of_thoughts_is_passed_on(serve: Serve, engine: StoppedEngine) -> None:
    server = await serve(engine)
    async with httpx.AsyncClient(base_url=server.url) as http:
        reply = await http.post(PATH, json=asked(thinking={"type": "enabled", "budget_tokens": 5}))
    assert "x-nova-ignored-fields" not in reply.headers
    assert engine.seen[-1][1].thinking_token_budget == 5


async def test_a_strict_server_refuses_what_has_no_effect(serve: Serve, engine: StoppedEngine) -> None:
    spelled = msgspec.structs.replace(engine.model_info.formats, marker_ids={})
    engine.model_info = FakeModelInfo(formats=spelled)
    server = await serve(engine, strict_fields=True)
    async with httpx.AsyncClient(base_url=server.url) as http:
        for more, field in (
            ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
            ({"output_config": {"effort": "low"}}, "output_config.effort"),
            ({"service_tier": "auto"}, "service_tier"),
        ):
            refused = await http.post(PATH, json=asked(**more))
            assert refused.status_code == 400
            assert refused.json()["error"]["message"].startswith(field)
        assert (await http.post(PATH, json=asked(thinking={"type": "disabled"}))).status_code == 200


async def test_keys_come_as_anthropics_clients_send_them(serve: Serve, engine: StoppedEngine) -> None:
    server = await serve(engine, api_keys=("key",))
    for how, is_right in (({"api_key": "key"}, True), ({"auth_token": "key"}, True), ({"api_key": "wrong"}, False)):
        async with anthropic.AsyncAnthropic(base_url=server.url, max_retries=0, **how) as client:  # type: ignore[arg-type]
            if is_right:
                assert (await client.messages.create(**asked())).content
                continue
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**asked())
            assert caught.value.type == "authentication_error"
    async with httpx.AsyncClient(base_url=server.url) as http:
        missing = await http.post(PATH, json=asked())
    assert (missing.status_code, missing.json()["error"]["type"]) == (401, "authentication_error")


async def test_models_are_listed_as_anthropics_client_reads_them(claude: anthropic.AsyncAnthropic) -> None:
    assert [(model.id, model.display_name) async for model in claude.models.list()] == [("fake", "fake")]
    assert (await claude.models.retrieve("fake")).created_at.year == 2023


async def test_errors_have_anthropics_types(claude: anthropic.AsyncAnthropic, engine: StoppedEngine) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.messages.create(**asked(model="claude"))
    assert caught.value.type == "not_found_error"
    async with httpx.AsyncClient(base_url=str(claude.base_url)) as http:
        for method, path in (("POST", f"{PATH}/batches/x"), ("GET", f"{PATH}/msg-x")):
            body = (await http.request(method, path, json={})).json()
            assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        for response in (
            await http.post(PATH, content=b"{", headers={"content-type": "application/json"}),
            await http.get(PATH),
            await http.post(PATH, content=b"x", headers={"content-type": "text/plain"}),
        ):
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert "type" not in (await http.post("/v1/chat/completions", json={})).json()
    engine.overloaded = True
    for stream in (False, True):
        with pytest.raises(anthropic.ServiceUnavailableError) as full:
            await claude.messages.create(**asked(stream=stream))
        assert full.value.type == "overloaded_error"
        assert full.value.error_code == "server_is_overloaded"
        assert full.value.response.headers["retry-after"] == "2"


async def test_a_failure_mid_stream_is_an_error_event_and_nothing_behind_it(
    claude: anthropic.AsyncAnthropic, engine: StoppedEngine
) -> None:
    engine.fail_at = 2
    for failure, said in ((StepFailedError("The step failed"), "The step failed"), (ValueError("x"), "its log says")):
        engine.failure = failure
        *_, last = events = await events_of(claude)
        assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        assert said in last["error"]["message"]
        assert [event["type"] for event in events].count("error") == 1
        assert not {"message_delta", "message_stop"} & {event["type"] for event in events}
        with pytest.raises(anthropic.APIStatusError, match=said):
            async with claude.messages.stream(**asked()) as stream:
                await stream.get_final_message()


async def test_a_stream_that_waits_shows_that_it_lives(serve: Serve, engine: StoppedEngine) -> None:
    engine.is_paced = True
    server = await serve(engine, sse_keep_alive_interval_s=0.01)
    async with (
        asyncio.timeout(TIMEOUT_S),
        httpx.AsyncClient(base_url=server.url) as http,
        http.stream("POST", PATH, json=asked(stream=True)) as response,
    ):
        parts, data = response.aiter_bytes(), b""
        while data.count(KEEP_ALIVE) < 2:
            data += await anext(parts)
        assert not data.replace(KEEP_ALIVE, b""), "message_start comes first"
        engine.release()
        while data.count(PING) < 2:
            data += await anext(parts)
        engine.release(100)
        async for part in parts:
            data += part
    assert data.endswith(b'data: {"type":"message_stop"}\n\n')


async def test_tokens_are_counted_as_a_message_would_begin(
    claude: anthropic.AsyncAnthropic, engine: StoppedEngine
) -> None:
    count = await claude.messages.count_tokens(model="fake", messages=USER, system="Be brief.", tools=[TOOL])
    assert count.input_tokens == len("Be brief.|Paris?") + 1
    assert engine.seen == []
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content"):
        await claude.messages.count_tokens(model="fake", messages=[{"role": "user", "content": []}])
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.count_tokens(model="claude", messages=USER)


# ---- whatever is sent ------------------------------------------------------------------------------------------------

FIELDS = ("system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "metadata")
KEYS = st.sampled_from(
    [
        *(
            "type",
            "text",
            "thinking",
            "id",
            "name",
            "input",
            "tool_use_id",
            "content",
            "role",
            "input_schema",
            "strict",
        ),
        *("budget_tokens", "display", "format", "schema", "disable_parallel_tool_use", "user_id"),
    ]
)
WORDS = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "enabled", "any", "tool", "custom", "f"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.text(max_size=3) | st.lists(JSON, max_size=3),
    }
)


@settings(max_examples=500, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON)), st.lists(TURNS, max_size=3))
def test_whatever_is_sent_is_taken_or_refused_by_the_field(more: dict[str, Any], messages: list[Any]) -> None:
    fault = fault_of(msgspec.json.encode({"max_tokens": 9, "messages": messages, **more}))
    assert fault is None or (fault.param or "nothing") in fault.message


def fault_of(body: bytes) -> CallerError | None:
    """What is wrong with a body."""
    try:
        request, _ = decode(MessagesRequest, body)
        request.sampling_params()
        to_prompt(request.prompt(FORMATS), 1000)
    except CallerError as error:
        return error
    return None


# ---- events and blocks are two ways of saying the same ---------------------------------------------------------------


class SaidAnswer:
    """An answer of which each delta brings a piece."""

    is_over = False

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = iter(pieces)
        self.tally = Tally(1, 1)

    def read(self, delta: Delta) -> list[tuple[Delta, list[Piece]]]:
        return [(delta, [piece] if (piece := next(self._pieces, None)) is not None else [])]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
CALLS = st.sampled_from(["{}", '{"a": 1.50}', '{"a": [1, {"b": "\\u00e9"}]}', ""])


@st.composite
def said(draw: st.DrawFn) -> list[Piece]:
    pieces: list[Piece] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from("tcf"), max_size=6)):
        if kind == "f":
            arguments = draw(CALLS)
            at = draw(st.integers(0, len(arguments)))
            pieces.append(CallBegun(num_calls, draw(st.sampled_from("fg"))))
            pieces += [CallArguments(num_calls, part) for part in (arguments[:at], arguments[at:]) if part]
            num_calls += 1
        else:
            pieces.append((Reasoning if kind == "t" else Content)(draw(TEXTS)))
    return pieces


@settings(max_examples=300, deadline=None)
@given(said(), st.sampled_from(["shown", "omitted", "none"]))
def test_what_a_client_puts_together_from_events_is_what_it_gets_in_one_piece(
    pieces: list[Piece], thoughts: Shown
) -> None:
    events = MessageEvents(SaidAnswer(pieces), ("msg-1", "fake"), "r", thoughts=thoughts, is_context_full=lambda: False)  # type: ignore[arg-type]
    data = b"".join(events.delta(Delta(request_id="r", index=0, text="")) for _ in [None, *pieces])
    events._last = Delta(request_id="r", index=0, text="", finish_reason=FinishReason.STOP)
    message, buffers = None, dict[int, bytes]()
    opened: set[int] = set()
    for block in (data + events.end()).decode().removesuffix("\n\n").split("\n\n"):
        event = EVENT.validate_json(block.split("\ndata: ")[1])
        if event.type == "content_block_start":
            assert not opened
            opened.add(event.index)
        elif event.type == "content_block_stop":
            opened.remove(event.index)
        elif event.type == "content_block_delta":
            assert opened == {event.index}
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    assert message is not None
    assert not opened
    found = [
        json.loads(block.model_dump_json(exclude={"id", "parsed_output", "toolset_name"})) for block in message.content
    ]
    whole = msgspec.json.decode(msgspec.json.encode(blocks_of(pieces, thoughts=thoughts)))
    assert found == [{name: value for name, value in block.items() if name != "id"} for block in whole]
