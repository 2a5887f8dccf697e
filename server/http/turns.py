"""When large bodies are decoded, which holds the loop: so far apart that others have as much of it, clients in turns.

A turn is asked for by the handler that decodes: what is refused before (its path, method, key or content type) takes
none. A request that ends while its body waits gives its turn up.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from novainfer import EngineOverloaded, RequestTimeout, SamplingParams
from novainfer.server.http.errors import TooManyRequests

LARGE_BODY_BYTES = 64 << 10  # a smaller one is decoded within 3 ms
LOOP_BYTES_PER_S = 25e6  # of large bodies: the worst JSON is decoded at 50 MB a second, so they have half of the loop
WAITING_BYTES_MAX = 128 << 20  # of large bodies, in all: 5.4 s of decoding
CLIENT_BYTES_MAX = WAITING_BYTES_MAX // 2  # of one client: a thousand bodies of 64 KiB at once


class Turn:
    """One body that waits; `future` holds None once it may be decoded, or why it may not."""

    __slots__ = ("client", "future", "num_bytes")

    def __init__(self, client: str, num_bytes: int) -> None:
        self.client = client
        self.num_bytes = num_bytes
        self.future: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()


class BodyTurns:
    """The account of large bodies that wait. Each client that has some decodes one of them, then the next client.

    So a client that has none waiting waits for one body of each other client, however many these have.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_s = 0.0  # when the next one may be decoded
        self._waiting: OrderedDict[str, dict[Turn, None]] = OrderedDict()  # by client, the next one's first
        self._latest = ""  # the client whose turn was the latest
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes: Counter[str] = Counter()  # that wait, of each client

    async def wait(self, client: str, num_bytes: int) -> float:
        """Wait until a body of so many bytes may be decoded; returns for how many seconds it did.

        Raises `TooManyRequests` or `EngineOverloaded` when too much waits already, or comes while this waits.
        """
        if num_bytes < LARGE_BODY_BYTES:
            return 0.0
        began_s = self._clock()
        turn = self.enter(client, num_bytes)
        try:
            self._go_on()
            if refusal := await turn.future:
                raise refusal
        finally:
            self.leave(turn)
        return self._clock() - began_s

    def enter(self, client: str, num_bytes: int) -> Turn:
        """A body waits from now on; raises `TooManyRequests` or `EngineOverloaded` where there is no room for it.

        Where there is room for its client, and none in all, the latest body of the client that has most gives way. A
        body that waits alone has room, however large it is.
        """
        held = self.num_bytes[client]
        if held and held + num_bytes > CLIENT_BYTES_MAX:
            raise _too_much()
        while self._waiting and self.num_bytes.total() + num_bytes > WAITING_BYTES_MAX:
            most = max(self._waiting, key=self.num_bytes.__getitem__)
            if self.num_bytes[most] <= held + num_bytes:
                raise EngineOverloaded(
                    "Too many large bodies wait to be decoded: try again in a moment",
                    retry_after_s=self.num_bytes.total() / LOOP_BYTES_PER_S,
                )
            latest = next(reversed(self._waiting[most]))
            self.leave(latest)
            if not latest.future.cancelled():
                latest.future.set_result(_too_much())
        turn = Turn(client, num_bytes)
        self._waiting.setdefault(client, {})[turn] = None
        self.num_bytes[client] += num_bytes
        return turn

    def leave(self, turn: Turn) -> None:
        """It waits no more, for whatever reason; again is fine."""
        turns = self._waiting.get(turn.client, {})
        if turn not in turns:
            return
        del turns[turn]
        self.num_bytes[turn.client] -= turn.num_bytes
        if not turns:
            del self._waiting[turn.client], self.num_bytes[turn.client]

    def next(self) -> Turn | None:
        """The body that may be decoded now: it waits no more; None when none waits, or the loop is for others."""
        now_s = self._clock()
        while self._waiting and now_s >= self._free_s:
            if self._latest in self._waiting:
                self._waiting.move_to_end(self._latest)  # now, so that a client that has come meanwhile is before it
            turn = next(iter(next(iter(self._waiting.values()))))
            self.leave(turn)
            if not turn.future.cancelled():  # by its client's leaving, of which its task has not heard yet
                self._latest = turn.client
                self._free_s = now_s + turn.num_bytes / LOOP_BYTES_PER_S
                return turn
        return None

    def _go_on(self) -> None:
        while (turn := self.next()) is not None:
            turn.future.set_result(None)
        if self._waiting and self._timer is None:
            wait_s = max(self._free_s - self._clock(), 0.001)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._go_on()


def after(params: SamplingParams, waited_s: float) -> SamplingParams:
    """`params` of a request whose body has waited: so much less of its time is left; raises `RequestTimeout`."""
    if params.timeout_s is None or not waited_s:
        return params
    left_s = params.timeout_s - waited_s
    if left_s <= 0:
        raise RequestTimeout(f"The deadline of {params.timeout_s:g} s passed before the request could begin")
    return msgspec.structs.replace(params, timeout_s=left_s)


def _too_much() -> TooManyRequests:
    return TooManyRequests("This client has too many large bodies that wait to be decoded: wait for some to be")
