"""What one HTTP request had the engine do, filled as it goes: for its line in the log, and its span.

A generation may go on behind its request: a response in the background, a stream in the journal whose client has left.
Its end is then told by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from novainfer import Delta, NovaInferError, SamplingParams
from novainfer.inspection import WAITS, RequestRecord, Transition


class Work:
    """A generation as an operator sees it: no text of prompts or answers. Times are `time.perf_counter`'s.

    `is_watched` says that its end will be told, so that what costs something is looked up then; `prefix` is that of its
    id, which names the kind of request. `is_behind`: its request has ended before it, and was told.
    """

    __slots__ = (
        "began_s",
        "cached_tokens",
        "carrier",
        "completion_tokens",
        "error",
        "finish_reasons",
        "first_s",
        "id",
        "is_behind",
        "is_over",
        "is_watched",
        "model",
        "params",
        "prefix",
        "prompt_tokens",
        "records",
        "request_id",
    )

    def __init__(self, *, is_watched: bool = False) -> None:
        self.is_watched = is_watched
        self.began_s = time.perf_counter()
        self.prefix = ""  # "": it has begun no generation
        self.id = ""
        self.model = ""
        self.params: SamplingParams | None = None
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.first_s: float | None = None  # when the first delta was there
        self.finish_reasons: dict[int, str] = {}  # by choice
        self.error: BaseException | None = None
        self.records: Sequence[RequestRecord] = ()  # the engine's, of each prompt that it had
        self.is_over = False
        self.is_behind = False
        self.request_id = ""
        self.carrier: Mapping[str, str] = {}  # the headers of its request that say of which trace it is a part

    def begin(self, prefix: str, request_id: str, model: str, params: SamplingParams) -> None:
        """A generation has begun."""
        self.prefix, self.id, self.model, self.params = prefix, request_id, model, params

    @property
    def is_going_on(self) -> bool:
        """Whether a generation has begun, and not ended."""
        return bool(self.prefix) and not self.is_over

    def leave_behind(self, request_id: str, carrier: Mapping[str, str]) -> None:
        """Its request has ended, and was told without it."""
        self.is_behind, self.request_id, self.carrier = True, request_id, carrier

    def note(self, delta: Delta, now_s: float) -> None:
        """A delta is there, at `now_s`."""
        if self.first_s is None:
            self.first_s = now_s
        if delta.finish_reason is not None:
            self.finish_reasons[delta.index] = str(delta.finish_reason)

    @property
    def queue_s(self) -> float | None:
        """How long its first prompt to run waited for that; None where none has run, or nothing is known of it."""
        found = [_waited_s(choice.history) for record in self.records for choice in record.choices]
        return min((waited_s for waited_s in found if waited_s is not None), default=None)

    @property
    def ended_by(self) -> str:
        """How the generation ended: the reasons of its choices, an error's code, or "disconnect"."""
        if isinstance(self.error, NovaInferError):
            return self.error.code
        if self.error is not None:
            return "internal_error" if isinstance(self.error, Exception) else "disconnect"
        return ",".join(sorted(set(self.finish_reasons.values())))


def _waited_s(history: Sequence[Transition]) -> float | None:
    """From the arrival of a choice to when it first ran."""
    ran = next((one.time for one in history if one.state not in WAITS), None)
    return max(ran - history[0].time, 0.0) if ran is not None else None
