"""What goes back: OpenAI's response objects, usage, and log probabilities in the two shapes that OpenAI has."""

from __future__ import annotations

import math
from codecs import getincrementaldecoder
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from novainfer import Delta, FinishReason, TokenLogprob
from novainfer.fsm.parsing.pieces import Piece

if TYPE_CHECKING:
    from novainfer.server.openai.protocol import ChatCompletionRequest, CompletionRequest

LOGPROB_MIN = -9999.0  # JSON has no -inf; vLLM's value


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Tokens of thoughts, where a model thinks; and guesses that steps have verified (speculative decoding).

    Of those as many were right (accepted), and as many wrong (rejected).
    """

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts of the whole request, all prompts and choices together; details where there is any."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities as chat completions give them."""

    content: list[ChatLogprob]
    refusal: str | None = None


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities as completions give them: parallel lists, offsets in characters of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def __add__(self, other: CompletionLogprobs) -> CompletionLogprobs:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return CompletionLogprobs(*(a + b for a, b in zip(mine, theirs, strict=True)))


class CalledFunctionReply(msgspec.Struct):
    """A function to be called, and its arguments: the JSON that the model has written, whatever it is."""

    name: str
    arguments: str


class ToolCallReply(msgspec.Struct):
    """A call of a tool; what the tool says comes back under its `id`."""

    id: str
    function: CalledFunctionReply
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """What a model says; `content` is null where it only calls tools. Both names of its thoughts are in use."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    tool_calls: list[ToolCallReply] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """`seed` reproduces the draw; `degraded` only when it is true; `token_ids` only with `return_token_ids`."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    seed: int | None = None
    degraded: bool | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/chat/completions` without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class PromptLogprob(msgspec.Struct):
    """What `prompt_logprobs` gives of one token, as vLLM has it; of those that cannot be drawn nothing."""

    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, of each token of the prompt and those it competed with; null of the first, which nothing is before."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """`seed` reproduces the draw; `degraded` only when it is true; token ids only with `return_token_ids`.

    `prompt_logprobs` only where they were asked for.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    seed: int | None = None
    degraded: bool | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/completions` without `stream`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Tally:
    """Counts tokens of one HTTP request as its deltas pass; choice i belongs to prompt i // n.

    A prompt counts once, and so does what the prefix cache had of it: when its first choice ran. What the others find
    there is the work of the first.
    """

    def __init__(self, num_prompts: int, n: int) -> None:
        self._n = n
        self._prompt_tokens = [0] * num_prompts
        self._cached_tokens = [0] * num_prompts
        self.completion_tokens = 0
        self._draft_tokens = self._accepted_tokens = 0
        self.reasoning_tokens: int | None = None  # where a model may think

    def expect(self, delta: Delta) -> None:
        """The prompt of `delta` is known, which is not counted yet."""
        self._prompt_tokens[delta.index // self._n] = delta.num_prompt_tokens

    def add(self, delta: Delta) -> None:
        num_tokens = len(delta.token_ids)
        self.completion_tokens += num_tokens
        if num_tokens < delta.num_generated_tokens and delta.finish_reason is None:
            return  # neither the first nor the last of its choice, which alone say more
        prompt_index = delta.index // self._n
        self._prompt_tokens[prompt_index] = delta.num_prompt_tokens
        if delta.index % self._n == 0:
            self._cached_tokens[prompt_index] = delta.num_cached_tokens
        self._draft_tokens += delta.num_draft_tokens
        self._accepted_tokens += delta.num_accepted_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens)

    def usage(self) -> Usage:
        prompt_tokens = self.prompt_tokens
        details = CompletionTokensDetails(reasoning_tokens=self.reasoning_tokens)
        if self._draft_tokens:
            details.accepted_prediction_tokens = self._accepted_tokens
            details.rejected_prediction_tokens = self._draft_tokens - self._accepted_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached_tokens)),
            completion_tokens_details=details if details != CompletionTokensDetails() else None,
        )


