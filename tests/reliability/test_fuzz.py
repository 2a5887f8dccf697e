"""Bodies that no client should send: each gets one answer that the document knows, and nothing is left behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from novainfer.server.app import ROUTES
from novainfer.server.operate.openapi import build_openapi
from tests.reliability import fuzz
from tests.reliability.bodies import SERVED, Bodies, Body

DOCUMENT: dict[str, Any] = json.loads(json.dumps(build_openapi("0", ROUTES)))
FOR_ADMINS = {"/v1/faults", "/v1/admin/reconfigure", "/models/load", "/models/unload"}
JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


def refused(**fields: Any) -> bytes:
    error = {"message": "temperature must be more", "type": "t", "param": "temperature", "code": "invalid_value"}
    return json.dumps({"error": error | fields}).encode()


def test_every_route_that_takes_a_body_is_sent_some() -> None:
    takes = {path for path, methods in DOCUMENT["paths"].items() if "requestBody" in methods.get("post", {})}
    assert takes - FOR_ADMINS == set(SERVED)


def test_one_seed_gives_the_same_bodies_and_another_one_others() -> None:
    first, same, other = (Bodies(DOCUMENT, seed) for seed in (1, 1, 2))
    bodies = [first.next() for _ in range(300)]
    assert bodies == [same.next() for _ in range(300)]
    assert bodies != [other.next() for _ in range(300)]
    assert {body.kind for body in bodies} == {"schema", "hostile", "text", "bytes", "nesting"}
    assert len({body.data for body in bodies}) > 250


@pytest.mark.parametrize(
    ("path", "status", "headers", "data"),
    [
        ("/v1/completions", 500, JSON, refused()),
        ("/v1/completions", 503, JSON, refused()),
        ("/v1/completions", 418, JSON, refused()),
        ("/v1/completions", 400, JSON, refused(param=None)),
        ("/v1/completions", 400, JSON, refused(message="first\nsecond")),
        ("/v1/completions", 400, JSON, refused(message="x" * 2_000)),
        ("/v1/completions", 200, JSON, b"{"),
        ("/v1/completions", 200, EVENTS, b"data: {}\n\n"),
        ("/v1/completions", 200, EVENTS, b"data: {}\n\ndata: [DONE]\n\ndata: [DONE]\n\n"),
        ("/v1/completions", 200, EVENTS, b"data: [DONE]\n\ndata: {}\n\n"),
        ("/v1/completions", 200, EVENTS, b'data: {"error":{"code":"step_failed"}}\n\n'),
        ("/v1/messages", 200, EVENTS, b"event: message_start\ndata: {}\n\n"),
        ("/v1/messages", 200, EVENTS, b"event: message_stop\ndata: {}\n\nevent: error\ndata: {}\n\n"),
        (
            "/v1/messages",
            400,
            JSON,
            b'{"type": "error", "error": {"message": "it is wrong", "type": "t", "details": {"error_code": "x"}}}',
        ),
    ],
)
def test_an_answer_that_is_none_is_told(path: str, status: int, headers: dict[str, str], data: bytes) -> None:
    with pytest.raises((fuzz.WrongAnswer, ValueError)):
        fuzz.judge(DOCUMENT, Body("schema", path, b"{}"), status, headers, data)


def test_an_answer_in_order_is_let_pass() -> None:
    body = Body("schema", "/v1/completions", b"{}")
    fuzz.judge(DOCUMENT, body, 400, JSON, refused())
    fuzz.judge(DOCUMENT, body, 400, JSON, refused(param=None, code="invalid_json"))
    fuzz.judge(DOCUMENT, body, 200, EVENTS, b": here\n\ndata: {}\n\ndata: [DONE]\n\n")
    message = b'{"type": "error", "error": {"message": "top_k is", "type": "t", "details": {"error_code": "x"}}}'
    fuzz.judge(DOCUMENT, Body("schema", "/v1/messages", b"{}"), 400, JSON, message)
    half = message.replace(b"top_k is", b"a b has half of a character")
    fuzz.judge(DOCUMENT, Body("schema", "/v1/messages", b"{}"), 400, JSON, half)
    cancelled = b'data: {"error":{"message":"x","type":"t","param":null,"code":"request_cancelled"}}'
    fuzz.judge(DOCUMENT, body, 200, EVENTS, b"data: {}\n\n" + cancelled + b"\n\n")
    fuzz.judge(DOCUMENT, body, 499, JSON, refused(param=None, code="request_cancelled"))  # by another body
    waited = {**JSON, "retry-after": "1"}
    fuzz.judge(DOCUMENT, Body("schema", "/v1/completions", b'{"max_queue_ms": 1}'), 503, waited, refused(param=None))


@pytest.mark.slow
async def test_a_thousand_bodies_each_get_their_answer() -> None:
    found = await fuzz.run(1_000, seed=1)
    statuses = {answer.rsplit(" ", 1)[1] for answer in found["answers"]}
    assert {"200", "400"} <= statuses
    assert sum(found["answers"].values()) == 1_500


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_hundred_thousand_bodies_each_get_their_answer_and_leave_nothing() -> None:
    found = await fuzz.run(100_000, seed=1)
    assert sum(found["answers"].values()) == 150_000
