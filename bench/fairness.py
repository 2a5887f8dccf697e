"""What one key can do to another: the time to the first token of one client, alone and beside one with many requests.

A server is started for it, with a file of two keys: of a model, or of a device whose steps take the same time however
many requests they hold, as a GPU's nearly do. What is seen then is the order of requests and the work of the server's
loop, and not how much slower a processor computes more of them.

A round is a number of requests of the first key, one after the other, alone; then as many beside the second key, which
always has so many requests open: whichever ends, or is refused, is followed by another one. Rounds alternate, so that
what disturbs the machine disturbs both.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from novainfer.bench.client import Version
from novainfer.bench.load import Load, drive
from novainfer.bench.machine import describe
from novainfer.bench.peers.launch import Server, ServerError
from novainfer.bench.report import Target, table, targets_json, targets_table
from novainfer.bench.serve import READY_TIMEOUT_S, VOCAB_SIZE, find_model
from novainfer.bench.statistic import Timeline, first_tokens_s, percentiles_ms
from novainfer.bench.workload import Workload
from novainfer.server.keys.record import KeyRecord, digest, new_key
from novainfer.server.keys.store import KeyStore

RATIO_MAX = 2.0
DEVICE_MS = 20.0
WAYS = ("alone", "beside")
WARM_UP_S = 1.0  # until all requests of the other key are open
REFUSED_WAIT_S = 0.05  # before a refused request is followed by another one

ASKED = Workload(name="asked", title="32 in, 8 out, one after the other", num_requests=0, prompt_len=32, max_tokens=8)
BESIDE = Workload(name="beside", title="128 in, 128 out", num_requests=0, prompt_len=128, max_tokens=128)


def run(
    model: str | None = None,
    *,
    device_ms: float = DEVICE_MS,
    num_open: int = 100,
    requests: int = 40,
    repeat: int = 3,
    version: Version = "h2",
    flags: tuple[str, ...] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its tables, of a server of `model` (None: of steps that take `device_ms`) with these flags.

    Raises ClickException when it does not start.
    """
    keys = [new_key(), new_key()]
    with tempfile.TemporaryDirectory(prefix="novainfer-") as folder:
        store = KeyStore.at(Path(folder) / "keys.yaml")
        for name, key in zip(("asked", "beside"), keys, strict=True):
            store.add(KeyRecord(name=name, hash=digest(key.encode())))
        with Server(_command(model, device_ms, store.path, flags), {"OMP_WAIT_POLICY": "passive"}) as server:
            try:
                server.wait_until_ready(READY_TIMEOUT_S)
            except ServerError as error:
                raise click.ClickException(f"the server did not start: {error}") from None
            loads = [find_model(server.url, key) for key in keys]
            rounds = asyncio.run(_rounds(loads[0], loads[1], version, num_open, requests, repeat, progress))
    return _report(rounds, model or f"steps of {device_ms:g} ms", num_open=num_open, requests=requests, version=version)


def _command(model: str | None, device_ms: float, keys_file: Path, flags: tuple[str, ...]) -> tuple[str, ...]:
    """A server's command; "{port}" is where."""
    if model is not None:
        return (
            sys.executable,
            "-m",
            "novainfer.server",
            model,
            "--port",
            "{port}",
            "--keys-file",
            str(keys_file),
            *flags,
        )
    code = f"from {__name__} import serve_steps; serve_steps({{port}}, {str(keys_file)!r}, {device_ms})"
    return (sys.executable, "-c", code)


def serve_steps(port: int, keys_file: str, device_ms: float) -> None:
    """A server of a device without a model, whose steps take `device_ms`; until a signal comes."""
    from novainfer import Engine, EngineConfig
    from novainfer.server.serve import run_server
    from novainfer.server.settings import ServerSettings
    from novainfer.testing import ByteTokenizer, FakeDevice

    device = FakeDevice(step_s=device_ms / 1e3)
    config = EngineConfig()
    settings = ServerSettings(port=port, keys_file=Path(keys_file))
    run_server(settings, lambda: Engine(config, device=device, tokenizer=ByteTokenizer()))


