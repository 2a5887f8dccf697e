"""Simulated time: what comes when. Nothing waits; whoever drives a world jumps to what is due next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

Call: TypeAlias = Callable[..., None]


class Clock:
    """Calls in the order of their due times, and for equal times in the order in which they were asked for."""

    __slots__ = ("_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, due_s: float, call: Call, *args: Any) -> None:
        """`call(*args)` is due at `due_s`."""
        self._serial += 1
        heappush(self._heap, (due_s, self._serial, call, args))

    def is_due(self, now_s: float) -> bool:
        """True when something is due by now."""
        return bool(self._heap) and self._heap[0][0] <= now_s

    def pop(self) -> tuple[float, Call, tuple[Any, ...]]:
        """What is due first: when, and the call with its arguments."""
        due_s, _, call, args = heappop(self._heap)
        return due_s, call, args
