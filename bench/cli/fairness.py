"""`novainfer bench fairness`: what one key can do to another."""

from __future__ import annotations

import click

from novainfer.bench.cli.options import as_json_option, progress, repeat_option
from novainfer.bench.report import emit


@click.command()
@click.argument("model", required=False)
@click.option(
    "--device-ms",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="Time that a step takes, where there is no MODEL.",
)
@click.option("--open", "num_open", type=click.IntRange(1), default=100, show_default=True, help="Of the other key.")
@click.option("--requests", type=click.IntRange(1), default=40, show_default=True, help="Of the key that is timed.")
@click.option("--http", type=click.Choice(["h1", "h2"]), default="h2", show_default=True)
@click.option(
    "--flag", "flags", multiple=True, help="A flag of MODEL's server, as in --max-num-seqs=64; several times."
)
@repeat_option(3)
@as_json_option
def fairness(
    model: str | None,
    device_ms: float,
    num_open: int,
    requests: int,
    http: str,
    flags: tuple[str, ...],
    repeat: int,
    as_json: bool,
) -> None:
    """The first tokens of one key, alone and beside another key with many requests.

    Of MODEL (a folder, or `demo`), or of a device that takes the same time for each step.
    """
    from novainfer.bench import fairness as run

    version = next(known for known in ("h1", "h2") if known == http)
    report, text = run.run(
        model,
        device_ms=device_ms,
        num_open=num_open,
        requests=requests,
        repeat=repeat,
        version=version,
        flags=flags,
        progress=progress,
    )
    emit(report, text, as_json)
