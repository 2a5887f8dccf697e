"""What is checked before a handler sees a request: content type, the body's size and its arrival in time, its turn.

A refused body is still read to its end, and dropped, before the answer goes out: an early answer makes HTTP/1.1 clients
lose it to a connection reset, and HTTP/2 clients too (curl, httpx). What that may take is bounded by time.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from novainfer.server.errors import BodyTimeout, PayloadTooLarge, UnsupportedMediaType
from novainfer.server.exchange import ClientGone, header

LARGE_BODY_BYTES = 64 << 10  # a smaller one is decoded within 3 ms
LOOP_BYTES_PER_S = 25e6  # of large bodies: the worst JSON is decoded at 50 MB a second, so they have half of the loop


class BodyTurns:
    """When large bodies may be decoded, which holds the loop: so far apart that others have as much of it."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def wait_s(self, num_bytes: int, now_s: float) -> float:
        """How long a body of so many bytes, which has come at `now_s`, waits for those before it."""
        if num_bytes < LARGE_BODY_BYTES:
            return 0.0
        begin_s = max(self._next_s, now_s)
        self._next_s = begin_s + num_bytes / LOOP_BYTES_PER_S
        return begin_s - now_s


def check_content_type(scope: Scope) -> None:
    """Raise `UnsupportedMediaType` unless a body is declared as JSON, or not declared at all."""
    given = header(scope, b"content-type")
    if given is None:
        return
    media_type = given.split(b";", 1)[0].strip().lower()
    if media_type != b"application/json" and not media_type.endswith(b"+json"):
        raise UnsupportedMediaType(
            f"The content type must be application/json, not {media_type.decode('latin-1')[:100]!r}"
        )


async def read_body(receive: Receive, *, bytes_max: int, timeout_s: float) -> bytes:
    """The whole body; raises `PayloadTooLarge`, `BodyTimeout`, or `ClientGone`."""
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk: bytes = message.get("body", b"")
                num_bytes += len(chunk)
                if num_bytes <= bytes_max:
                    chunks.append(chunk)
                else:
                    chunks.clear()
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        if num_bytes <= bytes_max:
            raise BodyTimeout(f"The body did not arrive within {timeout_s:g} seconds") from None
    if num_bytes > bytes_max:
        raise PayloadTooLarge(f"The body is over this server's limit of {bytes_max} bytes")
    return b"".join(chunks)
