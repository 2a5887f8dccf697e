"""`novainfer bench roofline`: what bounds a model on this machine."""

from __future__ import annotations

import click

from novainfer.bench import machine
from novainfer.bench.cli.options import as_json_option, repeat_option
from novainfer.bench.report import emit


@click.command()
@repeat_option(3)
@as_json_option
def roofline(repeat: int, as_json: bool) -> None:
    """Measure the machine: read bandwidth and the peak of matrix products."""
    report, text = machine.roofline_report(repeat)
    emit(report, text, as_json)
