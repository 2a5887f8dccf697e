"""Several prompts of one HTTP request as one stream of deltas, in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from novainfer import Delta

BEGUN_A_TURN = 16  # prompts: a thousand at once would hold the loop for a tenth of a second
BUFFERED_MAX = 64  # deltas between the prompts and their one reader; the engine merges what waits behind them


async def merge_deltas(sources: Sequence[AsyncGenerator[Delta, None]], n: int) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of `sources`, choice j of source i as index `i * n + j`.

    The first error of any source ends all of them and is raised here; so does closing this generator. `turns_to_begin`
    says after how many turns of the loop all have begun.
    """
    queue: asyncio.Queue[Delta | None] = asyncio.Queue(BUFFERED_MAX)
    tasks: list[asyncio.Task[None]] = []

    async def pump(source: AsyncGenerator[Delta, None], first_index: int) -> None:
        async with aclosing(source):
            async for delta in source:
                delta.index += first_index
                await queue.put(delta)

    async def run() -> None:
        """Begin all, some a turn, and wait for all or the first that fails; then end the reader's loop."""
        for i, source in enumerate(sources):
            if i and i % BEGUN_A_TURN == 0:
                await asyncio.sleep(0)
                if any(task.done() and task.exception() is not None for task in tasks):
                    break
            tasks.append(asyncio.create_task(pump(source, i * n)))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        await queue.put(None)
        for task in done:
            task.result()

    runner = asyncio.create_task(run())
    try:
        while (delta := await queue.get()) is not None:
            yield delta
        await runner  # raises what ended a source
    finally:
        runner.cancel()
        try:
            await asyncio.gather(runner, return_exceptions=True)
            for at in range(0, len(tasks), BEGUN_A_TURN):
                some = tasks[at : at + BEGUN_A_TURN]
                for task in some:
                    task.cancel()
                await asyncio.gather(*some, return_exceptions=True)
        finally:  # cancelled once more: none may go on, though all end in one turn then
            for task in tasks:
                task.cancel()


def turns_to_begin(num_sources: int) -> int:
    """Turns of the loop until `merge_deltas` has begun all of so many."""
    return 2 + num_sources // BEGUN_A_TURN
