"""One answer's way out: the head of a stream that was begun before its handler could."""

from __future__ import annotations

from typing import Any

from starlette.types import Message

from novainfer.server.http.exchange import WRITE_NOW_KEY, Exchange
from novainfer.server.http.writer import HEADERS

SCOPE: dict[str, Any] = {"method": "POST", "path": "/v1/completions", "http_version": "1.1", "headers": []}


async def test_the_answer_to_head_has_no_body_that_could_be_written_at_once() -> None:
    written: list[bytes] = []

    def take(data: bytes) -> bool:
        written.append(data)
        return True

    async def send(message: Message) -> None: ...

    for method, is_taken in [("GET", True), ("HEAD", False)]:
        scope = SCOPE | {"method": method, "extensions": {WRITE_NOW_KEY: take}}
        exchange = Exchange(scope, send, unread=lambda client: None)  # type: ignore[arg-type, return-value]
        assert exchange.stream()(method.encode()) == is_taken
    assert written == [b"GET"]


async def test_a_stream_that_is_begun_for_its_handler_has_one_head_and_is_the_handlers_from_its_own_on() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    exchange = Exchange(SCOPE, send, unread=lambda client: None)  # type: ignore[arg-type, return-value]
    await exchange.begin_stream(HEADERS)
    assert exchange.is_begun_stream, "an error is an event of it now"
    await exchange.send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    assert not exchange.is_begun_stream, "and now the handler's own affair"
    await exchange.send({"type": "http.response.body", "body": b"data: a", "more_body": True})
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    assert len(sent) == 3, "one head is left out, and no other"
