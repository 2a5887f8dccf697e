"""`novainfer bench startup`: from a new process to a warm model."""

from __future__ import annotations

from collections.abc import Sequence

import click

from novainfer.bench.cli.options import among, as_json_option, fields_of, progress, repeat_option, told
from novainfer.bench.report import emit
from novainfer.fsm.messages.mode import QUANTIZATIONS, UNQUANTIZED


@click.command()
@repeat_option(3)
@click.option("--model", default="demo", show_default=True)
@click.option("--quantizations", default="none", show_default=True, help="Of the weights, in turns: none,int8,int4.")
@click.option("--cached", is_flag=True, help="From packed weights that a start before, not counted, has kept.")
@click.option("--option", "options", multiple=True, metavar="FIELD=VALUE", help="A field of EngineConfig.")
@as_json_option
def startup(repeat: int, model: str, quantizations: str, cached: bool, options: Sequence[str], as_json: bool) -> None:
    """Seconds from a new process to a warm model, imports told apart."""
    from novainfer.bench import startup as run

    wanted = among(quantizations, (UNQUANTIZED, *QUANTIZATIONS), "quantization")
    fields = fields_of(options)
    measure = lambda: run.run(  # noqa: E731
        model, repeat, quantizations=wanted, cached=cached, options=fields, progress=progress
    )
    emit(*told(measure), as_json)
