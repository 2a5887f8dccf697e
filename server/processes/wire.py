"""What an API process and the engine's process say to each other: frames of four bytes of length and as much msgpack.

    engine's process                                      API process
    Hello ───────────────────────────────────────────▶    how to listen, and with which certificate
          ◀──────────────────────────────── Listening     connections are taken
          ◀───────────────────────────────────── Asks     requests, their bodies, clients that have gone
    Answers ─────────────────────────────────────────▶    heads, bodies and ends of answers
          ◀───────────────────────────────────── Beat     a sign of life
    Renewed, Close, Abort ───────────────────────────▶    another certificate; take no more; close what is left

Whatever one turn of a loop has to say is one frame, of all its requests: one message a step, and one write. A request
is known by a number that grows, so that what comes for one that has ended is told from what can never have been.

What one end holds for the other is bounded by credits: of an answer `ANSWER_BYTES` may be on their way that its client
has not taken, of a body `BODY_BYTES` that the app has not. Each end tells the other what was taken, many events at a
time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

FRAME_BYTES_MAX = 16 << 20  # of one turn, which is written when it has `TURN_BYTES`; beyond this it can only be garbage
TURN_BYTES = 256 << 10  # of one frame's bodies, above which it does not wait for the end of its turn
ANSWER_BYTES = 32 << 10  # as much as an HTTP/2 stream's buffer holds
ANSWERS_BYTES = 8 << 20  # of all answers of one process; with more under way, each may have
SHARE_BYTES = 8 << 10
TAKEN_BYTES = 4 << 10  # of an answer are told at once: less than a share, so that none waits for ever
BODY_BYTES = 256 << 10
PIECE_BYTES = 64 << 10  # of a body in one frame
BEAT_S = 0.25
_LENGTH = struct.Struct("!I")

Headers = list[tuple[bytes, bytes]]


class LinkError(Exception):
    """The other end does not keep to this; one sentence says what came."""


class Pem(msgspec.Struct, frozen=True, array_like=True):
    """A certificate with its chain, and its key."""

    chain: bytes
    key: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first frame to an API process: settings of HTTP by field, and from which level on its loggers matter."""

    settings: dict[str, Any]
    certificate: Pem | None
    log_levels: dict[str, int]
    logs_json: bool


class Renewed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Connections to come get this certificate."""

    certificate: Pem


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take no more connections, and end when those that are open have their answers."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Close the connections that are left, whatever their clients have not read."""


class Answers(msgspec.Struct, array_like=True, tag=True):
    """What one turn has for requests: in this order of each, and of a kind in the order in which it came."""

    admitted: list[int] = []  # they were let in, with their whole bodies
    starts: list[tuple[int, int, Headers]] = []  # request, status, headers
    bodies: list[tuple[int, bytes]] = []
    ends: list[int] = []  # the last byte of the answer came before
    aborts: list[int] = []  # nothing more comes, and the answer is not whole
    taken: list[tuple[int, int]] = []  # so many bytes of the request's body


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """A request's head, as ASGI has it."""

    request_id: int
    http_version: str
    method: str
    scheme: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: Headers
    client: tuple[str, int] | None
    server: tuple[str, int] | None


class Asks(msgspec.Struct, array_like=True, tag=True):
    """What one turn has for the app: in this order of each request, and of a kind in the order in which it came."""

    opened: list[Opened] = []
    bodies: list[tuple[int, bytes]] = []
    body_ends: list[int] = []
    taken: list[tuple[int, int]] = []  # so many bytes of the answer
    done: list[int] = []  # the whole answer was taken
    gone: list[int] = []  # its client has gone


class Listening(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Connections are taken from now on."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sign of life: connections that are open, how late the loop was, and the process's CPU time since its start."""

    num_connections: int
    lag_s: float
    cpu_s: float


ToProcess = Hello | Renewed | Close | Abort | Answers
FromProcess = Listening | Beat | Asks
Message = TypeVar("Message")


def frame(message: Any) -> bytes:
    """The bytes of one message."""
    body = _encode(message)
    assert len(body) <= FRAME_BYTES_MAX, "a turn is written before it is as large"
    return _LENGTH.pack(len(body)) + body


_encode = msgspec.msgpack.Encoder().encode


class FrameReader(Generic[Message]):
    """Takes the frames of one direction apart, however the bytes come."""

    def __init__(self, decode: Callable[[bytes | memoryview], Message]) -> None:
        self._decode = decode
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with `data`; raises `LinkError` for what is none."""
        rest = self._rest
        rest += data
        at = 0
        try:
            while len(rest) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(rest, at)
                if length > FRAME_BYTES_MAX:
                    raise LinkError(f"a frame of {length} bytes")
                end = at + _LENGTH.size + length
                if len(rest) < end:
                    break
                try:
                    message = self._decode(bytes(memoryview(rest)[at + _LENGTH.size : end]))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise LinkError(f"what is no message: {error}") from None
                at = end
                yield message
        finally:
            del rest[:at]


def to_process() -> FrameReader[ToProcess]:
    """A reader of what the engine's process says."""
    return FrameReader(msgspec.msgpack.Decoder(ToProcess).decode)


def from_process() -> FrameReader[FromProcess]:
    """A reader of what an API process says."""
    return FrameReader(msgspec.msgpack.Decoder(FromProcess).decode)
