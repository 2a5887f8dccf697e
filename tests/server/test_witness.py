"""What watches all streams of these tests sees one that ends twice, or not at all."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.server.conftest import eventually
from tests.witness import WITNESS, Witness

CHUNK, DONE = 'data: {"choices":[]}\n\n', "data: [DONE]\n\n"
FAILED = 'data: {"error":{"message":"x"}}\n\n'
DELTA = 'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n'
COMPLETED = 'event: response.completed\ndata: {"type":"response.completed"}\n\n'
ERROR = 'event: error\ndata: {"type":"error"}\n\n'
PING = 'event: ping\ndata: {"type":"ping"}\n\n'
STOP = 'event: message_stop\ndata: {"type":"message_stop"}\n\n'
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize("stream", [False, True])
async def test_it_sees_every_byte_that_a_client_gets(client: httpx.AsyncClient, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    with WITNESS.answers() as answers:
        reply = await client.post(CHAT, json=body)
        await eventually(lambda: answers)
    [answer] = answers
    assert (answer.status, answer.is_whole, answer.is_stream) == (200, True, stream)
    assert answer.body == reply.content


async def seen(path: str, *pieces: str, is_whole: bool = True, **more: Any) -> list[str]:
    """What a witness says of an application that sends this."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for at, piece in enumerate(pieces):
            has_more = not is_whole or at < len(pieces) - 1
            await send({"type": "http.response.body", "body": piece.encode(), "more_body": has_more})

    async def sent(message: Message) -> None:
        pass

    witness = Witness()
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], **more}
    await witness.around(app)(scope, None, sent)  # type: ignore[arg-type]
    return witness.wrong


@pytest.mark.parametrize(
    ("path", "pieces"),
    [
        (CHAT, (CHUNK, DONE)),
        (CHAT, (": keep-alive\n\n", CHUNK + FAILED, "")),
        (RESPONSES, (DELTA + COMPLETED,)),
        (f"{RESPONSES}/resp_1", (DELTA, ERROR)),
        (MESSAGES, (PING, STOP)),
        ("/v1/events", ("data: 1\n\n",)),
    ],
)
async def test_one_ending_is_right(path: str, pieces: tuple[str, ...]) -> None:
    assert await seen(path, *pieces) == []


@pytest.mark.parametrize(
    ("path", "pieces"),
    [
        (CHAT, (CHUNK,)),
        (CHAT, (CHUNK, FAILED, DONE)),
        (CHAT, (DONE, DONE)),
        ("/v1/completions", (DONE, CHUNK)),
        ("/v1/completions", (CHUNK, "data: [DO")),
        (RESPONSES, (DELTA,)),
        (RESPONSES, (COMPLETED, DELTA)),
        (RESPONSES, (COMPLETED + ERROR,)),
        (MESSAGES, (PING,)),
        (MESSAGES, (STOP, PING)),
    ],
)
async def test_none_or_more_are_seen(path: str, pieces: tuple[str, ...]) -> None:
    assert len(await seen(path, *pieces)) == 1


async def test_who_left_or_has_some_of_it_needs_no_ending() -> None:
    assert await seen(CHAT, CHUNK, is_whole=False) == []
    assert await seen(CHAT, DONE, DONE, is_whole=False) != []
    assert await seen(f"{RESPONSES}/resp_1", "", query_string=b"stream=true&starting_after=9") == []
    assert await seen(CHAT, "", headers=[(b"last-event-id", b"chatcmpl-a:1")]) == []
