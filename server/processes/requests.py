"""The engine's end of a link: the requests of one API process, each a task that runs the app.

What a client sees is what it would see of one process: the app's `send` waits when its answer is not taken, a client
that leaves is told by `http.disconnect`, and a process that is lost is all of its clients leaving at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from starlette.types import ASGIApp, Message

from novainfer.server.http.exchange import ADMITTED_KEY, Admitted
from novainfer.server.http.http2_stream import Inbox
from novainfer.server.processes.link import Link
from novainfer.server.processes.wire import (
    ANSWER_BYTES,
    ANSWERS_BYTES,
    BODY_BYTES,
    PIECE_BYTES,
    SHARE_BYTES,
    TURN_BYTES,
    Answers,
    Asks,
    LinkError,
    Opened,
)

log = logging.getLogger("novainfer.server")


class Beginnings:
    """Begins one request a turn of the loop, whichever process it comes from: each is a millisecond of work."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._is_due = False

    def add(self, request: Request) -> None:
        """Begin it in its turn."""
        self._waiting.append(request)
        self._ask()

    def _ask(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_due = False
        while self._waiting:
            if self._waiting.popleft().begin():
                break
        if self._waiting:
            self._ask()


class Requests:
    """Those of one API process; `take` is what its link calls, `leave` what ends them all."""

    def __init__(self, app: ASGIApp, beginnings: Beginnings) -> None:
        self.app = app
        self._beginnings = beginnings
        self._open: dict[int, Request] = {}
        self._last_id = 0
        self._link: Link | None = None
        self.answers = Answers()
        self.turn_bytes = 0  # of bodies in it
        self.untaken_bytes = 0  # of all answers

    @property
    def num_open(self) -> int:
        """Requests whose app has not returned."""
        return len(self._open)

    def over(self, link: Link) -> None:
        """Answer over `link`."""
        self._link = link
        link.batches(self._take_batch)

    def take(self, asks: Asks) -> None:
        """Take what one turn of the process had to say; raises `LinkError` for what cannot be."""
        for opened in asks.opened:
            self._begin(opened)
        for request_id, data in asks.bodies:
            if (request := self._known(request_id)) is not None:
                request.add_body(data)
        for request_id in asks.body_ends:
            if (request := self._known(request_id)) is not None:
                request.inbox.complete()
        for request_id, num_bytes in asks.taken:
            if (request := self._known(request_id)) is not None:
                request.take(num_bytes)
        for request_id in asks.done:
            if (request := self._known(request_id)) is not None:
                request.finish()
        for request_id in asks.gone:
            if (request := self._known(request_id)) is not None:
                request.leave()

    def leave(self) -> None:
        """All clients have gone."""
        for request in list(self._open.values()):
            request.leave()

    def forget(self, request: Request) -> None:
        """Its app has returned, or will never begin."""
        if self._open.pop(request.id, None) is not None:
            self.untaken_bytes -= request.untaken_bytes

    def has_more(self) -> None:
        """Something was added to `answers`."""
        if self._link is None:
            return
        if self.turn_bytes >= TURN_BYTES:
            self._link.flush()
        else:
            self._link.has_more()

    def _begin(self, opened: Opened) -> None:
        if opened.request_id <= self._last_id:
            raise LinkError(f"a request {opened.request_id} behind {self._last_id}")
        self._last_id = opened.request_id
        request = self._open[opened.request_id] = Request(self, opened)
        self._beginnings.add(request)

    def _known(self, request_id: int) -> Request | None:
        """The request of this id; None when it has ended."""
        if not 0 < request_id <= self._last_id:
            raise LinkError(f"something about the request {request_id}, which never began")
        return self._open.get(request_id)

    def _take_batch(self) -> Answers | None:
        batch, self.answers, self.turn_bytes = self.answers, Answers(), 0
        return batch


class Request:
    """One request: what ASGI calls `receive` and `send`, and the task that runs the app with them."""

    def __init__(self, requests: Requests, opened: Opened) -> None:
        self._requests = requests
        self._opened = opened
        self.id = opened.request_id
        self.inbox = Inbox(self._body_taken)
        self.untaken_bytes = 0  # of the answer: sent, and not taken by the client
        self._body_bytes = 0  # that wait for the app
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False  # the last byte was sent
        self._task: asyncio.Task[None] | None = None  # a loop keeps no task alive by itself

    def begin(self) -> bool:
        """Start the app; False where its client has gone already."""
        if self.inbox.is_disconnected:
            self._requests.forget(self)
            return False
        self._task = asyncio.get_running_loop().create_task(self._run())
        return True

    def add_body(self, data: bytes) -> None:
        """A piece of the request's body has come; raises `LinkError` when it had no room."""
        self._body_bytes += len(data)
        if self._body_bytes > BODY_BYTES:
            raise LinkError(f"{self._body_bytes} bytes of a body, of which {BODY_BYTES} may be on their way")
        self.inbox.add_body(data, len(data))

    def take(self, num_bytes: int) -> None:
        """The client has taken so many bytes of the answer; raises `LinkError` when there were fewer."""
        if not 0 <= num_bytes <= self.untaken_bytes:
            raise LinkError(f"that {num_bytes} bytes were taken, of {self.untaken_bytes}")
        self.untaken_bytes -= num_bytes
        self._requests.untaken_bytes -= num_bytes
        self._wake()

    def finish(self) -> None:
        """The client has the whole answer; raises `LinkError` when it cannot."""
        if not self._has_ended:
            raise LinkError("that an answer was taken to an end that it does not have")
        self.inbox.disconnect()
        self._wake()

    def leave(self) -> None:
        """The client has gone."""
        self.inbox.disconnect()
        self._wake()

    async def send(self, message: Message) -> None:
        """ASGI's `send`: waits while the client takes nothing, and at the end until it has everything."""
        if self.inbox.is_disconnected:
            return  # the app is told by http.disconnect
        requests = self._requests
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            requests.answers.starts.append((self.id, message["status"], headers))
            requests.has_more()
        elif message["type"] == "http.response.body":
            if body := message.get("body", b""):
                await self._send_body(body)
            if not message.get("more_body", False):
                await self._end()

    async def _send_body(self, body: bytes) -> None:
        """Put all of it on its way, and wait while that is too much: the pieces of two sends must not mix."""
        requests = self._requests
        self.untaken_bytes += len(body)
        requests.untaken_bytes += len(body)
        for begin in range(0, len(body), PIECE_BYTES):
            piece = body[begin : begin + PIECE_BYTES]
            requests.turn_bytes += len(piece)
            requests.answers.bodies.append((self.id, piece))
            requests.has_more()
        while self._is_full and not self.inbox.is_disconnected:
            await self._wait()

    async def _end(self) -> None:
        self._has_ended = True
        self._requests.answers.ends.append(self.id)
        self._requests.has_more()
        while not self.inbox.is_disconnected:
            await self._wait()

    @property
    def _is_full(self) -> bool:
        """Whether the app must wait for its client."""
        has_much = self._requests.untaken_bytes > ANSWERS_BYTES
        return self.untaken_bytes >= (SHARE_BYTES if has_much else ANSWER_BYTES)

    def _body_taken(self, num_bytes: int) -> None:
        self._body_bytes -= num_bytes
        self._requests.answers.taken.append((self.id, num_bytes))
        self._requests.has_more()

    async def _run(self) -> None:
        opened = self._opened
        scope = {
            "type": "http",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "http_version": opened.http_version,
            "method": opened.method,
            "scheme": opened.scheme,
            "path": opened.path,
            "raw_path": opened.raw_path,
            "query_string": opened.query_string,
            "root_path": "",
            "headers": opened.headers,
            "client": opened.client,
            "server": opened.server,
            "state": {ADMITTED_KEY: _AdmittedThere(self)},
            "extensions": {},
        }
        try:
            await self._requests.app(scope, self.inbox.get, self.send)
        except Exception:
            log.exception("the application raised")
        finally:
            if not self.inbox.is_disconnected:
                self._requests.answers.aborts.append(self.id)
                self._requests.has_more()
            self.inbox.disconnect()
            self._requests.forget(self)

    def admit(self) -> None:
        """It was let in: its connection is not closed to make room for another."""
        self._requests.answers.admitted.append(self.id)
        self._requests.has_more()

    async def _wait(self) -> None:
        """Until woken; an event and a sign of life may both wait."""
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._waiter])

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _AdmittedThere(Admitted):
    """The count of a connection that another process has: it is told, and knows the end of the request by itself."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def enter(self) -> None:
        self._request.admit()

    def leave(self) -> None:
        """Its process sees the answer's end."""
