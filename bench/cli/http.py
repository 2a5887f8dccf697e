"""`novainfer bench http`: what a streamed token costs, by where HTTP is spoken, and beside stock ASGI servers."""

from __future__ import annotations

import click

from novainfer.bench.cli.options import as_json_option, progress, repeat_option
from novainfer.bench.peers.run_asgi import SERVERS
from novainfer.bench.report import emit


@click.command()
@click.option("--api-processes", "ways", type=click.IntRange(0), multiple=True, default=(0, 1, 2), show_default=True)
@click.option(
    "--peer",
    "peers",
    type=click.Choice([*SERVERS]),
    multiple=True,
    help="Beside it, with the least app that sends the same; novainfer: our HTTP without the engine.",
)
@click.option("--requests", type=click.IntRange(1), default=256, show_default=True, help="Streams that are open.")
@click.option("--tokens", type=click.IntRange(2), default=100, show_default=True, help="Of each stream.")
@click.option(
    "--device-ms", type=click.FloatRange(0, min_open=True), default=20.0, show_default=True, help="Time of a step."
)
@click.option("--http", type=click.Choice(["h1", "h2"]), default="h1", show_default=True, help="h1: one stream each.")
@click.option("--connections", type=click.IntRange(1), default=1, show_default=True, help="That h2's streams share.")
@click.option("--tls/--no-tls", default=False, show_default=True)
@repeat_option(5)
@as_json_option
def http(
    ways: tuple[int, ...],
    peers: tuple[str, ...],
    requests: int,
    tokens: int,
    device_ms: float,
    http: str,
    connections: int,
    tls: bool,
    repeat: int,
    as_json: bool,
) -> None:
    """CPU time a streamed token, with HTTP in the engine's process, in API processes and in stock servers."""
    from novainfer.bench import http as bench

    version = next(known for known in ("h1", "h2") if known == http)
    report, text = bench.run(
        ways,
        peers,
        requests=requests,
        tokens=tokens,
        device_ms=device_ms,
        version=version,
        connections=connections,
        tls=tls,
        repeat=repeat,
        progress=progress,
    )
    emit(report, text, as_json)
