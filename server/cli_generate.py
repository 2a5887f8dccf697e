"""`novainfer generate`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import click
from msgspec import UNSET
from tqdm import tqdm

from novainfer import EngineConfig
from novainfer.server.batch import Batch, BatchResult, Defaults, num_done
from novainfer.server.cli_options import engine_config, engine_options, set_up_logging
from novainfer.server.cli_serve import make_engine
from novainfer.server.loop import loop_factory

STDIO = Path("-")
WINDOW_PER_SEQ = 2  # requests in the engine for each that can run, so that a step never waits for the next line


@click.command()
@engine_options
@click.option(
    "--input",
    "-i",
    "--input-file",
    "input_path",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    default="-",
    help="JSONL of records; default: standard input.",
)
@click.option(
    "--output",
    "-o",
    "--output-file",
    "output_path",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    default="-",
    help="JSONL of answers; what it holds already is not done again. Default: standard output.",
)
@click.option("--max-tokens", type=int, default=256, show_default=True, help="For records that do not say.")
@click.option("--temperature", type=float, default=1.0, show_default=True, help="For records that do not say.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="For records that do not say.")
@click.pass_context
def generate(ctx: click.Context, /, **options: Any) -> int:
    """Answer each line of a JSONL file with MODEL (a folder, a hub name, or the demo model).

    A record has "prompt", "messages" or "prompt_token_ids", fields of OpenAI's API as it likes, and perhaps an "id".
    """
    set_up_logging(options)
    config = engine_config(ctx, options)
    defaults = Defaults(max_tokens=options["max_tokens"], temperature=options["temperature"], top_p=options["top_p"])
    input_path, output_path = options["input_path"], options["output_path"]
    done = num_done(output_path) if output_path != STDIO else 0
    with ExitStack() as stack:
        source = sys.stdin.buffer if input_path == STDIO else stack.enter_context(input_path.open("rb"))
        sink = sys.stdout.buffer if output_path == STDIO else stack.enter_context(output_path.open("ab"))
        total = None if input_path == STDIO else _count_records(input_path)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            try:
                num_errors = runner.run(_run(config, defaults, source, sink, done, total))
            except KeyboardInterrupt:
                click.echo("Stopped. The same command goes on from here.", err=True)
                raise
    if num_errors:
        click.echo(f"{num_errors} of the records got an error instead of an answer", err=True)
    return 0


async def _run(
    config: EngineConfig, defaults: Defaults, source: BinaryIO, sink: BinaryIO, done: int, total: int | None
) -> int:
    engine = make_engine(config)
    num_errors = 0
    try:
        await engine.start()
        window = min(WINDOW_PER_SEQ * config.max_num_seqs, config.max_num_queued_reqs)
        with tqdm(total=total, initial=done, unit="record", file=sys.stderr) as bar:

            def on_done(result: BatchResult) -> None:
                nonlocal num_errors
                num_errors += result.error is not UNSET
                bar.update()

            lines = islice(_records(source), done, None)
            await Batch(engine, defaults, window).run(lines, done, sink, on_done)
    finally:
        await engine.aclose()
    return num_errors


def _records(source: BinaryIO) -> Iterator[bytes]:
    """The lines that are not empty."""
    return (line for line in source if line.strip())


def _count_records(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in _records(file))
