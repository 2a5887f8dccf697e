"""`novainfer bench offline`: the library beside transformers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from novainfer.bench import machine
from novainfer.bench.cli.options import (
    NAMES,
    as_json_option,
    chosen_works,
    fields_of,
    like_option,
    model_option,
    progress,
    repeat_option,
    roof_measure,
    roofline_option,
    scale_option,
    told,
)
from novainfer.bench.report import emit
from novainfer.bench.workload import PREFIX, scaled


@click.command()
@like_option
@model_option
@repeat_option(3)
@click.option("--workloads", default=",".join(NAMES), show_default=True, help="Which of them.")
@click.option("--peers/--no-peers", default=True, help="transformers' generate in between.")
@click.option("--peer", "extra", multiple=True, metavar="NAME=COMMAND", help="Another system; {model} is its folder.")
@click.option("--option", "options", multiple=True, metavar="FIELD=VALUE", help="A field of EngineConfig.")
@click.option("--against", multiple=True, metavar="FIELD=VALUE", help="A second NovaInfer with this field, in turns.")
@click.option("--sampling", is_flag=True, help="Only what drawing costs: five ways to sample, beside greedy.")
@click.option("--beside-busy", is_flag=True, help="Only the workloads alone and beside a process that spins, in turns.")
@roofline_option
@scale_option
@as_json_option
def offline(
    like: str,
    model: Path | None,
    repeat: int,
    workloads: str,
    peers: bool,
    extra: Sequence[str],
    options: Sequence[str],
    against: Sequence[str],
    sampling: bool,
    beside_busy: bool,
    with_roof: bool,
    scale: int,
    as_json: bool,
) -> None:
    """The library beside transformers: four workloads, the prefix cache, memory.

    W1 one request; W2 32 requests; W3 eight long prompts; W4 sixteen with one long beginning.
    """
    from novainfer.bench import offline as run

    folder = model or machine.find_checkpoint(like)
    commands = {run.OURS: run.ours(str(folder), fields_of(options))}
    if sampling:
        from novainfer.bench import sampling as drawing

        work = scaled(drawing.BATCH, scale)
        emit(*told(lambda: drawing.run(commands[run.OURS], workload=work, repeat=repeat, progress=progress)), as_json)
        return
    if beside_busy:
        from novainfer.bench import busy

        chosen = chosen_works(workloads, scale)
        emit(*told(lambda: busy.run(commands[run.OURS], workloads=chosen, repeat=repeat, progress=progress)), as_json)
        return
    if against:
        commands[" ".join((run.OURS, *against))] = run.ours(str(folder), fields_of(options) | fields_of(against))
    if peers:
        commands[run.TRANSFORMERS] = run.transformers(str(folder))
    for item in extra:
        name, _, command = item.partition("=")
        commands[name] = shlex.split(command.replace("{model}", shlex.quote(str(folder))))
    report, text = told(
        lambda: run.run(
            folder,
            commands,
            measure_roof=roof_measure(with_roof),
            workloads=chosen_works(workloads, scale),
            prefix=scaled(PREFIX, scale),
            repeat=repeat,
            progress=progress,
        )
    )
    emit(report, text, as_json)
