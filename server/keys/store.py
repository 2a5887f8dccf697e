"""The file that keys are kept in: YAML for people, SQLite for programs; which of them, its name says.

A file is written whole or not at all, readable by its owner only, by one writer at a time. What another program
writes there is found by its time, size and inode.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml

from novainfer import InvalidParameter
from novainfer.server.keys.record import KeyRecord, checked

YAML_SUFFIXES = (".yaml", ".yml")
SQLITE_SUFFIXES = (".db", ".sqlite", ".sqlite3")
# A file system tells times in ticks of some milliseconds: a file this young may change again within one.
YOUNG_NS = 100_000_000
FILE_BYTES_MAX = 64 << 20
SQLITE_TIMEOUT_S = 5.0
HEAD = """\
# Keys of NovaInfer, without the keys themselves. `novainfer keys` adds and revokes; what is changed by hand holds,
# comments do not.
"""

State = tuple[int, int, int, int]
GONE: State = (0, 0, 0, 0)
_FIELDS = msgspec.structs.fields(KeyRecord)
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where there is libyaml


class KeyStore(ABC):
    """Keys in a file at `path`; all of it raises `InvalidParameter` for what cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def at(path: Path) -> KeyStore:
        """The store for a file of this name, which need not be there yet."""
        if path.suffix in YAML_SUFFIXES:
            return YamlStore(path)
        if path.suffix in SQLITE_SUFFIXES:
            return SqliteStore(path)
        names = ", ".join((*YAML_SUFFIXES, *SQLITE_SUFFIXES))
        raise InvalidParameter(f"keys_file must end in one of {names}, not {path.name!r}", param="keys_file")

    def state(self) -> State | None:
        """What changes when the file does; None while it is so young that it may change unseen."""
        try:
            found = self.path.stat()
        except OSError:
            return GONE
        if abs(time.time_ns() - found.st_mtime_ns) < YOUNG_NS:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def read(self) -> list[KeyRecord]:
        """All keys."""
        try:
            if not self.path.is_file():
                raise InvalidParameter(
                    f"keys_file {self.path} is not there: `novainfer keys add` makes one", param="keys_file"
                )
            if (size := self.path.stat().st_size) > FILE_BYTES_MAX:
                raise InvalidParameter(f"keys_file {self.path} has {size} bytes, which are too many", param="keys_file")
            return checked(self._read())
        except (OSError, ValueError, yaml.YAMLError, sqlite3.Error) as error:
            reason = " ".join(str(error).split())
            if isinstance(error, InvalidParameter) and error.param == "keys_file":
                raise
            raise InvalidParameter(f"keys_file {self.path} cannot be read: {reason}", param="keys_file") from None

    def add(self, record: KeyRecord) -> None:
        """Keep one more."""
        with self._writing() as records:
            records.append(record)
            checked(records)

    def remove(self, name: str) -> None:
        """Keep it no more."""
        with self._writing() as records:
            left = [record for record in records if record.name != name]
            if len(left) == len(records):
                raise InvalidParameter(f"there is no key of the name {name!r} in {self.path}", param="name")
            records[:] = left

    @contextmanager
    def _writing(self) -> Iterator[list[KeyRecord]]:
        """All keys, to be changed, and written when that went well; other writers wait meanwhile."""
        folder = self.path.absolute().parent
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise InvalidParameter(f"keys_file: {folder}: {os.strerror(error.errno or 0)}", param="keys_file") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            records = self.read() if self.path.exists() else []
            yield records
            self._write(records)
        except (OSError, sqlite3.Error) as error:
            raise InvalidParameter(f"keys_file {self.path} cannot be written: {error}", param="keys_file") from None
        finally:
            os.close(lock)

    @abstractmethod
    def _read(self) -> list[KeyRecord]: ...
    @abstractmethod
    def _write(self, records: list[KeyRecord]) -> None: ...


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[KeyRecord]


class YamlStore(KeyStore):
    """`keys:` and a list below it, with the fields of `KeyRecord`."""

    def _read(self) -> list[KeyRecord]:
        with self.path.open(encoding="utf-8") as file:
            found = yaml.load(file, _Loader)
        return msgspec.convert({"keys": []} if found is None else found, _Keys).keys

    def _write(self, records: list[KeyRecord]) -> None:
        text = HEAD + yaml.safe_dump({"keys": msgspec.to_builtins(records)}, sort_keys=False, allow_unicode=True)
        descriptor, name = tempfile.mkstemp(dir=self.path.absolute().parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


class SqliteStore(KeyStore):
    """A table `keys` with a column for each field of `KeyRecord`; `models` is a JSON list."""

    def _read(self) -> list[KeyRecord]:
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=SQLITE_TIMEOUT_S)) as database:
            database.row_factory = sqlite3.Row
            rows = [dict(row) for row in database.execute("SELECT * FROM keys ORDER BY rowid")]
        return msgspec.convert({"keys": [_of_row(row) for row in rows]}, _Keys).keys

    def _write(self, records: list[KeyRecord]) -> None:
        if not self.path.exists():
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        names = [field.name for field in _FIELDS]
        columns = ", ".join(f"{field.name} {_column(field)}" for field in _FIELDS)
        marks = ", ".join(f":{name}" for name in names)
        with closing(sqlite3.connect(self.path, timeout=SQLITE_TIMEOUT_S)) as database, database:
            database.execute(f"CREATE TABLE IF NOT EXISTS keys ({columns})")
            database.execute("DELETE FROM keys")
            database.executemany(f"INSERT INTO keys ({', '.join(names)}) VALUES ({marks})", map(_to_row, records))


def _column(field: msgspec.structs.FieldInfo) -> str:
    kinds = get_args(field.type) or (field.type,)
    kind = next((sql for of, sql in ((bool, "INTEGER"), (int, "INTEGER"), (float, "REAL")) if of in kinds), "TEXT")
    return kind + (" NOT NULL UNIQUE" if field.required else "")


def _to_row(record: KeyRecord) -> dict[str, Any]:
    row = msgspec.structs.asdict(record)
    return row | {"models": None if record.models is None else msgspec.json.encode(record.models).decode()}


def _of_row(row: dict[str, Any]) -> dict[str, Any]:
    """A record's fields: a column that is NULL is one that is not given."""
    found = {name: value for name, value in row.items() if value is not None}
    if "is_admin" in found:
        found["is_admin"] = bool(found["is_admin"])
    if "models" in found:
        found["models"] = msgspec.json.decode(found["models"])
    return found
