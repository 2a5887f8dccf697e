"""`novainfer bench peers-table`: one table of several runs of `bench peers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from novainfer.bench.cli.options import as_json_option, draw, picture_option
from novainfer.bench.report import emit


@click.command("peers-table")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@picture_option
@as_json_option
def peers_table(files: Sequence[Path], picture: Path | None, as_json: bool) -> None:
    """One table of several runs of `bench peers`: FILES end with the line that --json wrote, the newest last."""
    from novainfer.bench.peers.report import MergeError, merged, render, targets
    from novainfer.bench.report import targets_json

    reports = []
    for file in files:
        try:
            reports.append(json.loads(file.read_text(encoding="utf-8").strip().splitlines()[-1]))
        except (ValueError, IndexError):
            raise click.BadParameter(
                f"the last line of {file} must be the JSON of a report", param_hint="FILES"
            ) from None
    try:
        report = merged(reports)
    except MergeError as error:
        raise click.BadParameter(str(error), param_hint="FILES") from None
    promised = targets(report)
    report["targets"] = targets_json(promised)
    draw(report, picture)
    emit(report, render(report, promised), as_json)
