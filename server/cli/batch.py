"""Runs the records of a batch through an engine: many at a time, and their results in the order of the input.

A record that cannot be used, or that fails, gets an error in its place; the others go on. An engine that dies ends the
batch: what it did not answer is left for the next run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing

from novainfer import EngineClosed, EngineDead, EngineOverloaded, NovaInferError
from novainfer.reading import Reading, naming_tools
from novainfer.server.cli.batch_records import Answered, Defaults, Record, Result, error_line, parse, result_line
from novainfer.server.engine import ServedEngine
from novainfer.server.openai.answering import read_by
from novainfer.server.openai.replies import Choice, Tally

ADMISSION_TRIES_MAX = 100  # against an engine that is full: the window below keeps that from happening by itself


class Batch:
    """Runs records through an engine, at most `window` at a time."""

    def __init__(self, engine: ServedEngine, defaults: Defaults, window: int) -> None:
        self._engine = engine
        self._defaults = defaults
        self._window = window

    async def run(self, records: Iterator[Record], on_result: Callable[[Result], None]) -> None:
        """Answer `records`; `on_result` takes each result as soon as those before it have gone.

        Raises what `on_result` raises, and `EngineDead` or `EngineClosed` when there is no engine any more.
        """
        pending: list[asyncio.Task[Result]] = []
        try:
            for record in records:
                pending.append(asyncio.create_task(self._answer(record)))
                if len(pending) >= self._window:
                    await asyncio.wait([pending[0]])
                    _pass_on(pending, on_result)
            while pending:
                await asyncio.wait([pending[0]])
                _pass_on(pending, on_result)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _answer(self, record: Record) -> Result:
        try:
            for attempt in range(ADMISSION_TRIES_MAX):
                try:
                    return await self._generate(record)
                except EngineOverloaded as error:
                    if attempt == ADMISSION_TRIES_MAX - 1:
                        raise
                    await asyncio.sleep(error.retry_after_s)
            raise AssertionError("unreachable")
        except (EngineDead, EngineClosed):
            raise
        except NovaInferError as error:
            return Result(record, error_line(record, error), is_error=True)

    async def _generate(self, record: Record) -> Result:
        info = self._engine.model_info
        request = parse(record, self._defaults, info.sampling_defaults, info.formats)
        params, wanted, is_held_by_tools = request.asked
        choices, tally = [Choice() for _ in range(params.n)], Tally(1, params.n)
        reading = None if wanted is None else Reading(wanted, self._engine.vocabulary, params.n, tally)
        deltas = self._engine.generate(request.prompt, params, request_id=f"batch-{record.index}")
        with naming_tools(is_held_by_tools=is_held_by_tools):
            async with aclosing(deltas):
                async for delta in deltas:
                    tally.add(delta)
                    for read, pieces in read_by(reading, delta):
                        choices[read.index].add(read, pieces)
                    if reading is not None and reading.is_over:
                        break
        answered = Answered(choices, tally.usage(), info.name)
        return Result(record, result_line(record, request, answered), is_error=False)


def _pass_on(pending: list[asyncio.Task[Result]], on_result: Callable[[Result], None]) -> None:
    num_done = 0
    while num_done < len(pending) and pending[num_done].done():
        num_done += 1
    done, pending[:num_done] = pending[:num_done], []
    for task in done:
        on_result(task.result())
