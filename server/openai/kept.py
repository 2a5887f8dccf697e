"""Answers that the journal keeps: made without their client, and read by whoever has their key, from any event on.

What the engine gives is cut into pieces of one token, which go into the journal and to those who read along: in the
engine's own turn, while they keep up. What a reader is sent follows from the pieces alone, so that one which comes
later, or comes to another server, is sent the same. An answer that nobody reads for `journal_grace_s` is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from novainfer import (
    Delta,
    EngineDraining,
    EngineOverloaded,
    NovaInferError,
    RequestCancelled,
)
from novainfer.reading import Reading
from novainfer.server.change import Change
from novainfer.server.http.errors import log_if_ours
from novainfer.server.journal.journal import Entry, Journal
from novainfer.server.journal.pieces import cutters, pieces_again
from novainfer.server.journal.records import RESPONSE, Asked, Said, Told, error_to_keep, said_of
from novainfer.server.openai.generation import LEFT_OPEN, Generation
from novainfer.server.served import OfAnswers
from novainfer.server.service import Service

PIECES_A_TURN = 32
RETRY_S = 0.2  # where the queue is full of others that go on

Take = Callable[[list[Delta]], bool]  # whether its reader wants the next ones in the same way
Make = Callable[[], tuple[Generation, Reading | None]]


class Kept:
    """One answer: its pieces so far, and how it has ended, if it has. Whoever reads it holds its model.

    `entry` is None where it is only read again. `ended_s` is when it ended, in seconds since 1970.
    """

    def __init__(self, service: Service, asked: Asked, entry: Entry | None, model: OfAnswers) -> None:
        self.asked = asked
        self.model = model
        self.pieces: list[Delta] = []
        self.is_over = False
        self.error: Exception | None = None
        self.ended_s = 0.0
        self._service = service
        self._entry = entry
        self._cutters = cutters(asked.num_choices, asked.params, model.vocabulary)
        self._has_got_on = True
        self._changed = Change()
        self._along: list[tuple[Take, asyncio.Future[None]]] = []  # readers that have all pieces there are
        self._num_readers = 0
        self._task: asyncio.Task[None] | None = None
        self._giving_up: asyncio.TimerHandle | None = None
        self._cancelled: RequestCancelled | None = None

    @property
    def _name(self) -> tuple[str, str]:
        return self.asked.id, self.asked.owner

    # ---- being made ----------------------------------------------------------------------------------------------

    def start(self, generation: Generation, first: asyncio.Task[Delta], reading: Reading | None) -> None:
        """Make it, of `generation`, whose first delta is or will be in `first`."""
        self._service.kept[self._name] = self
        self._service.left_open.discard(self._name)
        self._service.has_begun(self._name)
        task = self._task = asyncio.create_task(self._make(generation, first, reading))
        self._service.background.add(task)
        task.add_done_callback(self._service.background.discard)

    async def tell_again(self, said: Sequence[Said]) -> None:
        """Make the pieces that the journal has, some in each turn of the loop: those of a long answer take a while."""
        self._has_got_on = not said
        for first in range(0, len(said), PIECES_A_TURN):
            if first:
                await asyncio.sleep(0)
            self._tell(pieces_again(said[first : first + PIECES_A_TURN], self._cutters, self.asked.id))

    def go_on(self, said: Sequence[Said], make: Make) -> None:
        """Make the rest of it, behind what is `said`, of what `make` begins: again where there is no room yet.

        Its model, which is held for it, is released when it is over.
        """
        self._service.kept[self._name] = self
        task = self._task = asyncio.create_task(self._go_on(said, make))
        task.add_done_callback(lambda _: self.model.release())
        self._service.background.add(task)
        task.add_done_callback(self._service.background.discard)

    async def _go_on(self, said: Sequence[Said], make: Make) -> None:
        try:
            await self.tell_again(said)
            begun = await self._begin_again(make)
        except asyncio.CancelledError:
            self.end(self._cancelled or EngineDraining("The server is shutting down"))
        except Exception as error:
            self._log(error)
            self.end(error)
        else:
            await self._make(*begun)

    async def _begin_again(self, make: Make) -> tuple[Generation, asyncio.Task[Delta], Reading | None]:
        """What `make` begins, when there is room for it, and its first delta is there."""
        while True:
            generation, reading = make()
            for at, piece in enumerate(self.pieces if reading is not None else ()):
                assert reading is not None
                if at % PIECES_A_TURN == PIECES_A_TURN - 1:
                    await asyncio.sleep(0)
                reading.read(piece)
            first = asyncio.ensure_future(anext(generation.deltas))
            try:
                await asyncio.wait({first})
            except asyncio.CancelledError as cancelled:
                await generation.leave(first, cancelled)
                raise
            if not isinstance(error := first.exception(), EngineOverloaded):
                return generation, first, reading
            await generation.leave(first, error)
            await asyncio.sleep(RETRY_S)

    async def _make(self, generation: Generation, first: asyncio.Task[Delta], reading: Reading | None) -> None:
        ended_by: BaseException | None = None

        def take(more: Delta) -> bool:
            """More of it; False where nothing more is wanted."""
            generation.note(more)
            self._take(more, reading)
            return reading is None or not reading.is_over

        try:
            delta: Delta | None = await first
            while delta is not None and take(delta):
                await generation.forward(delta, take)
                if reading is not None and reading.is_over:
                    break
                delta = await anext(generation.deltas, None)
            self.end(None)
        except asyncio.CancelledError as error:
            draining = EngineDraining("The server is shutting down")
            ended_by = error if self._cancelled is not None else draining
            self.end(self._cancelled or draining)
        except Exception as error:
            ended_by = error
            self._log(error)
            self.end(error)
        finally:
            await generation.leave(first, ended_by)

    def _take(self, delta: Delta, reading: Reading | None) -> None:
        pieces = self._cutters[delta.index].cut(delta)
        if not pieces:
            return
        journal, entry = self._service.journal, self._entry
        for piece in pieces:
            if reading is not None:
                reading.read(piece)
            if journal is not None and entry is not None:
                journal.add(entry, said_of(piece))
                if not self._has_got_on:
                    self._has_got_on = True
                    journal.got_on(entry)
        self._tell(pieces)

    def _tell(self, pieces: list[Delta]) -> None:
        """Those who read along have these pieces now, and so do those who come later."""
        self.pieces += pieces
        for along in self._along[:]:
            take, waiter = along
            try:
                if waiter.done() or take(pieces):
                    continue
                waiter.set_result(None)
            except Exception as error:
                waiter.set_exception(error)
            self._along.remove(along)
        self._changed.tell()

    def end(self, error: Exception | None) -> None:
        """It has ended, well or by `error`."""
        self.is_over, self.error, self.ended_s = True, error, time.time()
        journal, entry = self._service.journal, self._entry
        if journal is not None and entry is not None:
            if isinstance(error, LEFT_OPEN):
                self._leave_open(journal, entry)
            elif error is not None and not self.asked.is_stream:
                journal.drop(entry)  # its client is told now, and whoever asks again gets another one
            else:
                journal.end(entry, None if error is None else error_to_keep(error), self.ended_s)
        for _, waiter in self._along:
            if not waiter.done():
                waiter.set_result(None)
        self._changed.tell()
        self._let_go()

    def _leave_open(self, journal: Journal, entry: Entry) -> None:
        """For another server; or for this one, where another engine of its model may come."""
        service = self._service
        if service.models is None or service.is_draining or self.asked.kind == RESPONSE:
            return
        assert self._task is not None, "what makes it ends it"
        service.left_open.note(journal, self._name, entry, self._task)

    def _log(self, error: Exception) -> None:
        """Of what is not streamed the request that waits for it fails, which is logged under the request's own id."""
        if self.asked.is_stream or not self._num_readers:
            log_if_ours(error, self.asked.id)

    async def made(self) -> None:
        """Return when nothing makes it any more: its name is free."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def cancel(self) -> None:
        """End it, because its client, or somebody for it, wants no more of it."""
        self._cancelled = RequestCancelled("The request was cancelled")
        if self._task is not None and not self._task.done():
            self._task.cancel()

    # ---- being read ----------------------------------------------------------------------------------------------

    async def forward(self, first: int, take: Take) -> None:
        """Give pieces from the `first`-th on to `take` in the turn in which they come, to which it answers at once.

        Returns when it has answered False, and when there is something for `behind`: pieces that it has not had, or the
        end. What it raises is raised here.
        """
        if first < len(self.pieces) or self.is_over:
            return
        along = take, asyncio.get_running_loop().create_future()
        self._along.append(along)
        try:
            await along[1]
        finally:
            if along in self._along:
                self._along.remove(along)

    async def behind(self, first: int) -> list[Delta]:
        """Pieces from the `first`-th on, once there are any, for others to read as well; none at its end.

        Raises what it ended with.
        """
        while first >= len(self.pieces):
            if self.is_over:
                if self.error is not None:
                    raise self.error
                return []
            await self._changed.wait()
        if len(self.pieces) - first > PIECES_A_TURN:  # a reader that catches up lets others have their turn
            await asyncio.sleep(0)
        return self.pieces[first : first + PIECES_A_TURN]

    @contextmanager
    def reader(self) -> Iterator[None]:
        """Somebody reads it meanwhile."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Somebody reads it."""
        self.model.hold()
        self._num_readers += 1
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def leave(self) -> None:
        """And no more: it may come back, for a while."""
        self.model.release()
        self._num_readers -= 1
        if self._num_readers:
            return
        if self.is_over:
            self._let_go()
            return
        grace_s = self._service.settings.journal_grace_s
        if self._entry is None or self._entry.is_broken or not self.asked.is_sought:
            grace_s = 0.0
        self._wait_for_reader(grace_s)

    def _wait_for_reader(self, grace_s: float) -> None:
        self._giving_up = asyncio.get_running_loop().call_later(grace_s, self.cancel)

    def expect_reader(self) -> None:
        """It goes on, and nobody reads it yet."""
        self._wait_for_reader(self._service.settings.journal_grace_s)

    def _let_go(self) -> None:
        """What has ended is read from the journal, once nobody reads it here."""
        if not self._num_readers and self._service.kept.get(self._name) is self:
            del self._service.kept[self._name]
        if self._giving_up is not None:
            self._giving_up.cancel()


def error_again(told: Told) -> NovaInferError:
    """An error that was told before, as what it was, where that makes a difference."""
    return RequestCancelled(told.message) if told.code == RequestCancelled.code else told
