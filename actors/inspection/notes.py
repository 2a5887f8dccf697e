"""What the inspector notes of a stream and its choices beside what their requests know themselves."""

from __future__ import annotations

from novainfer.actors.inspection.frames import RequestNow
from novainfer.actors.inspection.records import Transition
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.schedule.request import Request


class Note:
    """One stream: which request it is, whose, and when it came."""

    __slots__ = (
        "arrived_s",
        "came",
        "choices",
        "id",
        "key",
        "max_tokens",
        "num_choices",
        "num_live",
        "owner",
        "stream_id",
    )

    def __init__(
        self, stream_id: int, name: str, owner: str, params: SamplingParams, came: Transition, arrived_s: float
    ) -> None:
        self.stream_id = stream_id
        self.key = key_of(stream_id, 0)
        self.id = name
        self.owner = owner
        self.num_choices = self.num_live = params.n
        self.max_tokens = params.max_tokens
        self.came = came
        self.arrived_s = arrived_s
        self.choices: list[Choice] = []

    def bare(self, state: str, waits_for: str | None, since: float) -> RequestNow:
        """As it is told before the scheduler has it, or where that never got it."""
        return RequestNow(
            key=self.key,
            id=self.id,
            choice=0,
            state=state,
            waits_for=waits_for,
            owner=self.owner,
            arrived=self.came.time,
            since=since,
            prompt_tokens=None,
            cached_tokens=0,
            output_tokens=0,
            blocks=0,
        )


class Choice:
    """One request, since when it is in its state, and which states it has been in."""

    __slots__ = ("history", "key", "note", "request", "since_s")

    def __init__(self, request: Request, note: Note | None, since_s: float) -> None:
        self.key = key_of(request.stream_id, request.choice)
        self.request = request
        self.note = note
        self.since_s = since_s
        self.history: list[Transition] = []

    def now(self, waits_for: str | None, since: float, num_blocks: int) -> RequestNow:
        """As it is told; `since` is the time of day."""
        request, note = self.request, self.note
        assert note is not None
        return RequestNow(
            key=self.key,
            id=note.id,
            choice=request.choice,
            state=str(request.state),
            waits_for=waits_for,
            owner=note.owner,
            arrived=note.came.time,
            since=since,
            prompt_tokens=request.num_prompt,
            cached_tokens=request.num_cached,
            output_tokens=request.num_generated,
            blocks=num_blocks,
        )


def key_of(stream_id: int, choice: int) -> str:
    """What one choice is known by among all that an engine has had."""
    return f"{stream_id}.{choice}"
