"""The app of an API process: it hands each request to the engine's process, and gives its answer to the client.

It knows no path, no key and no model: what is decided of a request is decided in one place. When the engine's process
is gone, a request that has no answer gets a 503, and a stream of events that tell an answer ends with one more, of the
error; any other ends without its end.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from novainfer import EngineClosed
from novainfer.server.http.errors import error_headers, error_status
from novainfer.server.http.exchange import ADMITTED_KEY, Admitted, header, lifespan
from novainfer.server.http.shapes import body_of_error, event_of_error
from novainfer.server.processes.link import Link
from novainfer.server.processes.wire import (
    BODY_BYTES,
    PIECE_BYTES,
    TAKEN_BYTES,
    TURN_BYTES,
    Answers,
    Asks,
    Headers,
    LinkError,
    Opened,
)

EVENT_STREAM = b"text/event-stream"
EVENT_END = b"\n\n"
_NUMBERED = re.compile(rb'\ndata: \{"type":"[a-z_.]{1,80}","sequence_number":([0-9]{1,15}),')
_NUMBERED_BYTES_MAX = 160
_BEHIND = re.compile(rb"(?:^|&)starting_after=([0-9]{1,15})(?:&|$)")  # the event that the client has, of a response


class Forward:
    """ASGI app; `over` gives it its link, `take` what came over it, and `lose` ends what it still has."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._answers: dict[int, Answer] = {}
        self._last_id = 0
        self.asks = Asks()
        self._turn_bytes = 0

    @property
    def num_open(self) -> int:
        """Requests that have no whole answer."""
        return len(self._answers)

    def over(self, link: Link) -> None:
        """Forward requests over `link`."""
        self._link = link
        link.batches(self._take_batch)

    def take(self, batch: Answers) -> None:
        """Give each request what is there for it; raises `LinkError` for one that never was."""
        for request_id in batch.admitted:
            if (answer := self._known(request_id)) is not None:
                answer.admit()
        for request_id, status, headers in batch.starts:
            if (answer := self._known(request_id)) is not None:
                answer.begin(status, headers)
        for request_id, data in batch.bodies:
            if (answer := self._known(request_id)) is not None:
                answer.add(data)
        for request_id in batch.ends:
            if (answer := self._known(request_id)) is not None:
                answer.end()
        for request_id in batch.aborts:
            if (answer := self._known(request_id)) is not None:
                answer.abort()
        for request_id, num_bytes in batch.taken:
            if (answer := self._known(request_id)) is not None:
                answer.body_taken(num_bytes)

    def lose(self) -> None:
        """The engine's process is gone: whatever waits for it is answered."""
        for answer in list(self._answers.values()):
            answer.lose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        link = self._link
        assert link is not None, "connections are taken when the link is there"
        await link.until_free()
        answer = self._open(scope)
        if link.lost.done():
            answer.lose()
        reading = asyncio.get_running_loop().create_task(self._read(answer, link, receive))
        try:
            await answer.give(send)
        finally:
            reading.cancel()
            self._forget(answer)

    def _open(self, scope: Scope) -> Answer:
        self._last_id += 1
        answer = self._answers[self._last_id] = Answer(self, self._last_id, scope)
        opened = Opened(
            self._last_id,
            scope["http_version"],
            scope["method"],
            scope["scheme"],
            scope["path"],
            scope["raw_path"],
            scope["query_string"],
            [(bytes(name), bytes(value)) for name, value in scope["headers"]],
            scope.get("client"),
            scope.get("server"),
        )
        self.asks.opened.append(opened)
        self._turn_bytes += _size_of(opened)
        self.has_more()
        return answer

    async def _read(self, answer: Answer, link: Link, receive: Receive) -> None:
        """Forward the body while the app reads it, and see the client leave."""
        is_complete = False
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                answer.leave()
                return
            body = message.get("body", b"")
            for begin in range(0, len(body), PIECE_BYTES):
                piece = body[begin : begin + PIECE_BYTES]
                await answer.until_room(len(piece))
                await link.until_free()
                self.asks.bodies.append((answer.id, piece))
                self._turn_bytes += len(piece)
                self.has_more()
            if not is_complete and not message.get("more_body", False):
                is_complete = True
                self.asks.body_ends.append(answer.id)
                self.has_more()

    def _forget(self, answer: Answer) -> None:
        """Nothing more comes of it: the other end hears whether its client has all of it."""
        del self._answers[answer.id]
        if answer.is_whole:
            self.asks.done.append(answer.id)
        elif not answer.is_aborted:
            self.asks.gone.append(answer.id)
        self.has_more()
        answer.close()

    def has_more(self) -> None:
        """Something was added to `asks`."""
        assert self._link is not None, "a request came over it"
        if self._turn_bytes >= TURN_BYTES:
            self._link.flush()
        else:
            self._link.has_more()

    def _known(self, request_id: int) -> Answer | None:
        """The answer of this id; None when it has ended."""
        if not 0 < request_id <= self._last_id:
            raise LinkError(f"something about the request {request_id}, which never began")
        return self._answers.get(request_id)

    def _take_batch(self) -> Asks | None:
        batch, self.asks, self._turn_bytes = self.asks, Asks(), 0
        return batch


def _size_of(opened: Opened) -> int:
    """Bytes of a head; a client chooses how many, and heads of many requests may come in one turn."""
    fields = sum(len(name) + len(value) for name, value in opened.headers)
    return len(opened.path) + len(opened.raw_path) + len(opened.query_string) + fields


