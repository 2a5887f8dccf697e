"""The journal beside the loop: it takes what is told it at once, and writes it in a thread of its own.

Tokens are written every `BATCH_S`, in one transaction for all answers. A server that ends between two of them has lost
the last ones only: whoever goes on from fewer tokens computes the same ones again. That is why tokens that cannot be
written cost nothing but the time to compute them: an answer of which some were not written gets no more into the file
(`Entry.is_broken`), and nothing waits for a disk.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from novainfer.server.http.errors import ErrorDetail
from novainfer.server.journal.file import ANSWERS_MAX, JournalFile
from novainfer.server.journal.records import Asked, Said, Stored
from novainfer.server.keys.counted import Counted

log = logging.getLogger("novainfer.server")

BATCH_S = 0.05
OPEN_TIMEOUT_S = 1.0  # for an answer to be in the file, before its client hears of it
CLOSE_TIMEOUT_S = 5.0
WAITING_MAX = 200_000  # tokens, and what else is to be written
PRUNE_EVERY_S = 10.0
SAID_AGAIN_S = 60.0  # between two lines in the log about the same trouble

Found = TypeVar("Found")


class Entry:
    """An answer in the journal. `is_broken`: something of it was not written, and so no more will be."""

    __slots__ = ("is_broken", "is_written", "serial")

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.is_broken = False
        self.is_written: asyncio.Future[None] | None = None  # until it is in the file


class _Call:
    """What the thread is asked to do besides; its answer goes to `future`."""

    def __init__(self, work: Callable[[JournalFile], Any], future: asyncio.Future[Any]) -> None:
        self.work = work
        self.future = future


_Item = tuple[Entry, Callable[[JournalFile], None] | Said] | _Call


class Journal:
    """All of it but `close` is for the loop that it was made on. Raises as `JournalFile` does."""

    def __init__(self, path: Path, max_bytes: int, ttl_s: float) -> None:
        self._file = JournalFile(path, max_bytes, ttl_s)
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._next_serial = self._file.next_serial
        self.fingerprints: dict[str, str] = {}  # of each model that has come up
        self._waiting: deque[_Item] = deque()
        # Serials of answers that have ended broken, of which the file may know.
        self._left_over = deque[int](maxlen=ANSWERS_MAX)
        self._has_work = threading.Event()
        self._is_awake = False  # as `_has_work` says, at a tenth of the price
        self._is_urgent = threading.Event()
        self._is_closed = False
        self._pruned_s = -PRUNE_EVERY_S  # before anything is read
        self._said_s = -SAID_AGAIN_S
        self.failures_total = 0  # transactions that were not written
        self.tokens_total = 0  # that were
        self.write_s_total = 0.0
        self._thread = threading.Thread(target=self._run, name="novainfer-journal", daemon=True)
        self._thread.start()

    # ---- on the loop ---------------------------------------------------------------------------------------------

    def open(self, asked: Asked) -> Entry:
        """An answer begins; `wait` says whether it is in the file."""
        entry = Entry(self._next_serial)
        self._next_serial += 1
        entry.is_written = self._loop.create_future()
        fingerprint = self.fingerprints.get(asked.model, "")
        self._put((entry, lambda file: file.open(entry.serial, asked, fingerprint)))
        self._is_urgent.set()
        return entry

    async def wait(self, entry: Entry) -> bool:
        """Whether `entry` is in the file: soon, or not at all."""
        if entry.is_written is not None:
            await asyncio.wait({entry.is_written}, timeout=OPEN_TIMEOUT_S)
            entry.is_broken |= not entry.is_written.done()
        return not entry.is_broken

    def reopen(self, stored: Stored) -> Entry:
        """An answer that is in the file goes on."""
        entry = Entry(stored.serial)
        self._put((entry, lambda file: file.resume(entry.serial)))
        return entry

    def add(self, entry: Entry, said: Said) -> None:
        """One more token."""
        if entry.is_broken:
            return
        if len(self._waiting) >= WAITING_MAX:
            entry.is_broken = True
            return
        self._waiting.append((entry, said))
        if not self._is_awake:
            self._wake()

    def got_on(self, entry: Entry) -> None:
        """An answer that was reopened has one of its own."""
        self._put((entry, lambda file: file.got_on(entry.serial)))

    def end(self, entry: Entry, error: ErrorDetail | None, ended_s: float) -> None:
        """It has ended, at that moment (seconds since 1970).

        One that is broken may be computed to its end again, unless something has ended it.
        """
        if not entry.is_broken:
            self._put((entry, lambda file: file.end(entry.serial, error, ended_s)))
        elif error is not None:
            self.drop(entry)
        else:
            self._left_over.append(entry.serial)

    def end_stored(self, stored: Stored, error: ErrorDetail, ended_s: float) -> None:
        """An answer that is in the file does not go on."""
        self._put((Entry(stored.serial), lambda file: file.end(stored.serial, error, ended_s)))

    def drop(self, entry: Entry) -> None:
        """Forget it, also where something of it was not written."""
        self._put((Entry(entry.serial), lambda file: file.drop(entry.serial)))

    def forget(self, name: str, owner: str) -> None:
        """Forget the answer of this id, if it is there."""
        self._put((Entry(0), lambda file: file.forget(name, owner)))

    def count(self, counted: Counted) -> None:
        """So many tokens of a key, a conversation or a user are used by now."""
        self._put((Entry(0), lambda file: file.count(counted)))

    async def counted(self) -> list[Counted]:
        """All that is counted, what was used least recently first."""
        return await self._ask(JournalFile.counted)

    async def find(self, name: str, sees: str | None) -> Stored | None:
        """The answer of this id, as it is in the file."""
        return await self._ask(lambda file: file.find(name, sees))

    async def unended(self) -> list[Stored]:
        """All that have not ended, oldest first."""
        return await self._ask(JournalFile.unended)

    async def ended(self, kind: str, num_max: int) -> list[Stored]:
        """The latest of a kind that have ended, oldest first."""
        return await self._ask(lambda file: file.ended(kind, num_max))

    async def flush(self) -> None:
        """Return when all that was told before is written, or given up."""
        await self._ask(lambda file: None)

    def close(self) -> None:
        """Write what waits, and let go of the file; blocks for a moment."""
        self._is_closed = True
        self._has_work.set()
        self._is_urgent.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _put(self, item: tuple[Entry, Callable[[JournalFile], None] | Said]) -> None:
        if len(self._waiting) >= WAITING_MAX:
            item[0].is_broken = True
            return
        self._waiting.append(item)
        if not self._is_awake:
            self._wake()

    def _wake(self) -> None:
        self._is_awake = True
        self._has_work.set()

    async def _ask(self, work: Callable[[JournalFile], Found]) -> Found:
        future: asyncio.Future[Found] = self._loop.create_future()
        self._waiting.append(_Call(work, future))
        self._wake()
        self._is_urgent.set()
        return await future

    # ---- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._has_work.wait(PRUNE_EVERY_S)
            self._is_urgent.wait(BATCH_S)
            self._is_urgent.clear()
            self._has_work.clear()
            self._is_awake = False  # last, and before what waits is taken: what comes behind that wakes it again
            is_last = self._is_closed
            items = [self._waiting.popleft() for _ in range(len(self._waiting))]
            writes = [item for item in items if not isinstance(item, _Call)]
            if writes or time.monotonic() > self._pruned_s + PRUNE_EVERY_S:  # what is too old goes, also when all rest
                self._write(writes)
            for item in items:
                if isinstance(item, _Call):
                    self._answer(item)
            if is_last:
                self._file.close()
                return

    def _answer(self, call: _Call) -> None:
        try:
            found, error = call.work(self._file), None
        except Exception as failure:
            found, error = None, failure
        self._on_loop(_settle, call.future, found, error)

    def _write(self, writes: list[tuple[Entry, Callable[[JournalFile], None] | Said]]) -> None:
        """In one transaction; once more where there was no room, when some was made."""
        began_s = time.perf_counter()
        try:
            try:
                self._transact(writes)
            except sqlite3.OperationalError as error:
                if "full" not in str(error):
                    raise
                self._file.rollback()
                self._make_room()
                self._transact(writes)
        except Exception as error:
            self._give_up(writes, error)
        self.write_s_total += time.perf_counter() - began_s
        opened = [entry.is_written for entry, what in writes if type(what) is not Said and entry.is_written is not None]
        if opened:
            self._on_loop(_settle_all, opened)

    def _transact(self, writes: list[tuple[Entry, Callable[[JournalFile], None] | Said]]) -> None:
        file, said = self._file, dict[int, list[Said]]()
        file.begin()
        for entry, what in writes:
            if entry.is_broken:
                continue
            if isinstance(what, Said):
                said.setdefault(entry.serial, []).append(what)
                continue
            if tokens := said.pop(entry.serial, None):
                file.add(entry.serial, tokens)
            self._do(entry, what)
        for serial, tokens in said.items():
            file.add(serial, tokens)
        if time.monotonic() > self._pruned_s + PRUNE_EVERY_S:
            self._pruned_s = time.monotonic()
            file.prune()
        file.commit()
        self.tokens_total += sum(isinstance(what, Said) for _, what in writes)

    def _do(self, entry: Entry, what: Callable[[JournalFile], None]) -> None:
        """What cannot be encoded, because its client has sent what no file can hold, is no other answer's loss."""
        try:
            what(self._file)
        except sqlite3.Error:
            raise
        except Exception as error:
            entry.is_broken = True
            self._tell(error, 1)

    def _make_room(self) -> None:
        self._file.begin()
        while self._left_over:
            self._file.drop(self._left_over.popleft())
        self._file.prune(urgently=True)
        self._file.commit()

    def _give_up(self, writes: list[tuple[Entry, Callable[[JournalFile], None] | Said]], error: Exception) -> None:
        try:
            self._file.rollback()
        except sqlite3.Error:
            log.debug("the journal's transaction was over", exc_info=True)
        for entry, _ in writes:
            entry.is_broken = True
        self._tell(error, len({entry.serial for entry, _ in writes}))

    def _tell(self, error: Exception, num_answers: int) -> None:
        self.failures_total += 1
        if time.monotonic() >= self._said_s + SAID_AGAIN_S:
            self._said_s = time.monotonic()
            log.error(
                "journal %s cannot be written (%s): requests go on, and %d of them could not be resumed from here",
                self._path,
                error,
                num_answers,
            )

    def _on_loop(self, call: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # it has ended, and nobody waits
            log.debug("the journal's loop has ended")


def _settle_all(written: list[asyncio.Future[None]]) -> None:
    for future in written:
        _settle(future, None, None)


def _settle(future: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(found)
