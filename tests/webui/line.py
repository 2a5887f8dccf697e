"""A line between a browser and a server that a test can cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

CHUNK_BYTES = 65_536
# What Chromium writes on a console of a connection that broke, or could not be made.
BROKEN = "net::ERR_(CONNECTION|HTTP2|EMPTY|INCOMPLETE|NETWORK|SOCKET)"


class Line:
    """Bytes to the server at `url` and back, over TLS or not; `self.url` is its other end."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.url = ""

    async def open(self) -> asyncio.Server:
        """Listen on a free port."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"{self._target.scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    def cut(self) -> None:
        """All connections break, and no new one is made until `mend`."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        """Connections can be made again."""
        self._is_cut = False

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        there = await asyncio.open_connection(self._target.hostname, self._target.port)
        await asyncio.gather(self._carry(reader, there[1]), self._carry(there[0], writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


@asynccontextmanager
async def line_to(url: str) -> AsyncIterator[Line]:
    """A line to the server at `url`."""
    line = Line(url)
    server = await line.open()
    try:
        yield line
    finally:
        server.close()
        line.cut()
