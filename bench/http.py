"""What a streamed token costs in CPU: by where NovaInfer speaks HTTP, and beside stock ASGI servers.

The device sleeps for the time of a step, so what is seen is the work of scheduling, JSON and HTTP. Stock servers have
no engine: their app sends an event of the same size each time a clock ticks (`peers/run_asgi.py`). All servers run all
the time; each gets the same streams in turns, so that what disturbs the machine disturbs all. CPU time is what the
system counts of each process, while all streams are open: that of the engine's process bounds how many streams one
engine can have, that of all is what they cost the machine. The lag of a token is the time from the end of its step, or
its tick, to its arrival at the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from novainfer.bench.client import Origin, Version
from novainfer.bench.load import Drive, Load, drive
from novainfer.bench.machine import describe
from novainfer.bench.peers.launch import Server, process_cpu_s, tree
from novainfer.bench.peers.run_asgi import SERVERS, Ticks
from novainfer.bench.report import table
from novainfer.bench.serve import READY_TIMEOUT_S, VOCAB_SIZE
from novainfer.bench.statistic import intervals_s, lags_s, percentile
from novainfer.bench.workload import Workload
from novainfer.server.loop import loop_factory

WAYS = (0, 1, 2)  # API processes
PEERS = tuple(SERVERS)
DEVICE_MS = 20.0
READY_POLL_S = 0.1
CLOSE_S = 0.05  # for connections to be closed, before their loop is
SAMPLE_S = 0.05  # between two looks at CPU times


class Way(msgspec.Struct, frozen=True):
    """One server: what the report calls it, what the table does, and what starts it."""

    key: str
    name: str
    command: tuple[str, ...]
    has_engine: bool
    ticks: Path  # where it notes when tokens were there


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What each server is asked in a round."""

    requests: int
    tokens: int
    version: Version
    connections: int  # of HTTP/2


class CpuSample(msgspec.Struct, frozen=True):
    """CPU seconds of each process of a server, at one moment of `time.perf_counter`."""

    at_s: float
    used_s: dict[int, float]


