"""The model of a request while it comes up: how long it is waited for, and what a stream's client sees meanwhile.

Within seconds a request has its model, or an error with a status. A stream that waits for longer has its head, as one
that waits for its first token, and signs of life; what goes wrong behind that is told by an event.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from novainfer import InvalidParameter
from novainfer.fsm.messages.params import DURATION_S_MAX
from novainfer.server.http.exchange import ClientGone, Exchange, is_printable_id
from novainfer.server.http.writer import HEADERS, KEEP_ALIVE, Writer
from novainfer.server.openai.decode import OfModel
from novainfer.server.served import ServedModel
from novainfer.server.service import Service
from novainfer.server.settings import ServerSettings
from novainfer.server.waiting import Waiter

TIMEOUT_HEADER = "x-request-timeout-ms"
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")  # JSON's, and what C prints
SILENT_S_MAX = 15.0  # then a stream begins without its first event, so that proxies and clients see life
WAITS_COMMENT = b": waiting for the model to be loaded\n\n"

T = TypeVar("T")


async def model_in_time(
    service: Service, exchange: Exchange, prefix: str, body: OfModel, headers: Mapping[str, str]
) -> tuple[ServedModel, float]:
    """The model that `body` names, and for how many seconds its request has waited for it to be loaded.

    Raises `RequestTimeout` where the request's own deadline is over before that; and as `Service.model_for`.
    """
    if (model := service.model_now(exchange, body.model)) is not None:
        return model, 0.0
    deadlines_s = [one for one in (getattr(body, "timeout", None), header_timeout_s(headers)) if one]
    name = wanted_id(getattr(body, "request_id", None), exchange.request_id)
    waiter = Waiter(exchange.client, exchange.viewer.owner, prefix, name)
    began_s = time.perf_counter()
    within_s = min((one for one in deadlines_s if one > 0), default=None)
    coming = service.model_for(exchange, body.model, waiter, within_s)
    model = await (with_signs_of_life(exchange, service.settings, coming) if getattr(body, "stream", None) else coming)
    return model, time.perf_counter() - began_s


async def with_signs_of_life(exchange: Exchange, settings: ServerSettings, coming: Coroutine[Any, Any, T]) -> T:
    """What `coming` gives; where that takes long, the client is sent the head of its stream, and signs of life."""
    task = asyncio.create_task(coming)
    try:
        await asyncio.wait({task}, timeout=silent_s(settings))
        if not task.done():
            await _show_life(exchange, settings, task)
        return await task
    finally:
        if task.cancel():
            task.add_done_callback(_look_away)


async def _show_life(exchange: Exchange, settings: ServerSettings, task: asyncio.Task[Any]) -> None:
    """Begin the stream, and keep it alive until `task` has ended; raises `ClientGone` of one who takes nothing."""
    writer = Writer(exchange.send, settings.sse_keep_alive_interval_s, lambda: KEEP_ALIVE, exchange)
    try:
        await exchange.begin_stream(HEADERS)
        await writer.write(WAITS_COMMENT)
        await asyncio.wait({task})
        await writer.hand_over()
    except asyncio.CancelledError:
        if not writer.has_stalled:
            raise
        own = asyncio.current_task()
        assert own is not None
        own.uncancel()
        raise ClientGone from None
    finally:
        writer.close()


def silent_s(settings: ServerSettings, most_s: float = SILENT_S_MAX) -> float:
    """For how long a stream may have no head."""
    return min(settings.sse_keep_alive_interval_s or most_s, most_s)


def _look_away(task: asyncio.Task[Any]) -> None:
    """Its request has ended meanwhile: an error is of no interest any more, and of a model the exchange lets go."""
    if not task.cancelled():
        task.exception()


def wanted_id(body_id: str | None, exchange_id: str) -> str:
    """The id the client would like: the body's, else the x-request-id."""
    if body_id is None:
        return exchange_id
    if not is_printable_id(body_id):
        raise InvalidParameter(
            "request_id must be 1 to 128 printable ASCII characters without spaces and quotes", param="request_id"
        )
    return body_id


def header_timeout_s(headers: Mapping[str, str]) -> float | None:
    """The deadline of the header `x-request-timeout-ms` in seconds, if it has one; raises `InvalidParameter`."""
    value = headers.get(TIMEOUT_HEADER)
    if value is None:
        return None
    timeout_s = float(value) / 1000 if _NUMBER.fullmatch(value.strip()) else math.nan  # `float` takes 1_000 as well
    if not 0 < timeout_s <= DURATION_S_MAX:
        message = f"{TIMEOUT_HEADER} must be a number of milliseconds, above 0 and at most {DURATION_S_MAX * 1000:.0f}"
        raise InvalidParameter(message, param=TIMEOUT_HEADER)
    return timeout_s
