"""`novainfer bench speculative`: guesses beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from novainfer.bench import machine
from novainfer.bench.cli.options import (
    as_json_option,
    fields_of,
    like_option,
    model_option,
    numbers,
    progress,
    repeat_option,
    told,
)
from novainfer.bench.report import emit


@click.command()
@like_option
@model_option
@repeat_option(3)
@click.option("--batches", default="1,4,16", show_default=True, help="Numbers of requests at once.")
@click.option("--num-speculative-tokens", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--draft-model",
    metavar="FOLDER",
    help='Drafts of this model, or hub id, instead of prompt lookup; "demo-draft" asks the demo model questions.',
)
@click.option("--max-tokens", type=click.IntRange(2), default=96, show_default=True, help="Tokens of each answer.")
@click.option("--option", "options", multiple=True, metavar="FIELD=VALUE", help="A field of EngineConfig.")
@as_json_option
def speculative(
    like: str,
    model: Path | None,
    repeat: int,
    batches: str,
    num_speculative_tokens: int,
    draft_model: str | None,
    max_tokens: int,
    options: Sequence[str],
    as_json: bool,
) -> None:
    """Guesses beside plain decoding: text that repeats, guesses that are wrong, and nothing to guess."""
    from novainfer.bench import offline
    from novainfer.bench import speculative as run

    is_demo = draft_model == "demo-draft"
    folder = str(model or ("demo" if is_demo else machine.find_checkpoint(like)))
    fields = fields_of(options)
    config: dict[str, Any] = {"num_speculative_tokens": num_speculative_tokens}
    if draft_model is None:
        config |= {"method": "ngram", "prompt_lookup_min": 2}
    else:
        config |= {"method": "draft_model", "model": draft_model}
    drafted = run.QUESTIONS if is_demo else run.WITH_A_DRAFT_MODEL
    workloads = run.WORKLOADS if draft_model is None else drafted
    commands = offline.ours(folder, fields), offline.ours(folder, {"speculative_config": config, **fields})
    measure = lambda: run.run(  # noqa: E731
        *commands,
        batches=numbers(batches),
        repeat=repeat,
        max_tokens=max_tokens,
        workloads=workloads,
        progress=progress,
    )
    emit(*told(measure), as_json)
