"""`novainfer bench all`: everything, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from novainfer.bench import machine
from novainfer.bench.cli.options import as_json_option, like_option, progress, repeat_option, told
from novainfer.bench.cli.serve import serve_folder
from novainfer.bench.report import emit


@click.command("all")
@like_option
@repeat_option(3)
@as_json_option
def run_all(like: str, repeat: int, as_json: bool) -> None:
    """Everything, one after the other; about a quarter of an hour on two cores."""
    from novainfer.bench import control, offline, startup
    from novainfer.bench import serve as served

    folder = machine.find_checkpoint(like)
    commands = {offline.OURS: offline.ours(str(folder)), offline.TRANSFORMERS: offline.transformers(str(folder))}
    work = served.W5
    parts: dict[str, Callable[[], tuple[dict[str, Any], str]]] = {
        "roofline": lambda: machine.roofline_report(repeat),
        "control": lambda: control.run(repeat=repeat),
        "startup": lambda: startup.run(repeat=repeat),
        "offline": lambda: offline.run(
            folder, commands, measure_roof=machine.measure_roof, repeat=repeat, progress=progress
        ),
        "serve": lambda: serve_folder(folder, served.VERSIONS, work, served.CLIENTS, repeat),
    }
    report: dict[str, Any] = {"benchmark": "all", "machine": machine.describe()}
    for name, part in parts.items():
        progress(f"---- {name}")
        report[name], text = told(part)
        click.echo(text + "\n")
    emit(report, "", as_json)
