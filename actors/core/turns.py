"""When actors take their turns: in the order in which they asked for one, several in one callback of the loop.

A step is five turns, each of which asks for the next one. In a callback each, every one of them would wait for all that
is ready on the loop, readers and sockets, while the device has nothing to do. So they follow each other at once, until
they have taken `MESSAGES_MAX` messages together: then all that waits on the loop comes first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# A millisecond's work. 4,096 requests that come or go at once took 40 to 90 ms in one callback.
MESSAGES_MAX = 64


class Turns:
    """The turns that are asked for on one loop. A turn is a call, and answers with how many messages it has taken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._asked: deque[Callable[[], int]] = deque()
        self._is_awake = False

    def ask(self, turn: Callable[[], int]) -> None:
        """Take `turn` after those that were asked for before."""
        self._asked.append(turn)
        if not self._is_awake:
            self._is_awake = True
            self.loop.call_soon(self._run)

    def _run(self) -> None:
        asked, left = self._asked, MESSAGES_MAX
        try:
            while asked and left > 0:
                left -= asked.popleft()()
        finally:
            self._is_awake = bool(asked)
            if asked:
                self.loop.call_soon(self._run)
