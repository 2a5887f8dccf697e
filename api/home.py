"""The event loop that an engine lives on: whatever changes something must come from there."""

from __future__ import annotations

import asyncio

from novainfer.fsm.messages.errors import EngineClosed, WrongLoop


class Home:
    """One engine's loop, from its start on. A call from elsewhere would wake no task there: it would hang for ever."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self) -> None:
        """The running loop is home from now on; raises `WrongLoop` when there is none of asyncio's."""
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoop(
                "an Engine needs a running asyncio event loop, and there is none here (trio's is of another kind): "
                "use asyncio.run, or LLM, which brings its own"
            ) from None

    @property
    def has_ended(self) -> bool:
        """Whether the loop is closed, as it is after `asyncio.run`."""
        return self._loop is not None and self._loop.is_closed()

    def check(self) -> None:
        """Raise `WrongLoop` when the caller is on another loop or thread, and `EngineClosed` when the loop has ended.

        Between two runs of the loop its own thread may call.
        """
        if self._loop is None:
            return
        if self._loop.is_closed():
            raise EngineClosed("the event loop of this engine has ended, and the engine with it: make a new one")
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop or (running is None and not self._loop.is_running()):
            return
        raise WrongLoop(
            "this engine lives on another event loop: call it there (asyncio.run_coroutine_threadsafe reaches it from "
            "other threads), or make an engine for this loop"
        )
