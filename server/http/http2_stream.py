"""What one HTTP/2 stream holds on its way: bytes to the client, and a body on its way to the app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from h2.stream import H2Stream
from hypercorn.config import Config
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import AppWrapper, TaskGroup

from novainfer.server.http.exchange import WRITE_NOW_KEY


class Stream:
    """One request: what waits to be sent, and what the client sent that the app has not read."""

    __slots__ = ("buffer", "h2", "http", "id", "inbox", "is_ended", "is_finished", "request_ended", "waiter")

    def __init__(self, stream_id: int, h2: H2Stream | None, inbox: Inbox) -> None:
        self.id = stream_id
        self.h2 = h2  # h2's own
        self.http: HTTPStream | None = None
        self.inbox = inbox
        self.buffer = bytearray()
        self.is_ended = False  # the app has sent its last byte
        self.is_finished = False  # END_STREAM or RST_STREAM is on its way: nothing more can be sent
        self.request_ended = False  # the client has sent its last byte
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self) -> None:
        """Until woken; only the app's sends wait here."""
        previous = self.waiter
        if previous is not None and not previous.done():
            await asyncio.wait([previous])
            return
        self.waiter = asyncio.get_running_loop().create_future()
        await self.waiter


class Inbox:
    """ASGI's `receive`: joins the body's frames, and opens the client's window only for what the app has taken.

    So a body that is not read costs at most WINDOW_BYTES, and holds up no other stream.
    """

    def __init__(self, on_taken: Callable[[int], None]) -> None:
        self._on_taken = on_taken
        self._body = bytearray()
        self._flow_bytes = 0
        self._is_complete = False
        self.is_disconnected = False
        self._completion_sent = False
        self._waiter: asyncio.Future[None] | None = None

    def add_body(self, data: bytes, flow_bytes: int) -> None:
        self._body += data
        self._flow_bytes += flow_bytes
        self._wake()

    def complete(self) -> None:
        """The body has come to its end."""
        self._is_complete = True
        self._wake()

    def disconnect(self) -> None:
        """The client has gone, or has its whole answer."""
        self.is_disconnected = True
        self._wake()

    async def put(self, event: Any) -> None:
        """What Hypercorn's stream tells its app; the body comes by `add_body`."""
        if event["type"] == "http.disconnect":
            self.disconnect()
        elif not event.get("more_body", False):
            self.complete()

    async def get(self) -> Any:
        while True:
            if self.is_disconnected:
                return {"type": "http.disconnect"}  # also where a body has come: nothing waits for its answer
            if self._body or (self._is_complete and not self._completion_sent):
                body, flow_bytes = bytes(self._body), self._flow_bytes
                self._body.clear()
                self._flow_bytes = 0
                self._completion_sent = self._is_complete
                if flow_bytes:
                    self._on_taken(flow_bytes)
                return {"type": "http.request", "body": body, "more_body": not self._is_complete}
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AppSpawner:
    """The task group that an `HTTPStream` sees: starts its app on our inbox instead of a queue of ten messages."""

    def __init__(self, task_group: TaskGroup, inbox: Inbox, write_now: Callable[[bytes], bool]) -> None:
        self._task_group = task_group
        self._inbox = inbox
        self._write_now = write_now

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Any, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        scope["extensions"][WRITE_NOW_KEY] = self._write_now

        async def run() -> None:
            if self._inbox.is_disconnected:
                return  # it was reset before its turn came
            try:
                await app(scope, self._inbox.get, send, _no_threads, _no_threads)
            except Exception:
                await config.log.exception("the application raised")
            finally:
                await send(None)

        self._task_group.spawn(run)
        return self._inbox.put


def _no_threads(*args: Any) -> Any:
    raise RuntimeError("only ASGI apps are served")
