"""Calls of tools and thoughts over HTTP, as OpenAI's clients see them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from novainfer import CallerError, Chat, Delta, FinishReason, SamplingParams
from novainfer.fsm.parsing.formats import Formats
from novainfer.fsm.parsing.reader import Wanted
from novainfer.fsm.text import Vocabulary
from novainfer.offer import grammar_for
from novainfer.prompt import to_prompt
from novainfer.reading import Reading, params_for, wanted_of
from novainfer.server.openai.decode import decode
from novainfer.server.openai.protocol import ChatCompletionRequest
from novainfer.server.openai.replies import Tally
from tests.server.conftest import Serve, eventually
from tests.server.fakes import FakeEngine, FakeModelInfo

IDS = {"<think>": 901, "</think>": 902, "<tool_call>": 903, "</tool_call>": 904}
FORMATS = Formats(tool_calls="hermes", reasoning="think", marker_ids=IDS)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
STOP = FinishReason.STOP
MESSAGES: Any = [{"role": "user", "content": "Paris?"}]
PARIS = (
    "<tool_call>",
    "\n",
    '{"name": "weat',
    'her", "arg',
    'uments": {"city": ',
    '"Par',
    'is"',
    "}}",
    "\n",
    "</tool_call>",
)
ROME = ("<tool_call>", '\n{"name": "weather", "arguments": {"city": "Rome"}}\n', "</tool_call>")


# Fields and keys that are looked at, and tools that are nearly right.
FIELDS = ("messages", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "include_reasoning")
KEYS = st.sampled_from(
    [
        *(
            "role",
            "content",
            "tool_calls",
            "tool_call_id",
            "reasoning_content",
            "type",
            "function",
            "name",
            "arguments",
        ),
        *("parameters", "properties", "anyOf", "enum", "const", "strict", "description"),
    ]
)
TOOLS = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["f", "a.b", "", "a b"])},
            optional={"parameters": st.fixed_dictionaries({}, optional={"properties": st.deferred(lambda: JSON)})},
        ),
    }
)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(answer=("Well", ".", "\n\n", *PARIS, "\n", *ROME))
    engine.model_info = FakeModelInfo(formats=FORMATS)
    return engine


@pytest.fixture
async def ai(serve: Serve, engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    server = await serve(engine)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": MESSAGES, "tools": [TOOL], **more}


async def streamed(ai: openai.AsyncOpenAI, **more: Any) -> tuple[list[Any], dict[str, Any]]:
    """All chunks, and what a client puts together from them."""
    chunks = [chunk async for chunk in await ai.chat.completions.create(**asked(stream=True, **more))]
    said: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            said["finish"] = choice.finish_reason or said["finish"]
            for name in ("content", "reasoning_content", "reasoning"):
                said[name] += getattr(choice.delta, name, None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(said["calls"]):
                    assert call.id.startswith("call_")
                    assert call.type == "function"
                    said["calls"].append([call.id, call.function.name, call.function.arguments])
                else:
                    assert (call.id, call.type, call.function.name) == (None, None, None), "they are said once"
                    said["calls"][call.index][2] += call.function.arguments
    return chunks, said


async def test_calls_come_in_one_object(ai: openai.AsyncOpenAI):
    reply = await ai.chat.completions.create(**asked())
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    calls = choice.message.tool_calls or []
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("function", "weather", {"city": "Paris"}),
        ("function", "weather", {"city": "Rome"}),
    ]
    assert len({call.id for call in calls}) == 2
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


async def test_calls_come_as_openai_streams_them(ai: openai.AsyncOpenAI):
    chunks, said = await streamed(ai, stream_options={"include_usage": True})
    assert said["content"] == "Well."
    assert [call[1:] for call in said["calls"]] == [["weather", '{"city": "Paris"}'], ["weather", '{"city": "Rome"}']]
    assert len({call[0] for call in said["calls"]}) == 2
    assert said["finish"] == "tool_calls"
    assert sum(bool(choice.finish_reason) for chunk in chunks for choice in chunk.choices) == 1
    pieces = [
        call.function.arguments
        for chunk in chunks
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
        if call.index == 0
    ]
    assert pieces == ["", '{"city": ', '"Par', 'is"', "}"], "arguments come while they are written"
    assert chunks[-1].usage.completion_tokens == len(PARIS) + len(ROME) + 4


async def test_a_call_alone_has_null_for_content(ai: openai.AsyncOpenAI, engine: FakeEngine):
    engine.answer = PARIS
    reply = await ai.chat.completions.create(**asked())
    assert reply.choices[0].message.content is None
    assert reply.model_dump(exclude_unset=True)["choices"][0]["message"]["content"] is None


async def test_an_answer_without_calls_is_as_it_ever_was(ai: openai.AsyncOpenAI, engine: FakeEngine):
    engine.answer = ("Hel", "lo")
    reply = await ai.chat.completions.create(**asked())
    message = reply.choices[0].message
    assert (message.content, message.tool_calls, reply.choices[0].finish_reason) == ("Hello", None, "stop")
    assert "reasoning_content" not in message.model_dump(exclude_unset=True)


async def test_a_call_that_is_cut_ends_with_length(ai: openai.AsyncOpenAI, engine: FakeEngine):
    engine.answer = PARIS[:6]
    _, said = await streamed(ai, max_tokens=3)
    assert said["finish"] == "length"
    assert [call[1:] for call in said["calls"]] == [["weather", '{"city": "Par']]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "tool_calls", "arguments", "finish"),
    [
        (PARIS[:6], "hermes", ['{"city": "Par'], "stop"),
        ((*ROME, *PARIS[:5]), "hermes", ['{"city": "Rome"}', '{"city": '], "stop"),
        (PARIS[:8], "hermes", ['{"city": "Paris"}'], "tool_calls"),
        (
            ("<tool_call>", '{"name": "weather", "arguments": {"city": "Rome"}'),
            "hermes",
            ['{"city": "Rome"}'],
            "tool_calls",
        ),
        ((*ROME, *PARIS[:2]), "hermes", ['{"city": "Rome"}'], "tool_calls"),
        (("<tool_call>", "<function=weather><parameter=city>Par"), "qwen3_coder", ['{"city": "Par'], "stop"),
    ],
)
async def test_an_answer_that_stops_within_arguments_does_not_end_with_tool_calls(
    serve: Serve,
    engine: FakeEngine,
    answer: tuple[str, ...],
    tool_calls: str,
    arguments: list[str],
    finish: str,
    stream: bool,
):
    """At a stop string, or because the model did: a client that goes by `tool_calls` would run half a call."""
    engine.answer = answer
    engine.model_info = FakeModelInfo(formats=msgspec.structs.replace(FORMATS, tool_calls=tool_calls))
    server = await serve(engine)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
        if stream:
            _, said = await streamed(ai)
            found = [call[2] for call in said["calls"]], said["finish"]
        else:
            [choice] = (await ai.chat.completions.create(**asked())).choices
            calls = choice.message.tool_calls or []
            found = [call.function.arguments for call in calls], choice.finish_reason
    assert found == (arguments, finish)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_no_call_yet_is_content_where_the_answer_is_cut(
    ai: openai.AsyncOpenAI, engine: FakeEngine, stream: bool
):
    engine.answer = ("Well", "<tool_call>", '{"na')
    if stream:
        _, said = await streamed(ai, max_tokens=1)
        assert (said["content"], said["calls"], said["finish"]) == ('Well<tool_call>{"na', [], "length")
        return
    [choice] = (await ai.chat.completions.create(**asked(max_tokens=1))).choices
    assert (choice.message.content, choice.message.tool_calls) == ('Well<tool_call>{"na', None)


async def test_a_delta_may_bring_all_there_is(serve: Serve):
    engine = FakeEngine(answer=("<think>a</think>b" + "".join(PARIS) + "c",))
    server = await serve(engine, tool_call_parser="hermes", reasoning_parser="think")
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as ai:
        _, said = await streamed(ai, logprobs=True)
    assert (said["reasoning"], said["content"], said["finish"]) == ("a", "bc", "tool_calls")
    assert [call[1:] for call in said["calls"]] == [["weather", '{"city": "Paris"}']]


async def test_without_tools_calls_are_text(ai: openai.AsyncOpenAI):
    reply = await ai.chat.completions.create(model="fake", messages=MESSAGES)
    assert reply.choices[0].message.content == "Well.\n\n" + "".join(PARIS) + "\n" + "".join(ROME)
    assert reply.choices[0].finish_reason == "stop"


# ---- thoughts: tt-inference-server #4386 (tools with thoughts lose calls), vLLM #34937, #21130 and #35982 (where they
# begin), llama-swap #708 (what their field is called: both names are told) --------------------------------------------


@pytest.mark.parametrize(
    ("opened", "answer"),
    [("assistant\n<think>\n", ("Hm", ".\n", "</think>")), ("assistant\n", ("<think>", "\n", "Hm.", "</think>"))],
    ids=["by the template", "by the model"],
)
async def test_thoughts_are_told_from_content(
    ai: openai.AsyncOpenAI, engine: FakeEngine, opened: str, answer: tuple[str, ...]
):
    engine.prompt_ends_with = opened
    engine.answer = (*answer, "\n\n", "Yes", ". ", *PARIS)
    reply = await ai.chat.completions.create(**asked())
    message = reply.choices[0].message.model_dump()
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "Yes.")
    assert len(message["tool_calls"]) == 1
    assert reply.usage.completion_tokens_details.reasoning_tokens == len(answer)
    chunks, said = await streamed(ai, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (said["reasoning_content"], said["reasoning"], said["content"]) == ("Hm.", "Hm.", "Yes.")
    assert len(said["calls"]) == 1
    thought = [
        chunk.usage.completion_tokens_details.reasoning_tokens for chunk in chunks if chunk.usage.completion_tokens
    ]
    assert thought == sorted(thought)
    assert 0 < thought[0] < thought[-1] == len(answer)


async def test_thoughts_that_are_switched_off_leave_content(ai: openai.AsyncOpenAI, engine: FakeEngine):
    engine.prompt_ends_with = "assistant\n<think>\n\n</think>\n\n"
    engine.answer = ("Yes", ".")
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    reply = await ai.chat.completions.create(model="fake", messages=MESSAGES, extra_body=kwargs)
    assert reply.choices[0].message.content == "Yes."
    assert engine.seen[-1][0].template_kwargs == {"enable_thinking": False}


async def test_thoughts_can_be_left_out(ai: openai.AsyncOpenAI, engine: FakeEngine):
    engine.answer = ("<think>", "Hm", "</think>", "Yes")
    without = {"include_reasoning": False}
    reply = await ai.chat.completions.create(**asked(extra_body=without))
    assert "reasoning" not in reply.choices[0].message.model_dump(exclude_unset=True)
    chunks, said = await streamed(ai, extra_body=without)
    assert (said["reasoning"], said["content"]) == ("", "Yes")
    assert len(chunks) == 3


async def test_log_probabilities_and_token_ids_come_with_what_is_read(ai: openai.AsyncOpenAI, engine: FakeEngine):
    engine.answer = ("<think>", "Hm", "</think>", *PARIS)
    chunks, said = await streamed(ai, logprobs=True, extra_body={"return_token_ids": True})
    choices = [choice for chunk in chunks for choice in chunk.choices]
    ids = [token_id for choice in choices for token_id in getattr(choice, "token_ids", None) or []]
    assert ids == list(range(len(engine.answer)))
    tokens = [item.token for choice in choices if choice.logprobs for item in choice.logprobs.content]
    assert tokens == list(engine.answer)
    assert len(said["calls"]) == 1


# ---- what is asked for -----------------------------------------------------------------------------------------------


async def test_one_call_ends_the_answer_where_calls_are_not_parallel(ai: openai.AsyncOpenAI, engine: FakeEngine):
    chunks, said = await streamed(ai, parallel_tool_calls=False, stream_options={"include_usage": True})
    assert [call[1:] for call in said["calls"]] == [["weather", '{"city": "Paris"}']]
    assert said["finish"] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == 3 + PARIS.index("}}") + 1
    await eventually(lambda: len(engine.left_early) == 1)  # no more is computed
    reply = await ai.chat.completions.create(**asked(parallel_tool_calls=False, n=2))
    assert [len(choice.message.tool_calls or []) for choice in reply.choices] == [1, 1]
    assert [choice.finish_reason for choice in reply.choices] == ["tool_calls"] * 2
    assert len(engine.left_early) == 2


async def test_the_template_is_given_tools_and_what_they_said(ai: openai.AsyncOpenAI, engine: FakeEngine):
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    cut = {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Par'}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called, cut], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Rain"}]},
    ]
    strange = {**TOOL, "function": {"parameters": {"z": 1, "a": 2}, "strict": False, "name": "now"}}
    await ai.chat.completions.create(model="fake", messages=messages, tools=[TOOL, strange])
    prompt = engine.seen[-1][0]
    assert prompt == Chat(
        messages=[
            *MESSAGES,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {**called, "function": {"name": "weather", "arguments": {"city": "Paris"}}},
                    cut,
                ],
                "reasoning_content": "Hm.",
            },
            {"role": "tool", "content": "Rain", "tool_call_id": "call_1"},
        ],
        tools=[TOOL, {"type": "function", "function": {"name": "now", "parameters": {"z": 1, "a": 2}}}],
    )
    assert list(prompt.tools[1]["function"]) == ["name", "parameters"]
    assert list(prompt.tools[1]["function"]["parameters"]) == ["z", "a"]


async def test_no_call_can_begin_where_none_is_wanted(ai: openai.AsyncOpenAI, engine: FakeEngine):
    engine.answer = ("Yes",)
    await ai.chat.completions.create(**asked(tool_choice="none"))
    prompt, params, _ = engine.seen[-1]
    assert prompt.tools == [TOOL], "the prompt stays as it is, and with it what the prefix cache has of it"
    assert params.banned_token_ids == [IDS["<tool_call>"]]
    await ai.chat.completions.create(**asked(tool_choice="auto"))
    assert engine.seen[-1][1].banned_token_ids == []
    assert set(engine.seen[-1][1].mark_token_ids) == set(IDS.values())


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"tool_choice": {"function": {"name": "rain"}}}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tools", "unsupported_parameter"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "invalid_value"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": ["x"]}}}]},
            "tools[0].function.parameters.properties",
            "invalid_value",
        ),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "unsupported_parameter"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
            "invalid_value",
        ),
        ({"mark_token_ids": [1]}, None, None),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    ai: openai.AsyncOpenAI, engine: FakeEngine, more: dict[str, Any], param: str | None, code: str | None
):
    async with httpx.AsyncClient(base_url=str(ai.base_url)) as http:
        response = await http.post("chat/completions", json=asked(**more))
    if param is None:
        assert response.headers["x-nova-ignored-fields"] == "mark_token_ids"
        return
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]
    assert engine.seen == []


async def test_calls_that_are_not_wanted_are_content_where_no_token_begins_them(serve: Serve):
    engine = FakeEngine(answer=PARIS)
    engine.model_info = FakeModelInfo(formats=msgspec.structs.replace(FORMATS, marker_ids={}))
    server = await serve(engine)
    async with httpx.AsyncClient() as http:
        reply = (await http.post(f"{server.url}/v1/chat/completions", json=asked(tool_choice="none"))).json()
    assert reply["choices"][0]["message"]["content"] == "".join(PARIS)


@pytest.mark.parametrize("formats", [{}, {"tool_calls": "qwen3_coder"}, {"marker_ids": {}}])
async def test_calls_that_must_come_are_held_to_the_form_that_the_model_writes(serve: Serve, formats: dict[str, Any]):
    engine = FakeEngine(answer=PARIS)
    engine.model_info = FakeModelInfo(formats=msgspec.structs.replace(FORMATS, **formats))
    server = await serve(engine)
    async with httpx.AsyncClient() as http:
        await http.post(f"{server.url}/v1/chat/completions", json=asked(tool_choice="required"))
    held = engine.seen[-1][1].structured_outputs
    is_xml = formats.get("tool_calls") == "qwen3_coder"
    assert ("<function=weather>" if is_xml else '\\"name\\": \\"weather\\"') in held.grammar
    assert ('"<tool_call>"' in held.grammar) == (formats.get("marker_ids") == {})


async def test_a_model_without_tools_says_so_and_its_operator_may_know_better(serve: Serve):
    engine = FakeEngine(answer=("<think>", "a</think>", "b", "".join(PARIS)))
    plain, told = (
        await serve(engine),
        await serve(engine, tool_call_parser="qwen3_json", reasoning_parser="deepseek_r1"),
    )
    async with httpx.AsyncClient() as http:
        refused = await http.post(f"{plain.url}/v1/chat/completions", json=asked())
        assert refused.json()["error"]["param"] == "tools"
        [model] = (await http.get(f"{plain.url}/v1/models")).json()["data"]
        assert (model["tool_call_parser"], model["reasoning_parser"]) == ("none", "none")
        [model] = (await http.get(f"{told.url}/v1/models")).json()["data"]
        assert (model["tool_call_parser"], model["reasoning_parser"]) == ("hermes", "think")
        message = (await http.post(f"{told.url}/v1/chat/completions", json=asked())).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == ("a", "b", 1)


async def test_qwen3_coders_calls_have_the_types_of_their_schema(serve: Serve):
    engine = FakeEngine(
        answer=(
            "<tool_call>",
            "\n<function=weather>\n<parameter=city>\n5\n</par",
            "ameter>\n<parameter=days>\n5\n</parameter>\n</function>\n",
            "</tool_call>",
        )
    )
    engine.model_info = FakeModelInfo(formats=msgspec.structs.replace(FORMATS, tool_calls="qwen3_coder"))
    server = await serve(engine)
    async with httpx.AsyncClient() as http:
        reply = (await http.post(f"{server.url}/v1/chat/completions", json=asked())).json()
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "5", "days": 5}


def test_a_choice_that_comes_before_the_prompt_is_known_waits_for_it():
    vocabulary = Vocabulary.build([b"<think>"], frozenset())
    reading = Reading(Wanted(reasoning=True), vocabulary, 2, Tally(1, 2))
    assert reading.read(Delta(request_id="r", index=1, text="b", num_generated_tokens=1)) == []
    found = reading.read(Delta(request_id="r", index=0, text="a", num_generated_tokens=1, prompt_token_ids=[0]))
    assert [(delta.index, [piece.text for piece in pieces]) for delta, pieces in found] == [(1, ["b"]), (0, ["a"])]
    assert {type(piece).__name__ for _, pieces in found for piece in pieces} == {"Reasoning"}


@pytest.mark.parametrize(
    "arguments", ['{"n": 36893488147419103232}', '{"s": "\\ud800"}', "[1]", '{"a":', "[" * 100_000, "", None, {"a": 1}]
)
async def test_arguments_that_were_called_with_are_given_to_the_template_whatever_they_are(
    ai: openai.AsyncOpenAI, engine: FakeEngine, arguments: Any
):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    await ai.chat.completions.create(
        **{**asked(), "messages": [{"role": "assistant", "tool_calls": [call]}]}  # type: ignore[arg-type]
    )
    [found] = engine.seen[-1][0].messages[0]["tool_calls"]
    assert found["function"]["arguments"] == (arguments or {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=500, deadline=None)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON)), st.lists(TOOLS | JSON, max_size=3))
def test_whatever_is_sent_is_taken_or_refused_by_the_field(more: dict[str, Any], tools: list[Any]):
    assert fault_of(msgspec.json.encode({"messages": MESSAGES, "tools": tools, **more})) is not None


def fault_of(body: bytes) -> str | None:
    """The field that a body is refused for; "" where it is taken."""
    try:
        request, _ = decode(ChatCompletionRequest, body)
        to_prompt(request.prompt(has_tools=True), 1000)
        formats = msgspec.structs.replace(FORMATS, tool_calls="qwen3_coder")
        params_for(SamplingParams(), request, wanted_of(request, formats), formats)
        grammar_for(request.tools or [], request.tool_choice, FORMATS, has_one_call=False)
    except CallerError as error:
        return error.param
    return ""


def test_a_choice_whose_one_call_is_there_says_no_more():
    reading = Reading(Wanted(tool_calls="hermes", has_one_call=True), Vocabulary.build([], frozenset()), 2, Tally(1, 2))
    call = "".join(PARIS)
    [(delta, pieces)] = reading.read(Delta(request_id="r", index=0, text=call + "more", num_generated_tokens=1))
    assert (delta.finish_reason, len(pieces), reading.is_over) == ("tool_calls", 2, False)
    assert reading.read(Delta(request_id="r", index=0, text="more", num_generated_tokens=2, finish_reason=STOP)) == []
    reading.read(Delta(request_id="r", index=1, text=call, num_generated_tokens=1))
    assert reading.is_over
