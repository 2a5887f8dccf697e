"""Tools and thoughts for real: the demo model calls, is answered and thinks, over HTTP with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from tests.server.test_demo_model import KEY, SUM, DemoServer

pytestmark = pytest.mark.slow

THINK = {"chat_template_kwargs": {"enable_thinking": True}}


def tool(name: str, description: str, /, *, strict: bool = False, **types: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {parameter: {"type": kind} for parameter, kind in types.items()},
        "required": list(types),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}


WEATHER = tool("get_weather", "The weather in a city.", city="string")
CALCULATOR = tool("calculator", "Calculates with two numbers.", a="integer", b="integer", op="string")
PARIS: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def demo() -> Iterator[DemoServer]:
    server = DemoServer(KEY)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def ai(demo: DemoServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{demo.server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def ask(ai: openai.AsyncOpenAI, messages: Any, *, stream: bool = False, **more: Any) -> list[dict[str, Any]]:
    """The choices as messages with their `finish_reason`, put together from deltas where it is streamed."""
    create: Any = ai.chat.completions.create
    asked = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 120, **more}
    if not stream:
        reply = await create(**asked)
        return [choice.message.model_dump() | {"finish_reason": choice.finish_reason} for choice in reply.choices]
    found: dict[int, dict[str, Any]] = {}
    async for chunk in await create(**asked, stream=True):
        for choice in chunk.choices:
            message = found.setdefault(choice.index, {"role": "assistant", "content": "", "tool_calls": []})
            assert "finish_reason" not in message, "nothing comes behind the end of a choice"
            if choice.finish_reason is not None:
                message["finish_reason"] = choice.finish_reason
            delta = choice.delta
            thought = getattr(delta, "reasoning_content", None)
            assert not (thought and message["content"]), "thoughts come before content"
            if thought:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            message["content"] += delta.content or ""
            for call in delta.tool_calls or []:
                if call.index == len(message["tool_calls"]):
                    message["tool_calls"].append(call.model_dump(exclude={"index"}))
                else:
                    message["tool_calls"][call.index]["function"]["arguments"] += call.function.arguments
    return [found[index] for index in sorted(found)]


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
async def test_a_tool_is_called_and_what_it_says_becomes_the_answer(
    ai: openai.AsyncOpenAI, stream: bool, thinks: bool
) -> None:
    more = {"tools": [CALCULATOR, WEATHER], "stream": stream, "extra_body": THINK if thinks else {}}
    [first] = await ask(ai, PARIS, **more)
    assert first["finish_reason"] == "tool_calls"
    assert calls_of(first) == [("get_weather", {"city": "Paris"})]
    assert bool(first.get("reasoning_content")) is thinks
    told = {
        "role": "tool",
        "tool_call_id": first["tool_calls"][0]["id"],
        "content": '{"temperature": 12, "sky": "rain"}',
    }
    [answer] = await ask(ai, [*PARIS, first, told], **more)
    assert answer["finish_reason"] == "stop"
    assert answer["content"] == "The weather in Paris: temperature 12, sky rain."
    assert not answer["tool_calls"]


async def test_what_a_tool_calculates_is_more_than_the_model_can(ai: openai.AsyncOpenAI) -> None:
    asked = [{"role": "user", "content": "What is 345 + 678?"}]
    [alone] = await ask(ai, asked)
    assert "two digits" in alone["content"]
    [first] = await ask(ai, asked, tools=[CALCULATOR])
    assert calls_of(first) == [("calculator", {"a": 345, "b": 678, "op": "+"})]
    told = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "1023"}
    [answer] = await ask(ai, [*asked, first, told], tools=[CALCULATOR])
    assert answer["content"] == "345 + 678 = 1023."


async def test_names_that_it_has_never_seen_are_copied(ai: openai.AsyncOpenAI) -> None:
    strange = tool("get_brundoq", "The weather in a city.", flamket="string")
    [message] = await ask(ai, [{"role": "user", "content": "What is the weather in Grobinthal?"}], tools=[strange])
    assert calls_of(message) == [("get_brundoq", {"flamket": "Grobinthal"})]


@pytest.mark.parametrize("stream", [False, True])
async def test_two_cities_are_two_calls_unless_one_is_all_that_may_come(ai: openai.AsyncOpenAI, stream: bool) -> None:
    asked = [{"role": "user", "content": "What is the weather in Oslo and in Rome?"}]
    [both] = await ask(ai, asked, tools=[WEATHER], stream=stream)
    assert calls_of(both) == [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"})]
    first, second = (call["id"] for call in both["tool_calls"])
    assert first != second
    told = [
        {"role": "tool", "tool_call_id": first, "content": "3 degrees and snow"},
        {"role": "tool", "tool_call_id": second, "content": "21 degrees and sun"},
    ]
    [answer] = await ask(ai, [*asked, both, *told], tools=[WEATHER], stream=stream)
    wanted = "The weather in Oslo: 3 degrees and snow. The weather in Rome: 21 degrees and sun."
    assert answer["content"] == wanted
    [one] = await ask(ai, asked, tools=[WEATHER], stream=stream, parallel_tool_calls=False)
    assert calls_of(one) == [("get_weather", {"city": "Oslo"})]


async def test_where_no_tool_fits_none_is_called(ai: openai.AsyncOpenAI) -> None:
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    for tools in ([WEATHER], [WEATHER, CALCULATOR]):
        [message] = await ask(ai, asked, tools=tools)
        assert (message["content"], message["tool_calls"]) == ("The capital of France is Paris.", None)
    [message] = await ask(ai, PARIS, tools=[CALCULATOR])
    assert message["content"].startswith("Sorry,")


async def test_calls_are_forbidden_required_or_named(ai: openai.AsyncOpenAI) -> None:
    tools = [WEATHER, CALCULATOR]
    [message] = await ask(ai, PARIS, tools=tools, tool_choice="none")
    assert message["content"]
    assert not message["tool_calls"]
    hello = [{"role": "user", "content": "Hello!"}]
    [message] = await ask(ai, hello, tools=tools)
    assert (message["content"], message["tool_calls"]) == ("Hello! How can I help you?", None)
    [message] = await ask(ai, hello, tools=tools, tool_choice="required")
    assert message["finish_reason"] == "tool_calls"
    assert {name for name, _ in calls_of(message)} <= {"get_weather", "calculator"}
    for thinks in (False, True):
        named = {"type": "function", "function": {"name": "calculator"}}
        extra = THINK if thinks else {}
        [message] = await ask(ai, PARIS, tools=tools, tool_choice=named, extra_body=extra)
        assert [name for name, _ in calls_of(message)] == ["calculator"]
        assert message["content"] is None
        assert bool(message.get("reasoning_content")) is thinks


async def test_arguments_of_a_strict_tool_fit_its_schema(ai: openai.AsyncOpenAI) -> None:
    strict = tool("get_weather", "The weather in a city.", strict=True, city="string", days="integer")
    strict["function"]["parameters"]["properties"]["days"] |= {"minimum": 1, "maximum": 7}
    [message] = await ask(ai, PARIS, tools=[strict, CALCULATOR])
    [(name, arguments)] = calls_of(message)
    assert name == "get_weather"
    assert arguments["city"] == "Paris"
    assert list(arguments) == ["city", "days"]
    assert 1 <= arguments["days"] <= 7


async def test_thoughts_of_a_few_words_come_first(ai: openai.AsyncOpenAI) -> None:
    for asked, thought, content in (
        (SUM, "A sum: 7 + 5.", "7 + 5 = 12."),
        ([{"role": "user", "content": "Spell apple"}], "Letters of apple.", "apple: a-p-p-l-e"),
    ):
        for stream in (False, True):
            [message] = await ask(ai, asked, stream=stream, extra_body=THINK)
            assert message["reasoning_content"] == thought
            assert message["content"] == content
            assert message["finish_reason"] == "stop"
        [message] = await ask(ai, asked)
        assert message["content"] == content
        assert not message.get("reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_are_read_apart(ai: openai.AsyncOpenAI, stream: bool) -> None:
    more = {"n": 2, "temperature": 1.0, "seed": 5, "stream": stream, "extra_body": THINK}
    for message in await ask(ai, PARIS, tools=[WEATHER], **more):
        assert message["finish_reason"] == "tool_calls"
        assert message["reasoning_content"]
        assert calls_of(message) == [("get_weather", {"city": "Paris"})]
    found = await ask(ai, SUM, **more)
    assert [bool(message["reasoning_content"] and message["content"]) for message in found] == [True, True]


async def test_an_answer_that_is_sent_back_is_found_in_the_prefix_cache(ai: openai.AsyncOpenAI) -> None:
    """It is rendered to the tokens that the model has written, thoughts and calls included."""
    create: Any = ai.chat.completions.create
    long = [{"role": "system", "content": "You are a friendly assistant. " * 8}, *PARIS]
    asked = {"model": "demo", "temperature": 0, "tools": [WEATHER], "extra_body": THINK | {"return_token_ids": True}}
    reply = await create(messages=long, **asked)
    [choice] = reply.choices
    told = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "12 degrees"}
    again = await create(messages=[*long, choice.message.model_dump(), told], **asked)
    written = reply.model_extra["prompt_token_ids"] + choice.model_extra["token_ids"]
    assert again.model_extra["prompt_token_ids"][: len(written)] == written


async def test_the_formats_are_told(ai: openai.AsyncOpenAI) -> None:
    [model] = [model async for model in ai.models.list()]
    assert model.model_extra is not None
    assert (model.model_extra["tool_call_parser"], model.model_extra["reasoning_parser"]) == ("hermes", "think")
