"""What the journal costs a token: `python -m tests.bench.journal`, streams of a fake device with it and without.

The server has a thread of its own, whose CPU time is counted, and so is that of the journal's thread; the clients'
stands apart. Rounds with the journal and without follow each other, and medians are told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from novainfer.server.loop import loop_factory
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from novainfer.testing import FakeDevice
from tests.api.helpers import fake_engine

STEP_S = 0.01
BODY = {"prompt": "Once", "stream": True, "ignore_eos": True, "temperature": 0}


class Served:
    """A server in a thread of its own."""

    def __init__(self, journal: Path | None) -> None:
        self.server: Any = None
        self._journal = journal
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = Server(ServerSettings(port=0, shutdown_timeout_s=0.0, journal=self._journal))
        await self.server.run(
            lambda: fake_engine(FakeDevice(step_s=STEP_S), max_num_seqs=256), on_ready=self._ready.set
        )  # type: ignore[arg-type, return-value]

    def cpu_s(self) -> tuple[float, float]:
        """Of the loop, and of the journal's thread."""
        journal = self.server.service.journal
        return _cpu_s(self._thread), 0.0 if journal is None else _cpu_s(journal._thread)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop.set)
        self._thread.join()


def _cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


async def stream(port: int, num_tokens: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(BODY | {"max_tokens": num_tokens}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + body)
    found = await reader.read()
    assert found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), found[-300:]
    writer.close()


async def round_of(served: Served, num_streams: int, num_tokens: int) -> tuple[float, float, float]:
    """Microseconds a token: of the loop, of the journal's thread, and by the clock."""
    before, began_s = served.cpu_s(), time.perf_counter()
    await asyncio.gather(*(stream(served.server.port, num_tokens) for _ in range(num_streams)))
    await asyncio.sleep(0.1)  # for the journal's last batch
    after, count = served.cpu_s(), num_streams * num_tokens
    loop_us, journal_us = (1e6 * (b - a) / count for a, b in zip(before, after, strict=True))
    return loop_us, journal_us, 1e6 * (time.perf_counter() - began_s) / count


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ways = {"without": Served(None), "with": Served(Path(folder) / "journal.db")}
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        try:
            for _ in range(args.rounds + 1):
                for name, served in ways.items():
                    found[name].append(await round_of(served, args.streams, args.tokens))
        finally:
            for served in ways.values():
                served.stop()
        size = sum(entry.stat().st_size for entry in os.scandir(folder))
    for name, rounds in found.items():
        loop_us, journal_us, wall_us = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
        print(f"{name:8} loop {loop_us:6.2f} us a token, journal's thread {journal_us:5.2f}, wall {wall_us:6.2f}")
    more = [on[0] - off[0] for on, off in zip(found["with"][1:], found["without"][1:], strict=True)]
    count = args.streams * args.tokens * (args.rounds + 1)
    more_us = statistics.median(more)
    print(f"the loop has {more_us:.2f} us a token more with a journal; its file {size / count:.1f} bytes a token")


if __name__ == "__main__":
    asyncio.run(main())
