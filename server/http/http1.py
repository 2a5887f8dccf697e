"""Hypercorn 0.18's HTTP/1.1, hardened.

    stock Hypercorn                                                         here
    1  a connection that the client closed stays for keep_alive_timeout     closed at once
    2  a second request that is sent before the first is answered stops     what comes ahead is kept, up to a limit,
       all reading: nothing notices that the client has gone                and the client's leaving is noticed
    3  `Upgrade: h2c` and `Upgrade: websocket` are taken                    ignored, as RFC 9110 allows
    4  a body that has a length and is chunked is read as chunked, and      refused, as RFC 9112 6.1 allows: a proxy in
       the connection goes on                                               front may take a part of it for a request
    5  `GET http://host/path` is asked for as that path                     as /path, which RFC 9112 3.2.2 demands
    6  a status has no reason phrase                                        it has: h2load takes others for failures
    7  what is no HTTP is refused without a body                            with the error object that all others have
    8  `GET / HTTP/3.0` is answered as HTTP/1.1                             refused with 505

Without 1, every `curl` would hold a file descriptor for 75 s, and a hundred of them a second would run out of
descriptors. Upgrades are ignored because a reverse proxy that passes them on would connect its clients to this server
past its own rules; HTTP/2 without TLS begins with its preface ("prior knowledge").

A client that shuts down its side of a connection is taken as gone: TCP does not tell it from one that is, and an answer
that nothing reads costs steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import h11
import hypercorn.protocol
from h11._writers import ChunkedWriter
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request
from hypercorn.protocol.h11 import STREAM_ID, H2ProtocolAssumedError, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import AppWrapper, TaskGroup

from novainfer import CallerError
from novainfer.server.http.connection import connection_of
from novainfer.server.http.errors import (
    HeadersTooLarge,
    MalformedRequest,
    NotImplementedHere,
    VersionNotSupported,
    error_body,
    error_headers,
)
from novainfer.server.http.exchange import WRITE_NOW_KEY

REASONS = {status.value: status.phrase.encode("ascii") for status in HTTPStatus}
H11_CHARS_MAX = 200  # of what h11 says, which may hold what was sent
AHEAD_BYTES_MAX = 1024 * 1024  # that come before the request in hand is answered; more ends the connection


class Http1(H11Protocol):
    """One HTTP/1.1 connection, or one that does not know yet that it is HTTP/2."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._is_taking = False  # events are being taken, or wait for the request in hand
        self._is_closed = False
        self._ahead_bytes = 0

    async def handle(self, event: Event) -> None:
        if isinstance(event, Closed):
            self._is_closed = True
            await self.can_read.set()
            await super().handle(event)
            connection_of(self.send).idle_task.end()
        elif isinstance(event, RawData) and not self._is_closed:
            if self._is_taking:
                self._ahead_bytes += len(event.data)
                if self._ahead_bytes > AHEAD_BYTES_MAX:
                    await self.send(Closed())
                    await self.handle(Closed())
                    return
            await super().handle(event)

    async def _handle_events(self) -> None:
        """Take what has come, up to a request that has to wait for the answer to the one before it."""
        if self._is_taking:
            return  # what has just come is taken in its turn
        self._is_taking, self._ahead_bytes = True, 0
        is_ahead = False
        try:
            while (event := await self._next_event()) is not None:
                if event is h11.PAUSED:
                    is_ahead = True
                    await self.can_read.clear()
                    self.task_group.spawn(self._go_on)
                    return
                await self._take(event)
        finally:
            self._is_taking = is_ahead

    async def _go_on(self) -> None:
        await self.can_read.wait()
        self._is_taking = False
        if not self._is_closed:
            await self._handle_events()

    async def _next_event(self) -> Any:
        """What the client sent next; None when there is nothing more to take."""
        if self.connection.they_are_waiting_for_100_continue:
            await self._send_h11_event(
                h11.InformationalResponse(status_code=100, headers=self.config.response_headers("h11"))
            )
        try:
            event = self.connection.next_event()
        except h11.RemoteProtocolError as error:
            if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                await self._refuse(self._refusal_of(error))
            await self.send(Closed())
            return None
        if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
            return None
        return event

    async def _take(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            await self.send(Updated(idle=False))
            if event.method == b"PRI" and event.target == b"*" and event.http_version == b"2.0":
                raise H2ProtocolAssumedError(b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0])
            if not self._is_closed and (refusal := _refusal_for(event)) is not None:
                await self._refuse(refusal, has_body=event.method != b"HEAD")
                await self.send(Closed())
                await self.handle(Closed())
            elif not self._is_closed:
                await self._begin(event)
        elif self.stream is None:
            return
        elif isinstance(event, h11.Data):
            await self.stream.handle(Body(stream_id=STREAM_ID, data=event.data))
        elif isinstance(event, h11.EndOfMessage):
            await self.stream.handle(EndBody(stream_id=STREAM_ID))

    def _refusal_of(self, error: h11.RemoteProtocolError) -> CallerError:
        """What to say of what h11 does not take."""
        if error.error_status_hint == HeadersTooLarge.status:
            limit = self.config.h11_max_incomplete_size
            return HeadersTooLarge(f"The request line and the headers must have at most {limit} bytes")
        if error.error_status_hint == NotImplementedHere.status:
            return NotImplementedHere("transfer-encoding must be chunked")
        what = ascii(str(error))[1:-1][:H11_CHARS_MAX]
        return MalformedRequest(f"The request cannot be read as HTTP/1.1: {what}")

    async def _refuse(self, error: CallerError, *, has_body: bool = True) -> None:
        """Answer with `error`; the connection is closed behind it."""
        body = error_body(error)
        headers = [*error_headers(error), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        headers += self.config.response_headers("h11")
        await self._send_h11_event(h11.Response(status_code=error.status, headers=headers))
        if has_body:
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    async def _send_h11_event(self, event: Any) -> None:
        if isinstance(event, h11.Response | h11.InformationalResponse):
            reason = REASONS.get(event.status_code, b"")
            event = type(event)(status_code=event.status_code, headers=event.headers, reason=reason)
        await super()._send_h11_event(event)

    async def _begin(self, request: h11.Request) -> None:
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            _WritingSpawner(self.task_group, self._write_now),  # type: ignore[arg-type]
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=_origin_form(request.target),
                state=self.connection_state,
            )
        )
        await self.context.mark_request()

    def _write_now(self, data: bytes) -> bool:
        """Take more of the body of an answer that has begun; False where the app has to `send` it, and to wait."""
        if self._is_closed:
            return True  # the client has gone; the app is told by http.disconnect
        http11 = self.connection
        if http11.our_state is not h11.SEND_BODY or not isinstance(http11._writer, ChunkedWriter):
            return False
        return connection_of(self.send).write_now(b"%x\r\n%b\r\n" % (len(data), data))


