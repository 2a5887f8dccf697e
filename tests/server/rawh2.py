"""An HTTP/2 client that does only what a test tells it to, on the `h2` library: windows, resets, half-sent bodies."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import h2.config
import h2.connection
import h2.events
from h2.settings import SettingCodes, Settings

TIMEOUT_S = 10.0  # of any wait: a hang is a failure, not a stuck test run


class RawH2:
    """One connection; everything received is kept per stream. conftest.py closes what a failed test left open."""

    opened: ClassVar[list[RawH2]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, takes_data: bool) -> None:
        self.reader, self.writer = reader, writer
        self.connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.takes_data = takes_data  # gives the window back for what it has read
        self.headers: dict[int, dict[str, str]] = {}
        self.data: dict[int, bytearray] = defaultdict(bytearray)
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.goaway: int | None = None
        self.is_closed = False
        self.opened.append(self)

    @classmethod
    async def connect(
        cls, port: int, *, takes_data: bool = True, initial_window: int | None = None, authority: str = "test"
    ) -> RawH2:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = cls(reader, writer, takes_data=takes_data)
        if initial_window is not None:
            first = {SettingCodes.INITIAL_WINDOW_SIZE: initial_window}  # set later, it would not be in the first frame
            client.connection.local_settings = Settings(client=True, initial_values=first)
        client.connection.initiate_connection()
        await client.flush()
        return client

    async def flush(self) -> None:
        self.writer.write(self.connection.data_to_send())
        await self.writer.drain()

    async def request(
        self,
        path: str,
        body: bytes | None = None,
        *,
        method: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        end: bool = True,
    ) -> int:
        """Send a request; `end=False` leaves its body open."""
        stream_id = self.connection.get_next_available_stream_id()
        method = method or ("POST" if body is not None else "GET")
        head = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "test"), *headers]
        self.connection.send_headers(stream_id, head, end_stream=body is None and end)
        if body is not None:
            await self.send_data(stream_id, body, end=end)
        await self.flush()
        return stream_id

    async def send_data(self, stream_id: int, body: bytes, *, end: bool = False) -> None:
        """Send part of a body, waiting for the server's window."""
        while body:
            await self.read_until(lambda: self.connection.local_flow_control_window(stream_id) > 0)
            size = min(
                len(body), self.connection.local_flow_control_window(stream_id), self.connection.max_outbound_frame_size
            )
            self.connection.send_data(stream_id, body[:size])
            await self.flush()
            body = body[size:]
        if end:
            self.connection.end_stream(stream_id)
            await self.flush()

    async def reset(self, stream_id: int) -> None:
        self.connection.reset_stream(stream_id)
        await self.flush()

    async def read_until(self, condition: Callable[[], object]) -> None:
        """Read until `condition` holds or the server closes; a `TimeoutError` when neither happens."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition() and not self.is_closed:
                await self.read_some()

    async def read_some(self) -> None:
        data = await self.reader.read(65536)
        if not data:
            self.is_closed = True
            return
        for event in self.connection.receive_data(data):
            self._note(event)
        await self.flush()

    def _note(self, event: Any) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            self.headers[event.stream_id] = dict(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            self.data[event.stream_id] += event.data
            if self.takes_data:
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.resets[event.stream_id] = int(event.error_code)
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.goaway = int(event.error_code)

    async def response(self, stream_id: int) -> tuple[int, bytes]:
        """The status and body of an answer that must come to its end."""
        await self.read_until(lambda: stream_id in self.ended or stream_id in self.resets)
        assert stream_id in self.ended, f"stream {stream_id} was reset or the connection closed"
        return int(self.headers[stream_id][":status"]), bytes(self.data[stream_id])

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()
