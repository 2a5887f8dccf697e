"""How a client that was cut off finds its answer again: by the last event that it has, its key, or its address."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response

from novainfer import InvalidParameter
from novainfer.server.http.errors import AnswerNotFound
from novainfer.server.http.exchange import SCOPE_KEY, Exchange, header
from novainfer.server.journal.journal import Journal
from novainfer.server.journal.records import Stored, Told
from novainfer.server.openai.coming import with_signs_of_life
from novainfer.server.openai.journaled import whole
from novainfer.server.openai.kept import Kept, error_again
from novainfer.server.openai.kept_stream import LAST_EVENT_ID, Cursor, KeptStream, cursor_of
from novainfer.server.openai.kind import Kind
from novainfer.server.served import OfAnswers
from novainfer.server.service import Service

Rest = KeptStream | Response


async def rest_for(service: Service, request: Request, kind: Kind, keyed: str | None) -> Rest | None:
    """What a client lacks that names its last event, or repeats its request, whose answer has the id `keyed`; None
    where it does neither, or there is no journal. What ended badly is not repeated: it is made anew.
    """
    if service.journal is None:
        return None
    if (value := header(request.scope, LAST_EVENT_ID.encode())) is not None:
        answer_id, has = cursor_of(value.decode("latin-1"))
        return await _known(service, request, kind, answer_id, has)
    if keyed is not None:
        exchange: Exchange = request.scope[SCOPE_KEY]
        owner = exchange.viewer.owner
        async with AsyncExitStack() as stack:
            kept = await _find(service, exchange, kind, keyed, owner, stack, is_well=True)
            if kept is not None:
                service.has_begun((keyed, owner))
                return await _told(service, request, kept, kind, Cursor())
    return None


async def follow(service: Service, request: Request, kind: Kind) -> Rest:
    """The answer that the path names; of a stream what is behind the last event that the client names, if it does."""
    answer_id, has = request.path_params["answer_id"], Cursor()
    if (value := header(request.scope, LAST_EVENT_ID.encode())) is not None:
        named, has = cursor_of(value.decode("latin-1"))
        if named != answer_id:
            raise InvalidParameter(f"Last-Event-ID is of another answer than {answer_id[:80]!r}", param="Last-Event-ID")
    return await _known(service, request, kind, answer_id, has)


async def _told(service: Service, request: Request, kept: Kept, kind: Kind, has: Cursor) -> Rest:
    """As it was asked for: as a stream, or whole."""
    if not kept.asked.is_stream:
        return await whole(kept, kind)
    exchange: Exchange = request.scope[SCOPE_KEY]
    with kept.reader():
        telling = await kind.tell(kept.model, kept.asked, exchange.request_id)
        return KeptStream(kept, *telling, service.settings, has)


async def _known(service: Service, request: Request, kind: Kind, answer_id: str, has: Cursor) -> Rest:
    exchange: Exchange = request.scope[SCOPE_KEY]
    async with AsyncExitStack() as stack:
        kept = await _find(service, exchange, kind, answer_id, exchange.viewer.sees, stack)
        if kept is None:
            why = "it never was, is kept no longer, or this server has no journal (--journal)"
            raise AnswerNotFound(f"There is no answer with id {answer_id[:100]!r} to be told again: {why}")
        return await _told(service, request, kept, kind, has)


async def _find(
    service: Service,
    exchange: Exchange,
    kind: Kind,
    answer_id: str,
    sees: str | None,
    stack: AsyncExitStack,
    *,
    is_well: bool = False,
) -> Kept | None:
    """The answer of this id, as `Journal.find` sees it; where it `is_well`, no error has ended it.

    One that waits for its model is waited for. What makes texts of tokens is there until `stack` ends.
    """
    service.check_open()
    for (name, owner), returning in list(service.returning.items()):
        if name == answer_id and sees in (None, owner) and returning.asked.kind == kind.name:
            over = returning.is_over.wait()
            await (with_signs_of_life(exchange, service.settings, over) if returning.asked.is_stream else over)
            service.check_open()
    for (name, owner), kept in list(service.kept.items()):
        if (name, owner) in service.left_open:
            continue  # somebody reads the end of it still
        if name == answer_id and sees in (None, owner) and kept.asked.kind == kind.name:
            return kept if kept.error is None or not is_well else None
    if (journal := service.journal) is None:
        return None
    for _ in range(2):  # it may have begun, or ended, while the first look was under way
        stored = await journal.find(answer_id, sees)
        if stored is None or stored.asked.kind != kind.name:
            return None
        if stored.ended_s is not None:
            break
        if await _goes_on(service, journal, stored):
            return await _find(service, exchange, kind, answer_id, sees, stack, is_well=is_well)
    else:
        service.check_open()  # or the next server goes on with it
        return None
    if is_well and stored.error is not None:
        return None
    return await ended(
        service, stored, await stack.enter_async_context(service.tokens_for(exchange, stored.asked.model))
    )


async def _goes_on(service: Service, journal: Journal, stored: Stored) -> bool:
    """Whether it is to be looked for among those that go on: it is one of them, or is about to be."""
    name = answer_id, owner = stored.asked.id, stored.asked.owner
    left = service.left_open.find(name, stored.serial)
    if left is None:
        return name not in service.left_open and (name in service.kept or name in service.returning)
    if not left.made.done():  # its name is not free yet
        await asyncio.wait({left.made})
        return True
    now = await journal.find(answer_id, owner)  # it may have gone on since, and been left open again
    service.check_open()
    if now is None or service.left_open.find(name, now.serial) is not left:
        return True
    assert service.go_on is not None, "requests are taken"
    service.go_on(now)
    return True


async def ended(service: Service, stored: Stored, model: OfAnswers) -> Kept:
    """An answer as it was."""
    kept = Kept(service, stored.asked, None, model)
    await kept.tell_again(stored.said)
    kept.is_over, kept.ended_s = True, stored.ended_s or 0.0
    kept.error = None if stored.error is None else error_again(Told(stored.error))
    return kept
