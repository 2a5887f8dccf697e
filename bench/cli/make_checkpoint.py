"""`novainfer bench make-checkpoint`: a random checkpoint of a known shape."""

from __future__ import annotations

from pathlib import Path

import click

from novainfer.bench import machine
from novainfer.bench.cli.options import as_json_option, like_option
from novainfer.bench.report import emit


@click.command("make-checkpoint")
@like_option
@click.option("--seed", type=int, default=0, show_default=True)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@as_json_option
def make_checkpoint(like: str, seed: int, folder: Path, as_json: bool) -> None:
    """Write a random checkpoint with exactly the shape of a known model to FOLDER."""
    machine.make_checkpoint(like, folder, seed)
    size = sum(file.stat().st_size for file in folder.iterdir())
    report = {"benchmark": "make-checkpoint", "like": like, "seed": seed, "folder": str(folder), "bytes": size}
    emit(report, f"{folder}: a random checkpoint of {like}'s shape, {size / 1e6:.0f} MB", as_json)
