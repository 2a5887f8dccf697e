"""`novainfer bench recorder`: what the flight recorder costs."""

from __future__ import annotations

import click

from novainfer.bench.cli.options import as_json_option, numbers, repeat_option
from novainfer.bench.report import emit


@click.command()
@repeat_option(7)
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="Steps measured each time.")
@click.option("--batches", default="1,32,256", show_default=True, help="Numbers of running requests.")
@click.option("--device-ms", type=click.FloatRange(0), default=10.0, show_default=True, help="Time that a step takes.")
@as_json_option
def recorder(repeat: int, steps: int, batches: str, device_ms: float, as_json: bool) -> None:
    """What the flight recorder costs the event loop, per step and per token."""
    from novainfer.bench import recorder as run

    emit(*run.run(numbers(batches), steps, repeat, device_ms), as_json)
