"""Answers with a journal behind them: how one begins, and how it goes on in a server that was started again.

Streams are written down all, and those that are not streamed where their client says how it would ask for them again:
with an `Idempotency-Key`. Of that and of the body their id is made, so that the same request with the same key
finds the answer, and any other request does not.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import Chat, Delta, InvalidParameter, RequestTimeout, SamplingParams
from novainfer.reading import Reading
from novainfer.server.http.exchange import SCOPE_KEY, Exchange, Viewer, header
from novainfer.server.journal.journal import Entry
from novainfer.server.journal.records import Asked, Stored, committed_of
from novainfer.server.openai.answering import read_by
from novainfer.server.openai.generation import Generation, Origin
from novainfer.server.openai.kept import Kept
from novainfer.server.openai.kept_stream import KeptStream
from novainfer.server.openai.kind import Kind, MakeReading
from novainfer.server.openai.protocol import CommonRequest
from novainfer.server.openai.replies import Choice, Tally
from novainfer.server.served import ServedModel
from novainfer.server.service import Service
from novainfer.server.work import Work
from novainfer.thinking import with_thoughts

KEY_HEADER = "Idempotency-Key"
JOINERS = {"resp": "_"}  # of ids, where it is not "-"
_KEY = re.compile(rb"[\x20-\x7e]{1,255}")


class Begins(Protocol):
    """What waits for the first delta."""

    async def first(self) -> asyncio.Task[Delta]: ...


def keyed_id(service: Service, request: Request, prefix: str) -> str | None:
    """The id of the answer to a request that can be repeated; None where it has no key, or there is no journal.

    To be asked while the exchange has its body still.
    """
    value = header(request.scope, KEY_HEADER.lower().encode())
    if value is None or service.journal is None:
        return None
    if _KEY.fullmatch(value) is None:
        raise InvalidParameter(f"{KEY_HEADER} must be 1 to 255 printable ASCII characters", param=KEY_HEADER)
    exchange: Exchange = request.scope[SCOPE_KEY]
    return prefix + JOINERS.get(prefix, "-") + blake2b(value + bytes(1) + exchange.body, digest_size=16).hexdigest()


@asynccontextmanager
async def one_by_one(service: Service, request: Request, keyed: str | None) -> AsyncIterator[None]:
    """Requests that would have the same id begin one after the other, so that later ones find the answer of the first.

    The next one's turn is when the answer has begun (`Service.has_begun`), or nothing has come of it.
    """
    if keyed is None:
        yield
        return
    exchange: Exchange = request.scope[SCOPE_KEY]
    name = keyed, exchange.viewer.owner
    while (other := service.beginning.get(name)) is not None:
        await other.wait()
    own = service.beginning[name] = asyncio.Event()
    try:
        yield
    finally:
        if service.beginning.get(name) is own:
            service.has_begun(name)


def origin_of(
    service: Service, model: ServedModel, params: SamplingParams, num_prompts: int, *, is_wanted: bool
) -> Origin | None:
    """What a generation is to begin with so that another one can go on with it; None where there is no journal, or it
    is not wanted.
    """
    if service.journal is None or not is_wanted:
        return None
    draw = model.engine.draw_seed
    seeds = [draw() if params.seed is None else params.seed for _ in range(num_prompts)]
    return Origin(created=int(time.time()), seeds=seeds)


def check_stays(body: CommonRequest, origin: Origin | None) -> None:
    """Raise `InvalidParameter` where an answer is to go on without its client, and nothing would keep it."""
    if body.on_disconnect == "continue" and origin is None:
        needed = f"a server with a journal (--journal), for streams and for requests with an {KEY_HEADER}"
        raise InvalidParameter(f'on_disconnect "continue" needs {needed}', param="on_disconnect")


def written_down(
    service: Service,
    exchange: Exchange,
    kind: str,
    generation: Generation,
    origin: Origin,
    params: SamplingParams,
    prompts: Sequence[Any],
    *,
    is_stream: bool,
    is_sought: bool = True,
    stream_interval: int | None = None,
    more: bytes = b"",
) -> tuple[Asked, Entry]:
    """Put the request into the journal."""
    assert service.journal is not None
    asked = Asked(
        kind=kind,
        id=generation.id,
        owner=exchange.viewer.owner,
        client=exchange.client,
        model=exchange.model.name,
        created=origin.created,
        began_s=time.time(),
        body=exchange.asked,
        prompts=[prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt for prompt in prompts],
        params=params,
        seeds=origin.seeds,
        salt=secrets.token_bytes(16),
        more=more,
        user=exchange.user,
        is_stream=is_stream,
        is_sought=is_sought,
        stream_interval=stream_interval or service.settings.stream_interval,
    )
    return asked, service.journal.open(asked)


async def kept_answer(
    service: Service,
    exchange: Exchange,
    written: tuple[Asked, Entry],
    begins: Begins,
    generation: Generation,
    reading: Reading | None,
    kind: Kind,
) -> KeptStream | Response:
    """Make the answer that is `written` down, for a client that is sent it from its beginning on."""
    journal, (asked, entry), model = service.journal, written, exchange.model
    assert journal is not None
    kept = Kept(service, asked, entry, model)
    if not asked.is_stream:
        kept.start(generation, asyncio.ensure_future(anext(generation.deltas)), reading)
        return await whole(kept, kind)
    try:
        first = await begins.first()
    except BaseException:
        journal.drop(entry)
        raise
    kept.start(generation, first, reading)
    kept.expect_reader()
    has_ids = await journal.wait(entry)
    telling = await kind.tell(model, asked, exchange.request_id)
    return KeptStream(kept, *telling, service.settings, has_ids=has_ids, is_overflowed=generation.is_overflowed)


async def whole(kept: Kept, kind: Kind) -> Response:
    """The answer as one object, when all of it is there; raises what it ended with, once nothing of it is left."""
    tally = Tally(len(kept.asked.prompts), kept.asked.params.n)
    reading = kind.reading(kept.model, kept.asked, tally)
    choices = [Choice() for _ in range(kept.asked.num_choices)]
    at = 0

    def take(pieces: Sequence[Delta]) -> bool:
        nonlocal at
        at += len(pieces)
        for piece in pieces:
            tally.add(piece)
            for read, said in read_by(reading, piece):
                choices[read.index].add(read, said)
        return True

    with kept.reader():
        try:
            while pieces := await kept.behind(at):
                take(pieces)
                await kept.forward(at, take)
        except Exception:
            await kept.made()
            raise
        return Response(await kind.whole(kept.model, kept.asked, choices, tally), media_type="application/json")


# ---- after a restart -----------------------------------------------------------------------------------------------


class Resumed:
    """For whom an answer goes on: what `Generation` wants to know of an exchange."""

    def __init__(self, asked: Asked) -> None:
        self.viewer = Viewer(owner=asked.owner)
        self.client = asked.client
        self.user = asked.user
        self.work = Work()
        self.work.leave_behind("", {})
        self.model: ServedModel

    def take(self, model: ServedModel) -> None:
        """It is of this model."""
        self.model = model

    def close(self) -> None:
        """It ends before the answer goes on: let its model go, if it has one."""
        if self.has_model:
            self.model.release()

    @property
    def has_model(self) -> bool:
        """Whether its model is there."""
        return hasattr(self, "model")


def left_s(asked: Asked) -> float | None:
    """For how long it may still go on, where it has a deadline; raises `RequestTimeout`."""
    timeout_s = asked.params.timeout_s
    if timeout_s is None:
        return None
    found = timeout_s - (time.time() - asked.began_s)
    if found <= 0:
        raise RequestTimeout(f"The request took longer than {timeout_s:g} s, the server's restart included")
    return found


def go_on(service: Service, stored: Stored, who: Resumed, make_reading: MakeReading) -> Kept:
    """Let the answer go on from its last token, with the model that `who` has; raises what ends it at once.

    That is released with its end, or, where this raises, by `Resumed.close`.
    """
    asked, journal, model = stored.asked, service.journal, who.model
    assert journal is not None
    params = msgspec.structs.replace(asked.params, max_queue_s=None, timeout_s=left_s(asked))
    is_chat = any(isinstance(prompt, Chat) for prompt in asked.prompts)  # what the engine is told of in tokens, below
    params = with_thoughts(params, model.engine.model_info.formats, is_chat=is_chat)
    n, prompts = asked.params.n, list(asked.prompts)
    for said in stored.said:
        if said.begun is not None and said.begun.prompt_token_ids is not None:
            prompts[said.index // n] = said.begun.prompt_token_ids  # as it was rendered then
    committed = [
        [committed_of(stored.said, first + choice) for choice in range(n)] for first in range(0, asked.num_choices, n)
    ]
    origin = Origin(created=asked.created, seeds=asked.seeds, committed=committed)
    kept = Kept(service, asked, journal.reopen(stored), model)
    prefix, _, name = asked.id.partition("-")

    def make() -> tuple[Generation, Reading | None]:
        generation = Generation(service, who, prefix, name or asked.id, prompts, params, asked.id, origin)
        reading = make_reading(model, asked, generation.tally)
        return generation, reading

    kept.go_on(stored.said, make)
    return kept
