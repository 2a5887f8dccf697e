"""Several prompts of one HTTP request as one stream of deltas, in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from novainfer import Delta

BUFFERED_MAX = 64  # deltas between the prompts and their one reader; the engine merges what waits behind them


async def merge_deltas(sources: list[AsyncGenerator[Delta, None]], n: int) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of `sources`, choice j of source i as index `i * n + j`.

    The first error of any source ends all of them and is raised here; so does closing this generator.
    """
    queue: asyncio.Queue[Delta | None] = asyncio.Queue(BUFFERED_MAX)

    async def pump(source: AsyncGenerator[Delta, None], first_index: int) -> None:
        async with aclosing(source):
            async for delta in source:
                delta.index += first_index
                await queue.put(delta)

    tasks = [asyncio.create_task(pump(source, i * n)) for i, source in enumerate(sources)]
    watcher = asyncio.create_task(_finish(tasks, queue))
    try:
        while (delta := await queue.get()) is not None:
            yield delta
        await watcher  # raises what ended a source
    finally:
        for task in (watcher, *tasks):
            task.cancel()
        await asyncio.gather(watcher, *tasks, return_exceptions=True)


async def _finish(tasks: list[asyncio.Task[None]], queue: asyncio.Queue[Delta | None]) -> None:
    """Wait for all sources, or the first that fails, then end the reader's loop and raise the failure."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    await queue.put(None)
    for task in done:
        task.result()
