"""Hypercorn 0.18's HTTP/1.1, hardened.

    stock Hypercorn                                                         here
    1  a connection that the client closed stays for keep_alive_timeout     closed at once
    2  a second request that is sent before the first is answered stops     what comes ahead is kept, up to a limit,
       all reading: nothing notices that the client has gone                and the client's leaving is noticed
    3  `Upgrade: h2c` and `Upgrade: websocket` are taken                    ignored, as RFC 9110 allows

Without 1, every `curl` would hold a file descriptor for 75 s, and a hundred of them a second would run out of
descriptors. Upgrades are ignored because a reverse proxy that passes them on would connect its clients to this server
past its own rules; HTTP/2 without TLS begins with its preface ("prior knowledge").

A client that shuts down its side of a connection is taken as gone: TCP does not tell it from one that is, and an answer
that nothing reads costs steps.
"""

from __future__ import annotations

from typing import Any

import h11
import hypercorn.protocol
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request
from hypercorn.protocol.h11 import STREAM_ID, H2ProtocolAssumedError, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

from novainfer.server.http.connection import end_idle_timer

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
            end_idle_timer(self.send)
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
                await self._send_error_response(error.error_status_hint)
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
            if not self._is_closed:
                await self._begin(event)
        elif self.stream is None:
            return
        elif isinstance(event, h11.Data):
            await self.stream.handle(Body(stream_id=STREAM_ID, data=event.data))
        elif isinstance(event, h11.EndOfMessage):
            await self.stream.handle(EndBody(stream_id=STREAM_ID))

    async def _begin(self, request: h11.Request) -> None:
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
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
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        await self.context.mark_request()


def install() -> None:
    """Put `Http1` where Hypercorn looks for its HTTP/1.1; raises `AssertionError` when another is there already."""
    known = hypercorn.protocol.H11Protocol in (H11Protocol, Http1)  # type: ignore[attr-defined]
    assert known, "Hypercorn's HTTP/1.1 was replaced by someone else"
    hypercorn.protocol.H11Protocol = Http1  # type: ignore[attr-defined, assignment]
