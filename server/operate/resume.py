"""What the journal holds when a server starts: answers that go on, or end with a sentence that says why they cannot.

Of several models each answer waits for its own one, as a request does that comes now; its client may be back meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from functools import partial

import msgspec

from novainfer import (
    EngineDraining,
    EngineOverloaded,
    InvalidParameter,
    ModelNotFound,
    ModelUnavailable,
    NovaInferError,
    RequestCancelled,
    ServerError,
)
from novainfer.fsm.messages.params import DURATION_S_MAX
from novainfer.server.anthropic import messages
from novainfer.server.http.errors import log_if_ours
from novainfer.server.journal.records import Stored, error_to_keep
from novainfer.server.openai import chat, completions
from novainfer.server.openai.generation import LEFT_OPEN
from novainfer.server.openai.journaled import Resumed, go_on, left_s
from novainfer.server.openai.kept import RETRY_S
from novainfer.server.responses import again
from novainfer.server.served import OfAnswers
from novainfer.server.service import Service
from novainfer.server.store import Record
from novainfer.server.waiting import Returning, Waiter

log = logging.getLogger("novainfer.server")

RESUMES_MAX = 3  # without a new token: what ends a server each time is not tried for ever


class NotResumed(ServerError):
    """The server was started again, and the answer does not go on."""

    code = "not_resumed"


async def resume(service: Service) -> None:
    """Begin with what the journal holds, if there is one, and then take requests.

    The only model of a server is ready; of several each may have to be waited for.
    """
    journal = service.journal
    if journal is None:
        return
    try:
        unended, restored = await journal.unended(), await journal.ended(again.KIND, service.store.max_responses)
        for counted in await journal.counted():
            (service.quotas if counted.kind == "key" else service.spending).restore(counted)
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        message = f"journal {service.settings.journal} is damaged ({error}): move it away, or name another"
        raise InvalidParameter(message, param="journal") from None
    num_unended = len(unended)
    unended = [stored for stored in unended if _may_go_on(service, stored, _check, restored)]
    await _restore(service, restored)
    failed: list[Stored] = []
    service.go_on = partial(_go_on_here, service)
    service.is_resuming = False  # and no request is taken before all of these go on: none of it lets the loop go
    resumed = [stored for stored in unended if _may_go_on(service, stored, _begin, failed)]
    await _restore(service, failed)
    if num_unended:
        log.info(
            "%d answers go on from the journal, %d of them when their model is there; %d cannot",
            *(len(resumed), len(service.returning), num_unended - len(resumed)),
        )


def _may_go_on(
    service: Service, stored: Stored, step: Callable[[Service, Stored], None], restored: list[Stored]
) -> bool:
    """Whether `step` has nothing against it; else it has ended, and is one of those to be told again."""
    try:
        step(service, stored)
    except Exception as error:
        _end(service, stored, error)
        if stored.asked.kind == again.KIND:
            restored.append(stored)
        return False
    return True


def _go_on_here(service: Service, stored: Stored) -> None:
    """Let an answer go on, or end, whose engine has ended though the server lives; what leaves it open is raised."""
    try:
        _check_tries(stored)
        _begin(service, stored)
    except LEFT_OPEN:
        raise
    except Exception as error:
        _end(service, stored, error)
    service.left_open.discard((stored.asked.id, stored.asked.owner))


async def _told_by(service: Service, names: set[str]) -> dict[str, OfAnswers]:
    """What makes texts of the tokens of these models, as far as they are served: none is loaded for it."""
    found: dict[str, OfAnswers] = {}
    if service.models is None:
        assert service.engine is not None, "it is ready"
        return {service.engine.model_info.name: service.tokens_of(service.engine)}
    for name in sorted(names & set(service.models.names)):
        try:
            async with service.tokenizer_of(service.models, name) as tokens:
                found[name] = tokens
        except ServerError as error:
            log.warning("responses of the model %s cannot be told: %s", name, error)
    return found


def _begin(service: Service, stored: Stored) -> None:
    """Let an answer go on, now or when its model is there; raises why it cannot."""
    asked, who = stored.asked, Resumed(stored.asked)
    is_here = service.model_now(who, asked.model) is not None
    record: Record | None = None
    try:
        record = again.open_again(service, stored) if asked.kind == again.KIND else None
        if is_here:
            _go_on(service, stored, who, record)
            return
    except Exception:
        who.close()
        if record is not None:
            record.drop()
        raise
    name = asked.id, asked.owner
    service.returning[name] = Returning(asked, asyncio.Event())
    task = asyncio.create_task(_go_on_later(service, stored, who, record))
    if record is not None:
        record.task = task
    service.background.add(task)
    task.add_done_callback(service.background.discard)
    task.add_done_callback(lambda _: service.returning.pop(name).is_over.set())


def _check(service: Service, stored: Stored) -> None:
    left_s(stored.asked)
    if not service.settings.resume:
        raise NotResumed("The server was started again without --resume, and the answer ends here")
    if not stored.asked.is_sought:
        raise NotResumed("The server was started again, and the client was told nothing that it could ask for")
    _check_tries(stored)


def _check_tries(stored: Stored) -> None:
    if stored.num_resumed >= RESUMES_MAX:
        raise NotResumed(f"The answer went on {stored.num_resumed} times, and the server ended before its next token")


def _go_on(service: Service, stored: Stored, who: Resumed, record: Record | None) -> None:
    """With the model that `who` has; raises what ends the answer at once."""
    assert service.journal is not None
    if stored.fingerprint != service.journal.fingerprints.get(stored.asked.model):
        what = "The server was started again with another model, other settings of it, or another version"
        raise NotResumed(f"{what}: the answer cannot go on as it began")
    if record is not None:
        again.resume_response(service, stored, who, record)
        return
    go_on(service, stored, who, READINGS[stored.asked.kind]).expect_reader()


async def _go_on_later(service: Service, stored: Stored, who: Resumed, record: Record | None) -> None:
    """Wait for the model, and go on; what ends the answer before that is told to who comes back for it."""
    try:
        await _wait_for_model(service, stored, who)
        _go_on(service, stored, who, record)
    except asyncio.CancelledError:
        stops = EngineDraining("The server is shutting down")
        error: NovaInferError = stops if service.is_draining else RequestCancelled("The request was cancelled")
        await _end_later(service, stored, error, record)
    except Exception as error:
        who.close()
        await _end_later(service, stored, error, record)


async def _wait_for_model(service: Service, stored: Stored, who: Resumed) -> None:
    """Room is waited for as long as the request may take; a load that fails is tried again for a while."""
    asked = stored.asked
    prefix, _, name = asked.id.partition("-")
    waiter = Waiter(asked.client, asked.owner, prefix, name or asked.id, asked.id)
    tries_until_s = time.monotonic() + service.settings.model_wait_timeout_s
    while True:
        try:
            most_s = left_s(asked)
            await service.model_again(who, asked.model, waiter, DURATION_S_MAX if most_s is None else most_s)
            return
        except EngineOverloaded:
            await asyncio.sleep(RETRY_S)
        except ModelUnavailable as error:
            if time.monotonic() >= tries_until_s:
                raise
            await asyncio.sleep(error.retry_after_s)


async def _end_later(service: Service, stored: Stored, error: Exception, record: Record | None) -> None:
    if not isinstance(error, LEFT_OPEN):
        _end(service, stored, error)
    if record is None:
        return
    told = await _told_by(service, {stored.asked.model}) if stored.error is not None else {}
    if (model := told.get(stored.asked.model)) is not None:
        await again.restore_response(service, stored, model, record)
    else:
        again.fail_response(stored, record, error)


def _end(service: Service, stored: Stored, error: Exception) -> None:
    """An answer has ended before it went on: that is what is told of it from now on."""
    assert service.journal is not None
    log_if_ours(error, stored.asked.id)
    stored.error, stored.ended_s = error_to_keep(error), time.time()
    service.journal.end_stored(stored, stored.error, stored.ended_s)


async def _restore(service: Service, stored: list[Stored]) -> None:
    """Responses that have ended can be asked for again."""
    told = await _told_by(service, {one.asked.model for one in stored})
    for one in stored:
        try:
            if (model := told.get(one.asked.model)) is None:
                raise ModelNotFound(f"there is no tokenizer of the model {one.asked.model!r} here")
            await again.restore_response(service, one, model)
        except Exception as error:
            log.warning("the response %s cannot be kept any longer: %s", one.asked.id, error)


READINGS = {kind.name: kind.reading for kind in (chat.JOURNALED, completions.JOURNALED, messages.JOURNALED)}
