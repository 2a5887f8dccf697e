"""A kept answer as server-sent events that say where they stand: a later request with `Last-Event-ID` goes on there.

An event's id is `ANSWER:COUNTS`: how many events of each choice have been sent with it, joined by "-"; behind a dot
those that are of no choice, at the end. Each choice has the same events whenever they are made, though the choices may
come in another order; so what a client has is told by these counts.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from novainfer import Delta, InvalidParameter
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.http.writer import HEADERS, Writer
from novainfer.server.openai.chunks import StreamEncoder
from novainfer.server.openai.coarse import coarse
from novainfer.server.openai.kept import Kept
from novainfer.server.openai.replies import Tally
from novainfer.server.openai.sse import IN_OVERFLOW, IN_OVERFLOW_COMMENT
from novainfer.server.settings import ServerSettings

log = logging.getLogger("novainfer.server")

LAST_EVENT_ID = "last-event-id"
_CURSOR = re.compile(r"(?P<id>.+):(?P<counts>[0-9]{1,9}(-[0-9]{1,9})*)?(\.(?P<tail>[0-9]))?")
_BETWEEN = b"\n\n"  # events
_CHOICE = re.compile(rb'"choices":\[\{"index":([0-9]+)')


class Cursor(NamedTuple):
    """What a client has of an answer: events of each choice (none: nothing), and of those behind them."""

    counts: tuple[int, ...] = ()
    tail: int = 0


def cursor_of(value: str) -> tuple[str, Cursor]:
    """The answer's id, and what the client has of it; raises `InvalidParameter`."""
    found = _CURSOR.fullmatch(value)
    if found is None:
        message = "Last-Event-ID must be the id of an event, such as chatcmpl-abc:12"
        raise InvalidParameter(f"{message}, not {value[:80]!r}", param="Last-Event-ID")
    counts = tuple(map(int, found["counts"].split("-"))) if found["counts"] else ()
    return found["id"], Cursor(counts, int(found["tail"] or 0))


class Numbering:
    """Gives events their ids, and leaves out those that the client has."""

    def __init__(self, answer_id: str, num_choices: int, has: Cursor) -> None:
        if has.counts and len(has.counts) != num_choices:
            message = f"Last-Event-ID names {len(has.counts)} choices, and this answer has {num_choices}"
            raise InvalidParameter(message, param="Last-Event-ID")
        self._head = b"id: %b:" % answer_id.encode("ascii")
        self._has = has.counts or (0,) * num_choices
        self._has_tail = has.tail
        self._counts = [0] * num_choices
        self._num_tail = 0

    def choices(self, data: bytes) -> bytes:
        """Events of choices."""
        if not data:
            return data
        counts = self._counts
        if len(counts) == 1 and data.find(_BETWEEN) == len(data) - len(_BETWEEN):  # nearly all there are
            counts[0] += 1
            return b"%b%d\n%b" % (self._head, counts[0], data) if counts[0] > self._has[0] else b""
        told = b""
        for event in data.split(_BETWEEN)[:-1]:
            index = 0
            if len(counts) > 1:
                found = _CHOICE.search(event)
                assert found is not None, "it is of a choice"
                index = int(found[1])
            count = counts[index] = counts[index] + 1
            if count > self._has[index]:
                told += b"%b%b\n%b\n\n" % (self._head, self._where(), event)
        return told

    def tail(self, data: bytes) -> bytes:
        """Events behind all of these."""
        told = b""
        for event in data.split(_BETWEEN)[:-1]:
            self._num_tail += 1
            if self._num_tail > self._has_tail:
                told += b"%b%b.%d\n%b\n\n" % (self._head, self._where(), self._num_tail, event)
        return told

    def _where(self) -> bytes:
        """What the client has with this event: of the other choices perhaps more than was made again so far."""
        counts = self._counts
        if len(counts) == 1:
            return b"%d" % counts[0]
        return b"-".join(b"%d" % max(both) for both in zip(counts, self._has, strict=True))


class KeptStream:
    """ASGI response: the events of `kept`, for a client that has those that `has` says; `has_ids`: with their ids."""

    def __init__(
        self,
        kept: Kept,
        encoder: StreamEncoder,
        tally: Tally,
        settings: ServerSettings,
        has: Cursor = Cursor(),  # noqa: B008
        *,
        has_ids: bool = True,
        is_overflowed: bool = False,
    ) -> None:
        self._kept = kept
        self._encoder = coarse(encoder, kept.asked.stream_interval, has_ids=has_ids)
        self._tally = tally
        self._settings = settings
        self._numbering = Numbering(kept.asked.id, kept.asked.num_choices, has) if has_ids else None
        self._is_overflowed = is_overflowed
        kept.enter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept, encoder, numbering = self._kept, self._encoder, self._numbering
        exchange: Exchange = scope[SCOPE_KEY]
        writer = Writer(send, self._settings.sse_keep_alive_interval_s, lambda: encoder.keep_alive, exchange)
        of_choices = _as_it_is if numbering is None else numbering.choices
        of_tail = _as_it_is if numbering is None else numbering.tail
        try:
            if kept.pieces:
                self._tally.expect(kept.pieces[0])  # what a first chunk says of usage
            headers = [*HEADERS, IN_OVERFLOW] if self._is_overflowed else HEADERS
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await writer.write((IN_OVERFLOW_COMMENT if self._is_overflowed else b"") + of_choices(encoder.begin()))
            at = 0
            unsent: list[bytes] = []  # what had no room at once, or is the last

            def take(pieces: list[Delta]) -> bool:
                """What has come, in the turn of who makes it; False where its client does not keep up, or has all."""
                nonlocal at
                data = b""
                for piece in pieces:
                    at += 1
                    self._tally.add(piece)
                    data += of_choices(encoder.delta(piece))
                    if encoder.is_over:
                        break
                if encoder.is_over or not writer.write_now(data):
                    unsent.append(data)
                    return False
                return True

            try:
                while not encoder.is_over:
                    await kept.forward(at, take)
                    if not unsent:
                        if not (pieces := await kept.behind(at)):
                            break
                        take(pieces)
                    if unsent:
                        await writer.write(unsent.pop())
                await writer.write(of_tail(encoder.end()), is_last=True)
            except Exception as error:
                exchange.ended_by = getattr(error, "code", "internal_error")
                await writer.write(encoder.error(error), is_last=True)
        except asyncio.CancelledError:
            if not writer.has_stalled:
                raise
            log.warning("request %s: the client took nothing for too long, its stream is reset", kept.asked.id)
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        finally:
            writer.close()
            kept.leave()


def _as_it_is(data: bytes) -> bytes:
    return data
