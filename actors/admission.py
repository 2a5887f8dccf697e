"""Admission exists because a client must have its answer at once: it asks the gate by a call, not by a mailbox.

It opens a stream for whom the gate lets in, or lets wait, and measures how fast the queue drains, so that a refusal can
say when to try again. Cancels take the same way.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from novainfer.actors.core.streams import StreamHandle, Streams
from novainfer.actors.tokenizer.threads import size_of
from novainfer.fsm.client.drain import DrainRate, Expected
from novainfer.fsm.client.gate import Gate
from novainfer.fsm.messages.errors import EngineClosed, EngineDraining, EngineOverloaded, NovaInferError
from novainfer.fsm.messages.events import Arrive, Cancel, CancelAll, Cause, Chat, Committed, Departed, Prompt, Rejected
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.tenant import ANYONE, Tenant

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


class Admission:
    """The way in, and the way out before the end. `ask` hands an event to the gate's actor, now.

    `expected_s` says how long so many requests and prompt tokens will wait, while none has left the queue.
    """

    def __init__(
        self,
        gate: Gate,
        streams: Streams,
        *,
        ask: Callable[[Any], None],
        expected_s: Expected,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._streams = streams
        self._ask = ask
        self._expected_s = expected_s
        self._clock = clock
        self._next_stream_id = 0
        self._rejected: Rejected | None = None  # the gate's answer to the stream just added
        self._rate = DrainRate()
        self._num_rejected: Counter[str] = Counter()
        self._num_overflowed = 0

    def add(
        self,
        name: str,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        tenant: Tenant = ANYONE,
        committed: Sequence[Committed] = (),
    ) -> StreamHandle:
        """Ask for admission; raises `EngineOverloaded`, `EngineDraining` or `EngineClosed` when it is refused."""
        stream_id = self._next_stream_id
        num_tokens = estimate_tokens(prompt)
        handle = self._streams.add(stream_id, name, params.n)
        self._rate.arrives(self._gate, self._clock())
        self._ask(
            Arrive(
                stream_id=stream_id,
                prompt=prompt,
                params=params,
                seed=seed,
                num_tokens=num_tokens,
                tenant=tenant,
                committed=list(committed),
            )
        )
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
        self._rate.departs(self._gate, event, self._clock())

    def retry_after_s(self) -> float:
        """Seconds until all who wait now will have left the queue, at the rate they leave now, or are expected to."""
        return self._rate.wait_s(self._gate, self._clock(), self._expected_s)

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
    said = msgspec.structs.replace(prompt, template_kwargs={}) if isinstance(prompt, Chat) else prompt
    return size_of(said) // BYTES_PER_TOKEN + 1
