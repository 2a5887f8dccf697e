"""What one client holds of this server: live requests, and answers that it does not read.

A client is a key, where requests carry keys, and an address where they do not. What it may hold is bounded for each of
them, not for each stream: a thousand streams of one client are one client's doing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from novainfer.server.errors import TooManyRequests
from novainfer.server.settings import ServerSettings

RECENT_S = 60.0  # for which a client counts as one that is here, after its last request
SHARES_MAX = 8  # into which slots are divided: with more clients, the queue is what is fair
UNREAD_AFTER_S = 10.0  # that an answer waits for its client: less is a network, more is a client that does not read


class Clients:
    """The account of all clients; an entry is there only while it is not zero."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests_max = settings.max_client_reqs
        self._slots = settings.client_slots
        self._clock = clock
        self._left_s: dict[str, float] = {}  # when each had its last request; as many as there are keys
        self._unread_max = settings.max_client_unread
        self.live: Counter[str] = Counter()  # choices of live requests
        self.unread: Counter[str] = Counter()  # streams

    def enter(self, client: str, num_choices: int) -> None:
        """Let so many choices of one request in; raises `TooManyRequests`."""
        live, unread = self.live[client], self.unread[client]
        if self._unread_max is not None and unread >= self._unread_max:
            raise TooManyRequests(f"{unread} answers wait for this client to read them: read them, then ask for more")
        most = self._share(client)
        if live and live + num_choices > most:
            raise TooManyRequests(f"This client has {live} live requests, and may have {most:g}: wait for one to end")
        self.live[client] += num_choices

    def _share(self, client: str) -> float:
        """Live choices that `client` may have: of the slots an equal share, while other clients are here."""
        most = math.inf if self._requests_max is None else self._requests_max
        if self._slots is None:
            return most
        now_s = self._clock()
        self._left_s = {name: at_s for name, at_s in self._left_s.items() if at_s > now_s - RECENT_S}
        num_others = len((self.live.keys() | self._left_s.keys()) - {client})
        if not num_others:
            return most
        return min(most, max(self._slots // min(num_others + 1, SHARES_MAX), 1))

    def leave(self, client: str, num_choices: int) -> None:
        """They have ended."""
        self.live[client] -= num_choices
        if not self.live[client]:
            del self.live[client]
        if self._slots is not None:
            self._left_s[client] = self._clock()

    def hold(self, client: str) -> bool:
        """One more of its answers is unread; False when that is one too many, which ends the stream."""
        if self._unread_max is not None and self.unread[client] >= self._unread_max:
            return False
        self.unread[client] += 1
        return True

    def release(self, client: str) -> None:
        """One of them is read again, or has ended."""
        self.unread[client] -= 1
        if not self.unread[client]:
            del self.unread[client]


class Unread:
    """One answer's sends: notices when one waits for its client, and cancels its task when it has waited too long."""

    def __init__(self, clients: Clients, client: str, timeout_s: float) -> None:
        self._clients = clients
        self._client = client
        self.timeout_s = timeout_s  # of one send
        self._is_held = False
        self.has_stalled = False  # the task was cancelled because of it

    def waits(self, task: asyncio.Task[None], silent_s: float) -> None:
        """A send has waited for `silent_s`."""
        if silent_s >= UNREAD_AFTER_S and not self._is_held:
            self._is_held = self._clients.hold(self._client)
            if not self._is_held:
                silent_s = self.timeout_s
        if silent_s >= self.timeout_s:
            self.has_stalled = True
            task.cancel()

    def goes_on(self) -> None:
        """The send has ended."""
        if self._is_held:
            self._is_held = False
            self._clients.release(self._client)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around the send of an answer's end; raises `TimeoutError` when the client did not take it."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        began_s = loop.time()
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            silent_s = loop.time() - began_s
            self.waits(task, silent_s)
            until_s = self.timeout_s if self._is_held else min(UNREAD_AFTER_S, self.timeout_s)
            timer = loop.call_later(max(until_s - silent_s, 0.001), look)

        timer = loop.call_later(min(UNREAD_AFTER_S, self.timeout_s), look)
        try:
            yield
        except asyncio.CancelledError:
            if not self.has_stalled:
                raise
            task.uncancel()
            raise TimeoutError from None
        finally:
            timer.cancel()
            self.goes_on()
