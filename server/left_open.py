"""Answers of the journal whose engine has ended though the server lives, as one of several models may be unloaded.

They are not over: when their client comes back they go on with the next engine of their model. What nobody comes back
for leaves the journal in time, which no restart does for it here.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from novainfer.server.journal.journal import Entry, Journal

LEFT_OPEN_MAX = 10_000  # answers; of more, those that were left first are forgotten

Name = tuple[str, str]  # the id of an answer, and its owner


class Left(NamedTuple):
    """One of them; its name is free when what `made` it is done. `since_s` is of the monotonic clock."""

    entry: Entry
    made: asyncio.Task[None]
    since_s: float


class LeftOpen:
    """Those of one server, by id and owner; they stay for `ttl_s`."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._left: dict[Name, Left] = {}  # oldest first

    def __contains__(self, name: Name) -> bool:
        return name in self._left

    def __len__(self) -> int:
        return len(self._left)

    def note(self, journal: Journal, name: Name, entry: Entry, made: asyncio.Task[None]) -> None:
        """Its engine has ended. Others that nobody came back for leave `journal`."""
        self._left.pop(name, None)
        self._left[name] = Left(entry, made, time.monotonic())
        while self._left:
            oldest, left = next(iter(self._left.items()))
            if len(self._left) <= LEFT_OPEN_MAX and left.since_s >= time.monotonic() - self._ttl_s:
                break
            journal.drop(left.entry)
            del self._left[oldest]

    def find(self, name: Name, serial: int) -> Left | None:
        """The answer of this name, if it is the one that has this number in the journal."""
        left = self._left.get(name)
        return left if left is not None and left.entry.serial == serial else None

    def discard(self, name: Name) -> None:
        """It goes on, has ended, or another one has its name now."""
        self._left.pop(name, None)
