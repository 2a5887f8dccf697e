"""The stream: what one client gets, between the scheduler's steps and the reader's pace.

    OPEN ──too much unread──▶ STALLED ──read──▶ OPEN
      └───────────┴──last choice ended, or one ended badly──▶ CLOSED

Outputs that were not read yet merge into one delta per choice, so a slow reader costs text, not objects. Above the
high-water mark the request is paused; it leaves the batch and nobody else notices. A stream has exactly one end:
all its choices finished, or one error. What came before the end can still be read after it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from novainfer.fsm.events import End, Finished, Output, Pause, Read, Resume, Stop
from novainfer.fsm.machine import Machine, Table, ignore, on, table
from novainfer.fsm.outputs import Delta

# Unread tokens. At 50 tokens/s the high mark is ten seconds behind; with 20 top logprobs a token takes about 2 kB, so
# a stalled stream holds 1 MiB at most.
STALL_TOKENS_HIGH = 512
STALL_TOKENS_LOW = 128


class StreamState(StrEnum):
    """Whether the reader keeps up."""

    OPEN = "OPEN"
    STALLED = "STALLED"
    CLOSED = "CLOSED"


S = StreamState


class Stream(Machine):
    """One client's stream of `num_choices` choices; `name` is the request id that the client knows.

    It stalls above `stall_high` unread tokens, and is open again at `stall_low`.
    """

    TABLE: ClassVar[Table] = table(
        S,
        (Output, Read, Stop),
        on(S.OPEN, Output, "_output", S.OPEN, S.STALLED, S.CLOSED),
        on(S.STALLED, Output, "_output", S.STALLED, S.CLOSED),
        ignore(S.CLOSED, Output, "a stream ends once; siblings of a failed choice end after it"),
        on(S.OPEN, Read, "_read", S.OPEN),
        on(S.STALLED, Read, "_read", S.OPEN, S.STALLED),
        on(S.CLOSED, Read, "_read_rest", S.CLOSED),
        on((S.OPEN, S.STALLED), Stop, "_stop", S.CLOSED),
        ignore(S.CLOSED, Stop, "it has ended already"),
    )
    __slots__ = (
        "_begun",
        "_end",
        "_generated",
        "_num_open",
        "_pending",
        "_stall_high",
        "_stall_low",
        "_unread",
        "name",
        "stream_id",
    )
    state: StreamState

    def __init__(
        self,
        stream_id: int,
        name: str,
        num_choices: int,
        *,
        stall_high: int = STALL_TOKENS_HIGH,
        stall_low: int = STALL_TOKENS_LOW,
    ) -> None:
        super().__init__(S.OPEN)
        self._stall_high = stall_high
        self._stall_low = stall_low
        self.stream_id = stream_id
        self.name = name
        self._num_open = num_choices
        self._pending: dict[int, Delta] = {}  # choice -> what it has that was not read
        self._begun: tuple[int, int, int] = (0, 0, 0)  # prompt tokens, cached tokens, seed
        self._generated = [0] * num_choices
        self._unread = 0  # tokens
        self._end: End | None = None  # how it ended, if badly

    @property
    def num_choices_unread(self) -> int:
        """Choices with something that was not read."""
        return len(self._pending)

    @property
    def ended_well(self) -> bool:
        """True once every choice has its finish reason."""
        return self.state is S.CLOSED and self._end is None

    @property
    def end(self) -> End | None:
        """How it ended, if badly."""
        return self._end

    @property
    def has_news(self) -> bool:
        """True when a read would give something."""
        return bool(self._pending) or self.state is S.CLOSED

    def _output(self, event: Output) -> StreamState:
        end = event.end
        if end is not None and end.finish_reason is None:
            self._end = end
            return S.CLOSED
        choice = event.choice
        num_new = len(event.token_ids)
        generated = self._generated[choice] = self._generated[choice] + num_new
        delta = self._pending.get(choice)
        if event.first is not None:
            first = event.first
            self._begun = (first.num_prompt_tokens, max(first.num_cached_tokens, self._begun[1]), first.seed)
        if delta is None:
            num_prompt, num_cached, seed = self._begun
            delta = self._pending[choice] = Delta(
                request_id=self.name,
                index=choice,
                text=event.text,
                token_ids=event.token_ids,
                logprobs=event.logprobs,
                num_prompt_tokens=num_prompt,
                num_cached_tokens=num_cached,
                num_generated_tokens=generated,
                seed=seed,
            )
        else:
            delta.text += event.text
            delta.token_ids = delta.token_ids + event.token_ids
            if event.logprobs is not None:
                delta.logprobs = [*(delta.logprobs or ()), *event.logprobs]
            delta.num_generated_tokens = generated
        if event.first is not None and event.first.prompt_token_ids:
            delta.prompt_token_ids = event.first.prompt_token_ids
        self._unread += num_new
        if end is not None:
            delta.finish_reason = end.finish_reason
            delta.stop_reason = end.stop_reason
            self._num_open -= 1
            if self._num_open == 0:
                return S.CLOSED
        if self._unread > self._stall_high or self.state is S.STALLED:
            self._send("engine", Pause(self.stream_id))
            return S.STALLED
        return S.OPEN

    def _read(self, _: Read) -> StreamState:
        self._give_one()
        if self.state is S.STALLED:
            if self._unread > self._stall_low:
                return S.STALLED
            self._send("engine", Resume(self.stream_id))
        return S.OPEN

    def _read_rest(self, _: Read) -> StreamState:
        if self._pending:
            self._give_one()
        else:
            self._send("reader", Finished() if self._end is None else self._end)
        return S.CLOSED

    def _give_one(self) -> None:
        """The oldest choice's delta, if there is any."""
        if self._pending:
            delta = self._pending.pop(next(iter(self._pending)))
            self._unread -= len(delta.token_ids)
            self._send("reader", delta)

    def _stop(self, event: Stop) -> StreamState:
        self._end = End(error=event.error or "the engine was closed", code="engine_dead" if event.error else "draining")
        return S.CLOSED
