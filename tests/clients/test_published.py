"""Every body and every event of a stream is what OpenAI's and Anthropic's published types say, whatever was asked.

`make clients ARGS=types` installs these types and their compiler.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from novainfer import StepFailedError
from novainfer.server.http.errors import ResponseNotFound
from novainfer.server.http.shapes import response_error_event
from novainfer.server.responses.events import Event
from tests.clients.conftest import ToolEngine
from tests.clients.needs import environment
from tests.clients.published import WHOLE, Sent, judged, sent_of, wrong_among
from tests.server.conftest import running
from tests.server.fakes import FakeEngine
from tests.server.test_demo_model import DemoServer
from tests.server.test_tools import TOOL
from tests.witness import WITNESS, events_of

pytestmark = [pytest.mark.long, environment("types")]

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
KEY = "a-key"
SUM: Any = [{"role": "user", "content": "What is 7 + 5?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
USAGE = {"include_usage": True}
LOGPROBS = ["message.output_text.logprobs"]
CALLED = [
    {"type": "message", "role": "user", "content": "Paris?"},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Paris"}'},
    {"type": "function_call_output", "call_id": "c", "output": "Rain"},
]
FUNCTION = {"type": "function", **TOOL["function"]}
ANTHROPICS = {"name": "weather", "description": "The weather", "input_schema": TOOL["function"]["parameters"]}

# What the demo model is asked: each whole, and as a stream where it can be one.
DEMO: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": SUM}),
    (CHAT, {"messages": SUM, "n": 2, "logprobs": True, "top_logprobs": 2, "seed": 3, "max_tokens": 6}),
    (CHAT, {"messages": SUM, "response_format": SCHEMA_FORMAT, "max_completion_tokens": 40}),
    (CHAT, {"messages": SUM, "response_format": {"type": "json_object"}, "max_completion_tokens": 40}),
    (CHAT, {"messages": SUM, "stop": ["1"], "return_token_ids": True, "metadata": {"a": "b"}, "user": "u"}),
    (COMPLETIONS, {"prompt": "Once upon", "max_tokens": 6}),
    (COMPLETIONS, {"prompt": ["Once", "The"], "n": 2, "logprobs": 2, "max_tokens": 4, "temperature": 1}),
    (COMPLETIONS, {"prompt": "Once upon", "echo": True, "logprobs": 1, "max_tokens": 4}),
    (COMPLETIONS, {"prompt": "Once upon", "max_tokens": 4, "return_token_ids": True, "stop": "a"}),
    (RESPONSES, {"input": "What is 7 + 5?", "instructions": "Be short.", "metadata": {"a": "b"}, "user": "u"}),
    (RESPONSES, {"input": "What is 7 + 5?", "include": LOGPROBS, "top_logprobs": 2}),
    (RESPONSES, {"input": SUM, "max_output_tokens": 2, "truncation": "auto", "store": False}),
    (RESPONSES, {"input": SUM, "text": {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA}}}),
    (RESPONSES, {"input": SUM, "background": True}),
    (MESSAGES, {"messages": SUM, "max_tokens": 60, "system": "Be short."}),
    (MESSAGES, {"messages": SUM, "max_tokens": 2}),
    (MESSAGES, {"messages": SUM, "max_tokens": 60, "stop_sequences": ["1"], "metadata": {"user_id": "u"}}),
]
ONLY_WHOLE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": SUM, "prompt_logprobs": 1, "max_tokens": 2}),
    (COMPLETIONS, {"prompt": "Once upon", "prompt_logprobs": 1, "max_tokens": 2}),
    (COMPLETIONS, {"prompt": "Once upon", "best_of": 3, "max_tokens": 2}),
    ("/v1/embeddings", {"input": ["Once", "upon"]}),
    ("/v1/embeddings", {"input": "Once", "encoding_format": "base64", "dimensions": 8}),
    (f"{MESSAGES}/count_tokens", {"messages": SUM}),
]
# And the model that thinks and calls.
TOOLS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": SUM, "tools": [TOOL]}),
    (CHAT, {"messages": SUM, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}),
    (CHAT, {"messages": SUM, "logprobs": True}),
    (RESPONSES, {"input": "Paris?", "tools": [FUNCTION]}),
    (RESPONSES, {"input": CALLED, "tools": [FUNCTION], "reasoning": {"effort": "low"}}),
    (RESPONSES, {"input": "Paris?", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "weather"}}),
    (MESSAGES, {"messages": SUM, "max_tokens": 60, "tools": [ANTHROPICS]}),
    (
        MESSAGES,
        {
            "messages": SUM,
            "max_tokens": 60,
            "tools": [ANTHROPICS],
            "thinking": {"type": "adaptive", "display": "omitted"},
        },
    ),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((path, {"messages": SUM, "input": "x", "prompt": "x", "max_tokens": 1, "temperature": -1}) for path in
      (CHAT, COMPLETIONS, RESPONSES, MESSAGES)),
    *((path, {"messages": SUM, "input": "x", "prompt": "x", "max_tokens": 1, "model": "gpt"}) for path in
      (CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/embeddings")),
    (CHAT, {"messages": [{"role": "user", "content": "a b " * 3000}]}),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_none"}),
]  # fmt: skip


@asynccontextmanager
async def http(url: str, key: str = KEY) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        yield client


async def ask_all(client: httpx.AsyncClient, asked: list[tuple[str, dict[str, Any]]], *, model: str) -> None:
    """Each whole and streamed."""
    for path, body in asked:
        for stream in ({}, {"stream": True, **({"stream_options": USAGE} if path in (CHAT, COMPLETIONS) else {})}):
            reply = await client.post(path, json={"model": model, **body, **stream})
            assert reply.status_code == 200, reply.text


async def ask_demo(client: httpx.AsyncClient) -> None:
    greedy: list[tuple[str, dict[str, Any]]] = [(path, {"temperature": 0, **body}) for path, body in DEMO]
    await ask_all(client, greedy, model="demo")
    for path, body in ONLY_WHOLE:
        reply = await client.post(path, json={"model": "demo", **body})
        assert reply.status_code == 200, reply.text
    continuous = {"stream": True, "stream_options": {**USAGE, "continuous_usage_stats": True}}
    await client.post(CHAT, json={"messages": SUM, **continuous})
    await client.post(CHAT, json={"messages": SUM, "stream": True})
    for path, body in REFUSED:
        reply = await client.post(path, json={"model": "demo", **body})
        assert 400 <= reply.status_code < 500, reply.text
    for path in (
        "/v1/models",
        "/v1/models/demo",
        "/v1/models/gpt",
        f"{RESPONSES}/none",
        f"{RESPONSES}/none/input_items",
    ):
        await client.get(path)
    await client.post(CHAT, content=b"{", headers={"content-type": "application/json"})
    await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    await client.post(MESSAGES, json={"messages": [{"role": "user", "content": "x" * 2_000_000}], "max_tokens": 1})
    await ask_kept(client)


async def ask_kept(client: httpx.AsyncClient) -> None:
    kept = (await client.post(RESPONSES, json={"input": SUM})).json()["id"]
    next_ = (await client.post(RESPONSES, json={"input": CALLED[:1], "previous_response_id": kept})).json()["id"]
    await client.get(f"{RESPONSES}/{next_}")
    await client.get(f"{RESPONSES}/{next_}/input_items", params={"limit": 1})
    begun = (await client.post(RESPONSES, json={"input": SUM, "background": True, "ignore_eos": True})).json()["id"]
    assert (await client.post(f"{RESPONSES}/{begun}/cancel")).json()["status"] == "cancelled"
    await client.get(f"{RESPONSES}/{begun}", params={"stream": "true"})
    await client.delete(f"{RESPONSES}/{kept}")


async def ask_tools(client: httpx.AsyncClient) -> None:
    await ask_all(client, TOOLS, model="fake")


async def ask_failing(client: httpx.AsyncClient) -> None:
    """What fails in its middle, or before, each whole and streamed."""
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": SUM},
        COMPLETIONS: {"prompt": "x"},
        RESPONSES: {"input": "x"},
        MESSAGES: {"messages": SUM, "max_tokens": 9},
    }
    for path, body in asked.items():
        for stream in (False, True):
            reply = await client.post(path, json={**body, "stream": stream})
            assert reply.status_code in (200, 401, 500, 503), reply.text


async def ask_slow(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """A stream that is silent for a while, and shows that it lives."""
    text = ""
    async with client.stream("POST", MESSAGES, json={"messages": SUM, "max_tokens": 9, "stream": True}) as reply:
        async for piece in reply.aiter_text():
            text += piece
            engine.release(9 if "event: ping" in text else 1)


async def everything(demo_url: str) -> list[Sent]:
    """All of it."""
    failing, slow = FakeEngine(), FakeEngine(is_paced=True)
    failing.fail_at, failing.failure = 2, StepFailedError("The step failed")
    full = FakeEngine()
    full.overloaded = True
    with WITNESS.answers() as answers:
        async with AsyncExitStack() as stack:

            async def client_of(engine: FakeEngine, **settings: Any) -> httpx.AsyncClient:
                server = await stack.enter_async_context(running(engine, shutdown_timeout_s=0.0, **settings))
                return await stack.enter_async_context(http(server.url))

            await ask_demo(await stack.enter_async_context(http(demo_url)))
            await ask_tools(await client_of(ToolEngine()))
            await ask_failing(await client_of(failing))
            await ask_failing(await client_of(full))
            await ask_slow(await client_of(slow, sse_keep_alive_interval_s=0.05), slow)
            await ask_failing(await client_of(FakeEngine(), api_keys=("another-key",)))
    gone = ResponseNotFound("Response with id 'resp_1' is kept no longer")  # where there is no room for it any more
    [dropped] = events_of(response_error_event(gone, 7).decode())
    return [*sent_of(answers), Sent("response_event", dropped.data)]


@pytest.fixture(scope="module")
def sent(demo: DemoServer) -> list[Sent]:
    """All of it, asked once."""
    return asyncio.run(everything(demo.server.url))


def known_events(kind: type[Event]) -> set[str]:
    """The types of all events of a response that this server can send."""
    found = {one for below in kind.__subclasses__() for one in known_events(below)}
    return found or {str(kind.__struct_config__.tag)}


def test_all_that_is_sent_is_what_the_published_types_say(sent: list[Sent], tmp_path: Path) -> None:
    assert wrong_among(sent, tmp_path) == []
    kinds = {one.kind for one in sent}
    streams = {f"{kind}_event" for kind in ("chat", "completion", "response", "message")}
    assert kinds == {*WHOLE.values(), *streams, "error", "message_error"}
    said = {json.loads(one.text)["type"] for one in sent if one.kind == "response_event"}
    assert said == {"error", *known_events(Event)}


Change = Callable[[Any], None]


def without(*path: str | int) -> Change:
    """Leaves a field out."""

    def change(value: Any) -> None:
        for name in path[:-1]:
            value = value[name]
        del value[path[-1]]

    return change


def made(new: Any, *path: str | int) -> Change:
    """Makes a field something else."""

    def change(value: Any) -> None:
        for name in path[:-1]:
            value = value[name]
        value[path[-1]] = new

    return change


WRONG: list[tuple[str, Change]] = [
    ("chat", without("choices", 0, "message", "refusal")),
    ("chat", without("usage", "total_tokens")),
    ("chat", made("eos", "choices", 0, "finish_reason")),
    ("chat", made("now", "created")),
    ("chat", made(None, "choices", 0, "message", "tool_calls")),
    ("chat", made(1, "choices", 0, "message", "mood")),
    ("chat_event", without("object")),
    ("chat_event", made("robot", "choices", 0, "delta", "role")),
    ("chat_event", made("0", "choices", 0, "index")),
    ("completion", without("choices", 0, "logprobs")),
    ("completion", made("tool_calls", "choices", 0, "finish_reason")),
    ("completion_event", made(3, "choices", 0, "text")),
    ("embeddings", made("vector", "data", 0, "object")),
    ("embeddings", made([["1"]], "data", 0, "embedding")),
    ("embeddings", without("usage", "prompt_tokens")),
    ("models", without("data", 0, "owned_by")),
    ("model", made("Model", "object")),
    ("error", without("error", "param")),
    ("error", made(400, "error", "code")),
    ("response", without("parallel_tool_calls")),
    ("response", made("done", "status")),
    ("response", made("assistant!", "output", 0, "role")),
    ("response", made(7, "output", 0, "content", 0, "text")),
    ("response", without("output", 0, "content", 0, "annotations")),
    ("response_event", without("sequence_number")),
    ("response_event", made("response.begun", "type")),
    ("response_event", made("1", "sequence_number")),
    ("response_items", without("has_more")),
    ("response_deleted", made("yes", "deleted")),
    ("message", without("usage", "input_tokens")),
    ("message", made("eos", "stop_reason")),
    ("message", made(7, "content", 0, "text")),
    ("message", without("content", 0, "citations")),
    ("message_event", made("begun", "type")),
    ("message_event", made(1, "mood")),
    ("message_count", made("7", "input_tokens")),
    ("message_error", made("wrong", "error", "type")),
    ("message_error", without("error", "message")),
]


def test_what_is_wrong_is_found(sent: list[Sent], tmp_path: Path) -> None:
    planted = []
    for kind, change in WRONG:
        for one in sent:
            value = json.loads(one.text)
            try:
                if one.kind == kind:
                    change(value)
                    planted.append(Sent(kind, json.dumps(value)))
                    break
            except (IndexError, KeyError, TypeError):
                continue
        else:
            raise AssertionError(f"there is no {kind} that it could be planted in")
    told = judged(planted, tmp_path)
    assert [planted[at] for at in range(len(planted)) if at not in told] == []