class _WritingSpawner:
    """The task group that an `HTTPStream` sees: tells its app of `write_now`."""

    def __init__(self, task_group: TaskGroup, write_now: Callable[[bytes], bool]) -> None:
        self._task_group = task_group
        self._write_now = write_now

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Any, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        scope["extensions"][WRITE_NOW_KEY] = self._write_now
        return await self._task_group.spawn_app(app, config, scope, send)


def _refusal_for(request: h11.Request) -> CallerError | None:
    """Why a request that h11 takes is refused all the same, if it is."""
    if not request.http_version.startswith(b"1."):
        version = request.http_version.decode("ascii")
        return VersionNotSupported(f"The version must be HTTP/1.1, or HTTP/2 from its preface on, not HTTP/{version}")
    names = {name for name, _ in request.headers}
    if b"content-length" in names and b"transfer-encoding" in names:
        return MalformedRequest("A request must have content-length or transfer-encoding, not both")
    return None


def _origin_form(target: bytes) -> bytes:
    """The path and query of a target that may name the host as well, as clients of a proxy write it."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    host, _, path = rest.partition(b"/")
    return b"/" + path if b"?" not in host else b"/?" + rest.partition(b"?")[2]


def install() -> None:
    """Put `Http1` where Hypercorn looks for its HTTP/1.1; raises `AssertionError` when another is there already."""
    known = hypercorn.protocol.H11Protocol in (H11Protocol, Http1)  # type: ignore[attr-defined]
    assert known, "Hypercorn's HTTP/1.1 was replaced by someone else"
    hypercorn.protocol.H11Protocol = Http1  # type: ignore[attr-defined, assignment]
