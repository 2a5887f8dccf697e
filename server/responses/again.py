"""Responses that the journal keeps: made of pieces, here and after the server was started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from novainfer.reading import Reading, wanted_by
from novainfer.server.http.errors import StoreFull
from novainfer.server.journal.journal import Entry
from novainfer.server.journal.records import RESPONSE, Asked, Stored
from novainfer.server.openai.answering import Answer, AnswerAgain, reading_of
from novainfer.server.openai.decode import decode
from novainfer.server.openai.ids import Ids
from novainfer.server.openai.journaled import Resumed, go_on
from novainfer.server.openai.kept import PIECES_A_TURN, Kept
from novainfer.server.openai.protocol import Message
from novainfer.server.openai.replies import Tally
from novainfer.server.openai.rest import ended
from novainfer.server.responses.background import tell, tell_alone
from novainfer.server.responses.protocol import ResponseRequest
from novainfer.server.responses.run import Run
from novainfer.server.served import OfAnswers, ServedModel
from novainfer.server.service import Service
from novainfer.server.store import Record

KIND = RESPONSE


async def begin_kept(
    service: Service, model: ServedModel, written: tuple[Asked, Entry], answer: Answer, record: Record
) -> tuple[Kept, Run]:
    """Make the response that is `written` down into `record`; one that is to be followed is in the file by then."""
    journal, (asked, entry) = service.journal, written
    assert journal is not None
    is_in_background = bool(_body(asked).background)
    try:
        first = await (answer.first(0.0) if is_in_background else answer.first())
    except BaseException:
        journal.drop(entry)
        raise
    kept = Kept(service, asked, entry, model)
    kept.start(answer.generation, first, answer.reading)
    run = _make(service, kept, record)
    if not is_in_background:
        kept.expect_reader()
    if asked.is_stream:
        await journal.wait(entry)
    return kept, run


def open_again(service: Service, stored: Stored) -> Record:
    """A response that is to go on, before it does: it can be looked at, followed and cancelled."""
    record = service.store.open(stored.asked.id, stored.asked.owner, given=stored.asked.more, has_events=True)
    record.is_in_background = bool(_body(stored.asked).background)
    _run(stored.asked, None, record)
    return record


def resume_response(service: Service, stored: Stored, who: Resumed, record: Record) -> None:
    """Let a response go on; raises what ends it at once."""
    kept = go_on(service, stored, who, reading_again)
    if not _make(service, kept, record).response.background:
        kept.expect_reader()


def fail_response(stored: Stored, record: Record, error: Exception) -> None:
    """End one of which no more can be told than that `error` has ended it."""
    run = _run(stored.asked, None, record)
    with suppress(StoreFull):
        run.begin()
        run.error(error)


async def restore_response(service: Service, stored: Stored, model: OfAnswers, record: Record | None = None) -> None:
    """Keep a response that has ended, as it was; not where there is no room for it."""
    kept = await ended(service, stored, model)
    if record is None:
        record = open_again(service, stored)
    run = _run(stored.asked, model, record, lambda: kept.ended_s)
    with suppress(StoreFull):
        run.begin()
        for first in range(0, len(kept.pieces), PIECES_A_TURN):
            await asyncio.sleep(0)
            tell(run, kept.pieces[first : first + PIECES_A_TURN])
        if kept.error is None:
            run.end()
        else:
            run.error(kept.error)


def reading_again(model: OfAnswers, asked: Asked, tally: Tally) -> Reading | None:
    """What reads the answer of a response that is in the journal."""
    body = _body(asked)
    params = body.sampling_params({})  # by the model's own defaults no answer is read
    offer = body.chat([Message(role="user", content="")])
    return reading_of(model, wanted_by(params, offer, model.formats), 1, tally)


def _make(service: Service, kept: Kept, record: Record) -> Run:
    run = _run(kept.asked, kept.model, record, lambda: kept.ended_s)
    record.is_in_background = run.response.background
    record.task = tell_alone(service, kept, run)
    return run


def _run(asked: Asked, model: OfAnswers | None, record: Record, ended_s: Callable[[], float] = time.time) -> Run:
    """What makes the events of a response; without a model only such as need nothing that it said."""
    body, tally = _body(asked), Tally(1, 1)
    response = body.response(asked.id, created_at=asked.created, model=asked.model, store=True, params=asked.params)
    answer = AnswerAgain(None if model is None else reading_again(model, asked, tally), tally)
    return Run(response, answer, record, has_logprobs=body.has_logprobs, ids=Ids(asked.salt), now_s=ended_s)


def _body(asked: Asked) -> ResponseRequest:
    return decode(ResponseRequest, asked.body)[0]
