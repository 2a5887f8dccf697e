"""Deltas to the bytes of SSE events, in OpenAI's sequence of chunks.

Chat: a chunk with the role for each choice, content chunks, a chunk with `delta: {}` and the finish reason; then,
when asked for, one with `choices: []` and the usage; then `[DONE]`. Completions: text chunks, the last one with the
finish reason. Of thoughts and calls of tools each piece is a chunk: a call's index, id and name, then its arguments.
What does not change within a stream is encoded once: a plain token costs two concatenations and one string escape.
"""

from __future__ import annotations

from typing import Protocol, Self

import msgspec

from novainfer import Delta
from novainfer.fsm.parsing.pieces import Piece, Reasoning
from novainfer.reading import Reading
from novainfer.server.http.errors import error_body
from novainfer.server.http.writer import KEEP_ALIVE
from novainfer.server.openai.ids import BY_CHANCE, Ids
from novainfer.server.openai.protocol import CommonRequest, CompletionRequest
from novainfer.server.openai.reading import delta_of
from novainfer.server.openai.replies import Offsets, Tally, chat_logprobs, completion_logprobs, echoed_logprobs

DONE = b"data: [DONE]\n\n"
END = b"}\n\n"
PLAIN = b',"logprobs":null,"finish_reason":null'  # behind a text that comes alone

_json = msgspec.json.Encoder().encode
_interned: dict[bytes, bytes] = {}  # a handful


def intern(data: bytes) -> bytes:
    """The one object of these bytes, of which there are few."""
    return _interned.setdefault(data, data)


class StreamEncoder(Protocol):
    """Turns the deltas of one request into SSE bytes; each method may return nothing to send.

    `is_over`: no more deltas are wanted. `keep_alive` goes out where there is nothing else for a while. The last that
    is called is `end`, or `error` with what ended the stream early.
    """

    @property
    def is_over(self) -> bool: ...
    @property
    def keep_alive(self) -> bytes: ...
    def begin(self) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...
    def end(self) -> bytes: ...
    def error(self, error: Exception) -> bytes: ...


class ChunkOptions(msgspec.Struct, kw_only=True):
    """What the request asked for beside the text."""

    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    echoed_logprobs: int | None = None  # of a completion's prompt that is given back

    @classmethod
    def of(cls, body: CommonRequest) -> Self:
        """What `body` asks for."""
        token_ids = bool(body.return_token_ids)
        echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
        return cls(
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            token_ids=token_ids,
            echoed_logprobs=echoed,
        )


class _Chunks:
    """What both kinds of chunks share: the envelope, usage, and the extras of a choice."""

    kind = ""
    is_over = False
    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        tally: Tally,
        options: ChunkOptions,
        *,
        num_choices: int,
        text_begin: bytes,
        text_end: bytes = b"",
    ) -> None:
        """`text_begin` and `text_end` are around the text of a choice."""
        envelope = {"id": request_id, "object": self.kind, "created": created, "model": model}
        self._head = b"data: " + _json(envelope)[:-1] + b',"choices":['
        self._tally = tally
        self._options = options
        # OpenAI sends `usage: null` in the other chunks of a stream that ends with usage
        self._tail = b'],"usage":null' + END if options.include_usage else b"]" + END
        self._has_ids = options.token_ids
        self._is_plain = not options.continuous_usage and options.echoed_logprobs is None
        self._plain_begin = [self._head + b'{"index":%d,%b' % (index, text_begin) for index in range(num_choices)]
        # One object for all streams: at each step what is around a text would come from memory for each of them.
        self._plain_middle = intern(text_end + PLAIN + (b',"token_ids":' if self._has_ids else b""))
        self._plain_end = intern(b"}" + self._tail)

    def _plain(self, delta: Delta) -> bytes:
        """The chunk of a delta that has a text and its tokens, and no more; else nothing."""
        text = delta.text
        if (
            not text
            or not self._is_plain
            or delta.finish_reason is not None
            or delta.logprobs is not None
            or delta.prompt_token_ids is not None
        ):
            return b""
        begin = self._plain_begin[delta.index]
        if self._has_ids:
            return begin + _json(text) + self._plain_middle + _json(delta.token_ids) + self._plain_end
        return begin + _json(text) + self._plain_middle + self._plain_end

    def _close(self) -> bytes:
        if self._options.continuous_usage:
            return b'],"usage":' + _json(self._tally.usage()) + END
        return self._tail

    def _extras(self, delta: Delta) -> bytes:
        """Fields of a choice that OpenAI does not have, each with its leading comma."""
        extras = b""
        if self._options.token_ids:
            extras += b',"token_ids":' + _json(delta.token_ids)
            if delta.prompt_token_ids is not None:
                extras += b',"prompt_token_ids":' + _json(delta.prompt_token_ids)
        if delta.finish_reason is not None:
            extras += b',"stop_reason":' + _json(delta.stop_reason) + b',"seed":' + _json(delta.seed)
            if delta.is_degraded:
                extras += b',"degraded":true'
        return extras

    def end(self) -> bytes:
        """The usage chunk where it was asked for, and the end of the stream."""
        if not self._options.include_usage:
            return DONE
        return self._head + b'],"usage":' + _json(self._tally.usage()) + END + DONE

    def error(self, error: Exception) -> bytes:
        """The error event; without `[DONE]` behind it, which strict clients take as success."""
        return b"data: " + error_body(error) + b"\n\n"


