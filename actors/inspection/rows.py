"""How often each row of each table was taken, and the last times of each since somebody began to look.

To count is a lookup in a table of a few hundred rows; times are kept only once they have been asked for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from novainfer.actors.inspection.frames import RowCount, Taken
from novainfer.fsm.core.machine import Machine

TAKEN_MAX = 100  # times of one row

Row = tuple[StrEnum, type, StrEnum]


class Rows:
    """`clock` is the time of day; `who` says whose a machine is: an id to show, and its owner."""

    def __init__(self, clock: Callable[[], float], who: Callable[[Machine], tuple[str, str]]) -> None:
        self._clock = clock
        self._who = who
        self._counts: defaultdict[type[Machine], dict[Row, int]] = defaultdict(dict)
        self._last: defaultdict[type[Machine], dict[Row, deque[tuple[float, str, str]]]] | None = None

    def look(self) -> None:
        """Keep the last times of each row from now on."""
        if self._last is None:
            self._last = defaultdict(dict)

    def took(self, machine: Machine, before: StrEnum, event: Any) -> None:
        """As `Observer.took`."""
        kind = type(machine)
        row = before, type(event), machine.state
        counts = self._counts[kind]
        counts[row] = counts.get(row, 0) + 1
        if self._last is not None:
            times = self._last[kind].get(row)
            if times is None:
                times = self._last[kind][row] = deque(maxlen=TAKEN_MAX)
            times.append((self._clock(), *self._who(machine)))

    def counts(self, kind: type[Machine]) -> dict[Row, int]:
        """How often each row of this machine was taken, of those that were."""
        return self._counts[kind]

    def last(self, kind: type[Machine], state: str, event: str, to: str, owner: str | None) -> list[Taken]:
        """The last times of one row, the newest last; of others than `owner` it is not told who they were."""
        if self._last is None:
            return []
        for (before, of_event, after), times in self._last[kind].items():
            if (str(before), of_event.__name__, str(after)) == (state, event, to):
                return [
                    Taken(time, state, event, to, of if owner is None or whose == owner else "")
                    for time, of, whose in times
                ]
        return []


def row_counts(counts: dict[Row, int], told: dict[Row, int]) -> list[RowCount]:
    """Those that are not as `told`, which is then as `counts`."""
    found = []
    for row, count in counts.items():
        if told.get(row) != count:
            told[row] = count
            state, event, to = row
            found.append(RowCount(str(state), event.__name__, str(to), count))
    return found
