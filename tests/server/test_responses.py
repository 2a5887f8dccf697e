"""The Responses API over HTTP, as OpenAI's clients see it: shapes, events, and what becomes of the input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from novainfer import CallerError, InvalidParameter, StructuredOutputsParams
from novainfer.fsm.parsing.formats import Formats
from novainfer.prompt import to_prompt
from novainfer.server.openai.decode import decode
from novainfer.server.responses.given import KINDS, items_of
from novainfer.server.responses.items import decoded, encoded, messages_of
from novainfer.server.responses.protocol import ResponseRequest, own_names
from novainfer.server.serve import Server
from tests.server.conftest import Serve, eventually
from tests.server.fakes import FakeEngine, FakeModelInfo
from tests.server.openai_types import checked, checked_event

IDS = {"<think>": 901, "</think>": 902, "<tool_call>": 903, "</tool_call>": 904}
FORMATS = Formats(tool_calls="hermes", reasoning="think", marker_ids=IDS)
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PARIS = ("<tool_call>", '\n{"name": "weather", "arg', 'uments": {"city": ', '"Paris"', "}}\n", "</tool_call>")
ROME = ("<tool_call>", '\n{"name": "weather", "arguments": {"city": "Rome"}}\n', "</tool_call>")
THOUGHTS = ("<think>", "A ci", "ty.", "</think>")
TERMINAL = {"response.completed", "response.incomplete", "response.failed", "error"}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.model_info = FakeModelInfo(formats=FORMATS, max_model_len=4096)
    return engine


@pytest.fixture
async def ai(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def web(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", timeout=10) as client:
        yield client


async def created(web: httpx.AsyncClient, **body: Any) -> Response:
    reply = await web.post("/responses", json={"input": "Paris?", **body})
    assert reply.status_code == 200, reply.text
    return checked(Response, reply.content)


def events_of(text: str) -> list[Any]:
    """The events of a stream, each as OpenAI's types know it; their numbers count, and the last one is the end."""
    events = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        kind, data = block.split("\n")
        event = checked_event(data.removeprefix("data: "))
        assert kind == f"event: {event.type}"
        events.append(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type in TERMINAL for event in events] == [False] * (len(events) - 1) + [True]
    return events