class ChatChunks(_Chunks):
    """`chat.completion.chunk` events."""

    kind = "chat.completion.chunk"

    def __init__(
        self, request_id: str, created: int, model: str, tally: Tally, options: ChunkOptions, *, n: int
    ) -> None:
        super().__init__(
            *(request_id, created, model, tally, options),
            num_choices=n, text_begin=b'"delta":{"content":', text_end=b"}",
        )  # fmt: skip
        self._n = n

    def begin(self) -> bytes:
        """The chunks that give each choice its role."""
        role = b'{"role":"assistant","content":""}'
        return b"".join(self._chunk(index, role) for index in range(self._n))

    def delta(self, delta: Delta) -> bytes:
        """The chunks of one delta; nothing when all of its text is held back."""
        if plain := self._plain(delta):
            return plain
        return self._chunks(delta, [b'{"content":' + _json(delta.text) + b"}"] if delta.text else [])

    def _chunks(self, delta: Delta, bodies: list[bytes]) -> bytes:
        """A chunk for each of `bodies`, the first with what came beside the text; and one for the choice's end."""
        data = b""
        if not bodies and (delta.logprobs or (self._options.token_ids and delta.token_ids)):
            bodies = [b'{"content":""}']
        if bodies:
            logprobs = b"null" if delta.logprobs is None else _json(chat_logprobs(delta.logprobs))
            ids = msgspec.structs.replace(delta, finish_reason=None) if delta.finish_reason else delta
            data = self._chunk(delta.index, bodies[0], logprobs=logprobs, extras=self._extras(ids))
            data += b"".join([self._chunk(delta.index, body) for body in bodies[1:]])
        if delta.finish_reason is not None:
            bare = msgspec.structs.replace(delta, token_ids=[], prompt_token_ids=None)
            finish = _json(delta.finish_reason)
            data += self._chunk(delta.index, b"{}", finish=finish, extras=self._extras(bare))
        return data

    def _chunk(
        self, index: int, delta: bytes, *, logprobs: bytes = b"null", finish: bytes = b"null", extras: bytes = b""
    ) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}'
        return self._head + choice % (index, delta, logprobs, finish, extras) + self._close()


class ReadChatChunks(ChatChunks):
    """`chat.completion.chunk` events of answers that are read for thoughts and calls."""

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        tally: Tally,
        options: ChunkOptions,
        *,
        reading: Reading,
        n: int,
        has_reasoning: bool,
        ids: Ids = BY_CHANCE,
    ) -> None:
        super().__init__(request_id, created, model, tally, options, n=n)
        self._reading = reading
        self._has_reasoning = has_reasoning
        self._ids = ids
        self._open = [self._head + b'{"index":%d,"delta":' % index for index in range(n)]
        self._open_tail = b',"logprobs":null,"finish_reason":null}' + self._tail

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        """Whether nothing more is wanted, though the engine may go on."""
        return self._reading.is_over

    def delta(self, delta: Delta) -> bytes:
        """The chunks of what `delta` brings."""
        return b"".join([self._read(one, pieces) for one, pieces in self._reading.read(delta)])

    def _read(self, delta: Delta, pieces: list[Piece]) -> bytes:
        shown = pieces
        if not self._has_reasoning:
            shown = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        bodies = [delta_of(piece, delta.index, self._ids) for piece in shown]
        if self._is_plain and not self._has_ids and delta.finish_reason is None and delta.logprobs is None:
            return b"".join([self._open[delta.index] + body + self._open_tail for body in bodies])
        return self._chunks(delta, bodies)


class CompletionChunks(_Chunks):
    """`text_completion` events; `echoes[i]` is put before each completion of prompt i."""

    kind = "text_completion"

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        tally: Tally,
        options: ChunkOptions,
        *,
        echoes: list[str],
        n: int,
    ) -> None:
        super().__init__(
            *(request_id, created, model, tally, options), num_choices=len(echoes) * n, text_begin=b'"text":'
        )
        self._echoes = echoes
        self._n = n
        self._offsets = [Offsets(len(echoes[index // n])) for index in range(len(echoes) * n)]

    def begin(self) -> bytes:
        """The echoed prompts; those with log probabilities come when these are known."""
        if self._options.echoed_logprobs is not None:
            return b""
        choices = range(len(self._echoes) * self._n)
        return b"".join(
            self._chunk(index, self._echoes[index // self._n]) for index in choices if self._echoes[index // self._n]
        )

    def delta(self, delta: Delta) -> bytes:
        """The chunk of one delta, behind the echo that waited for it; nothing when all of its text is held back."""
        if plain := self._plain(delta):
            return plain
        if self._options.echoed_logprobs is not None and delta.prompt_logprobs is not None:
            told = _json(echoed_logprobs(delta.prompt_logprobs, self._options.echoed_logprobs))
            return self._chunk(delta.index, self._echoes[delta.index // self._n], logprobs=told) + self._delta(delta)
        return self._delta(delta)

    def _delta(self, delta: Delta) -> bytes:
        has_ids = self._options.token_ids and delta.token_ids
        if not (delta.text or delta.logprobs or delta.finish_reason or has_ids):
            return b""
        logprobs = b"null"
        if delta.logprobs is not None:
            logprobs = _json(completion_logprobs(delta.logprobs, self._offsets[delta.index]))
        finish = b"null" if delta.finish_reason is None else _json(delta.finish_reason)
        return self._chunk(delta.index, delta.text, logprobs=logprobs, finish=finish, extras=self._extras(delta))

    def _chunk(
        self, index: int, text: str, *, logprobs: bytes = b"null", finish: bytes = b"null", extras: bytes = b""
    ) -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}'
        return self._head + choice % (index, _json(text), logprobs, finish, extras) + self._close()