class Choice:
    """One choice put together from its deltas, for an answer that is not streamed."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_token_ids: list[int] = []
        self.pieces: list[Piece] = []  # of a conversation's answer
        self.prompt_logprobs: list[TokenLogprob] = []
        self.last: Delta | None = None

    def add(self, delta: Delta, pieces: Sequence[Piece] = ()) -> None:
        self.texts.append(delta.text)
        self.pieces.extend(pieces)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        if delta.prompt_token_ids is not None:
            self.prompt_token_ids = delta.prompt_token_ids
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.last = delta

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def drop_answer(self) -> None:
        """Nothing is left of it but its prompt."""
        assert self.last is not None, "a choice ended without a delta"
        self.texts, self.token_ids, self.logprobs = [], [], []
        self.last = msgspec.structs.replace(self.last, finish_reason=FinishReason.LENGTH, stop_reason=None)

    @property
    def mean_logprob(self) -> float:
        """The log probability of its tokens, a token; they must have been asked for."""
        return fmean(item.logprob for item in self.logprobs) if self.logprobs else -math.inf

    def ending(self) -> dict[str, Any]:
        """`finish_reason`, `stop_reason`, `seed` and `degraded`, for the choice's constructor."""
        assert self.last is not None, "a choice ended without a delta"
        assert self.last.finish_reason is not None, "a choice ended without a reason"
        return {
            "finish_reason": self.last.finish_reason,
            "stop_reason": self.last.stop_reason,
            "seed": self.last.seed,
            "degraded": self.last.is_degraded or msgspec.UNSET,
        }

    def of_chat(self, index: int, body: ChatCompletionRequest, message: AssistantMessage | None = None) -> ChatChoice:
        """As chat completions give it, with what `body` asks for; `message` where its text was read for more."""
        return ChatChoice(
            index=index,
            message=AssistantMessage(self.text) if message is None else message,
            logprobs=chat_logprobs(self.logprobs) if body.logprobs else None,
            token_ids=self.token_ids if body.return_token_ids else msgspec.UNSET,
            **self.ending(),
        )

    def of_completion(self, index: int, body: CompletionRequest, echo: str = "") -> CompletionChoice:
        """As completions give it, with what `body` asks for, behind the prompt that it repeats."""
        return CompletionChoice(
            index=index,
            text=echo + self.text,
            logprobs=None if body.logprobs is None else self._completion_logprobs(body, echo),
            token_ids=self.token_ids if body.return_token_ids else msgspec.UNSET,
            prompt_token_ids=self.prompt_token_ids if body.return_token_ids else msgspec.UNSET,
            prompt_logprobs=prompt_logprobs(self.prompt_logprobs, body.prompt_logprobs),
            **self.ending(),
        )

    def _completion_logprobs(self, body: CompletionRequest, echo: str) -> CompletionLogprobs:
        reply = completion_logprobs(self.logprobs, Offsets(len(echo)))
        return echoed_logprobs(self.prompt_logprobs, body.logprobs or 0) + reply if body.echo else reply


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOGPROB_MIN


def chat_logprobs(logprobs: list[TokenLogprob]) -> ChatLogprobs:
    """Chat's shape; a token that is no whole character reads as U+FFFD and is exact in `bytes`."""
    return ChatLogprobs(
        [
            ChatLogprob(
                item.token.decode("utf-8", "replace"),
                _finite(item.logprob),
                list(item.token),
                [
                    TopLogprob(token.decode("utf-8", "replace"), _finite(logprob), list(token))
                    for _, token, logprob in item.top
                ],
            )
            for item in logprobs
        ]
    )


def token_text(token: bytes) -> str:
    """A token as `top_logprobs` names it: its text, or OpenAI's `bytes:\\xe2\\x96` where it is no whole character."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class Offsets:
    """Where the tokens of a text begin in it, in characters: one that goes on with a character, where that begins."""

    def __init__(self, first: int = 0) -> None:
        self._num_chars = first  # that are whole
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def next(self, token: bytes) -> int:
        """Of the token behind those that were asked for before."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(token))
        return offset


def completion_logprobs(logprobs: list[TokenLogprob], offsets: Offsets) -> CompletionLogprobs:
    """Completions' shape; `offsets` is that of their text, and has had the tokens before these."""
    reply = CompletionLogprobs([], [], [], [])
    for item in logprobs:
        text = token_text(item.token)
        top = {token_text(token): _finite(logprob) for _, token, logprob in item.top}
        top[text] = _finite(item.logprob)  # lm-eval looks the chosen token up here, and compares exactly
        reply.text_offset.append(offsets.next(item.token))
        reply.token_logprobs.append(_finite(item.logprob))
        reply.tokens.append(text)
        reply.top_logprobs.append(top)
    return reply


def echoed_logprobs(logprobs: list[TokenLogprob], num_top: int) -> CompletionLogprobs:
    """Those of a prompt that is given back, in completions' shape: the first token has none."""
    kept = [msgspec.structs.replace(item, top=item.top[:num_top]) for item in logprobs]
    reply = completion_logprobs(kept, Offsets())
    if kept:
        reply.token_logprobs[0] = reply.top_logprobs[0] = None
    return reply


def prompt_logprobs(logprobs: list[TokenLogprob], num_top: int | None) -> PromptLogprobs | msgspec.UnsetType:
    """What the tokens of a prompt scored, in vLLM's shape; unset where that was not asked for."""
    if num_top is None:
        return msgspec.UNSET
    found: PromptLogprobs = [None]
    for item in logprobs[1:]:
        told = {
            str(token_id): PromptLogprob(_finite(logprob), token_text(token))
            for token_id, token, logprob in item.top[:num_top]
        }
        told[str(item.token_id)] = PromptLogprob(_finite(item.logprob), token_text(item.token))
        found.append(told)
    return found
