"""What wakes readers: each waits for the next change, and whoever made one tells all of them."""

from __future__ import annotations

import asyncio


class Change:
    """A change that happens again and again; for one event loop."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def wait(self) -> None:
        """Until `tell` is called next."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except BaseException:
            if future in self._waiting:
                self._waiting.remove(future)
            raise

    def tell(self) -> None:
        """Wake all that wait."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
