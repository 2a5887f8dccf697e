"""`novainfer doctor`: what this machine can do, and what stands in the way."""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec

from novainfer.server.cli.flags import Grouped, flag
from novainfer.server.cli.models import named_models
from novainfer.server.cli.options import set_up_logs, unknown_variables
from novainfer.server.cli.serve import engines_options, server_options, settings_from
from novainfer.server.settings import GENERAL

EXIT_UNFIT = 1
SIGNS = {"ok": "   ", "warning": "!  ", "failure": "!! "}
WIDTH = 10  # of a topic


@click.command(cls=Grouped)
@engines_options
@server_options
@flag(GENERAL, "--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
@click.pass_context
def doctor(ctx: click.Context, /, as_json: bool, **options: Any) -> int:
    """Say what this machine can do, what stands in the way of serving MODEL, and what to do about it.

    It takes the flags, the variables and the file that `novainfer serve` takes, and examines the machine for that
    server: the first thing to ask when something is wrong. Exit code 1: it would not start, or not answer right.
    """
    from novainfer.server.operate.doctor import Asked, Finding, examine

    set_up_logs(ctx, level="error")  # what a warning would say is a finding
    models = named_models(ctx, options)
    config, settings = settings_from(ctx, options)
    asked = Asked(
        config=config,
        settings=settings,
        models=tuple(models.values()),
        unknown_variables=tuple(unknown_variables(os.environ)),
    )

    def show(finding: Finding) -> None:
        click.echo(f"{SIGNS[finding.level]}{finding.topic:<{WIDTH}} {finding.text}")
        if finding.advice:
            click.echo(f"   {'':<{WIDTH}} -> {finding.advice}")

    report = examine(asked, on_finding=(lambda finding: None) if as_json else show)
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    return 0 if report.is_fit else EXIT_UNFIT