async def streamed(web: httpx.AsyncClient, **body: Any) -> list[Any]:
    reply = await web.post("/responses", json={"input": "Paris?", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events_of(reply.text)


async def let(engine: FakeEngine, num_tokens: int) -> None:
    """Let a request have so many tokens once it is there."""
    await engine.wait_until(lambda: engine.active)
    engine.release(num_tokens)


async def test_a_text_is_answered_in_one_object(web: httpx.AsyncClient, engine: FakeEngine):
    reply = await created(web, instructions="Be short.", temperature=0.5, metadata={"a": "b"}, user="u")
    assert reply.id.startswith("resp_")
    assert (reply.status, reply.object, reply.model, reply.error) == ("completed", "response", "fake", None)
    assert reply.output_text == "Hello, world!"
    [message] = reply.output
    assert (message.type, message.status) == ("message", "completed")
    assert (reply.instructions, reply.temperature, reply.metadata) == ("Be short.", 0.5, {"a": "b"})
    assert (reply.user, reply.background, reply.parallel_tool_calls, reply.truncation) == ("u", False, True, "disabled")
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (7, 5, 12)
    assert reply.usage.input_tokens_details.cached_tokens == 3
    assert reply.completed_at is not None
    [(prompt, params, engine_id)] = engine.seen
    assert engine_id.endswith(reply.id)
    assert prompt.messages == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Paris?"}]
    assert (params.temperature, params.max_tokens) == (0.5, None)


async def test_a_text_is_streamed_as_openai_does(web: httpx.AsyncClient):
    events = await streamed(web)
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 5,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event.delta for event in events[4:9]] == ["Hello", ",", " wor", "ld", "!"]
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert events[2].item.status == "in_progress"
    assert events[9].text == events[10].part.text == "Hello, world!"
    last = events[-1].response
    assert (last.status, last.output) == ("completed", [events[11].item])
    assert {event.item_id for event in events[3:11]} == {last.output[0].id}


async def test_thoughts_words_and_calls_are_items(web: httpx.AsyncClient, engine: FakeEngine):
    engine.answer = (*THOUGHTS, "Well", ".", *PARIS, "\n", *ROME)
    reply = await created(web, tools=[TOOL])
    thoughts, message, paris, rome = reply.output
    assert thoughts.type == "reasoning"
    assert [part.text for part in thoughts.content or []] == ["A city."]
    assert (message.type, reply.output_text) == ("message", "Well.")
    assert paris.type == rome.type == "function_call"
    assert [json.loads(call.arguments)["city"] for call in (paris, rome)] == ["Paris", "Rome"]
    assert (paris.name, paris.status) == ("weather", "completed")
    assert len({paris.call_id, rome.call_id, paris.id, rome.id}) == 4
    assert reply.usage is not None
    assert reply.usage.output_tokens_details.reasoning_tokens == 4

    events = await streamed(web, tools=[TOOL])
    kinds = [event.type.removeprefix("response.") for event in events]
    item = ("output_item.added", "content_part.added")
    assert kinds == [
        *("created", "in_progress", *item),
        *["reasoning_text.delta"] * 2,
        *("reasoning_text.done", "content_part.done", "output_item.done", *item),
        *["output_text.delta"] * 2,
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
        *["function_call_arguments.delta"] * 3,
        *("function_call_arguments.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert [event.output_index for event in events if event.type.endswith("output_item.added")] == [0, 1, 2, 3]
    by_index: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            by_index[event.output_index] = by_index.get(event.output_index, "") + event.delta
    assert by_index == {0: "A city.", 1: "Well.", 2: '{"city": "Paris"}', 3: '{"city": "Rome"}'}
    done = [event.item for event in events if event.type.endswith("output_item.done")]
    assert events[-1].response.output == done


async def test_openais_own_helper_puts_a_stream_together(ai: openai.AsyncOpenAI, engine: FakeEngine):
    engine.answer = (*THOUGHTS, "Well", ".", *PARIS)
    async with ai.responses.stream(model="fake", input="Paris?", tools=[TOOL]) as stream:  # type: ignore[list-item]
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Well."
    assert json.loads(final.output[-1].arguments) == {"city": "Paris"}  # type: ignore[union-attr]
    again = await ai.responses.retrieve(final.id)
    assert [item.id for item in again.output] == [item.id for item in final.output]
    assert (again.output_text, again.usage) == (final.output_text, final.usage)


async def test_an_answer_that_is_cut_is_incomplete(web: httpx.AsyncClient, engine: FakeEngine):
    reply = await created(web, max_output_tokens=2)
    assert reply.status == reply.output[0].status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert engine.seen[0][1].max_tokens == 2
    *_, done, last = await streamed(web, max_output_tokens=2)
    assert (done.type, done.item.status) == ("response.output_item.done", "incomplete")
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.completed_at is None


async def test_a_model_that_says_nothing_has_said_an_empty_message(web: httpx.AsyncClient, engine: FakeEngine):
    engine.answer = ("",)
    assert [(item.type, item.content[0].text) for item in (await created(web)).output] == [("message", "")]  # type: ignore[union-attr]
    engine.answer = ("<think>", "hm", "</think>")
    assert [item.type for item in (await created(web)).output] == ["reasoning", "message"]
    assert [item.type for item in (await created(web, max_output_tokens=1)).output] == ["reasoning"]


async def test_a_failure_before_the_first_token_has_a_status(web: httpx.AsyncClient, engine: FakeEngine):
    engine.overloaded = True
    for more in ({}, {"stream": True}, {"background": True}):
        reply = await web.post("/responses", json={"input": "a", **more})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert reply.headers["retry-after"] == "2"


async def test_a_failure_on_the_way_is_the_one_end_of_a_stream(
    web: httpx.AsyncClient, engine: FakeEngine, server: Server
):
    engine.fail_at = 2
    *_, last = events = await streamed(web)
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    assert "secret" not in last.response.error.message
    assert last.response.output[0].content[0].text == "Hello,"
    assert last.response.output[0].status == "incomplete"
    kept = await web.get(f"/responses/{events[0].response.id}")
    assert checked(Response, kept.content) == last.response
    reply = await web.post("/responses", json={"input": "a"})
    assert (reply.status_code, "secret" in reply.text) == (500, False)
    assert len(server.service.store) == 1, "one that had no answer is not kept"


async def test_log_probabilities_come_where_they_are_asked_for(web: httpx.AsyncClient, engine: FakeEngine):
    include = ["message.output_text.logprobs"]
    reply = await created(web, include=include, top_logprobs=2)
    [message] = reply.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert [one.token for one in part.logprobs or []] == ["Hello", ",", " wor", "ld", "!"]
    assert [len(one.top_logprobs) for one in part.logprobs or []] == [2] * 5
    assert reply.top_logprobs == 2
    events = await streamed(web, include=include)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [[one.token for one in event.logprobs] for event in deltas] == [["Hello"], [","], [" wor"], ["ld"], ["!"]]
    engine.answer = (*THOUGHTS, "Well")
    reply = await created(web, include=include)
    said = [one.token for one in reply.output[1].content[0].logprobs]  # type: ignore[union-attr]
    assert said == ["</think>", "Well"], "the marker has no text: it comes with what is behind it"
    reply = await created(web, top_logprobs=2)
    assert engine.seen[-1][1].logprobs is None


async def test_items_become_the_messages_of_a_chat(web: httpx.AsyncClient, engine: FakeEngine):
    call = {"type": "function_call", "name": "weather", "arguments": '{"city": "Paris"}'}
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Paris?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "I look", "annotations": []}, {"type": "refusal", "refusal": "."}]},
        {**call, "id": "fc_1", "call_id": "call_1", "status": "completed"},
        {**call, "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "assistant", "content": "Both."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    reply = await created(web, input=items, tools=[TOOL])
    called = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    assert engine.seen[0][0].messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Paris?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "call_1", **called}, {"id": "call_2", **called}],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "sun", "tool_call_id": "call_1"},
        {"role": "tool", "content": "rain", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "Both."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "Thanks"},
    ]
    [tool] = engine.seen[0][0].tools
    assert tool["function"]["name"] == "weather"
    assert reply.tools[0].to_dict() == TOOL


