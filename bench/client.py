"""Small streaming clients over HTTP/1.1 and HTTP/2 that cost the machine they measure as little as possible.

`connect` gives one of two connections with the same way of use: `post` yields pieces of the body as they come. An
HTTP/1.1 connection carries one request at a time; an HTTP/2 one as many as the server allows (prior knowledge on
http, ALPN on https). Certificates are not checked: who measures a server knows it.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol
from urllib.parse import urlsplit

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import msgspec

Version = Literal["h1", "h2"]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
READ_BYTES = 65_536
FRAME_HEAD = struct.Struct(">BHBBI")  # RFC 9113, 4.1: length in 24 bits, type, flags, stream
FRAME_HEAD_BYTES = 9
DATA, WINDOW_UPDATE = 0x0, 0x8  # types
END_STREAM, PADDED = 0x1, 0x8  # flags of DATA
WINDOW_UPDATE_BYTES = 4
CLOSE_TIMEOUT_S = 1.0
WINDOW_BYTES = 2**24  # of a stream and of the connection: a reader that keeps up must never be what is measured


class HTTPFailure(Exception):
    """The server answered with another status than 200, or broke off; the message says which."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server is."""

    host: str
    port: int
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Origin:
        """From http://host:port; raises ValueError when it is none."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// address")
        tls = parts.scheme == "https"
        return cls(host=parts.hostname, port=parts.port or (443 if tls else 80), tls=tls)

    @property
    def authority(self) -> str:
        """As the host header has it."""
        return f"{self.host}:{self.port}"


class Connection(Protocol):
    """One connection to a server."""

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[bytes]: ...
    async def close(self) -> None: ...


async def connect(origin: Origin, version: Version) -> Connection:
    """Open a connection; raises OSError when no server listens."""
    context = None
    if origin.tls:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["h2" if version == "h2" else "http/1.1"])
    open_streams = partial(asyncio.open_connection, origin.host, origin.port, ssl=context)
    if version == "h1":
        return HTTP1(origin, open_streams, await open_streams())
    return HTTP2(origin, *await open_streams())


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close and see it closed: over TLS both sides say so first, and a loop that ends meanwhile leaves an error."""
    writer.close()
    with suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), CLOSE_TIMEOUT_S)


