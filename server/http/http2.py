"""Hypercorn 0.18's HTTP/2, hardened: what it gets wrong must not hang, leak or kill a sibling stream.

    stock Hypercorn (facts measured against 0.18.0)                         here
    1  a shut window never blocks `send`: everything is buffered            `send` waits above BUFFER_HIGH_BYTES
    2  a connection that dies while `send` waits leaks the app's task       every waiter is woken
    3  an answer before the body's end kills the whole connection           late DATA is dropped, the rest refused
    4  one unread body stalls all streams of the connection                 its own window shuts, the others go on
    5  an app that raises mid-stream leaves its stream open for ever        RST_STREAM(INTERNAL_ERROR)
    6  keep_alive_max_requests silences streams in flight                   never reached (see `serve.py`)
    7  a connection without a request, or whose last one was reset,         the idle timer runs whenever there is
       never times out                                                      no stream
    8  reading waits for writing, so an upload beside a download may stop    reading never waits
       both for ever
    9  a connection that the client closed stays for keep_alive_timeout     closed at once (http1.py does it, too)
    10 a path that is not ASCII, or CONNECT, ends the connection            answered with 400, 501
    11 a connection that ends while its first packets are taken leaves      nothing waits between a stream's entry and
       its requests to be computed for nothing                              its app's start; what is reset is not begun
    12 what a client may ask for that leads to nothing has no limit         `http2_allowance.py`; 1 KiB a turn
    13 all requests that come in one packet begin in one turn of the loop   one a turn
    14 a client that says GOAWAY and reads nothing more is answered on      its requests end at once

It also writes once per turn of the loop for all streams, instead of once per frame (33 -> 13 µs an event), and frames
events by itself (`http2_frames.py`). An event for which there is room everywhere is framed when it comes, and written
by a callback of the loop; the sender's task has what is left: ends, and what has to wait for its client.
The app sees nothing of all this: `Http2` takes the place of `hypercorn.protocol.H2Protocol` (`install`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import hypercorn.protocol
from h2.errors import ErrorCodes
from h2.settings import SettingCodes, Settings
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import events as stream_events
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import AppWrapper, TaskGroup, WorkerContext
from hypercorn.utils import filter_pseudo_headers

from novainfer import CallerError
from novainfer.server.http.connection import HttpConfig, connection_of
from novainfer.server.http.errors import MalformedRequest, NotImplementedHere, error_body, error_headers
from novainfer.server.http.http2_allowance import ClientAllowance
from novainfer.server.http.http2_frames import frame, room_of, send_data
from novainfer.server.http.http2_stream import AppSpawner, Inbox, Stream

BUFFER_HIGH_BYTES = 32 * 1024  # `send` waits above it: two frames, as Hypercorn means to
CONNECTION_HIGH_BYTES = 4 * 1024 * 1024  # with more in all of its streams, each waits above
SHARE_BYTES = 4 * 1024  # of its own
BUFFER_LOW_BYTES = 16 * 1024  # and goes on below it
WRITE_BYTES_MAX = 256 * 1024  # one write to the socket, so that a bulk download does not delay others' tokens
WINDOW_BYTES = (
    1024 * 1024
)  # what a client may send on a stream before the app has read: Go's. With 64 KiB, uploads through
# httpcore starve: each window update that it waits for costs it a turn in a line of all its streams.
READ_BYTES = 1024  # taken in one turn of the loop: some thirty requests or sixty PINGs, 1 to 3 ms
CONTROL_BYTES_MAX = 1024 * 1024  # answers to PINGs and such that wait for a client to read: 60,000 of them


class Http2(H2Protocol):
    """One HTTP/2 connection; see the module's table for what differs from its base."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        task_group: TaskGroup,
        connection_state: Any,
        ssl: bool,
        client: tuple[str, int] | None,
        server: tuple[str, int] | None,
        send: Callable[[Event], Awaitable[None]],
    ) -> None:
        super().__init__(app, config, context, task_group, connection_state, ssl, client, server, send)
        self.connection = make_connection(config)
        self._open: dict[int, Stream] = {}
        self._ready: dict[int, None] = {}  # streams with something to send and no reason not to, in turn
        self._wake_sender = asyncio.Event()
        self._is_flushing = False
        self._connection = connection_of(send)
        self._is_write_due = False  # of what was framed at once
        self._num_framed = 0  # that was not told to the allowance
        self._frame_bytes_max = config.h2_max_inbound_frame_size + 9
        self._unsent_bytes = 0  # of all streams
        self._received_bytes = 0  # of bodies, not yet given back to the connection's window
        self._allowance = ClientAllowance(config.h2_max_concurrent_streams, time.monotonic)

    @property
    def idle(self) -> bool:
        return not self._open

    async def initiate(self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None) -> None:
        assert headers is None and settings is None, "http1.py takes no upgrade"  # noqa: PT018
        self.connection.initiate_connection()
        assert isinstance(self.config, HttpConfig), "a listening socket has its own"
        if more := self.config.h2_connection_window_bytes - self.connection.inbound_flow_control_window:
            self.connection.increment_flow_control_window(more)
        await self._flush()
        self.task_group.spawn(self.send_task)
        await self.send(Updated(idle=True))

    # What the client sends

    async def handle(self, event: Event) -> None:
        if isinstance(event, RawData):
            data = memoryview(event.data)
            for begin in range(0, len(data), READ_BYTES):
                if begin:
                    await asyncio.sleep(0)
                if self.closed:
                    return
                await self._take(data[begin : begin + READ_BYTES])
        elif isinstance(event, Closed):
            await self._close()

    async def _take(self, data: memoryview) -> None:
        """Take a slice of what came, and end the connection if it breaks the protocol or asks for too much."""
        try:
            events = self.connection.receive_data(data)
        except h2.exceptions.ProtocolError:
            await self._end()
            return
        reset = {event.stream_id for event in events if isinstance(event, h2.events.StreamReset)}
        has_begun = False
        for event in events:
            if isinstance(event, h2.events.RequestReceived):
                if event.stream_id in reset:
                    continue  # its client has gone already
                if has_begun:
                    await asyncio.sleep(0)  # a request is a millisecond of work: other connections have their turns
                has_begun = True
            if isinstance(event, h2.events.StreamReset) and not self._allowance.reset():
                await self._end(ErrorCodes.ENHANCE_YOUR_CALM)
            if self.closed:
                return
            await self._handle_event(event)
        self._open_connection_window()
        is_fair = self._allowance.received(len(data), events)
        if (code := self._excess() if is_fair else ErrorCodes.ENHANCE_YOUR_CALM) is not None:
            await self._end(code)
            return
        # Only the sender writes. Were reading to wait for it, a client that reads nothing before it has sent
        # everything (httpcore, with an upload beside downloads) and this server would wait for each other.
        self._wake_sender.set()

    async def _end(self, code: ErrorCodes | None = None) -> None:
        """Close the connection with a GOAWAY (h2's own when `code` is None), and cancel all that it asked for."""
        if code is not None:
            self._say_goodbye(code)
        if not self._is_flushing:
            await self._flush()
        await self._leave()
        await self.send(Closed())

    def _excess(self) -> ErrorCodes | None:
        """Why this connection must end, when its client makes it hold more than it should."""
        if len(getattr(self.connection.incoming_buffer, "_data", b"")) > self._frame_bytes_max:
            return ErrorCodes.FRAME_SIZE_ERROR  # h2 itself looks when all of it has come: up to 16 MB of nothing
        if len(getattr(self.connection, "_data_to_send", b"")) > CONTROL_BYTES_MAX:
            return ErrorCodes.ENHANCE_YOUR_CALM  # a flood of PING or SETTINGS whose answers it does not read
        return None

    async def _handle_event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            assert event.stream_id is not None
            if self.context.terminated.is_set():
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    self.connection.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)  # safe to send elsewhere
            else:
                await self._request(event.stream_id, event.headers or [])
        elif isinstance(event, h2.events.DataReceived):
            assert event.stream_id is not None
            flow_bytes = event.flow_controlled_length or 0
            self._received_bytes += flow_bytes
            stream = self._open.get(event.stream_id)
            if stream is not None:  # else it was answered already, and its data is dropped
                stream.inbox.add_body(event.data or b"", flow_bytes)
        elif isinstance(event, h2.events.StreamEnded):
            assert event.stream_id is not None
            await self._end_of_request(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            assert event.stream_id is not None
            await self._forget(event.stream_id)
            await self._update_idle()
        elif isinstance(event, h2.events.WindowUpdated):
            self._window_opened(event.stream_id or None)
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            self._window_opened(None)
        elif isinstance(event, h2.events.ConnectionTerminated):
            await self._leave()  # now: the connection itself is closed when its client has taken what was written
            await self.send(Closed())

    async def _request(self, stream_id: int, headers: list[tuple[bytes, bytes]]) -> None:
        pseudo = {name: value for name, value in headers if name.startswith(b":")}
        method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
        if method.upper() == b"CONNECT":
            self._refuse(stream_id, NotImplementedHere("CONNECT is no method of this server, which is no proxy"))
            return
        if not path or not path.isascii() or not method.isascii():
            self._refuse(stream_id, MalformedRequest("The method and the path must be ASCII, and there must be a path"))
            return
        if not self._open:
            await self.send(Updated(idle=False))
            if self.closed:  # while the idle timer was stopped
                return
        inbox = Inbox(lambda flow_bytes: self._taken(stream_id, flow_bytes))
        stream = Stream(stream_id, self.connection.streams.get(stream_id), inbox)
        stream.http = HTTPStream(
            self.app,
            self.config,
            self.context,
            AppSpawner(self.task_group, stream.inbox, partial(self._write_now, stream)),  # type: ignore[arg-type]
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            stream_id,
        )
        # From here to the app's start nothing waits: an end of the connection in between would be told to nothing.
        self._open[stream_id] = stream
        await stream.http.handle(
            stream_events.Request(
                stream_id=stream_id,
                headers=filter_pseudo_headers(headers),
                http_version="2",
                method=method.decode("ascii").upper(),
                raw_path=path,
                state=self.connection_state,
            )
        )
        await self.context.mark_request()

    def _refuse(self, stream_id: int, error: CallerError) -> None:
        """Answer with `error`, without its body where the client has no window for that."""
        with contextlib.suppress(h2.exceptions.ProtocolError):
            body = error_body(error)
            if len(body) > room_of(self.connection, stream_id):
                body = b""
            headers = [(b":status", b"%d" % error.status), *error_headers(error)]
            headers += [(b"content-length", b"%d" % len(body)), *self.config.response_headers("h2")]
            self.connection.send_headers(stream_id, headers, end_stream=not body)
            if body:
                self.connection.send_data(stream_id, body, end_stream=True)

    async def _end_of_request(self, stream_id: int) -> None:
        stream = self._open.get(stream_id)
        if stream is not None and stream.http is not None:
            stream.request_ended = True
            await stream.http.handle(stream_events.EndBody(stream_id=stream_id))

    def _taken(self, stream_id: int, flow_bytes: int) -> None:
        """The app has read part of a body: let the client send as much again on this stream."""
        if stream_id not in self._open:
            return
        with contextlib.suppress(h2.exceptions.ProtocolError):  # the client has sent its last byte
            self.connection.increment_flow_control_window(flow_bytes, stream_id)
            self._wake_sender.set()

    def _open_connection_window(self) -> None:
        """Give back the connection's window at once; what a stream may hold is bounded by its own."""
        num_bytes, self._received_bytes = self._received_bytes, 0
        if num_bytes:
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self.connection.increment_flow_control_window(num_bytes)

    # What the app sends

    async def stream_send(self, event: stream_events.Event) -> None:
        stream = self._open.get(event.stream_id)
        if stream is None or self.closed:
            return  # the client has gone; the app is told by http.disconnect
        if isinstance(event, stream_events.Body):
            if stream.is_finished:
                return
            stream.buffer += event.data
            self._unsent_bytes += len(event.data)
            self._is_ready(event.stream_id)
            while self._is_full(stream) and not stream.is_finished:
                await stream.wait()
        elif isinstance(event, stream_events.EndBody):
            stream.is_ended = True
            self._is_ready(event.stream_id)
            while not stream.is_finished:
                await stream.wait()
        elif isinstance(event, stream_events.InformationalResponse | stream_events.Response):
            headers = [(b":status", b"%d" % event.status_code), *event.headers, *self.config.response_headers("h2")]
            try:
                self.connection.send_headers(event.stream_id, headers)
            except h2.exceptions.ProtocolError:
                return
            self._wake_sender.set()  # goes out with the first of the body
        elif isinstance(event, stream_events.StreamClosed):
            await self._app_is_done(event.stream_id, stream)

    def _write_now(self, stream: Stream, data: bytes) -> bool:
        """Take more of the body of an answer that has begun; False where the app has to `send` it, and to wait."""
        if stream.is_finished or self.closed:
            return True  # as `stream_send`
        unsent_bytes = len(stream.buffer) if self._unsent_bytes else 0
        if unsent_bytes + len(data) >= SHARE_BYTES:
            return False  # which may be full
        connection = self.connection
        is_clear = not (unsent_bytes or self._ready or self._is_flushing)
        if is_clear and len(connection._data_to_send) < WRITE_BYTES_MAX and frame(connection, stream.h2, data):
            self._num_framed += 1
            if not self._is_write_due:
                self._is_write_due = True
                self._connection.loop.call_soon(self._write_framed)
            return True
        stream.buffer += data
        self._unsent_bytes += len(data)
        self._is_ready(stream.id)
        return True

    def _write_framed(self) -> None:
        """Write what was framed at once, if the client takes what is written; else the sender waits for that."""
        self._is_write_due = False
        if self.closed:
            return
        if self._is_flushing or not self._connection.is_clear:
            self._wake_sender.set()
            return
        if data := self.connection.data_to_send():  # else the sender was first
            self._connection.writer.transport.write(data)
        self._allowance.sent(self._num_framed)
        self._num_framed = 0

    def _is_full(self, stream: Stream) -> bool:
        """True while a stream's app must wait for its client. A stream that waits is woken by its own progress."""
        length = len(stream.buffer)
        return length >= BUFFER_HIGH_BYTES or (length >= SHARE_BYTES and self._unsent_bytes > CONNECTION_HIGH_BYTES)

    async def _app_is_done(self, stream_id: int, stream: Stream) -> None:
        """The app returned: a stream it left open is reset, a request still being sent is refused."""
        try:
            if not stream.is_finished:
                self.connection.reset_stream(stream_id, ErrorCodes.INTERNAL_ERROR)
            elif not stream.request_ended:
                # RFC 9113, 8.1: stop sending. Clients that wait for a window (httpcore) do not notice a reset.
                self.connection.increment_flow_control_window(self.connection.max_inbound_frame_size, stream_id)
                self.connection.reset_stream(stream_id, ErrorCodes.NO_ERROR)
        except h2.exceptions.ProtocolError:
            pass
        self._wake_sender.set()
        await self._forget(stream_id)
        await self._update_idle()

    def _is_ready(self, stream_id: int) -> None:
        self._ready[stream_id] = None
        self._wake_sender.set()

    def _window_opened(self, stream_id: int | None) -> None:
        for name in self._open if stream_id is None else (stream_id,):
            stream = self._open.get(name)
            if stream is not None and (stream.buffer or stream.is_ended):
                self._ready[name] = None
        self._wake_sender.set()

    async def send_task(self) -> None:
        """Write what all streams have, once each time the loop has let them all add to it."""
        while not self.closed:
            await self._wake_sender.wait()
            self._wake_sender.clear()
            while not self.closed:
                num_bytes = self._fill()
                await self._flush()
                if num_bytes < WRITE_BYTES_MAX:
                    break

    def _fill(self) -> int:
        """Frame one write's worth of data, a frame from each stream in turn; returns its size in bytes."""
        num_bytes, num_frames, self._num_framed = 0, self._num_framed, 0
        connection, ready = self.connection, self._ready
        shut = list[int]()  # in their turn, which they keep until the connection's window opens
        while ready and num_bytes < WRITE_BYTES_MAX:
            stream_id = next(iter(ready))
            del ready[stream_id]
            stream = self._open.get(stream_id)
            if stream is None or stream.is_finished:
                continue
            try:
                length = len(stream.buffer)
                if length:
                    room = room_of(connection, stream_id)
                    if room <= 0:  # a window update brings it back
                        if connection.outbound_flow_control_window <= 0:
                            shut.append(stream_id)
                        continue
                    data = bytes(stream.buffer[:room])
                    is_last = stream.is_ended and len(data) == length
                    if is_last:
                        connection.send_data(stream_id, data, end_stream=True)
                    else:
                        send_data(connection, stream_id, data)
                    length = len(data)
                    del stream.buffer[:length]
                    self._unsent_bytes -= length
                    num_bytes += length
                    num_frames += 1
                elif stream.is_ended:
                    connection.end_stream(stream_id)
                    is_last = True
                else:
                    continue
            except h2.exceptions.ProtocolError:  # reset by the client, or the connection is closing
                stream.is_finished = True
                stream.wake()
                continue
            if is_last:
                stream.is_finished = True
                self._allowance.answered()
            elif stream.buffer:
                ready[stream_id] = None  # to the end of the line
            if is_last or len(stream.buffer) < BUFFER_LOW_BYTES:
                stream.wake()
        ready.update(dict.fromkeys(shut))
        self._allowance.sent(num_frames)
        return num_bytes

    async def _flush(self) -> None:
        data = self.connection.data_to_send()
        if data:
            self._is_flushing = True
            try:
                await self.send(RawData(data=data))
            finally:
                self._is_flushing = False

    # Endings

    async def _forget(self, stream_id: int) -> None:
        stream = self._open.pop(stream_id, None)
        if stream is None:
            return
        self._ready.pop(stream_id, None)
        self._unsent_bytes -= len(stream.buffer)
        stream.is_finished = True
        stream.wake()
        if stream.http is not None:
            await stream.http.handle(stream_events.StreamClosed(stream_id=stream_id))

    async def _update_idle(self) -> None:
        if self._open:
            return
        if self.context.terminated.is_set() and not self.closed:
            self._say_goodbye()
            await self._flush()
        await self.send(Updated(idle=True))

    def _say_goodbye(self, error_code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.connection.close_connection(error_code)

    async def _close(self) -> None:
        if self.closed:
            return
        if not self._open and not self._is_flushing:  # idle: tell a client that is still there
            self._say_goodbye()
            self.closed = True
            await self._flush()
        await self._leave()

    async def _leave(self) -> None:
        self.closed = True
        for stream_id in list(self._open):
            await self._forget(stream_id)
        self._wake_sender.set()
        self._connection.idle_task.end()


def make_connection(config: Config) -> h2.connection.H2Connection:
    """A server's end of HTTP/2, with the limits of `config`."""
    connection = h2.connection.H2Connection(config=h2.config.H2Configuration(client_side=False, header_encoding=None))
    connection.DEFAULT_MAX_INBOUND_FRAME_SIZE = config.h2_max_inbound_frame_size
    connection.local_settings = Settings(
        client=False,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: config.h2_max_concurrent_streams,
            SettingCodes.MAX_HEADER_LIST_SIZE: config.h2_max_header_list_size,
            SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
        },
    )
    return connection


def install() -> None:
    """Put `Http2` where Hypercorn looks for its HTTP/2; raises `AssertionError` when another is there already."""
    known = hypercorn.protocol.H2Protocol in (H2Protocol, Http2)  # type: ignore[attr-defined]
    assert known, "Hypercorn's HTTP/2 was replaced by someone else"
    hypercorn.protocol.H2Protocol = Http2  # type: ignore[attr-defined]
