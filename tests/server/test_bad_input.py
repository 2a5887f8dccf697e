"""Bad input gets one clear sentence with the field, and the server goes on."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from novainfer.server.serve import Server
from tests.server.fakes import FakeEngine

USER = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, which must have OpenAI's four fields and a one-sentence message."""
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert "Traceback" not in response.text
    return error


REFUSED_PART = ("messages[0].content[0].type", "unsupported_parameter")
UNSAID_PART = ("messages[0].content[0].refusal", "invalid_value")
CHAT_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": None}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_value"),
    ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_parameter"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": "9"}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"top_k": 2**64}, "top_k", "invalid_value"),
    ({"top_k": -(2**63) - 1}, "top_k", "invalid_value"),
    ({"min_tokens": 10**30}, "min_tokens", "invalid_value"),
    ({"max_tokens": 2**31}, "max_tokens", "invalid_value"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": 1e-320}, "repetition_penalty", "invalid_value"),
    ({"top_p": 5e-324}, "top_p", "invalid_value"),
    ({"stop": "x" * 257}, "stop", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"timeout": 1e300}, "timeout", "invalid_value"),
    ({"bad_words": [" "]}, "bad_words", "invalid_value"),
    ({"bad_words": "no"}, "bad_words", "invalid_value"),
    ({"bad_words": ["x" * 257]}, "bad_words", "invalid_value"),
    ({"bad_words": ["x"] * 257}, "bad_words", "invalid_value"),
    ({"max_queue_ms": 1e300}, "max_queue_ms", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x"}] * 10_001}, "messages", "invalid_value"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]}, *REFUSED_PART),
    ({"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, *UNSAID_PART),
    ({"n": True}, "n", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"seed": 1 << 70}, "seed", "invalid_value"),
    ({"stop": [""]}, "stop", "invalid_value"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"stop": [1]}, "stop[0]", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
    ({"timeout": 0}, "timeout", "invalid_value"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"request_id": "a b"}, "request_id", "invalid_value"),
    ({"stream": True, "stream_interval": 0}, "stream_interval", "invalid_value"),
    ({"on_disconnect": "stay"}, "on_disconnect", "invalid_value"),
    ({"stream": True, "on_disconnect": "continue"}, "on_disconnect", "invalid_value"),  # there is no journal
    ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"functions": [{}]}, "functions", "unsupported_parameter"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"rexeg": "a"}}, "structured_outputs.rexeg", "invalid_value"),
    ({"guided_choice": [""]}, "guided_choice", "invalid_value"),
    ({"guided_json": 3}, "guided_json", "invalid_value"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "invalid_value"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"priority": 1 << 40}, "priority", "invalid_value"),
    ({"chat_template": "{{ x }}"}, "chat_template", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ({"add_special_tokens": True}, "add_special_tokens", "unsupported_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), CHAT_FAULTS, ids=[f"{f}"[:60] for f, _, _ in CHAT_FAULTS])
async def test_a_faulty_chat_field_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, code: str
) -> None:
    for stream in (False, True):
        response = await client.post("/v1/chat/completions", json={"messages": USER, "stream": stream, **fields})
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
        field = param.split(".")[0].split("[")[0]
        assert field in error["message"] or "content of type" in error["message"] or "role" in error["message"]
    assert not engine.seen
    assert (await client.post("/v1/chat/completions", json={"messages": USER})).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["", ""]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "echo": True, "truncate_prompt_tokens": 3}, "echo"),
        ({"prompt": [300], "echo": True}, "prompt"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "a", "best_of": 129}, "best_of"),
        ({"prompt": "a", "best_of": 0}, "best_of"),
        ({"prompt": "a", "n": 0, "best_of": 2}, "n"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt": "a", "truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "x" * 65}, "prompt"),
    ],
    ids=str,
)
async def test_a_faulty_completion_field_is_named(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        response = await client.post("/v1/completions", json={"stream": stream, **fields})
        assert response.status_code == 400, response.text
        assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b'{"messages":[]}x', b"\xff\xfe", b"[" * 100_000, b'{"messages":' + b"[" * 100_000],
)
async def test_what_is_not_a_json_object_is_told_so(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["code"] in ("invalid_json", "invalid_value")


async def test_an_unknown_model_is_404_and_names_the_right_one(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={"model": "gpt-9", "messages": USER})
    assert response.status_code == 404
    error = error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'fake'" in error["message"]


async def test_a_long_prompt_says_the_maximum_context_length(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "x" * 1000, "stream": True})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 64 tokens" in error["message"]


@pytest.mark.parametrize("size", [1_000_001, 8_000_000, 12_000_000])
async def test_a_body_over_the_limit_is_413(client: httpx.AsyncClient, size: int) -> None:
    for _ in range(3):
        response = await client.post("/v1/completions", json={"prompt": "x" * size})
        assert response.status_code == 413
        assert error_of(response)["code"] == "payload_too_large"
    assert (await client.get("/health")).status_code == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("flag", ["--http1.1", "--http2-prior-knowledge"])
async def test_curl_sees_why_its_body_is_refused(server: Server, tmp_path: Path, flag: str) -> None:
    body = tmp_path / "body"
    body.write_bytes(b"x" * 20_000_000)
    for header in ("content-type: application/json", "content-type: text/plain"):
        process = await asyncio.create_subprocess_exec(
            *("curl", "-sS", flag, "--data-binary", f"@{body}", "-H", header, f"{server.url}/v1/completions"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        expected = "unsupported_media_type" if "text" in header else "payload_too_large"
        assert json.loads(out)["error"]["code"] == expected, err
        assert not err


async def test_another_content_type_is_415(client: httpx.AsyncClient) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded"):
        response = await client.post(
            "/v1/chat/completions", content=json.dumps({"messages": USER}), headers={"content-type": content_type}
        )
        assert response.status_code == 415
        assert "application/json" in error_of(response)["message"]


async def test_an_unknown_path_is_404_and_a_wrong_method_405(client: httpx.AsyncClient) -> None:
    response = await client.get("/v2/nothing")
    assert response.status_code == 404
    assert error_of(response)["code"] == "path_not_found"
    response = await client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert error_of(response)["code"] == "method_not_allowed"


async def test_an_error_of_ours_keeps_its_secret(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_at = 0
    response = await client.post("/v1/chat/completions", json={"messages": USER})
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text
