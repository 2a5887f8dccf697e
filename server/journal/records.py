"""What the journal holds of an answer: what was asked, each token with all that came with it, and how it ended.

All of an answer follows from these: what its client reads is made again from them, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from novainfer import Chat, Committed, Delta, FinishReason, NovaInferError, SamplingParams, TokenLogprob
from novainfer.fsm.messages.outputs import Mark
from novainfer.server.http.errors import INTERNAL_MESSAGE, ErrorDetail, detail_of

Prompt = str | list[int] | Chat
RESPONSE = "resp"  # the kind of an answer that the store of responses has as well


class Asked(msgspec.Struct, kw_only=True):
    """A request as the engine has it: `kind` is the endpoint's, and `body` what its client sent.

    `user` is whose budget it takes its tokens of, beside that of `params.session_id`.

    Where it is not `is_stream`, its client has nothing of it before its end; where it is not `is_sought`, that cannot
    ask for it, and it ends with its connection.

    Each of `prompts` has its own of `seeds`, drawn where the client named none; `began_s` is when it came, in seconds
    since 1970. Of `salt` the ids of its items and calls are made. Between two events of a choice are
    `stream_interval` tokens. `more` is what its endpoint wants to know besides.
    """

    kind: str
    id: str
    owner: str
    client: str
    model: str
    created: int
    began_s: float
    body: bytes
    prompts: list[Prompt]
    params: SamplingParams
    seeds: list[int]
    salt: bytes
    more: bytes = b""
    user: str | None = None
    is_stream: bool = True
    is_sought: bool = True
    stream_interval: int = 1

    @property
    def num_choices(self) -> int:
        """Of all prompts together: choice i is one of prompt i // n."""
        return len(self.prompts) * self.params.n


class Begun(msgspec.Struct, array_like=True):
    """What the first token of a choice brings."""

    num_prompt_tokens: int
    num_cached_tokens: int
    seed: int | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class Ended(msgspec.Struct, array_like=True):
    """What the last token of a choice brings."""

    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    marks: list[Mark]
    num_draft_tokens: int
    num_accepted_tokens: int


class Said(msgspec.Struct, array_like=True):
    """One token of choice `index`."""

    index: int
    token_id: int
    is_degraded: bool = False
    logprob: TokenLogprob | None = None
    begun: Begun | None = None
    ended: Ended | None = None


class Stored(msgspec.Struct, kw_only=True):
    """An answer as it is in the file. `error` is what it ended with, if it did so badly; times are since 1970."""

    serial: int
    asked: Asked
    fingerprint: str
    said: list[Said]
    num_resumed: int
    ended_s: float | None
    error: ErrorDetail | None


class Told(NovaInferError):
    """An error as it was told before the server was started again."""

    def __init__(self, detail: ErrorDetail) -> None:
        super().__init__(detail.message, param=detail.param)
        self.type = detail.type  # type: ignore[misc]
        self.code = detail.code or self.code  # type: ignore[misc]


_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(Asked)
_said = msgspec.msgpack.Decoder(list[Said])
_error = msgspec.msgpack.Decoder(ErrorDetail)


def encoded(value: Any) -> bytes:
    """A record as the file has it."""
    return _encode(value)


def decoded_asked(data: bytes) -> Asked:
    """What was asked, of its bytes."""
    return _asked.decode(data)


def decoded_said(data: bytes) -> list[Said]:
    """Tokens, of their bytes."""
    return _said.decode(data)


def decoded_error(data: bytes | None) -> ErrorDetail | None:
    """An error, of its bytes."""
    return None if data is None else _error.decode(data)


def error_to_keep(error: Exception) -> ErrorDetail:
    """`error` as clients are told of it."""
    return detail_of(error if isinstance(error, NovaInferError) else NovaInferError(INTERNAL_MESSAGE))


def said_of(piece: Delta) -> Said:
    """A delta of one token, to be kept."""
    said = Said(piece.index, piece.token_ids[0], piece.is_degraded)
    if piece.logprobs:
        said.logprob = piece.logprobs[0]
    if piece.num_generated_tokens == 1:
        said.begun = Begun(
            piece.num_prompt_tokens,
            piece.num_cached_tokens,
            piece.seed,
            piece.prompt_token_ids,
            piece.prompt_logprobs,
        )
    if piece.finish_reason is not None:
        said.ended = Ended(
            piece.text,
            piece.finish_reason,
            piece.stop_reason,
            piece.marks,
            piece.num_draft_tokens,
            piece.num_accepted_tokens,
        )
    return said


def committed_of(said: Sequence[Said], index: int) -> Committed:
    """What choice `index` has got, for an engine that is to go on with it."""
    own = [one for one in said if one.index == index]
    begun = own[0].begun if own else None
    logprobs = [one.logprob for one in own if one.logprob is not None]
    return Committed(
        token_ids=[one.token_id for one in own],
        logprobs=logprobs if own and own[0].logprob is not None else None,
        prompt_logprobs=begun.prompt_logprobs if begun is not None else None,
        num_cached_tokens=begun.num_cached_tokens if begun is not None else 0,
        is_degraded=any(one.is_degraded for one in own),
    )