async def _rounds(
    asked: Load,
    beside: Load,
    version: Version,
    num_open: int,
    requests: int,
    repeat: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    await drive(asked, version, _prompts(ASKED, 8, "warm"), ASKED.max_tokens, 1)
    rounds = []
    for turn in range(repeat):
        alone = await drive(asked, version, _prompts(ASKED, requests, f"{turn} alone"), ASKED.max_tokens, 1)
        stop = asyncio.Event()
        other = asyncio.create_task(_keep_open(beside, version, num_open, turn, stop))
        await asyncio.sleep(WARM_UP_S)
        both = await drive(asked, version, _prompts(ASKED, requests, f"{turn} beside"), ASKED.max_tokens, 1)
        stop.set()
        counts = await other
        found = {"alone": _figures(alone.timelines), "beside": _figures(both.timelines), "other": dict(counts)}
        rounds.append(found)
        p95 = [found[way]["ttft_ms"]["p95"] for way in ("alone", "beside")]
        progress(f"round {turn + 1} of {repeat}: p95 of the first token {p95[0]:.1f} ms alone, {p95[1]:.1f} ms beside")
    return rounds


async def _keep_open(load: Load, version: Version, num_open: int, turn: int, stop: asyncio.Event) -> Counter[str]:
    """Have `num_open` requests open until `stop`; how many ended well, and how many were refused or failed."""
    counts: Counter[str] = Counter()
    numbers = itertools.count()

    async def client() -> None:
        while not stop.is_set():
            prompts = _prompts(BESIDE, 1, f"{turn} {next(numbers)}")
            [line] = (await drive(load, version, prompts, BESIDE.max_tokens, 1)).timelines
            counts["answered" if line.error is None else "refused" if "429" in line.error else "failed"] += 1
            if line.error is not None:
                await asyncio.sleep(REFUSED_WAIT_S)

    await asyncio.gather(*(client() for _ in range(num_open)))
    return counts


def _prompts(work: Workload, number: int, seed: str) -> list[list[int]]:
    """Such as no other round has: the prefix cache must not know them."""
    own = msgspec.structs.replace(work, name=f"{work.name} {seed}", num_requests=number)
    return own.prompts(VOCAB_SIZE, 0)


def _figures(lines: list[Timeline]) -> dict[str, Any]:
    times_s = first_tokens_s(line for line in lines if line.error is None)
    errors = sorted({line.error for line in lines if line.error is not None})
    return {"ttft_ms": percentiles_ms(times_s), "ttft_s": times_s, "errors": errors}


def _report(
    rounds: list[dict[str, Any]], model: str, *, num_open: int, requests: int, version: Version
) -> tuple[dict[str, Any], str]:
    times_s = {way: list(itertools.chain.from_iterable(one[way].pop("ttft_s") for one in rounds)) for way in WAYS}
    figures = {way: percentiles_ms(times_s[way]) for way in WAYS}
    by_round = [one["beside"]["ttft_ms"]["p95"] / one["alone"]["ttft_ms"]["p95"] for one in rounds]
    ratio = figures["beside"]["p95"] / figures["alone"]["p95"]
    errors = sorted({error for one in rounds for way in WAYS for error in one[way]["errors"]})
    target = Target(name="p95 of the first token, beside / alone", wanted=RATIO_MAX, measured=ratio, at_most=True)
    report = {
        "benchmark": "fairness",
        "machine": describe(),
        "model": model,
        "http": version,
        "open": num_open,
        "requests": requests,
        "ttft_ms": figures,
        "ratio_p95": ratio,
        "ratio_p95_of_rounds": statistics.median(by_round),
        "errors": errors,
        "rounds": rounds,
        "targets": targets_json([target]),
    }
    others: Counter[str] = sum((Counter(one["other"]) for one in rounds), Counter())
    said = ", ".join(f"{count} {what}" for what, count in sorted(others.items())) or "none ended"
    rows = [(f"beside {num_open} open" if way == "beside" else way, *figures[way].values()) for way in WAYS]
    title = f"{model}: first tokens of one key ({len(rounds)} x {requests} requests, {ASKED.title})"
    lines = [
        table(title, ("", "TTFT p50", "p95", "p99 ms"), rows),
        f"the other key's requests ({BESIDE.title}): {said}",
        f"p95 beside / alone, median of the rounds: {statistics.median(by_round):.2f}",
        *(f"error: {error}" for error in errors),
        targets_table([target]),
    ]
    return report, "\n".join(lines)
