"""The stream: what one client gets, between the scheduler's steps and the reader's pace.

    OPEN ──too much unread──▶ STALLED ──read──▶ OPEN
      └───────────┴──last choice ended, or one ended badly──▶ CLOSED
                  └──nothing read for stall_timeout_s──▶ CLOSED

Outputs that were not read yet merge into one delta per choice, so a slow reader costs text, not objects. Above the
high-water mark the request is paused; it leaves the batch, and no other notices. A reader that takes nothing for too
long loses its requests, and finds one error when it comes back. A stream has exactly one end: all its choices
finished, or one error. What came before the end can still be read after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar

from novainfer.fsm.core.dwell import ENDED, Dwell, any_time
from novainfer.fsm.core.machine import Machine, Send, Table, ignore, on, table, timer
from novainfer.fsm.messages.events import (
    Cancel,
    Cause,
    End,
    Finished,
    Incident,
    Output,
    Pause,
    Read,
    Resume,
    StallOver,
    Stop,
)
from novainfer.fsm.messages.outputs import Delta

# Unread tokens. At 50 tokens/s the high mark is ten seconds behind. A token takes about 50 bytes, one with 20 top
# logprobs 2700, so each four of those count as a token more: a stalled stream holds 0.25 MiB, and as JSON less again.
STALL_TOKENS_HIGH = 512
STALL_TOKENS_LOW = 128
LOGPROBS_PER_TOKEN = 4
STALL_TIMEOUT_S = 300.0


class StreamState(StrEnum):
    """Whether the reader keeps up."""

    OPEN = "OPEN"
    STALLED = "STALLED"
    CLOSED = "CLOSED"


S = StreamState


class Stream(Machine):
    """One client's stream of `num_choices` choices; `name` is the request id that the client knows.

    It stalls above `stall_high` unread tokens, is open again at `stall_low`, and ends when a stall has lasted for
    `stall_timeout_s` in which nothing was read.
    """

    TABLE: ClassVar[Table] = table(
        S,
        (Output, Read, StallOver, Stop),
        on(S.OPEN, Output, "_output", S.OPEN, S.STALLED, S.CLOSED),
        on(S.STALLED, Output, "_output", S.STALLED, S.CLOSED),
        ignore(S.CLOSED, Output, "a stream ends once; siblings of a failed choice end after it"),
        on(S.OPEN, Read, "_read", S.OPEN),
        on(S.STALLED, Read, "_read", S.OPEN, S.STALLED),
        on(S.CLOSED, Read, "_read_rest", S.CLOSED),
        timer(S.STALLED, StallOver, "_stall_over", S.CLOSED),
        on((S.OPEN, S.STALLED), Stop, "_stop", S.CLOSED),
        ignore(S.CLOSED, Stop, "it has ended already"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.OPEN: any_time("an answer may be long, and each step has a deadline"),
        S.STALLED: any_time("its reader's time, which the stall timeout ends"),
        S.CLOSED: ENDED,
    }
    __slots__ = (
        "_begun",
        "_end",
        "_generated",
        "_num_open",
        "_pending",
        "_seeds",
        "_stall_high",
        "_stall_low",
        "_stall_timeout_s",
        "_unread",
        "_weights",
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
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        super().__init__(S.OPEN)
        self._stall_high = stall_high
        self._stall_low = stall_low
        self._stall_timeout_s = stall_timeout_s
        self.stream_id = stream_id
        self.name = name
        self._num_open = num_choices
        self._pending: dict[int, Delta] = {}  # choice -> what it has that was not read
        self._begun: tuple[int, int] = (0, 0)  # prompt tokens, and those that were cached for the first choice
        self._seeds = [0] * num_choices
        self._generated = [0] * num_choices
        self._weights: dict[int, int] = {}  # choice -> what its unread tokens count, if more than one each
        self._unread = 0  # tokens, and what counts as such
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
        end, first, logprobs = event.end, event.first, event.logprobs
        if end is not None and end.finish_reason is None:
            self._end = end
            return S.CLOSED
        choice = event.choice
        num_new = len(event.token_ids)
        generated = self._generated[choice] = self._generated[choice] + num_new
        delta = self._pending.get(choice)
        if first is not None:
            # What the other choices find in the prefix cache is mostly the work of the first.
            self._begun = (first.num_prompt_tokens, first.num_cached_tokens if choice == 0 else self._begun[1])
            self._seeds[choice] = first.seed
        if delta is None:
            num_prompt, num_cached = self._begun
            delta = self._pending[choice] = Delta(
                request_id=self.name,
                index=choice,
                text=event.text,
                token_ids=event.token_ids,
                logprobs=logprobs,
                num_prompt_tokens=num_prompt,
                num_cached_tokens=num_cached,
                num_generated_tokens=generated,
                seed=self._seeds[choice],
                is_degraded=event.is_degraded,
            )
        else:
            delta.text += event.text
            delta.token_ids = delta.token_ids + event.token_ids
            if logprobs is not None:
                delta.logprobs = [*(delta.logprobs or ()), *logprobs]
            delta.num_generated_tokens = generated
            delta.is_degraded = delta.is_degraded or event.is_degraded
        if event.marks:
            delta.marks = delta.marks + event.marks
        if first is not None:
            if first.prompt_token_ids:
                delta.prompt_token_ids = first.prompt_token_ids
            if first.prompt_logprobs is not None:
                delta.prompt_logprobs = first.prompt_logprobs
            delta.embedding = event.embedding  # which comes at once, or never
        self._unread += num_new
        if logprobs is not None:
            extra = sum([len(logprob.top) for logprob in logprobs]) // LOGPROBS_PER_TOKEN
            self._weights[choice] = self._weights.get(choice, 0) + extra
            self._unread += extra
        if end is not None:
            delta.finish_reason = end.finish_reason
            delta.stop_reason = end.stop_reason
            delta.num_draft_tokens = end.num_draft_tokens
            delta.num_accepted_tokens = end.num_accepted_tokens
            self._num_open -= 1
            if self._num_open == 0:
                return S.CLOSED
        if self.state is S.STALLED:  # all were asked once: with n=128, to ask them at each delivery is 16,000 messages
            self._send("engine", Pause(self.stream_id, choice))
            return S.STALLED
        if self._unread > self._stall_high:
            self._send("engine", Pause(self.stream_id))
            self._set_timer()
            return S.STALLED
        return S.OPEN

    def _set_timer(self) -> None:
        self._until_left(self._stall_timeout_s, StallOver(self.stream_id))

    def _stall_over(self, _: StallOver) -> StreamState:
        message = f"the reader of this stream took nothing for {self._stall_timeout_s:g} seconds"
        self._end = End(error=message, code="stalled")
        self._send("gate", Cancel(self.stream_id, Cause.STALLED), urgent=True)
        incident = Incident(
            kind="stall", message=message, action="its requests were ended", stream_ids=[self.stream_id]
        )
        self._send("incidents", incident)
        return S.CLOSED

    def _read(self, _: Read) -> StreamState:
        self._give_one()
        if self.state is S.STALLED:
            if self._unread > self._stall_low:  # of other choices
                self._set_timer()
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
            self._unread -= len(delta.token_ids) + (self._weights.pop(delta.index, 0) if self._weights else 0)
            self._effects.append(Send("reader", delta))

    def _stop(self, event: Stop) -> StreamState:
        self._end = End(error=event.error or "the engine was closed", code="engine_dead" if event.error else "draining")
        return S.CLOSED