def run(
    ways: Sequence[int] = WAYS,
    peers: Sequence[str] = (),
    *,
    requests: int = 256,
    tokens: int = 100,
    device_ms: float = DEVICE_MS,
    version: Version = "h1",
    connections: int = 1,
    tls: bool = False,
    repeat: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its table; peers that cannot be asked are named in both, with the reason.

    Raises ClickException when a server does not start, or a request fails.
    """
    skipped = {name: reason for name in peers if (reason := why_not(name, version, tls=tls))}
    for name, reason in skipped.items():
        progress(f"{name} is left out: {reason}")
    asked = Asked(requests=requests, tokens=tokens, version=version, connections=connections)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="novainfer-bench-")))
        chosen = [_engine_way(way, requests, device_ms, tls, folder / str(way)) for way in ways]
        chosen += [_peer_way(name, version, device_ms, folder / name) for name in peers if name not in skipped]
        servers = {way: stack.enter_context(Server(way.command)) for way in chosen}
        loads = {way: Load(origin=_origin(server, tls), model="fake") for way, server in servers.items()}
        for way, load in loads.items():
            _until_ready(load, way, version)
            _run(_drive(load, asked, _prompts(requests, f"warm {way.key}"), 10))
        runs: dict[Way, list[dict[str, float]]] = {way: [] for way in chosen}
        for turn in range(repeat):
            for way, server in servers.items():
                found = _once(way, server, loads[way], asked, _prompts(requests, f"{turn} {way.key}"))
                runs[way].append(found)
                progress(f"round {turn + 1} of {repeat}, {way.name}: {found['all_us']:.1f} us a token")
    return _report(runs, asked, skipped, device_ms=device_ms, tls=tls)


def why_not(peer: str, version: Version, *, tls: bool) -> str | None:
    """Why a peer cannot be asked; None where it can."""
    if tls:
        return "peers are asked in clear text"
    if importlib.util.find_spec(peer) is None:
        return "it is not installed (pip install 'novainfer[bench]')"
    if peer == "uvicorn" and version == "h2":
        return "it speaks no HTTP/2"
    return None


def serve_steps(
    port: int, api_processes: int, requests: int, device_ms: float, self_signed: bool, ticks_file: str
) -> None:
    """A server of a device without a model, whose steps take `device_ms`; until a signal comes."""
    from novainfer import Engine, EngineConfig
    from novainfer.server.serve import run_server
    from novainfer.server.settings import ServerSettings
    from novainfer.testing import ByteTokenizer, FakeDevice, StepPlan

    ticks = Ticks(ticks_file)

    class TickingDevice(FakeDevice):
        def run(self, plan: StepPlan) -> Any:
            done = super().run(plan)
            ticks.note()
            return done

    config = EngineConfig(model="fake", max_num_seqs=requests)
    settings = ServerSettings(port=port, api_processes=api_processes, self_signed=self_signed)
    device = TickingDevice(step_s=device_ms / 1e3)
    run_server(settings, lambda: Engine(config, device=device, tokenizer=ByteTokenizer()))


def _engine_way(number: int, requests: int, device_ms: float, tls: bool, ticks: Path) -> Way:
    call = f"serve_steps({{port}}, {number}, {requests}, {device_ms}, {tls}, {str(ticks)!r})"
    command = sys.executable, "-c", f"from {__name__} import serve_steps; {call}"
    name = {0: "no API process", 1: "1 API process"}.get(number, f"{number} API processes")
    return Way(str(number), name, command, True, ticks)


def _peer_way(name: str, version: Version, device_ms: float, ticks: Path) -> Way:
    module = "novainfer.bench.peers.run_asgi"
    command = sys.executable, "-m", module, name, "{port}", version, str(device_ms), str(ticks)
    told = "NovaInfer's HTTP, no engine" if name == "novainfer" else f"{name} {importlib.metadata.version(name)}"
    return Way(name, told, command, False, ticks)


def _origin(server: Server, tls: bool) -> Origin:
    return Origin(host="127.0.0.1", port=server.port, tls=tls)


def _prompts(requests: int, seed: str) -> list[list[int]]:
    work = Workload(name=f"http {seed}", title="", num_requests=requests, prompt_len=16, max_tokens=0)
    return work.prompts(VOCAB_SIZE, 0)


def _run(driving: Any) -> Any:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(driving)


async def _drive(load: Load, asked: Asked, prompts: list[list[int]], tokens: int) -> Drive:
    """All prompts at once."""
    found = await drive(load, asked.version, prompts, tokens, len(prompts), connections=asked.connections)
    await asyncio.sleep(CLOSE_S)
    return found


def _until_ready(load: Load, way: Way, version: Version) -> None:
    asked = Asked(requests=1, tokens=1, version=version, connections=1)
    ends_s = time.perf_counter() + READY_TIMEOUT_S
    while time.perf_counter() < ends_s:
        try:
            [line] = _run(_drive(load, asked, [[1, 2, 3]], 1)).timelines
            if line.error is None:
                return
        except OSError:  # nothing listens yet
            pass
        time.sleep(READY_POLL_S)
    raise click.ClickException(f"the server did not start: {way.name}")


@asynccontextmanager
async def _sampled(pid: int) -> AsyncIterator[list[CpuSample]]:
    """CPU times of a process and those below it, again and again while this lasts, and at both ends."""
    pids, found = tree(pid), list[CpuSample]()

    def sample() -> None:
        found.append(CpuSample(time.perf_counter(), {one: process_cpu_s(one) for one in pids}))

    async def again() -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            sample()

    sample()
    task = asyncio.create_task(again())
    try:
        yield found
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        sample()


def _once(way: Way, server: Server, load: Load, asked: Asked, prompts: list[list[int]]) -> dict[str, float]:
    way.ticks.write_bytes(b"")  # of this round alone

    async def driven() -> tuple[Drive, list[CpuSample]]:
        async with _sampled(server.pid) as samples:
            return await _drive(load, asked, prompts, asked.tokens), samples

    began_s = time.process_time()
    found, samples = _run(driven())
    client_s = time.process_time() - began_s
    errors = {line.error for line in found.timelines if line.error is not None}
    if errors:
        raise click.ClickException(f"requests to {way.name} failed: {sorted(errors)[0]}")
    count = sum(sum(line.counts) for line in found.timelines)
    used_s, between = cpu_between(found, samples)
    all_us = 1e6 * sum(used_s.values()) / between
    whole_s = sum(samples[-1].used_s.values()) - sum(samples[0].used_s.values())
    ticks_s = array("d", way.ticks.read_bytes())
    lags = [lag for line, at_s in _lines(found) for lag in lags_s(line, at_s, ticks_s)]
    gaps = intervals_s(found.timelines)
    return {
        "engine_us": 1e6 * used_s[server.pid] / between if way.has_engine else float("nan"),
        "all_us": all_us,
        "request_us": (1e6 * whole_s - all_us * count) / len(prompts),
        "client_us": 1e6 * client_s / count,
        "tokens_per_s": count / found.wall_s,
        "lag_ms_p50": 1e3 * percentile(lags, 50),
        "lag_ms_p99": 1e3 * percentile(lags, 99),
        "gap_ms_p50": 1e3 * percentile(gaps, 50),
        "gap_ms_p99": 1e3 * percentile(gaps, 99),
    }


def cpu_between(found: Drive, samples: Sequence[CpuSample]) -> tuple[dict[int, float], int]:
    """CPU seconds of each process while all streams had begun and none had ended, and the tokens that came meanwhile.

    Where that time is too short for two samples: of all of the run.
    """
    spans = [(at_s + line.times_s[0], at_s + line.times_s[-1]) for line, at_s in _lines(found)]
    begins_s, ends_s = max(first for first, _ in spans), min(last for _, last in spans)
    inside = [sample for sample in samples if begins_s <= sample.at_s <= ends_s]
    first, last = (inside[0], inside[-1]) if len(inside) > 1 else (samples[0], samples[-1])
    count = sum(
        number
        for line, at_s in _lines(found)
        for came_s, number in zip(line.times_s, line.counts, strict=True)
        if first.at_s < at_s + came_s <= last.at_s
    )
    return {pid: last.used_s[pid] - used_s for pid, used_s in first.used_s.items()}, count


def _lines(found: Drive) -> list[tuple[Any, float]]:
    return [*zip(found.timelines, found.began_s, strict=True)]


def _report(
    runs: dict[Way, list[dict[str, float]]], asked: Asked, skipped: dict[str, str], *, device_ms: float, tls: bool
) -> tuple[dict[str, Any], str]:
    rows = {way: {key: statistics.median(run[key] for run in found) for key in found[0]} for way, found in runs.items()}
    first = next(iter(runs))
    for way, row in rows.items():
        for ratio, of in (("engine_ratio", "engine_us"), ("all_ratio", "all_us")):
            pairs = zip(runs[way], runs[first], strict=True)
            # a run of a moment may have taken no tick of the CPU's clock
            row[ratio] = statistics.median(one[of] / base[of] if base[of] else float("nan") for one, base in pairs)
    repeat = len(runs[first])
    report = {
        "benchmark": "http",
        "machine": describe(),
        "http": asked.version,
        "connections": asked.connections if asked.version == "h2" else asked.requests,
        "tls": tls,
        "requests": asked.requests,
        "tokens": asked.tokens,
        "device_ms": device_ms,
        "repeat": repeat,
        "ways": {way.key: _known(row) for way, row in rows.items()},
        "skipped": skipped,
        "runs": {way.key: [_known(run) for run in found] for way, found in runs.items()},
    }
    where = "over TLS" if tls else "in clear text"
    connections = "one connection" if report["connections"] == 1 else f"{report['connections']} connections"
    title = (
        f"{asked.requests} streams of {1e3 / device_ms:g} tokens/s, {asked.version} {where}, {connections} "
        f"({repeat} rounds of {asked.tokens} tokens, medians)"
    )
    header = ("", "us/token", "ratio", "engine's process", "ratio", "us/request", "client, us/token", "tokens/s")
    times = ("lag p50", "p99", "gap p50", "p99, ms")
    columns = ("all_us", "all_ratio", "engine_us", "engine_ratio", "request_us", "client_us", "tokens_per_s")
    times_ms = ("lag_ms_p50", "lag_ms_p99", "gap_ms_p50", "gap_ms_p99")
    lines = [(way.name, *(row[column] for column in (*columns, *times_ms))) for way, row in rows.items()]
    notes = [f"{name} is left out: {reason}" for name, reason in skipped.items()]
    return report, "\n".join([table(title, (*header, *times), lines), *notes])


def _known(row: dict[str, float]) -> dict[str, float]:
    """Without what a server has not: JSON knows no NaN."""
    return {key: value for key, value in row.items() if value == value}
