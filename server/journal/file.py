"""The journal's file: SQLite, written ahead (WAL), by one process at a time and one thread of it.

A transaction is on its way to the disk when it is committed, and waits for none (synchronous = NORMAL): what is
committed survives the end of the process, however sudden. When the machine itself fails, the last ones may be missing;
the file is whole all the same, and an answer that goes on from an earlier token gives the same tokens.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from novainfer import InvalidParameter
from novainfer.server.http.errors import ErrorDetail
from novainfer.server.journal.records import (
    Asked,
    Said,
    Stored,
    decoded_asked,
    decoded_error,
    decoded_said,
    encoded,
)
from novainfer.server.keys.counted import Counted

log = logging.getLogger("novainfer.server")

APPLICATION_ID = 0x4E4F5641  # "NOVA"
VERSION = 1  # of what the tables hold
ANSWERS_MAX = 100_000
FULL, EMPTIED = 0.9, 0.7  # of the bytes that it may have: from the one on ended answers go, until it is the other
PAGE_BYTES = 4096
TABLES = """
CREATE TABLE answers (
    serial INTEGER PRIMARY KEY, name TEXT NOT NULL, owner TEXT NOT NULL, asked BLOB NOT NULL, fingerprint TEXT NOT NULL,
    began_s REAL NOT NULL, num_resumed INTEGER NOT NULL DEFAULT 0, ended_s REAL, error BLOB, UNIQUE (name, owner)
);
CREATE TABLE said (serial INTEGER NOT NULL, batch INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (serial, batch))
    WITHOUT ROWID;
