"""Deltas to the bytes of SSE events, in Anthropic's sequence.

`message_start`, with the usage of the prompt; of each block `content_block_start`, its deltas and `content_block_stop`,
one block after the other; `message_delta` with why it stopped and the usage of all; `message_stop`. An error is an
event of its own, and nothing comes behind it. Signs of life are `ping` events, and a comment line before the first
event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import msgspec

from novainfer import CallerError, Delta
from novainfer.fsm.parsing.pieces import CallArguments, CallBegun, Content, Piece, Reasoning
from novainfer.server.anthropic.protocol import renamed
from novainfer.server.anthropic.replies import (
    AnsweredMessage,
    Shown,
    delta_usage_of,
    ending_of,
    signature_of,
    usage_of,
    use_id,
)
from novainfer.server.http.shapes import anthropic_error_body
from novainfer.server.http.writer import KEEP_ALIVE
from novainfer.server.openai.answering import Answer, AnswerAgain
from novainfer.server.openai.ids import BY_CHANCE, Ids

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_START = (
    b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":{"type":"%b",%b}}\n\n'
)
_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'

_json = msgspec.json.Encoder().encode
Kind = Literal["text", "thinking", "tool_use"]


class MessageEvents:
    """The events of one `answer`, `of` this id and this model; `request_id` is told with an error.

    `thoughts` says what is shown of them; `is_context_full` what an end by length means.
    """

    def __init__(
        self,
        answer: Answer | AnswerAgain,
        of: tuple[str, str],
        request_id: str,
        *,
        thoughts: Shown,
        is_context_full: Callable[[], bool],
        ids: Ids = BY_CHANCE,
    ) -> None:
        self._answer = answer
        self._message_id, self._model = of
        self._ids = ids
        self._request_id = request_id
        self._thoughts = thoughts
        self._is_context_full = is_context_full
        self._has_begun = False
        self._kind: Kind | None = None  # of the block that is open
        self._index = -1  # of the block that was opened last
        self._digest = hashlib.sha256()  # of the thoughts in it
        self._last: Delta | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted, though the engine may go on."""
        return self._answer.is_over

    @property
    def keep_alive(self) -> bytes:
        """A `ping`; before the first event, which has to be `message_start`, a comment line."""
        return PING if self._has_begun else KEEP_ALIVE

    def begin(self) -> bytes:
        """Nothing: the first event tells the tokens of the prompt, which the first delta brings."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """The events of what `delta` brings."""
        data = []
        for one, pieces in self._answer.read(delta):
            self._last = one
            if not self._has_begun:
                data.append(self._start())
            data += map(self._piece, pieces)
        return b"".join(data)

    def end(self) -> bytes:
        """The end of the last block and of the message."""
        assert self._last is not None, "an answer ended without a delta"
        reason, sequence = ending_of(self._last, is_context_full=self._is_context_full())
        stopped = {"container": None, "stop_details": None, "stop_reason": reason, "stop_sequence": sequence}
        event = {"type": "message_delta", "delta": stopped, "usage": delta_usage_of(self._answer.tally)}
        return self._close() + b"event: message_delta\ndata: " + _json(event) + b"\n\n" + STOP

    def error(self, error: Exception) -> bytes:
        """The error event, behind which nothing comes."""
        if isinstance(error, CallerError):
            error = renamed(error)
        return b"event: error\ndata: " + anthropic_error_body(error, self._request_id) + b"\n\n"

    def _start(self) -> bytes:
        self._has_begun = True
        message = AnsweredMessage(
            id=self._message_id,
            model=self._model,
            content=[],
            stop_reason=None,
            usage=usage_of(self._answer.tally),
        )
        return b"event: message_start\ndata: " + _json({"type": "message_start", "message": message}) + b"\n\n"

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                return self._open("text", b'"text":"","citations":null') + self._delta(b"text_delta", b"text", text)
            case Reasoning(text):
                return self._thought(text)
            case CallBegun(index, name):
                use_name = _json(use_id(self._ids, index))
                use = b'"id":%b,"name":%b,"input":{},"caller":{"type":"direct"}' % (use_name, _json(name))
                return self._close() + self._open("tool_use", use)
            case CallArguments(_, text):
                return self._delta(b"input_json_delta", b"partial_json", text)

    def _thought(self, text: str) -> bytes:
        if self._thoughts == "none":
            return b""
        opened = self._open("thinking", b'"thinking":"","signature":""')
        self._digest.update(text.encode())
        return opened if self._thoughts == "omitted" else opened + self._delta(b"thinking_delta", b"thinking", text)

    def _open(self, kind: Kind, fields: bytes) -> bytes:
        """The end of another block, and the beginning of this one, unless it is open."""
        if self._kind == kind:
            return b""
        closed = self._close()
        self._kind = kind
        self._index += 1
        return closed + _START % (self._index, kind.encode(), fields)

    def _delta(self, kind: bytes, field: bytes, text: str) -> bytes:
        return _DELTA % (self._index, kind, field, _json(text))

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        signed = b""
        if self._kind == "thinking":
            signed = self._delta(b"signature_delta", b"signature", signature_of(self._digest.digest()))
            self._digest = hashlib.sha256()
        self._kind = None
        return signed + _STOP % self._index
