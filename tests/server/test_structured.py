"""Answers that are held to a grammar, asked for as each kind of client does, over HTTP to the demo model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from novainfer import StructuredOutputsParams, UnsupportedParameter
from novainfer.reading import is_whole
from tests.server.test_chat import events
from tests.server.test_demo_model import KEY, SUM, DemoServer

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 99, "minimum": 0}, "is_even": {"type": "boolean"}},
    "required": ["sum", "is_even"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def demo() -> Iterator[DemoServer]:
    server = DemoServer(KEY)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(demo: DemoServer) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=demo.server.url, headers=headers, timeout=60) as client:
        yield client


def is_sum(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["sum", "is_even"] and type(found["sum"]) is int and type(found["is_even"]) is bool


HELD: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": STRICT}, is_sum),
    ({"response_format": {"type": "json_object"}, "max_tokens": 9}, lambda text: text.startswith("{")),
    ({"response_format": {"type": "text"}, "guided_regex": "[0-9]{3}"}, lambda text: re.fullmatch("[0-9]{3}", text)),
    ({"structured_outputs": {"json": SCHEMA}, "temperature": 1, "seed": 4}, is_sum),
    ({"structured_outputs": {"choice": ["twelve", "a dozen"]}}, lambda text: text in ("twelve", "a dozen")),
    ({"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"}, is_sum),
    ({"guided_choice": ["twelve", "a dozen"]}, lambda text: text in ("twelve", "a dozen")),
    ({"guided_grammar": 'root ::= "is " [0-9] [0-9]'}, lambda text: re.fullmatch("is [0-9]{2}", text)),
]


@pytest.mark.parametrize(("fields", "is_right"), HELD, ids=[str(fields)[:50] for fields, _ in HELD])
def test_an_answer_is_what_was_asked_for_streamed_or_not_in_chats_and_completions(
    client: httpx.Client, fields: dict[str, Any], is_right: Any
) -> None:
    common = {"temperature": 0, "max_tokens": 400, **fields}  # room for as much white space as a model may like
    chat = client.post("/v1/chat/completions", json={"messages": SUM, **common}).json()["choices"][0]
    assert is_right(chat["message"]["content"]), chat
    streamed = client.post("/v1/chat/completions", json={"messages": SUM, "stream": True, **common})
    choices = [choice for event in events(streamed.text) if event != "[DONE]" for choice in event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == chat["message"]["content"]
    assert choices[-1]["finish_reason"] == chat["finish_reason"]
    text = client.post("/v1/completions", json={"prompt": "7 + 5 ", **common}).json()["choices"][0]["text"]
    assert is_right(text), text


def test_a_schema_that_cannot_be_used_is_a_400_that_says_why(client: httpx.Client) -> None:
    faults: list[tuple[dict[str, Any], str, str]] = [
        ({"guided_json": {"type": "foo"}}, "invalid_value", "Invalid type: foo"),
        ({"guided_json": {"$ref": "#"}}, "invalid_value", "made of itself alone"),
        ({"guided_json": {"type": "integer", "multipleOf": 7919191}}, "grammar_limit", "the limit of 10000"),
        ({"guided_regex": "a+", "allowed_token_ids": [3]}, "no_token_allowed", "allowed_token_ids"),
    ]
    for fields, code, said in faults:
        for stream in (False, True):
            reply = client.post("/v1/chat/completions", json={"messages": SUM, "stream": stream, **fields})
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["code"] == code
            assert said in reply.json()["error"]["message"]


BAD = {"type": "object", "not": {}}
BAD_FORMAT = {"type": "json_schema", "name": "bad", "schema": BAD}
BAD_STRICT = {"type": "json_schema", "json_schema": {"name": "bad", "schema": BAD}}
NAMED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": SUM, "response_format": BAD_STRICT}, "response_format.json_schema.schema"),
    ("/v1/chat/completions", {"messages": SUM, "guided_json": BAD}, "guided_json"),
    ("/v1/chat/completions", {"messages": SUM, "structured_outputs": {"json": BAD}}, "structured_outputs.json"),
    ("/v1/chat/completions", {"messages": SUM, "structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ("/v1/completions", {"prompt": "7", "structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
    ("/v1/completions", {"prompt": "7", "guided_choice": ["a"], "allowed_token_ids": [0]}, "guided_choice"),
    ("/v1/responses", {"input": "7", "text": {"format": BAD_FORMAT}}, "text.format.schema"),
    ("/v1/messages", {"messages": SUM, "output_config": {"format": BAD_FORMAT}}, "output_config.format.schema"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "field"), NAMED, ids=[field for _, _, field in NAMED])
def test_what_is_wrong_with_a_grammar_names_the_field_that_its_client_has_sent(
    client: httpx.Client, path: str, fields: dict[str, Any], field: str, stream: bool
) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = client.post(path, json={"model": "demo", limit: 20, "stream": stream, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(field)
    assert error["message"].count(field) == 1
    assert error.get("param", field) == field


def test_an_answer_that_is_held_as_a_whole_has_no_place_for_tool_calls() -> None:
    whole, tagged = StructuredOutputsParams(regex="a"), StructuredOutputsParams(structural_tag={"structures": []})
    assert is_whole(whole, calls_tools=False)
    assert not is_whole(tagged, calls_tools=True)
    assert not is_whole(None, calls_tools=True)
    with pytest.raises(UnsupportedParameter, match='tool_choice to "none"'):
        is_whole(whole, calls_tools=True)


def test_a_limit_that_is_met_in_the_middle_of_an_answer_ends_it_with_an_event_that_names_the_limit(
    client: httpx.Client,
) -> None:
    body = {"messages": SUM, "guided_regex": "(a{1000}){1000}", "stream": True}
    *_, last = events(client.post("/v1/chat/completions", json=body).text)
    assert last["error"]["code"] == "grammar_limit"
    assert "step_lexer_fuel (200000)" in last["error"]["message"]
    assert client.post("/v1/chat/completions", json=body | {"stream": False}).status_code == 400
    held = {"messages": SUM, "guided_choice": ["fine"], "chat_template_kwargs": {"enable_thinking": False}}
    assert client.post("/v1/chat/completions", json=held).json()["choices"][0]["message"]["content"] == "fine"


def test_openais_client_parses_what_it_has_asked_for(demo: DemoServer) -> None:
    with openai.OpenAI(base_url=f"{demo.server.url}/v1", api_key=KEY) as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=SUM,  # type: ignore[arg-type]
            response_format=STRICT,  # type: ignore[arg-type]
            temperature=0,
        )
    assert is_sum(answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
