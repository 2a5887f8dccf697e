"""Responses that are made without their client: each in a task of its own, which ends with the server at the latest."""

from __future__ import annotations

import asyncio

from novainfer import Delta
from novainfer.server.http.errors import log_if_ours
from novainfer.server.openai.answering import Answer
from novainfer.server.openai.sse import TURN_BYTES
from novainfer.server.responses.run import Run
from novainfer.server.service import Service


async def make(answer: Answer, run: Run, first: asyncio.Task[Delta]) -> None:
    """Write all of `answer`, from its beginning on; its first delta is (or will be) in `first`.

    Raises what ends it early.
    """
    generation = answer.generation
    ended_by: BaseException | None = None
    try:
        run.begin()
        delta: Delta | None = await first
        unturned_bytes = 0
        while delta is not None:
            generation.note(delta)
            unturned_bytes += len(run.delta(delta))
            if unturned_bytes >= TURN_BYTES:
                unturned_bytes = 0
                await asyncio.sleep(0)
            delta = None if run.is_over else await anext(generation.deltas, None)
        run.end()
    except BaseException as error:
        ended_by = error
        raise
    finally:
        await generation.leave(first, ended_by)


def make_alone(service: Service, answer: Answer, run: Run, first: asyncio.Task[Delta]) -> asyncio.Task[None]:
    """`make` in a task of its own; whatever ends it is told by the response itself."""
    task = asyncio.create_task(_make_alone(answer, run, first))
    service.background.add(task)
    task.add_done_callback(service.background.discard)
    return task


async def stop(task: asyncio.Task[None]) -> None:
    """End what `make_alone` has begun, and wait until its response says so."""
    await asyncio.sleep(0)  # a task that is cancelled before its first turn would close nothing
    task.cancel()
    await asyncio.wait({task})


async def _make_alone(answer: Answer, run: Run, first: asyncio.Task[Delta]) -> None:
    try:
        await make(answer, run, first)
    except asyncio.CancelledError:
        run.cancel()
    except Exception as error:
        log_if_ours(error, answer.generation.id)
        run.error(error)
