"""Attacks on HTTP/2: floods, resets, connections that vanish, headers that are forbidden; in frames written by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

import hpack
from h2.errors import ErrorCodes

from tests.reliability.attack import ATTACKER_KEY, TIMEOUT_S, Attack, open_connection, shut_down

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, _, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 0x1, 0x4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CANCEL = struct.pack(">I", ErrorCodes.CANCEL)
AUTHORIZATION = ("authorization", f"Bearer {ATTACKER_KEY}")
POST = [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "x"), AUTHORIZATION]
LONG = json.dumps({"prompt": "Once", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}).encode()
SHORT = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
SHUT = struct.pack(">HI", 0x4, 0)  # SETTINGS_INITIAL_WINDOW_SIZE
WINDOW_BYTES = 64 * 1024  # what the server may send on a connection whose window is never opened


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


class Raw:
    """A connection whose every frame is written by hand; what comes back is read as far as it is asked for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._data = b""
        self.next_stream = 1

    @classmethod
    async def open(cls, port: int, settings: bytes = b"") -> Raw:
        raw = cls(*await open_connection(port, "h2"))
        raw.writer.write(PREFACE + frame(SETTINGS, 0, 0, settings))
        return raw

    def request(self, headers: Iterable[tuple[str, str]], body: bytes | None = None) -> tuple[int, bytes]:
        """A stream's id, and the frames of its request; without a body it is not ended."""
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        block = self.encoder.encode(list(headers))
        data = frame(HEADERS, END_HEADERS, stream, block)
        return stream, data if body is None else data + frame(DATA, END_STREAM, stream, body)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def some(self, wait_s: float) -> list[tuple[int, int, int, bytes]]:
        """The frames that come next: type, flags, stream and payload; none when the server closes, or says nothing."""
        found: list[tuple[int, int, int, bytes]] = []
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(wait_s):
                while not found and (piece := await self.reader.read(65536)):
                    self._data += piece
                    while len(self._data) >= 9 and len(self._data) >= 9 + int.from_bytes(self._data[:3], "big"):
                        length = int.from_bytes(self._data[:3], "big")
                        kind, flags, stream = struct.unpack(">BBI", self._data[3:9])
                        found.append((kind, flags, stream, self._data[9 : 9 + length]))
                        self._data = self._data[9 + length :]
        return found

    def status(self, block: bytes) -> str:
        """The status that a block of headers tells; each must be decoded once, in order."""
        return str(dict(self._decoder.decode(block))[":status"])

    async def end(self) -> str:
        """Read to the connection's end; how it ended."""
        while frames := await self.some(TIMEOUT_S):
            for kind, _, _, payload in frames:
                if kind == GOAWAY:
                    return f"GOAWAY {ErrorCodes(struct.unpack('>I', payload[4:8])[0]).name}"
        return "cut off"

    def reset(self) -> None:
        """End the connection with a RST, at once."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.close()

    def close(self) -> None:
        self.writer.transport.abort()


def flood(piece: bytes, *, first: Callable[[Raw], bytes] = lambda raw: b"") -> Callable[[int, int], Awaitable[str]]:
    """Send `piece` so often, and read what comes back, until the server ends it."""

    async def run(port: int, number: int) -> str:
        raw = await Raw.open(port)
        end = asyncio.create_task(raw.end())
        with contextlib.suppress(OSError):
            await raw.write(first(raw))
            for _ in range(0, number, 500):
                await raw.write(piece * 500)
            shut_down(raw.writer)
        found = await end
        raw.close()
        return found

    return run


def _open_stream(raw: Raw) -> bytes:
    return raw.request(POST)[1]


def _open_headers(raw: Raw) -> bytes:
    return frame(HEADERS, 0, 1, raw.encoder.encode(POST))


async def rapid_resets(port: int, number: int) -> str:
    raw = await Raw.open(port)
    end = asyncio.create_task(raw.end())
    with contextlib.suppress(OSError):
        for _ in range(0, number, 100):
            pieces = []
            for _ in range(100):
                stream, data = raw.request(POST, LONG)
                pieces.append(data + frame(RST_STREAM, 0, stream, CANCEL))
            await raw.write(b"".join(pieces))
        shut_down(raw.writer)
    found = await end
    raw.close()
    return found


async def made_to_reset(port: int, number: int) -> str:
    """The server resets them, because their windows overflow."""
    raw = await Raw.open(port)
    end = asyncio.create_task(raw.end())
    with contextlib.suppress(OSError):
        for _ in range(0, number, 100):
            pieces = []
            for _ in range(100):
                stream, data = raw.request(POST, LONG)
                pieces.append(data + frame(WINDOW_UPDATE, 0, stream, b"\x7f\xff\xff\xff"))
            await raw.write(b"".join(pieces))
        shut_down(raw.writer)
    found = await end
    raw.close()
    return found


async def resets_while_computed(port: int, number: int) -> str:
    """Hundreds of streams at once, reset once tokens come."""
    raw = await Raw.open(port)
    asked = [raw.request(POST, LONG) for _ in range(number)]
    await raw.write(b"".join(data for _, data in asked))
    seen = 0
    while seen < WINDOW_BYTES // 2:
        seen += len(await raw.reader.read(65536))
    await raw.write(b"".join(frame(RST_STREAM, 0, stream, CANCEL) for stream, _ in asked))
    shut_down(raw.writer)
    found = await raw.end()
    raw.close()
    return found


async def vanishing_connections(port: int, number: int) -> str:
    """Ten requests each, and a RST: at once, or when the first bytes of an answer have come."""
    for at in range(number):
        raw = await Raw.open(port)
        raw.writer.write(b"".join(raw.request(POST, LONG)[1] for _ in range(10)))
        if at % 2:
            await raw.reader.read(65536)
        raw.reset()
    return f"{10 * number} requests"


async def unread(port: int, number: int) -> str:
    """Answers that nothing reads: so many streams on four connections whose windows are never opened."""
    raws = [await Raw.open(port, SHUT) for _ in range(4)]
    for raw in raws:
        raw.writer.write(b"".join(raw.request(POST, LONG)[1] for _ in range(number // len(raws))))
    statuses: Counter[str] = Counter()
    while await asyncio.gather(*(_count(raw, statuses) for raw in raws)) != [False] * len(raws):
        pass
    for raw in raws:
        raw.close()
    return words(statuses)


async def _count(raw: Raw, statuses: Counter[str]) -> bool:
    """Count the answers that begin, until nothing has come for a second; False when nothing came at all."""
    found = False
    while True:
        frames = await raw.some(1.0)
        if not frames:
            return found
        found = True
        for kind, _, _, payload in frames:
            if kind == HEADERS:
                statuses[raw.status(payload)] += 1


def words(counts: Counter[str]) -> str:
    return ", ".join(f"{what}: {count}" for what, count in sorted(counts.items()))


FORBIDDEN: dict[str, list[tuple[str, str]]] = {
    "upper case": [*POST, ("X-Upper", "1")],
    "connection": [*POST, ("connection", "keep-alive")],
    "transfer-encoding": [*POST, ("transfer-encoding", "chunked")],
    "upgrade": [*POST, ("upgrade", "h2c")],
    "te: gzip": [*POST, ("te", "gzip")],
    "CR LF in a value": [*POST, ("x-evil", "a\r\nhost: b")],
    "NUL in a value": [*POST, ("x-evil", "a\0b")],
    "CR LF in the path": [POST[0], (":path", "/health HTTP/1.1\r\nhost: b"), *POST[2:]],
    "space in the path": [POST[0], (":path", "/health HTTP/1.1"), *POST[2:]],
    "no path": [POST[0], *POST[2:]],
    "empty path": [POST[0], (":path", ""), *POST[2:]],
    "no method": POST[1:],
    "two methods": [POST[0], *POST],
    "two paths": [POST[1], *POST],
    "unknown pseudo-header": [(":evil", "1"), *POST],
    "pseudo-header behind": [*POST[:3], AUTHORIZATION, POST[3]],
    "response's pseudo-header": [(":status", "200"), *POST],
    "two lengths": [*POST, ("content-length", "5"), ("content-length", "6")],
    "wrong length": [*POST, ("content-length", str(len(SHORT) + 7))],
    "length that is none": [*POST, ("content-length", "-1")],
    "host and authority": [*POST, ("host", "other")],
    "space in a name": [*POST, ("x evil", "1")],
    "empty name": [*POST, ("", "1")],
}


async def forbidden(port: int, number: int) -> str:
    """Each on a connection of its own; the last one is in order, and is the only one that is answered with 200."""
    seen: Counter[str] = Counter()
    for _ in range(number):
        for name, headers in {**FORBIDDEN, "in order": POST}.items():
            raw = await Raw.open(port)
            raw.writer.write(raw.request(headers, SHORT)[1])
            end = ""
            while not end:
                frames = await raw.some(TIMEOUT_S)
                if not frames:
                    end = "cut off"
                for kind, _, stream, payload in frames:
                    if kind == HEADERS and stream == 1:
                        end = raw.status(payload)
                    elif kind in (GOAWAY, RST_STREAM):
                        end = end or {GOAWAY: "GOAWAY", RST_STREAM: "RST_STREAM"}[kind]
            raw.close()
            assert (end == "200") == (name == "in order"), f"{name}: {end}"
            seen[end] += 1
    return words(seen)


async def too_many_streams(port: int, number: int) -> str:
    raw = await Raw.open(port)
    with contextlib.suppress(OSError):
        await raw.write(b"".join(raw.request(POST)[1] for _ in range(number)))
        shut_down(raw.writer)
    found = await raw.end()
    raw.close()
    return found


async def garbage(port: int, number: int) -> str:
    """Frames of every type with flags and payloads that fit nothing; the bytes are the same each time."""
    ends: Counter[str] = Counter()
    for at in range(number):
        raw = await Raw.open(port)
        junk = b"".join(
            frame(
                (at + i) % 12, (at * 7 + i * 13) % 256, (i * at) % 5, bytes((at + i * j) % 256 for j in range(i % 40))
            )
            for i in range(20)
        )
        with contextlib.suppress(OSError):
            await raw.write(raw.request(POST)[1] + junk)
            shut_down(raw.writer)
        ends[await raw.end()] += 1
        raw.close()
    return words(ends)


SETTINGS_PIECE = frame(SETTINGS, 0, 0, b"\x00\x04\x00\x01\x00\x00")
ATTACKS = (
    Attack("h2 ping flood", "PING frames on one connection", 50_000, flood(frame(PING, 0, 0, bytes(8))), 20_000),
    Attack("h2 settings flood", "SETTINGS frames on one connection", 50_000, flood(SETTINGS_PIECE)),
    Attack(
        "h2 window flood", "WINDOW_UPDATE frames of one byte", 50_000, flood(frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"))
    ),
    Attack("h2 priority flood", "PRIORITY frames", 50_000, flood(frame(PRIORITY, 0, 3, bytes(4) + b"\x10"))),
    Attack("h2 unknown flood", "frames of a type that is none", 50_000, flood(frame(0xEE, 0, 0, b"x"))),
    Attack("h2 empty data", "DATA frames without data", 50_000, flood(frame(DATA, 0, 1), first=_open_stream)),
    Attack(
        "h2 continuation flood",
        "CONTINUATION frames of headers that never end",
        20_000,
        flood(frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b"), first=_open_headers),
        1000,
    ),
    Attack("h2 rapid resets", "HEADERS, DATA and RST_STREAM at once, on one connection", 20_000, rapid_resets, 5000),
    Attack("h2 made to reset", "streams that the server has to reset (window overflow)", 5000, made_to_reset),
    Attack("h2 resets", "streams of one connection, reset while they are computed", 500, resets_while_computed, 100),
    Attack("h2 vanishing", "connections of ten requests each, reset early", 100, vanishing_connections, 20),
    Attack("h2 unread", "answers that nothing reads, on four connections", 2000, unread, may_refuse=True),
    Attack("h2 forbidden headers", f"requests of {len(FORBIDDEN)} malformed shapes", 5, forbidden, 1),
    Attack("h2 too many streams", "streams opened at once, without a body", 5000, too_many_streams),
    Attack("h2 garbage", "connections of twenty malformed frames", 300, garbage, 30),
)
