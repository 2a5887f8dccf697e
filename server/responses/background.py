"""Responses that are made without their client: each in a task of its own, which ends with the server at the latest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from novainfer import Delta
from novainfer.server.http.errors import log_if_ours
from novainfer.server.openai.answering import Answer
from novainfer.server.openai.kept import Kept
from novainfer.server.openai.sse import TURN_BYTES
from novainfer.server.responses.run import Run
from novainfer.server.service import Service
from novainfer.server.store import Record


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


async def stop(service: Service, record: Record) -> None:
    """End what makes `record`, if anything does, and wait until its response says so."""
    if (task := record.task) is None:
        return
    await asyncio.sleep(0)  # a task that is cancelled before its first turn would close nothing
    if (kept := service.kept.get((record.id, record.owner))) is not None:
        kept.cancel()
    else:
        task.cancel()
    await asyncio.wait({task})


def tell_alone(service: Service, kept: Kept, run: Run) -> asyncio.Task[None]:
    """As `make_alone`, of an answer that the journal keeps, which is made by itself.

    One in the background goes on when nobody reads it.
    """
    if run.response.background:
        kept.enter()
    task = asyncio.create_task(_tell_alone(kept, run))
    service.background.add(task)
    task.add_done_callback(service.background.discard)
    return task


async def _tell_alone(kept: Kept, run: Run) -> None:
    at = 0

    def take(pieces: Sequence[Delta]) -> bool:
        nonlocal at
        at += len(pieces)
        tell(run, pieces)
        return True

    try:
        run.begin()
        while pieces := await kept.behind(at):
            take(pieces)
            await kept.forward(at, take)
        run.end()
    except asyncio.CancelledError:  # the server stops
        run.cancel()
    except Exception as error:
        run.error(error)
        kept.cancel()  # nothing, where that is what has ended
    finally:
        if run.response.background:
            kept.leave()


def tell(run: Run, pieces: Iterable[Delta]) -> None:
    """Write `pieces`, as far as they are wanted."""
    for piece in pieces:
        if run.is_over:
            break
        run.tally.add(piece)
        run.delta(piece)


async def _make_alone(answer: Answer, run: Run, first: asyncio.Task[Delta]) -> None:
    try:
        await make(answer, run, first)
    except asyncio.CancelledError:
        run.cancel()
    except Exception as error:
        log_if_ours(error, answer.generation.id)
        run.error(error)
