"""Admission exists because a client must have its answer at once: it asks the gate by a call, not by a mailbox.

It opens a stream for whom the gate lets in, and measures how fast the queue drains, so that a refusal can say when to
try again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from novainfer.actors.streams import StreamHandle, Streams
from novainfer.fsm.errors import EngineClosed, EngineDraining, EngineOverloaded, NovaInferError
from novainfer.fsm.events import Arrive, Cancel, Cause, Chat, Departed, Prompt, Rejected
from novainfer.fsm.gate import Gate
from novainfer.fsm.params import SamplingParams

DRAIN_RATE_WINDOW = 64  # departures from the queue that its drain rate is computed from, and
DRAIN_RATE_WINDOW_S = 60.0  # how old they may be
RETRY_AFTER_S_DEFAULT = 1.0  # while nothing has departed yet there is no rate
RETRY_AFTER_S_MAX = 60.0  # openai-python gives up above 120 s
BYTES_PER_TOKEN = 3  # what admission reserves for text before it is tokenised: Qwen2's English average is about 4


class Admission:
    """The way in. `ask` hands an event to the gate's actor, now; `cancel` ends a stream wherever it is."""

    def __init__(
        self,
        gate: Gate,
        streams: Streams,
        *,
        ask: Callable[[Any], None],
        cancel: Callable[[Cancel], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._streams = streams
        self._ask = ask
        self._cancel = cancel
        self._clock = clock
        self._next_stream_id = 0
        self._rejected: Rejected | None = None  # the gate's answer to the stream just added
        self._departures: deque[float] = deque(maxlen=DRAIN_RATE_WINDOW)

    def add(self, name: str, prompt: Prompt, params: SamplingParams, seed: int) -> StreamHandle:
        """Ask for admission; raises `EngineOverloaded`, `EngineDraining` or `EngineClosed` when it is refused."""
        stream_id = self._next_stream_id
        num_tokens = estimate_tokens(prompt)
        handle = self._streams.add(stream_id, name, params.n)
        self._ask(Arrive(stream_id=stream_id, prompt=prompt, params=params, seed=seed, num_tokens=num_tokens))
        rejected, self._rejected = self._rejected, None
        if rejected is not None:
            self._streams.forget(stream_id)
            raise self._refusal(rejected)
        self._next_stream_id += 1
        return handle

    def cancel(self, stream_id: int, cause: Cause) -> None:
        """End this stream; harmless when it has ended."""
        self._cancel(Cancel(stream_id, cause))

    def abandon(self, stream_id: int) -> None:
        """Its reader has left: cancel it, and drop what it may still say."""
        self.cancel(stream_id, Cause.DISCONNECT)
        self._streams.forget(stream_id)

    def note_rejected(self, event: Rejected) -> None:
        """The gate's answer to the stream that is being added."""
        self._rejected = event

    def note_departed(self, event: Departed) -> None:
        """The engine is telling the gate who has left the queue."""
        num_left = sum(map(self._gate.holds, set(event.stream_ids)))  # the others left when they first ran
        self._departures.extend([self._clock()] * num_left)

    def retry_after_s(self) -> float:
        """Seconds until the queue will have drained, at the rate it drains now."""
        times, now_s = self._departures, self._clock()
        while times and times[0] < now_s - DRAIN_RATE_WINDOW_S:
            times.popleft()
        if len(times) < 2:
            return RETRY_AFTER_S_DEFAULT
        rate = len(times) / max(now_s - times[0], 1e-3)
        return min(max(self._gate.num_queued / rate, RETRY_AFTER_S_DEFAULT), RETRY_AFTER_S_MAX)

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
    if isinstance(prompt, Chat):
        return sum(len(str(m.get("content", ""))) for m in prompt.messages) // BYTES_PER_TOKEN + len(prompt.messages)
    return len(prompt) // BYTES_PER_TOKEN + 1
