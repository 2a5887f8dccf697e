"""A server under load, over HTTP/1.1 and HTTP/2 in turns; and, with the model's folder, beside its peers.

Given an address, a running server is measured. Given a folder, a server is started for it in a process of its own;
then the same prompts go through transformers' `generate` in between (one padded batch, the best it can do), and the
roofline is measured too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import statistics
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from novainfer.bench.client import Origin, Version
from novainfer.bench.ideal import Geometry, Roof, ideal_served_s
from novainfer.bench.load import Load, drive
from novainfer.bench.machine import describe
from novainfer.bench.offline import WARM_UP, transformers
from novainfer.bench.peers.launch import Server, ServerError
from novainfer.bench.report import table
from novainfer.bench.statistic import median_ratio, medians, percentiles_ms, summary
from novainfer.bench.worker import Child, Task
from novainfer.bench.workload import Workload

W5 = Workload(name="W5", title="32 requests, 128 in, 64 out", num_requests=32, prompt_len=128, max_tokens=64)
CLIENTS = 16
VERSIONS: tuple[Version, ...] = ("h1", "h2")
NAMES = {"h1": "HTTP/1.1", "h2": "HTTP/2", "transformers": "transformers generate"}
VOCAB_SIZE = 256  # prompts are random bytes: ids that any model has
ANSWER_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 300.0


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder at hand makes possible: transformers in a child, and the roofline."""

    model_dir: Path
    child: Child
    measure_roof: Callable[[], Roof]


def run(
    url: str,
    *,
    api_key: str | None = None,
    versions: Sequence[Version] = VERSIONS,
    workload: Workload = W5,
    clients: int = CLIENTS,
    repeat: int = 3,
    peer: Peer | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its tables, of the server at `url`; raises ClickException when none answers there."""
    load = find_model(url, api_key)
    runs: dict[str, list[dict[str, Any]]] = {}
    roofs = [peer.measure_roof()] if peer else []
    for version in versions:  # connections, caches and code paths are warm before anything counts
        asyncio.run(drive(load, version, [[1, 2, 3, 4]], 2, 1))
    if peer:
        peer.child.run(WARM_UP)
    for repetition in range(repeat):
        shift = repetition % len(versions)
        for version in [*versions[shift:], *versions[:shift]]:
            # Other prompts for each: the prefix cache of the server must not know them.
            prompts = workload.prompts(VOCAB_SIZE, repetition * len(VERSIONS) + VERSIONS.index(version))
            found = asyncio.run(drive(load, version, prompts, workload.max_tokens, clients))
            record = summary(found.timelines, found.wall_s) | {"request_ms": percentiles_ms(found.whole_s)}
            record["error_messages"] = sorted({line.error for line in found.timelines if line.error})[:3]
            runs.setdefault(version, []).append(record)
            progress(f"{workload.name} #{repetition + 1} {NAMES[version]}: {record['output_tok_s']:.1f} output tok/s")
        if peer:
            prompts = workload.prompts(VOCAB_SIZE, repetition * len(VERSIONS))
            result = peer.child.run(Task(prompts=prompts, max_tokens=workload.max_tokens))
            runs.setdefault("transformers", []).append(summary(result.timelines, result.wall_s))
            roofs.append(peer.measure_roof())
    report: dict[str, Any] = {
        "benchmark": "serve",
        "url": url,
        "model": load.model,
        "machine": describe(),
        "repeat": repeat,
        "workload": {"title": workload.title, "clients": clients},
        "systems": {name: medians(records) | {"runs": records} for name, records in runs.items()},
    }
    if peer:
        _compare(report, runs, workload, clients, Geometry.read(peer.model_dir), roofs)
    return report, render(report)


def _compare(
    report: dict[str, Any],
    runs: dict[str, list[dict[str, Any]]],
    workload: Workload,
    clients: int,
    geometry: Geometry,
    roofs: Sequence[Roof],
) -> None:
    """Add the ratio to transformers and the share of the roofline of each system."""
    ideals = [ideal_served_s(workload, clients, geometry, roof) for roof in roofs[1:]]
    theirs = [record["output_tok_s"] for record in runs["transformers"]]
    for name, records in runs.items():
        system = report["systems"][name]
        system["ratio_to_transformers"] = median_ratio([r["output_tok_s"] for r in records], theirs)
        if name != "transformers":  # one batch of all is another shape than waves of `clients`
            system["share_of_roofline"] = median_ratio(ideals, [r["wall_s"] for r in records])
    report["ideal_s"] = statistics.median(ideals)
    report["roofline"] = [msgspec.to_builtins(roof) for roof in roofs]


def render(report: dict[str, Any]) -> str:
    """One line for each protocol and peer."""
    rows = []
    for name, found in report["systems"].items():
        ttft, itl = found["ttft_ms"], found["itl_ms"]
        rows.append(
            (
                NAMES[name],
                found["output_tok_s"],
                found["total_tok_s"],
                *(ttft[p] for p in ("p50", "p95", "p99")),
                *(itl[p] for p in ("p50", "p95", "p99")),
                found["errors"],
                found.get("ratio_to_transformers"),
                found.get("share_of_roofline"),
            )
        )
    header = (
        *("", "out tok/s", "total tok/s", "TTFT p50", "p95", "p99 ms", "ITL p50", "p95", "p99 ms", "errors"),
        *("x transformers", "of roof"),
    )
    work = report["workload"]
    title = f"{report['model']} at {report['url']}: {work['title']}, {work['clients']} clients, {report['repeat']} x"
    messages = {message for found in report["systems"].values() for message in found.get("error_messages", [])}
    return "\n".join([table(title, header, rows), *(f"error: {message}" for message in sorted(messages))])


def find_model(url: str, api_key: str | None) -> Load:
    """The first model that the server names."""
    url = url.rstrip("/")
    try:
        origin = Origin.parse(url)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    context = ssl._create_unverified_context() if origin.tls else None
    request = urllib.request.Request(
        f"{url}/v1/models", headers={"authorization": f"Bearer {api_key}"} if api_key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S, context=context) as answer:
            model = json.load(answer)["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise click.ClickException(f"no server answers at {url}/v1/models: {error}") from None
    return Load(origin=origin, model=model, api_key=api_key)


@contextlib.contextmanager
def started(model_dir: Path) -> Iterator[str]:
    """A server of this model on a free port, in a process of its own; gives its address."""
    wait_policy = os.environ.get("OMP_WAIT_POLICY", "passive")
    with Server(our_server(str(model_dir)), {"OMP_WAIT_POLICY": wait_policy}) as server:
        try:
            server.wait_until_ready(READY_TIMEOUT_S)
        except ServerError as error:
            raise click.ClickException(f"the server did not start: {error}") from None
        yield server.url


def our_server(model: str, *flags: str) -> tuple[str, ...]:
    """The command that serves `model` with NovaInfer; "{port}" is where."""
    return (sys.executable, "-m", "novainfer.server", model, "--port", "{port}", *flags)


@contextlib.contextmanager
def peer_of(model_dir: Path, measure_roof: Callable[[], Roof]) -> Iterator[Peer]:
    """transformers on the same checkpoint, ready."""
    with Child(transformers(str(model_dir))) as child:
        yield Peer(model_dir=model_dir, child=child, measure_roof=measure_roof)
