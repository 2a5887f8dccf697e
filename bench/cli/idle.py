"""`novainfer bench idle`: how long a device waits."""

from __future__ import annotations

from typing import Literal

import click

from novainfer.bench.cli.options import as_json_option, repeat_option
from novainfer.bench.report import emit


@click.command()
@repeat_option(5)
@click.option("--steps", type=click.IntRange(10), default=300, show_default=True, help="Steps measured each time.")
@click.option("--requests", type=click.IntRange(1), default=256, show_default=True, help="Running requests.")
@click.option("--device-ms", type=click.FloatRange(0), default=10.0, show_default=True, help="Time that a step takes.")
@click.option("--worker", type=click.Choice(["thread", "process"]), default="process", show_default=True)
@click.option("--async-scheduling/--no-async-scheduling", default=None, help="Only so. [default: both, in turns]")
@as_json_option
def idle(
    repeat: int,
    steps: int,
    requests: int,
    device_ms: float,
    worker: Literal["thread", "process"],
    async_scheduling: bool | None,
    as_json: bool,
) -> None:
    """What share of its time the device waits for the next step, over a device that only sleeps."""
    from novainfer.bench import idle as run

    ways = (False, True) if async_scheduling is None else (async_scheduling,)
    emit(*run.run(requests, steps, repeat, device_ms, worker, ways), as_json)
