"""`novainfer generate`: the answers to a file of records, in a file that the next run goes on with."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec
from tqdm import tqdm

from novainfer import EngineConfig, InvalidParameter, NovaInferError
from novainfer.server.cli.batch import Batch
from novainfer.server.cli.batch_output import BatchOutput
from novainfer.server.cli.batch_records import Defaults, Record, Result, digest_of
from novainfer.server.cli.flags import Grouped, flag
from novainfer.server.cli.options import engine_config, engine_options, set_up_logs
from novainfer.server.cli.serve import make_engine
from novainfer.server.loop import loop_factory

STDIO = Path("-")
EXIT_FAILURE = 1
BATCH = "Records"
WINDOW_PER_SEQ = 2  # requests in the engine for each that can run, so that a step never waits for the next line


@click.command(cls=Grouped)
@engine_options
@flag(
    BATCH,
    "--input",
    "-i",
    "--input-file",
    "input_path",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    default="-",
    help="JSONL of records. [default: standard input]",
)
@flag(
    BATCH,
    "--output",
    "-o",
    "--output-file",
    "output_path",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    default="-",
    help="JSONL of answers; what it holds already is not asked again, errors are. [default: standard output]",
)
@flag(BATCH, "--max-tokens", type=int, default=256, show_default=True, help="For records that do not say.")
@flag(BATCH, "--temperature", type=float, help="For records that do not say. [default: the model's own]")
@flag(BATCH, "--top-p", type=float, help="For records that do not say. [default: the model's own]")
@click.pass_context
def generate(ctx: click.Context, /, **options: Any) -> int:
    """Answer each line of a JSONL file with MODEL (a folder, a hub name, or the demo model).

    A record has "prompt", "messages" or "prompt_token_ids", fields of OpenAI's API, and perhaps an "id"; or the format
    of OpenAI's batches (custom_id, method, url, body), and is answered in theirs. Exit code 1: some got an error.
    """
    set_up_logs(ctx)
    config = engine_config(ctx, options)
    defaults = Defaults(max_tokens=options["max_tokens"], temperature=options["temperature"], top_p=options["top_p"])
    settings = msgspec.json.encode((str(config.model), config.generation_config, config.seed, defaults))
    input_path, output_path = options["input_path"], options["output_path"]
    with ExitStack() as stack:
        sink: BatchOutput | None = None
        if output_path != STDIO:
            if input_path.exists() and output_path.exists() and input_path.samefile(output_path):
                raise InvalidParameter(f"output {output_path} is the input: choose another file", param="output")
            sink = BatchOutput(output_path)
            stack.callback(sink.close)
        source = sys.stdin.buffer if input_path == STDIO else stack.enter_context(_open(input_path))
        if sink is not None and not sink.is_empty and not source.seekable():
            source = _spooled(source, stack)
        is_whole = source.seekable()  # it can be read twice
        begin = source.tell() if is_whole else 0
        digests = [record.digest for record in _records(source, settings)] if is_whole else []
        run = _Run(config, defaults, sink, total=len(digests) if is_whole else None)
        if is_whole:
            source.seek(begin)
            run.num_done = sink.num_answered(digests) if sink is not None else 0
        return run.all(_records(source, settings), digests)


class _Run:
    """One run over the records that have no answer yet."""

    def __init__(self, config: EngineConfig, defaults: Defaults, sink: BatchOutput | None, total: int | None) -> None:
        self._config = config
        self._defaults = defaults
        self._sink = sink
        self._total = total
        self.num_done = 0  # by earlier runs
        self._num_new = self._num_errors = 0

    def all(self, records: Iterator[Record], digests: list[str]) -> int:
        """Answer them; returns the exit code."""
        todo = _without(records, self._sink.answered() if self._sink is not None else Counter())
        first = next(todo, None)
        if first is not None:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                try:
                    runner.run(self._answer(chain([first], todo)))
                except KeyboardInterrupt:
                    again = " The same command goes on from here." if self._sink is not None else ""
                    click.echo(f"Stopped.{again}", err=True)
                    raise
        if self._sink is not None and self._total is not None:
            self._sink.finish(digests)
        if first is None:
            what = f"all {self.num_done} records have their answers" if self.num_done else "the input holds no record"
            click.echo(f"Nothing to do: {what}", err=True)
        if self._num_errors:
            again = "; the same command tries them again" if self._sink is not None else ""
            count = f"{self._num_errors} of {self.num_done + self._num_new} records"
            click.echo(f"Error: {count} got an error instead of an answer{again}", err=True)
        return EXIT_FAILURE if self._num_errors else 0

    async def _answer(self, records: Iterator[Record]) -> None:
        engine = make_engine(self._config)
        try:
            await engine.start()
            window = min(WINDOW_PER_SEQ * self._config.max_num_seqs, self._config.max_num_queued_reqs)
            with tqdm(total=self._total, initial=self.num_done, unit="record", file=sys.stderr, disable=None) as bar:

                def on_result(result: Result) -> None:
                    self._write(result)
                    self._num_new += 1
                    self._num_errors += result.is_error
                    bar.update()

                await Batch(engine, self._defaults, window).run(records, on_result)
        finally:
            await engine.aclose()

    def _write(self, result: Result) -> None:
        if self._sink is not None:
            self._sink.add(result)
            return
        try:
            sys.stdout.buffer.write(result.line + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
            raise NovaInferError("standard output was closed before all records were answered") from None


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidParameter(f"input {path} cannot be read: {error.strerror}", param="input") from None


def _spooled(source: BinaryIO, stack: ExitStack) -> BinaryIO:
    """All of `source`, in a file that can be read twice; `stack` closes it."""
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    shutil.copyfileobj(source, file)
    file.seek(0)
    return file


def _records(source: BinaryIO, settings: bytes) -> Iterator[Record]:
    """The lines that are not empty."""
    lines = (line for line in source if line.strip())
    return (Record(index, digest_of(line, settings), line) for index, line in enumerate(lines))


def _without(records: Iterator[Record], answered: Counter[str]) -> Iterator[Record]:
    """The records that have no answer yet; of equal ones, as many as are missing."""
    for record in records:
        if answered[record.digest] > 0:
            answered[record.digest] -= 1
        else:
            yield record