class HTTP1:
    """One request at a time.

    A server may end a connection after any answer, and llama.cpp's does after each streamed one without saying so: a
    request that finds its connection ended, before a byte of its answer came, is sent once more over a new one.
    """

    def __init__(self, origin: Origin, open_streams: Callable[[], Awaitable[Streams]], streams: Streams) -> None:
        self._origin = origin
        self._open_streams = open_streams
        self._reader, self._writer = streams
        self._has_answered = False  # on this connection

    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The body's chunks; raises `HTTPFailure`."""
        lines = [f"POST {path} HTTP/1.1", f"host: {self._origin.authority}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        try:
            head = await self._send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            status = int(head.split(b" ", 2)[1])
            chunks = self._chunks(head.lower())
            if status != 200:
                raise HTTPFailure(_failure(status, b"".join([chunk async for chunk in chunks])))
            async for chunk in chunks:
                yield chunk
        except asyncio.IncompleteReadError:
            raise HTTPFailure("the server closed the connection in the middle of an answer") from None

    async def _send(self, request: bytes) -> bytes:
        """The head of the answer; raises IncompleteReadError or OSError where none comes."""
        if self._has_answered:
            try:
                return await self._send_once(request)
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
            except ConnectionError:  # it was closed with the request unread
                pass
            await _close(self._writer)
            self._reader, self._writer = await self._open_streams()
        return await self._send_once(request)

    async def _send_once(self, request: bytes) -> bytes:
        self._has_answered = False
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        self._has_answered = True
        return head

    async def _chunks(self, head: bytes) -> AsyncIterator[bytes]:
        if b"transfer-encoding: chunked" not in head:
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
            yield await self._reader.readexactly(length)
            return
        data = b""
        while True:
            chunks, data, is_last = _dechunked(data)
            for chunk in chunks:
                yield chunk
            if is_last:
                return
            if not (more := await self._reader.read(READ_BYTES)):
                raise asyncio.IncompleteReadError(data, None)
            data += more

    async def close(self) -> None:
        """Close the connection."""
        await _close(self._writer)


class HTTP2:
    """Many requests at a time; one task reads for all of them.

    Frames of DATA that end no stream are taken here, and all others by h2: it would need ten times as long for them,
    and the client would be what is measured. What they take of the window is given back in large parts.
    """

    def __init__(self, origin: Origin, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._origin = origin
        self._reader = reader
        self._writer = writer
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration())
        self._streams: dict[int, asyncio.Queue[bytes | int | None]] = {}  # status, body pieces, None at the end
        self._untold_bytes: Counter[int] = Counter()  # of DATA, for which the window was not opened again; 0: of all
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES})
        self._h2.increment_flow_control_window(WINDOW_BYTES)
        self._flush()
        self._task = asyncio.create_task(self._read())

    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The body's pieces; raises `HTTPFailure`."""
        stream_id = self._h2.get_next_available_stream_id()
        pieces = self._streams[stream_id] = asyncio.Queue()
        fixed = {":method": "POST", ":path": path, ":authority": self._origin.authority}
        scheme = "https" if self._origin.tls else "http"
        self._h2.send_headers(stream_id, list({**fixed, ":scheme": scheme, **headers}.items()))
        largest = self._h2.max_outbound_frame_size
        for begin in range(0, len(body), largest):
            self._h2.send_data(stream_id, body[begin : begin + largest])
        self._h2.end_stream(stream_id)
        self._flush()
        try:
            status = await pieces.get()
            if not isinstance(status, int):
                raise HTTPFailure("the server ended the stream without an answer")
            if status != 200:
                text = b""
                while isinstance(piece := await pieces.get(), bytes):
                    text += piece
                raise HTTPFailure(_failure(status, text))
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, int):
                    raise HTTPFailure(f"the server reset the stream with error {-piece}")
                yield piece
        finally:
            del self._streams[stream_id]
            del self._untold_bytes[stream_id]

    async def close(self) -> None:
        """Close the connection and end the reading task."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await _close(self._writer)

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())

    async def _read(self) -> None:
        try:
            rest = b""
            while data := await self._reader.read(READ_BYTES):
                rest = self._take_frames(rest + data)
                self._flush()
        except (OSError, h2.exceptions.ProtocolError):
            pass
        finally:
            for pieces in self._streams.values():
                pieces.put_nowait(None)

    def _take_frames(self, data: bytes) -> bytes:
        """Take the frames that `data` holds whole; returns the rest."""
        at, length = 0, len(data)
        while at + FRAME_HEAD_BYTES <= length:
            high, low, kind, flags, stream_id = FRAME_HEAD.unpack_from(data, at)
            begin, size = at + FRAME_HEAD_BYTES, high << 16 | low
            if begin + size > length:
                break
            if kind == DATA and not flags & (END_STREAM | PADDED):
                self._take_data(stream_id, data[begin : begin + size])
            else:
                for event in self._h2.receive_data(data[at : begin + size]):
                    self._take(event)
            at = begin + size
        return data[at:]

    def _take_data(self, stream_id: int, data: bytes) -> None:
        if (pieces := self._streams.get(stream_id)) is not None and data:
            pieces.put_nowait(data)
        for whose in (stream_id, 0):
            self._untold_bytes[whose] += len(data)
            if (untold := self._untold_bytes[whose]) >= WINDOW_BYTES // 2:
                self._writer.write(FRAME_HEAD.pack(0, WINDOW_UPDATE_BYTES, WINDOW_UPDATE, 0, whose))
                self._writer.write(untold.to_bytes(WINDOW_UPDATE_BYTES, "big"))
                del self._untold_bytes[whose]

    def _take(self, event: h2.events.Event) -> None:
        stream_id = getattr(event, "stream_id", None)
        pieces = self._streams.get(stream_id) if stream_id is not None else None
        if isinstance(event, h2.events.DataReceived):
            assert event.flow_controlled_length is not None
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id or 0)
            if pieces is not None and event.data:
                pieces.put_nowait(event.data)
        elif pieces is None:
            return
        elif isinstance(event, h2.events.ResponseReceived):
            assert event.headers is not None
            pieces.put_nowait(int(dict(event.headers)[b":status"]))
        elif isinstance(event, h2.events.StreamEnded):
            pieces.put_nowait(None)
        elif isinstance(event, h2.events.StreamReset):
            pieces.put_nowait(-int(event.error_code or 0))


def _dechunked(data: bytes) -> tuple[list[bytes], bytes, bool]:
    """The chunks that `data` holds whole; the rest; and whether the last chunk was among them."""
    chunks, at = list[bytes](), 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end], 16)
        following = end + 2 + size + 2
        if len(data) < following:
            break
        at = following
        if not size:
            return chunks, data[at:], True
        chunks.append(data[end + 2 : following - 2])
    return chunks, data[at:], False


def _failure(status: int, body: bytes) -> str:
    """One line: the status, and the beginning of what the server said."""
    return f"status {status}: {body[:200].decode('utf-8', 'replace')}"
