"""One response while it is made: pieces of an answer go in, events come out, and it can be looked at at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from novainfer import CallerError, Delta, FinishReason, RequestCancelled
from novainfer.fsm.parsing.pieces import CallArguments, CallBegun, Content, Piece, Reasoning
from novainfer.server.http.errors import StoreFull
from novainfer.server.http.writer import KEEP_ALIVE
from novainfer.server.openai.answering import Answer, AnswerAgain
from novainfer.server.openai.ids import BY_CHANCE, Ids
from novainfer.server.openai.replies import ChatLogprob, Tally, chat_logprobs
from novainfer.server.responses.events import (
    Completed,
    Created,
    Event,
    Failed,
    Incomplete,
    InProgress,
    Queued,
    event_bytes,
)
from novainfer.server.responses.items import FunctionCallItem, ItemStatus, MessageItem, OutputItem, encoded
from novainfer.server.responses.protocol import in_own_names
from novainfer.server.responses.reply import IncompleteDetails, Response, ResponseStatus, error_of, usage_of
from novainfer.server.responses.writing import Writing, WritingCall, WritingMessage, WritingReasoning
from novainfer.server.store import Record


class Run:
    """The encoder of one response; what it sends goes into `record` too, where the response is kept.

    `response` is what it is at its beginning. Log probabilities of tokens that are said are told where `has_logprobs`;
    beside thoughts and calls in one delta, those of their tokens are among them.
    """

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        response: Response,
        answer: Answer | AnswerAgain,
        record: Record | None,
        *,
        has_logprobs: bool,
        ids: Ids = BY_CHANCE,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._ids = ids
        self._now_s = now_s
        self._response = response
        self._answer = answer
        self._record = record
        self._has_logprobs = has_logprobs
        self._output: list[OutputItem] = []
        self._writing: Writing | None = None
        self._logprobs: list[ChatLogprob] = []  # of tokens whose text has not come yet
        self._finish_reason: FinishReason | None = None
        self._num_events = 0
        self._has_ended = False
        if record is not None:
            record.look = lambda: msgspec.json.encode(self.response)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted, though the engine may go on."""
        return self._answer.is_over

    @property
    def tally(self) -> Tally:
        """What was counted of its answer."""
        return self._answer.tally

    @property
    def response(self) -> Response:
        """What it is now."""
        return msgspec.structs.replace(self._response, output=self._items("in_progress"))

    def begin(self) -> bytes:
        """That it is there."""
        created = self._emit(Created(response=self._response))
        if self._response.status == "queued":
            return created + self._emit(Queued(response=self._response))
        return created + self._emit(InProgress(response=self._response))

    def delta(self, delta: Delta) -> bytes:
        """What `delta` brings."""
        data = b""
        if self._response.status == "queued":
            self._response = msgspec.structs.replace(self._response, status="in_progress")
            data = self._emit(InProgress(response=self._response))
        for one, pieces in self._answer.read(delta):
            data += self._take(one, pieces)
        return data

    def end(self) -> bytes:
        """That it has ended well, or was cut at its limit."""
        is_cut = self._finish_reason is FinishReason.LENGTH
        data = b""
        if isinstance(self._writing, WritingMessage) and self._logprobs:
            data = self._say("")  # tokens without a text, such as the one that ends an answer
        if not is_cut and not self._has_answered:
            data = self._open(WritingMessage)  # a model that says nothing has said ""
        data += self._close("incomplete" if is_cut else "completed")
        if is_cut:
            self._finish("incomplete", incomplete_details=IncompleteDetails("max_output_tokens"))
            return data + self._last(Incomplete(response=self._response))
        self._finish("completed", completed_at=int(self._now_s()))
        return data + self._last(Completed(response=self._response))

    def error(self, error: Exception) -> bytes:
        """That `error` has ended it."""
        if isinstance(error, RequestCancelled):
            return self.cancel()
        if self._has_ended:
            return b""
        if isinstance(error, CallerError):
            error = in_own_names(error)
        self._finish("failed", error=error_of(error))
        return self._last(Failed(response=self._response))

    def cancel(self) -> bytes:
        """That it was cancelled; nothing where it has ended before."""
        if self._has_ended:
            return b""
        self._finish("cancelled")
        return self._last(Incomplete(response=self._response))

    # ---- items ---------------------------------------------------------------------------------------------------

    def _take(self, delta: Delta, pieces: list[Piece]) -> bytes:
        if self._has_logprobs and delta.logprobs:
            self._logprobs += chat_logprobs(delta.logprobs).content
        data = b""
        for piece in pieces:
            match piece:
                case Content(text):
                    data += self._say(text)
                case Reasoning(text):
                    data += self._think(text)
                case CallBegun(_, name):
                    data += self._open(partial(WritingCall, name=name))
                case CallArguments(_, text):
                    assert isinstance(self._writing, WritingCall), "a call has a beginning"
                    data += self._emit(self._writing.add(text))
        if pieces and not isinstance(pieces[-1], Content):
            self._logprobs = []  # of what is not said
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
        return data

    def _say(self, text: str) -> bytes:
        data = b"" if isinstance(self._writing, WritingMessage) else self._open(WritingMessage)
        assert isinstance(self._writing, WritingMessage)
        logprobs, self._logprobs = self._logprobs, []
        return data + self._emit(self._writing.add(text, logprobs))

    def _think(self, text: str) -> bytes:
        data = b"" if isinstance(self._writing, WritingReasoning) else self._open(WritingReasoning)
        assert isinstance(self._writing, WritingReasoning)
        return data + self._emit(self._writing.add(text))

    def _open(self, kind: Callable[[int, Ids], Writing]) -> bytes:
        data = self._close("completed")
        self._writing = kind(len(self._output), self._ids)
        return data + b"".join(map(self._emit, self._writing.begin()))

    def _close(self, status: ItemStatus) -> bytes:
        if self._writing is None:
            return b""
        writing, self._writing = self._writing, None
        self._output.append(writing.item(status))
        return b"".join(map(self._emit, writing.end(status)))

    def _items(self, status: ItemStatus) -> list[OutputItem]:
        """All there are; the one that is being written has this `status`."""
        return [*self._output, self._writing.item(status)] if self._writing is not None else [*self._output]

    @property
    def _has_answered(self) -> bool:
        return any(isinstance(item, MessageItem | FunctionCallItem) for item in self._items("in_progress"))

    # ---- events --------------------------------------------------------------------------------------------------

    def _finish(self, status: ResponseStatus, **more: Any) -> None:
        usage = self._answer.tally.usage()
        counted = usage_of(usage) if usage.prompt_tokens else None  # none where it has not begun
        items = self._items("incomplete")
        self._response = msgspec.structs.replace(self._response, status=status, output=items, usage=counted, **more)

    def _last(self, event: Event) -> bytes:
        self._has_ended = True
        data = self._emit(event, is_last=True)
        if self._record is not None:
            items = self._response.output
            answer = msgspec.json.encode(self._response)
            self._record.end(answer, encoded(items), [item.id for item in items])
        return data

    def _emit(self, event: Event, *, is_last: bool = False) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        data = event_bytes(event)
        if self._record is None:
            return data
        try:
            self._record.add(data)
        except StoreFull:
            if not self._response.background:  # its client has it all the same
                self._record.drop()
                self._record = None
                self._response = msgspec.structs.replace(self._response, store=False)
            elif not is_last:
                raise
        return data
