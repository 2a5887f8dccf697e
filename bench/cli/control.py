"""`novainfer bench control`: the event loop's CPU."""

from __future__ import annotations

from typing import Literal

import click

from novainfer.bench.cli.options import as_json_option, numbers, repeat_option
from novainfer.bench.report import emit


@click.command()
@repeat_option(5)
@click.option("--steps", type=click.IntRange(1), default=400, show_default=True, help="Steps measured each time.")
@click.option("--batches", default="16,64,128,256", show_default=True, help="Numbers of running requests.")
@click.option("--device-ms", type=click.FloatRange(0), default=0.0, show_default=True, help="Time that a step takes.")
@click.option("--worker", type=click.Choice(["thread", "process"]), default="thread", show_default=True)
@as_json_option
def control(
    repeat: int, steps: int, batches: str, device_ms: float, worker: Literal["thread", "process"], as_json: bool
) -> None:
    """CPU of the event loop per token and per step, over a device that computes nothing."""
    from novainfer.bench import control as run

    emit(*run.run(numbers(batches), steps, repeat, device_ms, worker), as_json)
