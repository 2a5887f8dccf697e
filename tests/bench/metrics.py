"""What a scrape of /metrics costs the server's loop, with and without requests that run.

    python -m tests.bench.metrics [--live 0,100] [--times 300] [--json FILE]

A server of the demo model is asked over one connection, as a router asks: /livez and /metrics in turns of ten, so that
what disturbs the machine disturbs both. Of the thread that the loop runs in the processor time is read before and after
each turn: /livez is what HTTP costs, and what /metrics costs more is the scrape. While requests run, their own work is
in both.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

from novainfer.bench.load import Load, drive
from novainfer.bench.machine import describe
from novainfer.bench.peers.launch import Server
from novainfer.bench.serve import VOCAB_SIZE, find_model
from novainfer.bench.workload import Workload

TURN = 10
READY_TIMEOUT_S = 60.0
LIVE = Workload(name="live", title="64 in, 1500 out", num_requests=0, prompt_len=64, max_tokens=1500)


def loop_cpu_ms(pid: int) -> float:
    """Processor time of the process's first thread: the one with the loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e6


def costs(server: Server, times: int) -> dict[str, float]:
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


def main(live: list[int], times: int) -> dict[str, Any]:
    """Start a server, and measure it with so many requests running."""
    rows = {}
    with Server(
        (sys.executable, "-m", "novainfer.server", "--port", "{port}"), {"OMP_WAIT_POLICY": "passive"}
    ) as server:
        server.wait_until_ready(READY_TIMEOUT_S)
        load = find_model(server.url, None)
        asyncio.run(drive(load, "h1", [[1, 2, 3]], 2, 1))
        for number in live:
            prompts = [[*range(VOCAB_SIZE)][at : at + LIVE.prompt_len] for at in range(number)]
            if number:
                threading.Thread(target=_ask, args=(load, prompts), daemon=True).start()
                _wait_for(server, number)
            rows[str(number)] = costs(server, times)
    return {"benchmark": "metrics", "machine": describe(), "times": times, "live": rows}


def _ask(load: Load, prompts: list[list[int]]) -> None:
    """Have them all run, over one connection."""
    asyncio.run(drive(load, "h2", prompts, LIVE.max_tokens, len(prompts)))


def _wait_for(server: Server, number: int) -> None:
    """Until so many requests run."""
    running = 0.0
    while running < number:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        line = next(line for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
        running = float(line.rpartition(" ")[2])
        connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--live", default="0,100")
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = main([int(number) for number in options.live.split(",")], options.times)
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
