"""How fast the queue drains, and so when a client that is refused should come again; each call is told the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from novainfer.fsm.client.gate import Gate
    from novainfer.fsm.messages.events import Departed

DRAIN_RATE_WINDOW = 256  # departures from the queue that its drain rate is computed from, and
DRAIN_RATE_WINDOW_S = 60.0  # how old they may be
RETRY_AFTER_S_DEFAULT = 1.0  # while nothing has departed yet there is no rate, and no expectation without costs
RETRY_AFTER_S_MIN = 0.1  # less is a burst of retries, not a wait
RETRY_AFTER_S_MAX = 60.0  # openai-python gives up above 120 s

Expected = Callable[[int, int], float | None]  # seconds for so many requests and prompt tokens, if that can be said


class DrainRate:
    """How fast requests leave a queue that is not empty, over the last minute at most.

    An interval counts only if a stream waited all through it, and one still waits: what an idle engine takes at once
    says nothing of what a busy one can take. Requests leave in bursts, so each interval counts with the burst at
    its end.
    """

    def __init__(self) -> None:
        self._bursts: deque[tuple[float, int, float]] = deque(maxlen=DRAIN_RATE_WINDOW)  # when, how many, since when
        self._since_s: float | None = None  # the last departure, if a stream waited after it
        self._filled_s: float | None = None  # when a stream came to an empty queue, until one leaves it
        self._leaving: set[int] = set()  # streams that have left, of which the gate has yet to hear

    # ---- at the gate ---------------------------------------------------------------------------------------------

    def arrives(self, gate: Gate, now_s: float) -> None:
        """A stream is about to ask `gate` for room."""
        if not self._num_waiting(gate):
            self.fills(now_s)

    def departs(self, gate: Gate, event: Departed, now_s: float) -> None:
        """`gate` is about to hear of the streams that have left its queue."""
        leaving = {i for i in self._leaving if gate.num_credits(i)}
        new = {i for i in event.stream_ids if gate.num_credits(i)} - leaving  # the others left when they first ran
        self._leaving = leaving | new
        self.note(now_s, sum(map(gate.num_credits, new)), num_waiting=self._num_waiting(gate))

    def wait_s(self, gate: Gate, now_s: float, expected_s: Expected) -> float:
        """Seconds until all who wait at `gate` now will have left the queue, at the rate they leave now.

        While there is no rate, `expected_s` says it, of so many requests and prompt tokens: by what steps cost.
        """
        num_waiting, rate = gate.num_queued + gate.num_overflow, self.per_s(now_s)
        if rate is not None:
            found_s: float | None = num_waiting / rate
        else:
            found_s = expected_s(num_waiting, gate.num_queued_tokens + gate.num_overflow_tokens)
        return RETRY_AFTER_S_DEFAULT if found_s is None else min(max(found_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

    def _num_waiting(self, gate: Gate) -> int:
        """Those who wait for room in the queue come to it when others leave."""
        return gate.num_queued + gate.num_overflow - sum(map(gate.num_credits, self._leaving))

    # ---- the rate ------------------------------------------------------------------------------------------------

    def fills(self, now_s: float) -> None:
        """A stream comes to an empty queue."""
        self._filled_s = now_s

    def note(self, now_s: float, num_left: int, *, num_waiting: int) -> None:
        """`num_left` requests have left the queue, and `num_waiting` are still in it."""
        if not num_left:
            return
        since_s = self._since_s
        if since_s is None and num_waiting:
            since_s = self._filled_s
        if since_s is not None:
            self._bursts.append((now_s, num_left, since_s))
        self._filled_s = None
        self._since_s = now_s if num_waiting else None

    def per_s(self, now_s: float) -> float | None:
        """Requests a second; None when there is nothing to tell it from."""
        bursts = self._bursts
        while bursts and bursts[0][0] < now_s - DRAIN_RATE_WINDOW_S:
            bursts.popleft()
        if not bursts:
            return None
        intervals_s = [at_s - since_s for at_s, _, since_s in bursts]
        elapsed_s = sum(intervals_s)
        since_s = self._filled_s if self._since_s is None else self._since_s
        if since_s is not None:  # the interval that has not ended yet, as far as it is longer than all of them
            elapsed_s += max(now_s - since_s - max(intervals_s), 0.0)
        return sum(num_left for _, num_left, _ in bursts) / max(elapsed_s, 1e-3)
