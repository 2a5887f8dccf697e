"""What one HTTP request had the engine do, filled as it goes: for its line in the log."""

from __future__ import annotations

import time
from collections.abc import Sequence

from novainfer import Delta, NovaInferError, SamplingParams
from novainfer.inspection import RequestRecord, Transition

WAITS = frozenset({"OVERFLOW", "WAITING"})  # the states of a request that has not run yet


class Work:
    """A generation as an operator sees it: no text of prompts or answers. Times are `time.perf_counter`'s.

    `is_watched` says that its end will be told, so that what costs something is looked up then; `prefix` is that of its
    id, which names the kind of request.
    """

    __slots__ = (
        "began_s",
        "cached_tokens",
        "completion_tokens",
        "error",
        "finish_reasons",
        "first_s",
        "id",
        "is_watched",
        "model",
        "params",
        "prefix",
        "prompt_tokens",
        "records",
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

    def begin(self, prefix: str, request_id: str, model: str, params: SamplingParams) -> None:
        """A generation has begun."""
        self.prefix, self.id, self.model, self.params = prefix, request_id, model, params

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
