"""Admission exists because a client must have its answer at once: it asks the gate by a call, not by a mailbox.

It opens a stream for whom the gate lets in, or lets wait, and measures how fast the queue drains, so that a refusal can
say when to try again. Cancels take the same way.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from novainfer.actors.encoding import size_of
from novainfer.actors.streams import StreamHandle, Streams
from novainfer.fsm.errors import EngineClosed, EngineDraining, EngineOverloaded, NovaInferError
from novainfer.fsm.events import Arrive, Cancel, CancelAll, Cause, Departed, Prompt, Rejected
from novainfer.fsm.gate import Gate
from novainfer.fsm.params import SamplingParams

DRAIN_RATE_WINDOW = 256  # departures from the queue that its drain rate is computed from, and
DRAIN_RATE_WINDOW_S = 60.0  # how old they may be
RETRY_AFTER_S_DEFAULT = 1.0  # while nothing has departed yet there is no rate
RETRY_AFTER_S_MIN = 0.1  # less is a burst of retries, not a wait
RETRY_AFTER_S_MAX = 60.0  # openai-python gives up above 120 s
BYTES_PER_TOKEN = 3  # what admission reserves for text before it is tokenised: Qwen2's English average is about 4


class AdmissionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Admission at one moment; counts are in requests (choices), `*_total` only grow, and are in streams.

    `rejected_total` is by what was exhausted ("requests", "tokens", "overflow"), or "draining" or "closed".
    `cancelled_total` is in choices, by cause: "queue" is who waited too long. `num_stalled` streams have slow readers.
    `drain_rate_per_s` is None while the queue has not been longer than the engine takes at once.
    """

    num_queued: int = 0
    num_queued_tokens: int = 0
    num_overflow: int = 0
    overflowed_total: int = 0
    rejected_total: dict[str, int] = {}
    drain_rate_per_s: float | None = None
    num_stalled: int = 0
    stalls_total: int = 0
    cancelled_total: dict[str, int] = {}


class DrainRate:
    """How fast requests leave a queue that is not empty, over the last minute at most.

    An interval counts only if somebody waited all through it, and still waits: what an idle engine takes at once says
    nothing of what a busy one can take. Requests leave in bursts, so each interval counts with the burst at its end.
    """

    def __init__(self) -> None:
        self._bursts: deque[tuple[float, int, float]] = deque(maxlen=DRAIN_RATE_WINDOW)  # when, how many, since when
        self._since_s: float | None = None  # the last departure, if somebody waited after it
        self._filled_s: float | None = None  # when somebody came to an empty queue, until somebody leaves it

    def fills(self, now_s: float) -> None:
        """Somebody comes to an empty queue."""
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
        if self._since_s is not None:  # the interval that has not ended yet, as far as it is longer than all of them
            elapsed_s += max(now_s - self._since_s - max(intervals_s), 0.0)
        return sum(num_left for _, num_left, _ in bursts) / max(elapsed_s, 1e-3)


class Admission:
    """The way in, and the way out before the end. `ask` hands an event to the gate's actor, now."""

    def __init__(
        self,
        gate: Gate,
        streams: Streams,
        *,
        ask: Callable[[Any], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._streams = streams
        self._ask = ask
        self._clock = clock
        self._next_stream_id = 0
        self._rejected: Rejected | None = None  # the gate's answer to the stream just added
        self._rate = DrainRate()
        self._num_rejected: Counter[str] = Counter()
        self._num_overflowed = 0

    def add(self, name: str, prompt: Prompt, params: SamplingParams, seed: int) -> StreamHandle:
        """Ask for admission; raises `EngineOverloaded`, `EngineDraining` or `EngineClosed` when it is refused."""
        stream_id = self._next_stream_id
        num_tokens = estimate_tokens(prompt)
        handle = self._streams.add(stream_id, name, params.n)
        if not self._gate.num_queued:
            self._rate.fills(self._clock())
        self._ask(Arrive(stream_id=stream_id, prompt=prompt, params=params, seed=seed, num_tokens=num_tokens))
        rejected, self._rejected = self._rejected, None
        if rejected is not None:
            self._streams.forget(stream_id)
            self._num_rejected[rejected.limit or rejected.reason] += 1
            raise self._refusal(rejected)
        self._next_stream_id += 1
        self._num_overflowed += self._gate.is_overflowed(stream_id)
        return handle

    def cancel(self, stream_id: int, cause: Cause) -> None:
        """End this stream; harmless when it has ended."""
        self._ask(Cancel(stream_id, cause))

    def cancel_all(self, cause: Cause) -> None:
        """End every stream."""
        self._ask(CancelAll(cause))

    def abandon(self, stream_id: int) -> None:
        """Its reader has left: cancel it, and drop what it may still say."""
        self.cancel(stream_id, Cause.DISCONNECT)
        self._streams.forget(stream_id)

    def note_rejected(self, event: Rejected) -> None:
        """The gate's answer to the stream that is being added."""
        self._rejected = event

    def note_departed(self, event: Departed) -> None:
        """The engine is telling the gate who has left the queue."""
        num_left = sum(map(self._gate.num_credits, set(event.stream_ids)))  # the others left when they first ran
        self._rate.note(self._clock(), num_left, num_waiting=self._gate.num_queued - num_left)

    def retry_after_s(self) -> float:
        """Seconds until all who wait now will have left the queue, at the rate they leave now."""
        rate = self._rate.per_s(self._clock())
        if rate is None:
            return RETRY_AFTER_S_DEFAULT
        num_waiting = self._gate.num_queued + self._gate.num_overflow
        return min(max(num_waiting / rate, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

    def statistics(self) -> AdmissionStatistics:
        """An immutable record of the moment."""
        return AdmissionStatistics(
            num_queued=self._gate.num_queued,
            num_queued_tokens=self._gate.num_queued_tokens,
            num_overflow=self._gate.num_overflow,
            overflowed_total=self._num_overflowed,
            rejected_total=dict(self._num_rejected),
            drain_rate_per_s=self._rate.per_s(self._clock()),
            num_stalled=self._streams.num_stalled,
            stalls_total=self._streams.stalls_total,
            cancelled_total={str(cause): count for cause, count in self._streams.cancelled_total.items()},
        )

    def _refusal(self, rejected: Rejected) -> NovaInferError:
        if rejected.reason == "draining":
            return EngineDraining(rejected.message)
        if rejected.reason == "closed":
            return EngineClosed(rejected.message)
        return EngineOverloaded(rejected.message, retry_after_s=self.retry_after_s())


def estimate_tokens(prompt: Prompt) -> int:
    """What admission reserves for a prompt before it is tokenised, in tokens."""
    if isinstance(prompt, list):
        return len(prompt)
    return size_of(prompt) // BYTES_PER_TOKEN + 1
