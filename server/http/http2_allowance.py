"""What one HTTP/2 client may make its server do for nothing: so much at once, and so much a second.

A frame costs the loop 10 to 100 µs, and other clients wait. Requests and their bodies are work; what is
limited here is the rest: floods of PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty DATA, CONTINUATION, frames on streams
that have ended, and requests that are reset again ("rapid reset").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import h2.events

OVERHEAD_BYTES_MAX = 2 * 1024 * 1024  # at once: above a body's rest that was on its way when its stream was refused
OVERHEAD_BYTES_PER_S = 32 * 1024
FRAME_COST_BYTES = 256  # of an event that asks for nothing, beside its bytes: a PING has 17, and costs as much as this
REQUEST_BYTES = 16 * 1024  # given back with each request: the headers that it may bring
WINDOW_UPDATES_PER_FRAME = 8  # given back with each frame of DATA that is sent; Envoy allows 10
RESETS_PER_S = 33.0  # nghttp2's figure
IDLE_EVENTS = (
    h2.events.PingReceived,
    h2.events.PriorityUpdated,
    h2.events.RemoteSettingsChanged,
    h2.events.WindowUpdated,
    h2.events.UnknownFrameReceived,
    h2.events.DataReceived,  # without data
)


class Allowance:
    """A bucket: `spend` takes out of it and says whether there was enough; time and `give` fill it again."""

    def __init__(self, size: float, per_s: float, clock: Callable[[], float]) -> None:
        self._size = size
        self._per_s = per_s
        self._clock = clock
        self._left = size
        self._at_s = clock()

    def spend(self, amount: float) -> bool:
        """Take `amount` out; False when there was less."""
        now_s = self._clock()
        self._left = min(self._size, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if amount > self._left:
            return False
        self._left -= amount
        return True

    def give(self, amount: float) -> None:
        """Put `amount` in, up to the bucket's size."""
        self._left = min(self._size, self._left + amount)


class ClientAllowance:
    """Both buckets of one connection."""

    def __init__(self, num_streams_max: int, clock: Callable[[], float]) -> None:
        self._overhead = Allowance(OVERHEAD_BYTES_MAX, OVERHEAD_BYTES_PER_S, clock)
        self._resets = Allowance(2 * num_streams_max, RESETS_PER_S, clock)  # all that may be open, twice at once

    def received(self, num_bytes: int, events: Iterable[h2.events.Event]) -> bool:
        """Note what came in one go; False when the client has asked for too much work that leads to nothing."""
        num_requests = num_idle = body_bytes = 0
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.data:
                body_bytes += event.flow_controlled_length or 0
            elif isinstance(event, h2.events.RequestReceived):
                num_requests += 1
            elif isinstance(event, IDLE_EVENTS):
                num_idle += 1
        is_enough = self._overhead.spend(num_bytes + num_idle * FRAME_COST_BYTES)
        self._overhead.give(body_bytes + num_requests * REQUEST_BYTES)  # a frame is known when its last byte is here
        return is_enough

    def sent(self, num_frames: int) -> None:
        """So many frames of DATA were sent: the client may answer each with a few window updates."""
        self._overhead.give(num_frames * WINDOW_UPDATES_PER_FRAME * FRAME_COST_BYTES)

    def reset(self) -> bool:
        """Note that the client has reset a stream; False when that was one too many."""
        return self._resets.spend(1)

    def answered(self) -> None:
        """A stream was answered to its end."""
        self._resets.give(1)
