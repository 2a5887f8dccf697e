"""What one client holds of this server: live requests, prompts that wait, and answers that it does not read.

A client is a key, where requests carry keys, and an address where they do not. What it may hold is bounded for each of
them, not for each stream: a thousand streams of one client are one client's doing. A client that is alone may have more
than one that is not: clients are here until `RECENT_S` after their last request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from novainfer import InvalidParameter
from novainfer.server.http.errors import TooManyRequests
from novainfer.server.settings import ServerSettings

RECENT_S = 60.0  # for which a client counts as one that is here, after its last request
SHARES_MAX = 8  # into which the queue is divided
UNREAD_AFTER_S = 10.0  # that an answer waits for its client: less is a network, more is a client that does not read


class Clients:
    """The account of all clients; an entry is there only while it is not zero."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._here: OrderedDict[str, float] = OrderedDict()  # when each was seen last, the longest ago first
        self._unread_max = settings.max_client_unread
        self.live: Counter[str] = Counter()  # choices of live requests
        self.waiting: Counter[str] = Counter()  # prompt tokens of those that have no token yet
        self.unread: Counter[str] = Counter()  # streams

    def enter(self, client: str, num_prompts: int, n: int, num_tokens: int) -> None:
        """Let one request of `num_prompts * n` choices in, with so many tokens of prompts.

        Raises `TooManyRequests` when the client has to wait or to ask for less, `InvalidParameter` when it may never
        have as much. What it has waiting may be one prompt of any length.
        """
        live, waiting, unread = self.live[client], self.waiting[client], self.unread[client]
        if self._unread_max is not None and unread >= self._unread_max:
            raise TooManyRequests(f"{unread} answers wait for this client to read them: read them, then ask for more")
        num_choices = num_prompts * n
        self._check_size(num_prompts, n, num_tokens)
        num_here = self._num_here(client)
        most = self._choices_max(num_here)
        if live + num_choices > most:
            what = f"This client has {live} live requests, and may have {most:g}"
            raise TooManyRequests(f"{what}: wait for one to end" if live else f"{what} while others are here")
        most = self._tokens_max(num_here)
        if waiting + num_tokens > most and (waiting or num_prompts > 1):
            what = f"Prompts of this client wait with {waiting} tokens, and may have {most:g}"
            raise TooManyRequests(f"{what}: wait for one to begin" if waiting else f"{what} while others are here")
        self.enter_again(client, num_choices, num_tokens)

    def enter_again(self, client: str, num_choices: int, num_tokens: int) -> None:
        """A request goes on that was let in before."""
        self.live[client] += num_choices
        self.waiting[client] += num_tokens
        self._see(client)

    def begin(self, client: str, num_tokens: int) -> None:
        """A prompt of so many tokens waits no more."""
        self.waiting[client] -= num_tokens
        if not self.waiting[client]:
            del self.waiting[client]

    def leave(self, client: str, num_choices: int) -> None:
        """They have ended."""
        self.live[client] -= num_choices
        if not self.live[client]:
            del self.live[client]
        self._see(client)

    def _check_size(self, num_prompts: int, n: int, num_tokens: int) -> None:
        """Raise `InvalidParameter` for one request that is more than a client may ever have."""
        choices, tokens = self._settings.max_client_reqs, self._settings.max_client_tokens
        if choices is not None and num_prompts * n > choices:
            what = f"This is a request of {num_prompts} prompts with n={n}, and a client may have {choices} choices"
            raise InvalidParameter(f"{what}: ask for fewer at a time", param="n" if n > choices else "prompt")
        if tokens is not None and num_tokens > tokens and num_prompts > 1:
            what = f"The prompts have {num_tokens} tokens, and those of a client that wait may have {tokens}"
            raise InvalidParameter(f"{what}: send fewer at a time", param="prompt")

    def _choices_max(self, num_here: int) -> float:
        """Live choices that a client may have: all that it may ever have, or less while other clients are here."""
        found = [self._settings.max_client_reqs]
        if num_here > 1:
            found.append(self._settings.client_room)
        return min((most for most in found if most is not None), default=math.inf)

    def _tokens_max(self, num_here: int) -> float:
        found = [self._settings.max_client_tokens]
        if num_here > 1:
            found.append(_share(self._settings.client_tokens, num_here))
        return min((most for most in found if most is not None), default=math.inf)

    def _num_here(self, client: str) -> int:
        """How many clients are here, `client` included."""
        now_s = self._clock()
        while self._here:
            longest = next(iter(self._here))
            if self._here[longest] > now_s - RECENT_S:
                break
            if longest in self.live:
                self._see(longest)
            else:
                del self._here[longest]
        return len(self._here) + (client not in self._here)

    def _see(self, client: str) -> None:
        self._here[client] = self._clock()
        self._here.move_to_end(client)

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


def _share(most: int | None, num_here: int) -> int | None:
    return None if most is None else max(most // min(num_here, SHARES_MAX), 1)


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