class Answer:
    """One answer on its way to the client: what has come of it, and was not taken."""

    def __init__(self, forward: Forward, request_id: int, scope: Scope) -> None:
        self._forward = forward
        self.id = request_id
        self._path: str = scope["path"]
        self._x_request_id = (header(scope, b"x-request-id") or b"").decode("latin-1")
        self._admitted: Admitted | None = scope.get("state", {}).get(ADMITTED_KEY)
        self._is_admitted = False
        self._start: Message | None = None
        self._has_begun = self._is_stream = False
        self._pieces: list[bytes] = []
        behind = _BEHIND.search(scope.get("query_string", b""))
        self._sent = Sent(0 if behind is None else int(behind[1]) + 1)
        self._has_end = False  # its last byte has come
        self._is_lost = False  # the engine's process is gone
        self._has_left = False  # its client has
        self._taken_bytes = 0  # and not told
        self._body_bytes = 0  # of the request's body that are on their way
        self._task: asyncio.Task[Any] | None = None
        self._is_sending = self._is_interrupted = False
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self.is_aborted = False  # nothing more comes of it
        self.is_whole = False  # the client has all of it

    # What comes of it

    def admit(self) -> None:
        """The request was let in."""
        if self._admitted is not None and not self._is_admitted:
            self._is_admitted = True
            self._admitted.enter()

    def begin(self, status: int, headers: Headers) -> None:
        """Its head has come."""
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        content_type = next((value for name, value in headers if name.lower() == b"content-type"), b"")
        self._is_stream = content_type.startswith(EVENT_STREAM)
        self._wake()

    def add(self, data: bytes) -> None:
        """A piece of its body has come."""
        self._pieces.append(data)
        self._wake()

    def end(self) -> None:
        """All of it has come."""
        self._has_end = True
        self._wake()

    def abort(self) -> None:
        """Nothing more comes, though it is not whole."""
        self.is_aborted = True
        if self._is_sending and self._task is not None:  # its client takes nothing, and has had its time
            self._is_interrupted = True
            self._task.cancel()
        self._wake()

    def lose(self) -> None:
        """Nothing more comes, as the process that would give it is gone."""
        self._is_lost = True
        self._wake()

    def leave(self) -> None:
        """The client has gone."""
        self._has_left = True
        self._wake()

    def body_taken(self, num_bytes: int) -> None:
        """The app has read so many bytes of the request's body."""
        self._body_bytes -= num_bytes
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # What is done with it

    async def give(self, send: Send) -> None:
        """Send it as it comes, until it is whole, its client has gone, or nothing more comes."""
        self._task = asyncio.current_task()
        try:
            while not self._has_left and not self.is_whole:
                if self._start is not None:
                    start, self._start = self._start, None
                    self._has_begun = True
                    await self._send(send, start)
                elif self._pieces or self._has_end:
                    await self._send_pieces(send)
                elif self.is_aborted:
                    return
                elif self._is_lost:
                    await self._send_loss(send)
                    return
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        except asyncio.CancelledError:
            if not self._is_interrupted or self._task is None:
                raise
            self._task.uncancel()

    async def until_room(self, num_bytes: int) -> None:
        """Wait until so many bytes of the request's body may be on their way."""
        while self._body_bytes + num_bytes > BODY_BYTES:
            self._room = asyncio.get_running_loop().create_future()
            await self._room
        self._body_bytes += num_bytes

    def close(self) -> None:
        """It is over, in whatever way."""
        if self._is_admitted and self._admitted is not None:
            self._admitted.leave()

    async def _send_pieces(self, send: Send) -> None:
        body, is_last = b"".join(self._pieces), self._has_end
        self._pieces.clear()
        if self._is_stream:
            self._sent.add(body)
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": not is_last})
        if is_last:
            self.is_whole = True
            return
        self._taken_bytes += len(body)
        if self._taken_bytes >= TAKEN_BYTES:
            self._forward.asks.taken.append((self.id, self._taken_bytes))
            self._forward.has_more()
            self._taken_bytes = 0

    async def _send_loss(self, send: Send) -> None:
        error = EngineClosed("The engine's process is gone: try again in a moment")
        if not self._has_begun:
            body = body_of_error(error, self._path, self._x_request_id)
            headers = [*error_headers(error), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": error_status(error), "headers": headers})
            await send({"type": "http.response.body", "body": body})
        elif self._is_stream and self._sent.is_whole:
            event = event_of_error(error, self._path, self._x_request_id, self._sent.num_numbered)
            if event is not None:
                await send({"type": "http.response.body", "body": event})

    async def _send(self, send: Send, message: Message) -> None:
        self._is_sending = True
        await send(message)
        self._is_sending = False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Sent:
    """What the events that a client was sent say of the next one."""

    def __init__(self, num_before: int = 0) -> None:
        self.num_numbered = num_before  # events of a response, whose numbers begin with 0
        self._tail = b"\n"  # of all that was sent; a number may be cut in two

    def add(self, data: bytes) -> None:
        """These bytes go out."""
        data = self._tail + data
        for found in _NUMBERED.finditer(data):
            self.num_numbered = int(found[1]) + 1
        self._tail = data[-_NUMBERED_BYTES_MAX:]

    @property
    def is_whole(self) -> bool:
        """Whether the last event has its end: another one behind a part would be taken for the rest of it."""
        return self._tail.endswith(EVENT_END) or self._tail == b"\n"