"""
COUNTED = """
CREATE TABLE IF NOT EXISTS counted (
    kind TEXT NOT NULL, owner TEXT NOT NULL, name TEXT NOT NULL, began_ns INTEGER NOT NULL, at_ns INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, PRIMARY KEY (kind, owner, name)
) WITHOUT ROWID
"""
COUNTED_S = 24 * 3600.0  # for which a count outlasts its last request
_COLUMNS = "serial, asked, fingerprint, num_resumed, ended_s, error"


class JournalFile:
    """The file at `path`, of at most `max_bytes`; what has ended stays for `ttl_s`.

    Raises `InvalidParameter`, naming the setting, when it cannot be used; `sqlite3.Error` later.
    """

    def __init__(self, path: Path, max_bytes: int, ttl_s: float) -> None:
        self.path = path
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._batches: dict[int, int] = {}  # of answers that go on, the last one written
        try:
            if not path.exists():
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # it holds prompts and answers
            elif (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
                log.warning("journal %s holds prompts and answers, and others may read it (%o): chmod 600", path, mode)
            self._database = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
            try:
                self._begin()
            except BaseException:
                self._database.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise InvalidParameter(f"journal {path} cannot be used: {_why(error)}", param="journal") from None

    def _begin(self) -> None:
        execute = self._database.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute(f"PRAGMA page_size = {PAGE_BYTES}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute("PRAGMA secure_delete = ON")  # a prompt that is forgotten is not left in a free page
        execute("BEGIN EXCLUSIVE")  # another server's file is told now, and not at the first request
        is_new = not execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if is_new:
            for statement in TABLES.split(";"):
                execute(statement)
            execute(f"PRAGMA application_id = {APPLICATION_ID}")
            execute(f"PRAGMA user_version = {VERSION}")
        execute("COMMIT")
        found = self._number("application_id"), self._number("user_version")
        if found[0] != APPLICATION_ID:
            raise InvalidParameter(f"journal {self.path} is a file of another program", param="journal")
        if found[1] != VERSION:
            message = (
                f"is of version {found[1]}, and this server writes version {VERSION}: move it away, or name another"
            )
            raise InvalidParameter(f"journal {self.path} {message}", param="journal")
        if (found_wrong := execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(f"it is damaged: {found_wrong}")
        execute(COUNTED)  # files of this version that are older have no such table
        execute(f"PRAGMA max_page_count = {self._max_bytes // PAGE_BYTES}")

    def _number(self, name: str) -> int:
        return int(self._database.execute(f"PRAGMA {name}").fetchone()[0])

    def close(self) -> None:
        """Let go of it."""
        self._database.close()

    # ---- writing: between `begin` and `commit` ------------------------------------------------------------------

    def begin(self) -> None:
        """A transaction begins."""
        self._database.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """It is written."""
        self._database.execute("COMMIT")

    def rollback(self) -> None:
        """It never was; harmless where none is under way."""
        self._batches.clear()
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def open(self, serial: int, asked: Asked, fingerprint: str) -> None:
        """An answer begins; an older one that its client calls the same is forgotten."""
        data = encoded(asked)
        self.forget(asked.id, asked.owner)
        self._database.execute(
            "INSERT INTO answers (serial, name, owner, asked, fingerprint, began_s) VALUES (?, ?, ?, ?, ?, ?)",
            (serial, asked.id, asked.owner, data, fingerprint, asked.began_s),
        )

    def add(self, serial: int, said: Sequence[Said]) -> None:
        """It goes on with these tokens."""
        batch = self._batches.get(serial)
        if batch is None:
            found = self._database.execute("SELECT max(batch) FROM said WHERE serial = ?", (serial,)).fetchone()
            batch = found[0] or 0
        self._batches[serial] = batch + 1
        self._database.execute("INSERT INTO said VALUES (?, ?, ?)", (serial, batch + 1, encoded(said)))

    def end(self, serial: int, error: ErrorDetail | None, ended_s: float) -> None:
        """It has ended, at that moment."""
        self._batches.pop(serial, None)
        self._database.execute(
            "UPDATE answers SET ended_s = ?, error = ? WHERE serial = ?",
            (ended_s, None if error is None else encoded(error), serial),
        )

    def resume(self, serial: int) -> None:
        """It is about to go on."""
        self._database.execute("UPDATE answers SET num_resumed = num_resumed + 1 WHERE serial = ?", (serial,))

    def got_on(self, serial: int) -> None:
        """It has, with a token of its own."""
        self._database.execute("UPDATE answers SET num_resumed = 0 WHERE serial = ?", (serial,))

    def forget(self, name: str, owner: str) -> None:
        """Forget the answer of this id, if it is there."""
        old = self._database.execute("SELECT serial FROM answers WHERE name = ? AND owner = ?", (name, owner))
        self._delete([row[0] for row in old.fetchall()])

    def drop(self, serial: int) -> None:
        """Forget it."""
        self._delete([serial])

    def count(self, counted: Counted) -> None:
        """So many tokens are used; nothing is left of what has used none."""
        if counted.num_tokens:
            self._database.execute("REPLACE INTO counted VALUES (?, ?, ?, ?, ?, ?)", msgspec.structs.astuple(counted))
        else:
            key = (counted.kind, counted.owner, counted.name)
            self._database.execute("DELETE FROM counted WHERE kind = ? AND owner = ? AND name = ?", key)

    def prune(self, *, urgently: bool = False) -> None:
        """Forget what has ended long ago; and where there is little room, or none, what has ended first."""
        execute = self._database.execute
        too_old = execute("SELECT serial FROM answers WHERE ended_s < ?", (time.time() - self._ttl_s,))
        self._delete([row[0] for row in too_old.fetchall()])
        execute("DELETE FROM counted WHERE at_ns < ?", (int((time.time() - COUNTED_S) * 1e9),))
        left = execute("SELECT count(*) FROM answers").fetchone()[0] - ANSWERS_MAX
        if left > 0:
            self._delete_oldest(left)
        if urgently or self.num_bytes > FULL * self._max_bytes:
            while self.num_bytes > EMPTIED * self._max_bytes and self._delete_oldest(16):
                pass

    def _delete_oldest(self, count: int) -> int:
        ended = "SELECT serial FROM answers WHERE ended_s IS NOT NULL ORDER BY ended_s LIMIT ?"
        serials = [row[0] for row in self._database.execute(ended, (count,)).fetchall()]
        self._delete(serials)
        return len(serials)

    def _delete(self, serials: Iterable[int]) -> None:
        for serial in serials:
            self._batches.pop(serial, None)
            self._database.execute("DELETE FROM said WHERE serial = ?", (serial,))
            self._database.execute("DELETE FROM answers WHERE serial = ?", (serial,))

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """What it holds; as much as it may be long, and less what is free in it."""
        return (self._number("page_count") - self._number("freelist_count")) * PAGE_BYTES

    @property
    def next_serial(self) -> int:
        """A number that no answer has."""
        return int(self._database.execute("SELECT coalesce(max(serial), 0) + 1 FROM answers").fetchone()[0])

    def counted(self) -> list[Counted]:
        """All that is counted, what was used least recently first."""
        rows = self._database.execute("SELECT * FROM counted ORDER BY at_ns").fetchall()
        return [Counted(*row) for row in rows]

    def find(self, name: str, sees: str | None) -> Stored | None:
        """The answer of this id, if it is of the owner `sees`, or of any where that is None."""
        where = "name = ? AND owner = coalesce(?, owner) ORDER BY serial DESC LIMIT 1"
        return next(iter(self._read(where, (name, sees))), None)

    def unended(self) -> list[Stored]:
        """All that have not ended, oldest first."""
        return self._read("ended_s IS NULL ORDER BY serial", ())

    def ended(self, kind: str, num_max: int = ANSWERS_MAX) -> list[Stored]:
        """The latest of a kind that have ended, oldest first."""
        return self._read("ended_s IS NOT NULL ORDER BY serial DESC", (), kind, num_max)[::-1]

    def _read(
        self, where: str, values: tuple[object, ...], kind: str | None = None, num_max: int = ANSWERS_MAX
    ) -> list[Stored]:
        """Row by row: of those of other kinds, which may be nearly all that the file holds, no token is read."""
        found: list[Stored] = []
        for serial, data, *more in self._database.execute(f"SELECT {_COLUMNS} FROM answers WHERE {where}", values):
            if len(found) == num_max:
                break
            asked = decoded_asked(data)
            if kind is None or asked.kind == kind:
                found.append(self._stored(serial, asked, *more))
        return found

    def _stored(
        self,
        serial: int,
        asked: Asked,
        fingerprint: str,
        num_resumed: int,
        ended_s: float | None,
        error: bytes | None,
    ) -> Stored:
        said = self._database.execute("SELECT data FROM said WHERE serial = ? ORDER BY batch", (serial,)).fetchall()
        return Stored(
            serial=serial,
            asked=asked,
            fingerprint=fingerprint,
            said=[one for row in said for one in decoded_said(row[0])],
            num_resumed=num_resumed,
            ended_s=ended_s,
            error=decoded_error(error),
        )


def _why(error: OSError | sqlite3.Error) -> str:
    if isinstance(error, OSError):
        return os.strerror(error.errno or 0)
    if "locked" in str(error):
        return "another server has it"
    return str(error)
