"""What a scrape of /metrics costs the server's loop.

    python -m tests.bench.metrics [--times 300] [--live 0,100] [--json FILE]

A server of the demo model is asked over one connection, as a router asks: /livez and /metrics in turns of ten, so that
what disturbs the machine disturbs both. Of the thread that the loop runs in the processor time is read before and after
each turn: /livez is what HTTP costs, and what /metrics costs more is the scrape. Nothing runs meanwhile, as that would
be in the loop's time; what requests add to a scrape itself is measured in this process, with `--live` of them.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from novainfer import Engine, EngineConfig, SamplingParams
from novainfer.bench.load import drive
from novainfer.bench.machine import describe
from novainfer.bench.peers.launch import Server as Process
from novainfer.bench.serve import find_model
from novainfer.server.operate.scrape import scrape
from novainfer.server.serve import Server
from novainfer.server.settings import ServerSettings
from novainfer.testing import ByteTokenizer, FakeDevice

TURN = 10
STEP_S = 0.02
READY_TIMEOUT_S = 60.0


def loop_cpu_ms(pid: int) -> float:
    """Processor time of the process's first thread: the one with the loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e6


def costs(server: Process, times: int) -> dict[str, float]:
    """Milliseconds of the loop's time for each request, by path."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    found: dict[str, list[float]] = {"/livez": [], "/metrics": []}
    size = 0
    for _ in range(times // TURN):
        for path, each in found.items():
            before = loop_cpu_ms(server.pid)
            for _ in range(TURN):
                connection.request("GET", path)
                answer = connection.getresponse()
                size = len(answer.read())
                assert answer.status == 200, answer.status
            each.append((loop_cpu_ms(server.pid) - before) / TURN)
    connection.close()
    health, metrics = (statistics.median(each) for each in found.values())
    more = statistics.median(b - a for a, b in zip(found["/livez"], found["/metrics"], strict=True))
    return {"livez_ms": health, "metrics_ms": metrics, "scrape_ms": more, "bytes": size}


def own_ms(live: int, times: int) -> float:
    """Milliseconds of this thread for the text of one scrape, with so many requests that run; the median."""

    async def measure() -> float:
        device = FakeDevice(step_s=STEP_S)
        server = Server(ServerSettings(port=0))
        task = asyncio.create_task(server.run(lambda: Engine(EngineConfig(), device=device, tokenizer=ByteTokenizer())))
        await server.ready.wait()
        engine = server.service.engine
        assert engine is not None
        params = SamplingParams(max_tokens=1500, ignore_eos=True)
        names = [engine.add_request("x" * 64, params) for _ in range(live)]  # type: ignore[attr-defined]
        while engine.statistics().num_running < live:  # noqa: ASYNC110
            await asyncio.sleep(STEP_S)
        found = []
        for _ in range(times):
            began_s = time.thread_time()
            scrape(server.service)
            found.append(time.thread_time() - began_s)
            await asyncio.sleep(0)
        for name in names:
            engine.cancel(name)
        server.stop.set()
        await task
        return 1e3 * statistics.median(found)

    return asyncio.run(measure())


def main(times: int, live: list[int]) -> dict[str, Any]:
    """Of a server in a process of its own, and of the text alone."""
    command = (sys.executable, "-m", "novainfer.server", "--port", "{port}")
    with Process(command, {"OMP_WAIT_POLICY": "passive"}) as process:
        process.wait_until_ready(READY_TIMEOUT_S)
        asyncio.run(drive(find_model(process.url, None), "h1", [[1, 2, 3]], 2, 1))
        served = costs(process, times)
    own = {str(number): own_ms(number, times) for number in live}
    return {"benchmark": "metrics", "machine": describe(), "times": times, "served": served, "text_ms": own}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--live", default="0,100", help="so many requests run while the text alone is timed")
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = main(options.times, [int(number) for number in options.live.split(",")])
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
