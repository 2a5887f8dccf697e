"""What a request gives back: deltas, their log probabilities, and how it ended."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """How a choice ended well; OpenAI's words. A request that ends badly raises an error instead.

    That it calls tools is known where its text is read (`novainfer.fsm.parsing`): no delta says so.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class TokenLogprob(msgspec.Struct, frozen=True):
    """The log probability (natural) of one sampled token and, most likely first, those it competed with.

    `token` and the middle item of each `top` entry are the token's bytes, which need not be valid UTF-8 alone.
    """

    token_id: int
    token: bytes
    logprob: float
    top: list[tuple[int, bytes, float]]


class Mark(msgspec.Struct, frozen=True):
    """Where a token stands in a choice: characters `start` to `end` of all its text, none where its text is not shown.

    It is the `num_tokens`-th token of the choice. A mark may come before the text that it is in.
    """

    token_id: int
    start: int
    end: int
    num_tokens: int


class Delta(msgspec.Struct, kw_only=True):
    """What is new in one choice of a request since the last delta that was read; slow readers get merged ones.

    `text` never splits a UTF-8 character or a stop string; `token_ids` may therefore run ahead of it.
    `finish_reason` is set on the last delta of each choice. `prompt_token_ids` is set on the first delta.
    Counts are totals so far, in tokens; `num_cached_tokens` of the prompt came from the prefix cache when its first
    choice ran. On the last delta of each choice, `num_draft_tokens` guesses were verified for it, and
    `num_accepted_tokens` of them were right.
    `marks` are those of tokens that `SamplingParams.mark_token_ids` names.
    `prompt_logprobs` is set on the first delta of each choice where they were asked for: of each token of the prompt,
    behind those before it. Of the first one nothing can be said: its log probability is 0, beside no other token's.
    `embedding` is what a request with `SamplingParams.pooling` gives, in its one delta: float32, little-endian.
    `is_degraded`: some of it was computed in a degraded mode (plainer kernels or a lower precision than the engine was
    started with), and may differ from what it says otherwise.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    marks: list[Mark] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    embedding: bytes | None = None
    seed: int | None = None
    is_degraded: bool = False