async def test_thoughts_and_words_behind_calls_stay_in_their_turn(web: httpx.AsyncClient, engine: FakeEngine):
    def call(name: str) -> dict[str, str]:
        return {"type": "function_call", "name": "weather", "call_id": name, "arguments": "{}"}

    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    said = {"role": "assistant", "content": "c"}
    await created(web, input=[said, call("1"), said, {"role": "user", "content": "f"}])
    assert [message["content"] for message in engine.seen[-1][0].messages] == ["cc", "f"]
    items = [
        *(thought("a"), call("1"), thought("b"), call("2"), said),
        *(thought("d"), {"role": "assistant", "content": "e"}, {"role": "user", "content": "f"}),
    ]
    await created(web, input=items)
    first, second, _ = engine.seen[-1][0].messages
    assert (first["reasoning_content"], first["content"]) == ("a\nb", "c")
    assert [one["id"] for one in first["tool_calls"]] == ["1", "2"]
    assert (second["reasoning_content"], second["content"]) == ("d", "e")


async def test_formats_of_text_hold_the_answer(web: httpx.AsyncClient, engine: FakeEngine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    reply = await created(web, text=text)
    assert engine.seen[-1][1].structured_outputs == StructuredOutputsParams(json=schema)
    assert reply.text is not None
    assert reply.text.to_dict() == text
    await created(web, text={"format": {"type": "json_object"}, "verbosity": "low"})
    assert engine.seen[-1][1].structured_outputs == StructuredOutputsParams(json_object=True)
    reply = await created(web, text={"format": {"type": "text"}})
    assert engine.seen[-1][1].structured_outputs is None
    assert reply.text is not None
    assert reply.text.to_dict() == {"format": {"type": "text"}}


async def test_the_choice_of_tools_is_that_of_chats(web: httpx.AsyncClient, engine: FakeEngine):
    other = {**TOOL, "name": "time"}
    named = {"type": "function", "name": "weather"}
    reply = await created(web, tools=[TOOL, other], tool_choice=named)
    grammar = engine.seen[-1][1].structured_outputs
    assert grammar is not None
    assert "weather" in grammar.grammar
    assert "time" not in grammar.grammar
    assert reply.tool_choice.to_dict() == named  # type: ignore[union-attr]
    await created(web, tools=[TOOL, other], tool_choice="none")
    assert engine.seen[-1][1].banned_token_ids == [903]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    reply = await created(web, tools=[TOOL, other], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in engine.seen[-1][0].tools] == ["time"]
    assert len(reply.tools) == 2
    assert reply.tool_choice.to_dict() == allowed  # type: ignore[union-attr]
    engine.answer = (*PARIS, "\n", *ROME)
    reply = await created(web, tools=[TOOL], parallel_tool_calls=False)
    assert ([item.type for item in reply.output], reply.parallel_tool_calls) == (["function_call"], False)


async def test_effort_is_told_to_the_template(web: httpx.AsyncClient, engine: FakeEngine):
    reply = await created(web, reasoning={"effort": "none", "summary": "auto"})
    assert engine.seen[-1][0].template_kwargs == {"enable_thinking": False}
    assert reply.reasoning is not None
    assert reply.reasoning.effort == "none"
    await created(web, reasoning={"effort": "high"}, chat_template_kwargs={"a": 1})
    assert engine.seen[-1][0].template_kwargs == {"reasoning_effort": "high", "a": 1}


async def test_vllms_fields_say_how_to_sample(web: httpx.AsyncClient, engine: FakeEngine):
    await created(web, top_k=5, seed=7, stop=["x"], min_p=0.1)
    params = engine.seen[-1][1]
    assert (params.top_k, params.seed, params.stop, params.min_p) == (5, 7, ["x"], 0.1)


async def test_what_has_no_effect_is_named(web: httpx.AsyncClient):
    reply = await web.post("/responses", json={"input": "a", "n": 1, "conversation": None, "fancy": 1, "user": "u"})
    assert reply.headers["x-nova-ignored-fields"] == "fancy"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is required"),
        ({"input": ""}, "input", "not be empty"),
        ({"input": []}, "input", "input must hold at least one"),
        ({"input": [{"content": "a"}]}, "input[0].role", "required"),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "tool"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "may be message, function_call"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name", "required"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", "required"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "not found"),
        ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content", "list of parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            'only "input_text"',
        ),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", '"function"'),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name", "required"),
        ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
        (
            {"input": "a", "tools": [{"type": "function", "name": "a", "parameters": {"properties": "x"}}]},
            "tools[0].parameters.properties",
            "object",
        ),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "allowed_tools"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice", "none of"),
        (
            {"input": "a", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}},
            "tool_choice.tools",
            "at least one",
        ),
        (
            {"input": "a", "tools": [TOOL], "text": {"format": {"type": "json_object"}}},
            "tools",
            "text.format",
        ),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "between 1"),
        ({"input": "a", "temperature": 200}, "temperature", "between 0"),
        ({"input": "a", "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"input": "a", "include": ["everything"]}, "include[0]", "one of"),
        ({"input": "a", "metadata": {"a": "b" * 513}}, "metadata", "512"),
        ({"input": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
        ({"input": "a", "background": True, "store": False}, "store", "background needs store"),
        ({"input": "a", "stream_options": {"include_obfuscation": False}}, "stream_options", "needs stream"),
        (
            {"input": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "not supported",
        ),
        ({"input": "a", "messages": [1]}, "messages", "use input"),
        ({"input": "a", "max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"input": "a", "response_format": {"type": "text"}}, "response_format", "use text.format"),
        ({"input": "a", "conversation": "conv_1"}, "conversation", "not supported"),
        ({"input": "a", "n": 2}, "n", "not supported"),
        ({"input": "a", "model": "other"}, "model", "not served"),
        ({"input": "a\ud800"}, "input", "half of a character"),
        ({"input": "a", "user": "\ud800"}, "user", "half of a character"),
        ({"input": "a", "": "\ud800"}, '""', "half of a character"),
    ],
)
async def test_bad_input_gets_one_sentence_that_names_the_field(
    web: httpx.AsyncClient, body: dict[str, Any], param: str | None, message: str, server: Server
):
    for more in ({}, {"background": True, "store": body.get("store")}):
        reply = await web.post("/responses", content=json.dumps({**more, **body}))
        error = reply.json()["error"]
        assert reply.status_code == (404 if param == "model" else 400), error
        assert param in (None, error["param"])
        assert message in error["message"]
        assert "\n" not in error["message"]
    assert not len(server.service.store)
    assert not server.service.live.num_live


PARTS = ("input_text", "output_text", "refusal", "reasoning_text", "summary_text", "input_image")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=4) | st.sampled_from(["user", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.fixed_dictionaries({"type": st.sampled_from(PARTS)}, optional={"text": inner, "refusal": inner})
        | st.dictionaries(st.sampled_from(["format", "type", "name", "schema", "tools", "mode"]), inner, max_size=3)
    ),
    max_leaves=5,
)
ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from([*KINDS, "web_search_call"]) | VALUES,
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | VALUES,
        "content": st.lists(VALUES, max_size=2) | VALUES,
        **dict.fromkeys(("call_id", "name", "arguments", "output", "summary", "id"), VALUES),
    },
)
OTHERS = [field for field in ResponseRequest.__struct_fields__ if field != "input"]


@settings(max_examples=400, deadline=None)
@given(st.lists(ITEMS, max_size=4) | VALUES, st.dictionaries(st.sampled_from(OTHERS), VALUES, max_size=3))
def test_whatever_is_sent_is_taken_or_refused_by_the_field(given_input: Any, more: dict[str, Any]):
    def find(item_id: str, path: str) -> Any:
        raise InvalidParameter("there is none", param=path)

    body = msgspec.json.encode({"input": given_input, "tools": [TOOL], **more})
    fault: CallerError | None = None
    try:
        request, _ = decode(ResponseRequest, body)
        params = request.sampling_params()
        items = items_of(request.input, find, has_tools=True)
        with own_names():
            to_prompt(request.chat(messages_of(items)).prompt(has_tools=True), 1000)
        assert decoded(encoded(items)) == items
        msgspec.json.encode(request.response("resp_1", created_at=1, model="m", store=True, params=params))
    except CallerError as error:
        fault = error
    if fault is not None:
        assert fault.param
        assert "\n" not in fault.message
        path = fault.param.split("[")[0].split(".")[0]
        assert path in ResponseRequest.__struct_fields__, "fields are named as they were sent"


async def test_without_tools_in_the_template_calls_are_refused(web: httpx.AsyncClient, engine: FakeEngine):
    engine.model_info = FakeModelInfo()
    for body, param in (
        ({"input": "a", "tools": [TOOL]}, "tools"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input[0].type"),
    ):
        reply = await web.post("/responses", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_truncation_lets_the_oldest_turns_go(web: httpx.AsyncClient, engine: FakeEngine):
    engine.model_info = FakeModelInfo(max_model_len=64)  # and a byte is a token
    items: list[Any] = [{"role": "system", "content": "S" * 5}]
    for letter in "abcd":
        items += [{"role": "user", "content": letter * 9}, {"role": "assistant", "content": letter.upper() * 9}]
    items += [{"role": "user", "content": "e" * 9}]
    await created(web, input=items, truncation="auto", max_output_tokens=10)
    kept = "|".join(message["content"] for message in engine.seen[-1][0].messages)
    assert kept == "SSSSS|ddddddddd|DDDDDDDDD|eeeeeeeee"
    engine.model_info = FakeModelInfo(max_model_len=90)
    await created(web, input=items, truncation="auto", max_output_tokens=10)
    assert [message["content"][0] for message in engine.seen[-1][0].messages] == list("SbBcCdDe")
    await created(web, input=items[-1:], truncation="auto")
    assert engine.seen[-1][0].messages == [{"role": "user", "content": "e" * 9}]
    reply = await created(web, input=[{"role": "user", "content": "f" * 90}], truncation="auto")
    assert len(engine.seen[-1][0].messages[0]["content"]) == 90, "the engine says that it is too long, or not"
    assert reply.truncation == "auto"


async def test_a_client_that_leaves_takes_its_response_along(
    web: httpx.AsyncClient, engine: FakeEngine, server: Server
):
    engine.is_paced = True
    letting = asyncio.create_task(let(engine, 2))
    async with web.stream("POST", "/responses", json={"input": "a", "stream": True}) as stream:
        await letting
        lines = stream.aiter_lines()
        async for line in lines:
            if '"delta":","' in line:
                break
        [response_id] = [record.id for record in server.service.store._all.values()]
        now = checked(Response, (await web.get(f"/responses/{response_id}")).content)
        assert (now.status, now.output_text) == ("in_progress", "Hello,")
    await engine.wait_until(lambda: not engine.active)
    await eventually(lambda: not server.service.live.num_live)
    kept = checked(Response, (await web.get(f"/responses/{response_id}")).content)
    assert (kept.status, kept.output_text) == ("cancelled", "Hello,")
    assert len(engine.left_early) == 1


async def test_what_is_not_to_be_stored_is_not(web: httpx.AsyncClient, server: Server):
    reply = await created(web, store=False)
    *_, last = await streamed(web, store=False)
    assert not len(server.service.store)
    for response_id in (reply.id, last.response.id):
        gone = await web.get(f"/responses/{response_id}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")


async def test_a_server_that_keeps_none_says_so(serve: Serve, engine: FakeEngine):
    server = await serve(engine, max_stored_responses=0)
    async with httpx.AsyncClient(base_url=f"{server.url}/v1") as web:
        reply = checked(Response, (await web.post("/responses", json={"input": "a"})).content)
        assert reply.status == "completed"
        assert reply.to_dict()["store"] is False  # type: ignore[index]
        for field in ("store", "background"):
            refused = await web.post("/responses", json={"input": "a", field: True})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
