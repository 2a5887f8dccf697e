"""What is checked before a handler sees a request: content type, the body's size and its arrival in time.

A refused body is still read to its end, and dropped, before the answer goes out: an early answer makes HTTP/1.1 clients
lose it to a connection reset, and HTTP/2 clients too (curl, httpx). What that may take is bounded by time.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from novainfer.server.http.errors import BodyTimeout, PayloadTooLarge, UnsupportedMediaType
from novainfer.server.http.exchange import ClientGone, header


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
