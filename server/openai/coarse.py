"""Fewer and larger events of a stream: each has several tokens of a choice (vLLM's `stream_interval`).

The first token of a choice goes out at once, and so does what ends it. What is held is told by counts of tokens alone,
so that a stream which is told again has the same events.
"""

from __future__ import annotations

import msgspec

from novainfer import Delta
from novainfer.server.openai.chunks import StreamEncoder


def coarse(encoder: StreamEncoder, interval: int, *, has_ids: bool = False) -> StreamEncoder:
    """`encoder`, given at least `interval` tokens at a time; `has_ids`: its events can be asked for again."""
    return encoder if interval == 1 else _Coarse(encoder, interval, has_ids=has_ids)


class _Coarse:
    """As `StreamEncoder`."""

    def __init__(self, encoder: StreamEncoder, interval: int, *, has_ids: bool) -> None:
        self._encoder = encoder
        self._interval = interval
        self._has_ids = has_ids
        self._held: dict[int, Delta] = {}
        self._begun: set[int] = set()  # choices of which a token has gone out

    @property
    def is_over(self) -> bool:
        return self._encoder.is_over

    @property
    def keep_alive(self) -> bytes:
        return self._encoder.keep_alive

    def begin(self) -> bytes:
        return self._encoder.begin()

    def delta(self, delta: Delta) -> bytes:
        """What is held of its choice together with it, once that is enough."""
        if (held := self._held.pop(delta.index, None)) is not None:
            delta = _joined(held, delta)
        is_first = delta.index not in self._begun
        if not (is_first or delta.finish_reason is not None or len(delta.token_ids) >= self._interval):
            self._held[delta.index] = delta
            return b""
        self._begun.add(delta.index)
        return self._encoder.delta(delta)

    def end(self) -> bytes:
        return self._encoder.end()

    def error(self, error: Exception) -> bytes:
        """What is held, and the error; who can ask for the rest again gets it with its event then, and not twice."""
        held = b"" if self._has_ids else b"".join([self._encoder.delta(one) for one in self._held.values()])
        return held + self._encoder.error(error)


def _joined(one: Delta, other: Delta) -> Delta:
    """Both as one: lists and text one behind the other, and the counts of `other`, which are totals."""
    return msgspec.structs.replace(
        other,
        text=one.text + other.text,
        token_ids=one.token_ids + other.token_ids,
        logprobs=None if one.logprobs is None else one.logprobs + (other.logprobs or []),
        marks=one.marks + other.marks,
        prompt_token_ids=one.prompt_token_ids or other.prompt_token_ids,
        prompt_logprobs=one.prompt_logprobs or other.prompt_logprobs,
        is_degraded=one.is_degraded or other.is_degraded,
    )
