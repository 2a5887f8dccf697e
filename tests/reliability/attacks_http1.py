"""Attacks on HTTP/1.1: requests that two parsers would read in two ways, slow, half-closed and idle clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter

from tests.reliability.attack import ATTACKER_KEY, TIMEOUT_S, Attack, open_connection, shut_down
from tests.reliability.attacks_http2 import LONG, SHORT, words

KEY = b"authorization: Bearer " + ATTACKER_KEY.encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + KEY + b"\r\n"
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + KEY + b"\r\n\r\n"  # must never be answered
CHUNKED = b"transfer-encoding: chunked\r\n"


def length(number: int) -> bytes:
    return b"content-length: %d\r\n" % number


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


IN_ORDER = HEAD + length(len(SHORT)) + b"\r\n" + SHORT
SHAPES: dict[str, bytes] = {
    "length and chunks": HEAD + length(5) + CHUNKED + b"\r\n" + chunk(SHORT) + b"0\r\n\r\n" + HIDDEN,
    "chunks and length": HEAD + CHUNKED + length(5) + b"\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": HEAD + length(len(SHORT)) + length(len(SHORT) + 3) + b"\r\n" + SHORT + HIDDEN,
    "a list of lengths": HEAD + b"content-length: %d, 7\r\n\r\n" % len(SHORT) + SHORT + HIDDEN,
    "length +5": HEAD + b"content-length: +%d\r\n\r\n" % len(SHORT) + SHORT + HIDDEN,
    "length -1": HEAD + b"content-length: -1\r\n\r\n" + SHORT + HIDDEN,
    "length 0x5": HEAD + b"content-length: 0x5\r\n\r\n" + SHORT + HIDDEN,
    "space before the colon": HEAD + b"content-length : 5\r\n\r\n" + SHORT + HIDDEN,
    "transfer-encoding that is none": HEAD
    + b"transfer-encoding: xchunked\r\n\r\n"
    + chunk(SHORT)
    + b"0\r\n\r\n"
    + HIDDEN,
    "two transfer-encodings": HEAD
    + CHUNKED
    + b"transfer-encoding: identity\r\n\r\n"
    + chunk(SHORT)
    + b"0\r\n\r\n"
    + HIDDEN,
    "gzip, chunked": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunk(SHORT) + b"0\r\n\r\n" + HIDDEN,
    "chunk size with a sign": HEAD + CHUNKED + b"\r\n+5\r\nabcde\r\n0\r\n\r\n" + HIDDEN,
    "chunk size 0x": HEAD + CHUNKED + b"\r\n0x5\r\nabcde\r\n0\r\n\r\n" + HIDDEN,
    "chunk size of 30 digits": HEAD + CHUNKED + b"\r\n" + b"f" * 30 + b"\r\nabcde\r\n0\r\n\r\n" + HIDDEN,
    "chunk longer than its size": HEAD + CHUNKED + b"\r\n3\r\nabcde\r\n0\r\n\r\n" + HIDDEN,
    "chunk size that ends in LF": HEAD + CHUNKED + b"\r\n5\nabcde\n0\n\n" + HIDDEN,
    "folded header": HEAD + b"transfer-encoding:\r\n chunked\r\n" + length(3) + b"\r\n0\r\n\r\n" + HIDDEN,
    "CR alone in a header": HEAD + b"x: a\rtransfer-encoding: chunked\r\n" + length(5) + b"\r\n0\r\n\r\n" + HIDDEN,
    "NUL in a header": HEAD + b"x: a\0b\r\n" + length(len(SHORT)) + b"\r\n" + SHORT + HIDDEN,
    "header without a colon": HEAD + b"nothing\r\n\r\n" + HIDDEN,
    "header without a name": HEAD + b": x\r\n\r\n" + HIDDEN,
    "no host": HEAD.replace(b"host: x\r\n", b"") + length(len(SHORT)) + b"\r\n" + SHORT + HIDDEN,
    "two hosts": HEAD + b"host: y\r\n" + length(len(SHORT)) + b"\r\n" + SHORT + HIDDEN,
    "HTTP/1.9": HEAD.replace(b"1.1", b"1.9", 1) + length(len(SHORT)) + b"\r\n" + SHORT + HIDDEN,
    "HTTP/0.9": b"GET /v1/models\r\n" + HIDDEN,
    "two spaces": HEAD.replace(b" HTTP", b"  HTTP", 1) + length(len(SHORT)) + b"\r\n" + SHORT + HIDDEN,
    "a path of CR LF": b"GET /v1/models\r\nx HTTP/1.1\r\n" + HIDDEN,
    "headers of a megabyte": HEAD + b"x: " + b"y" * 1_000_000 + b"\r\n\r\n" + HIDDEN,
    "ten thousand headers": HEAD + b"x: y\r\n" * 10_000 + b"\r\n" + HIDDEN,
    "upgrade": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n"
    b"http2-settings: !!!\r\n\r\n" + HIDDEN,
    "websocket": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    + HIDDEN,
}


async def smuggling(port: int, number: int) -> str:
    """What hides behind a malformed request is never answered; the request in order, which goes first, is."""
    seen: Counter[str] = Counter()
    for _ in range(number):
        for name, data in {"in order": IN_ORDER, **SHAPES}.items():
            reader, writer = await open_connection(port, "http/1.1")
            answer = b""
            with contextlib.suppress(OSError):
                writer.write(data)
                async with asyncio.timeout(TIMEOUT_S):
                    while piece := await reader.read(65536):
                        answer += piece
            writer.transport.abort()
            statuses = [line.split(b" ")[1].decode() for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
            assert len(statuses) <= 1, f"{name}: {statuses}"
            assert b'"max_model_len"' not in answer, name  # the hidden request's answer
            assert (statuses == ["200"]) == (name == "in order"), f"{name}: {statuses}"
            seen[statuses[0] if statuses else "cut off"] += 1
    return words(seen)


async def _connections(port: int, number: int, data: bytes) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    found = []
    for _ in range(number):
        reader, writer = await open_connection(port, "http/1.1", limit=1024)
        writer.write(data)
        found.append((reader, writer))
    return found


async def slow_heads(port: int, number: int) -> str:
    """Connections that send their headers byte by byte, and never all of them."""
    found = await _connections(port, number, b"")
    for at in range(100):
        for _, writer in found:
            writer.write(IN_ORDER[at : at + 1])
        await asyncio.sleep(0.01)
    for _, writer in found:
        writer.transport.abort()
    return "held"


async def slow_bodies(port: int, number: int) -> str:
    """Connections that send their bodies byte by byte, and never all of them."""
    found = await _connections(port, number, HEAD + length(1000) + b"\r\n")
    for _ in range(100):
        for _, writer in found:
            writer.write(b" ")
        await asyncio.sleep(0.01)
    for _, writer in found:
        writer.transport.abort()
    return "held"


async def half_closed(port: int, number: int) -> str:
    """Ask for long answers, shut the own side down, and read what comes."""
    long = HEAD + length(len(LONG)) + b"\r\n" + LONG
    found = await _connections(port, number, long)
    num_bytes = 0
    for _, writer in found:
        shut_down(writer)
    for reader, writer in found:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(TIMEOUT_S):
                while piece := await reader.read(65536):
                    num_bytes += len(piece)
        writer.transport.abort()
    return "closed"


async def pipelined(port: int, number: int) -> str:
    """Twenty requests each, sent ahead; then a RST."""
    long = HEAD.replace(b"connection: close\r\n", b"") + length(len(LONG)) + b"\r\n" + LONG
    for _, writer in await _connections(port, number, long * 20):
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
    return f"{20 * number} requests"


async def unread(port: int, number: int) -> str:
    """Connections that ask for long answers and read nothing."""
    found = await _connections(port, number, HEAD + length(len(LONG)) + b"\r\n" + LONG)
    await asyncio.sleep(3)
    for _, writer in found:
        writer.transport.abort()
    return "held"


async def idle(port: int, number: int) -> str:
    """Connections that say nothing."""
    found = await _connections(port, number, b"")
    await asyncio.sleep(1)
    for _, writer in found:
        writer.transport.abort()
    return "held"


ATTACKS = (
    Attack("h1 smuggling", f"requests of {len(SHAPES)} malformed shapes, with another hidden behind", 5, smuggling, 1),
    Attack("h1 slow heads", "connections that send headers byte by byte", 500, slow_heads),
    Attack("h1 slow bodies", "connections that send bodies byte by byte", 500, slow_bodies),
    Attack("h1 half-closed", "connections shut down after their request", 200, half_closed, 20),
    Attack("h1 pipelined", "connections of twenty requests sent ahead, then reset", 100, pipelined, 20),
    Attack("h1 unread", "connections that read nothing of long answers", 200, unread),
    Attack("h1 idle", "connections that say nothing", 500, idle),
)
