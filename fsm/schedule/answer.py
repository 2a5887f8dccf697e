"""What a client is given for a token that was sampled, what ends its answer, and what is refused at once.

A sampled token ends an answer when it is a stop token, when it completes a stop string, or when it is the last one that
there is room for. Text is assembled here, from token bytes: it never splits a character, nor what a stop string may
begin in.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import msgspec

from novainfer.fsm.messages.events import Begun, Committed, End, Output, Submit
from novainfer.fsm.messages.outputs import FinishReason, TokenLogprob
from novainfer.fsm.messages.step import Logprobs
from novainfer.fsm.schedule.request import UNCONSTRAINED, Request, RequestState
from novainfer.fsm.text import Vocabulary

NOTHING_SAID: Logprobs = (0.0, [], [])  # of the first token of a prompt
ENDED_AS = {FinishReason.STOP: RequestState.FINISHED_STOPPED, FinishReason.LENGTH: RequestState.FINISHED_LENGTH}


def next_output(
    request: Request,
    token_id: int,
    logprob: Logprobs | None,
    vocabulary: Vocabulary,
    eos_token_ids: Sequence[int],
) -> Output:
    """Append `token_id` to `request`: what its client is given, with an end if this is one (`ENDED_AS`).

    Log probabilities are of the token, and of those that it competed with.
    """
    token_ids = request.token_ids
    token_ids.append(token_id)
    request.losses = request.failures = 0
    if len(token_ids) < request.plain_until and token_id not in request.stop_ids:
        plain = vocabulary.plain.get(token_id)
        if plain is not None:  # else it is asked for below, and known from then on
            return Output(
                request.request_id,
                request.stream_id,
                request.choice,
                [token_id],
                plain,
                is_degraded=request.is_degraded,
            )
    params, text = request.params, request.text
    output = Output(
        request.request_id, request.stream_id, request.choice, [token_id], "", is_degraded=request.is_degraded
    )
    if logprob is not None:
        output.logprobs = [_with_bytes(token_id, logprob, vocabulary)]
    if request.is_first_output:
        request.is_first_output = False
        prompt = token_ids[: request.num_prompt] if request.choice == 0 else []
        output.first = Begun(
            request.num_prompt, request.num_cached, prompt, request.seed, _scores_with_bytes(request, vocabulary)
        )
    may_stop = len(token_ids) - request.num_prompt >= params.min_tokens or (
        request.mask != UNCONSTRAINED and token_id in eos_token_ids  # too early, and all that the grammar has left
    )
    if may_stop and token_id in request.stop_ids:
        is_eos = token_id in eos_token_ids
        output.text = text.flush()
        if params.include_stop_str_in_output and not is_eos:
            output.text += vocabulary.bytes_of(token_id).decode("utf-8", "replace")
        output.end = _good_end(request, FinishReason.STOP, None if is_eos else token_id)
        return output
    output.text = text.push(token_id, may_stop=may_stop)
    if params.mark_token_ids:
        output.marks = text.take_marks()
    if text.stopped_by is not None:
        output.end = _good_end(request, FinishReason.STOP, text.stopped_by)
    elif len(token_ids) >= request.max_len:
        output.text += text.flush()
        output.end = _good_end(request, FinishReason.LENGTH)
    else:
        request.plain_until = request.max_len if text.is_whole and _is_plain(request) else 0
    return output


def _is_plain(request: Request) -> bool:
    """Whether `request` wants nothing but text, which no string ends: only its length does, or a stop token."""
    params = request.params
    return params.logprobs is None and not params.stop_strings and not params.mark_token_ids


def outputs_again(
    request: Request, committed: Committed, vocabulary: Vocabulary, eos_token_ids: Sequence[int]
) -> list[Output]:
    """Give `request`, which is new, what it had got before: its outputs as they were, up to its end if that is there.

    They are one step's work each, and so is what follows from them: text that is held back, stop strings across the
    seam, and how many tokens there are room for.
    """
    request.num_cached, request.is_degraded = committed.num_cached_tokens, committed.is_degraded
    outputs: list[Output] = []
    for at, token_id in enumerate(committed.token_ids):
        request.scores = None  # they were told with the first token
        output = next_output(request, token_id, None, vocabulary, eos_token_ids)
        if committed.logprobs is not None:
            output.logprobs = [committed.logprobs[at]]
        if output.first is not None:
            output.first = msgspec.structs.replace(output.first, prompt_logprobs=committed.prompt_logprobs)
        outputs.append(output)
        if output.end is not None:
            break
    request.num_committed = request.num_generated
    request.work = len(request.token_ids)
    return outputs


def has_no_number(request: Request) -> bool:
    """Whether what was scored of its prompt is not a number somewhere."""
    return request.scores is not None and any(isnan(score[0]) for score in request.scores)


def refusal(submit: Submit, max_len: int) -> End | None:
    """Why this request can never run where one may have `max_len` tokens, prompt included; None if it can."""
    num_prompt, params = len(submit.token_ids), submit.params
    max_tokens = None if params.pooling is not None else params.max_tokens
    if num_prompt == 0:
        return End(error="the prompt must hold at least one token", code="invalid_value", param="prompt")
    if num_prompt + params.num_tokens_needed <= max_len:
        return None
    wish = f"{num_prompt} prompt tokens" + (f" plus max_tokens={max_tokens}" if max_tokens else "")
    advice = "shorten the prompt" + (" or ask for fewer tokens" if params.pooling is None else "")
    return End(
        error=f"This model's maximum context length is {max_len} tokens, but {wish} were requested; {advice}.",
        code="context_length_exceeded",
        param="max_tokens" if num_prompt < max_len else "prompt",
    )


def pooled_output(request: Request, embedding: bytes) -> Output:
    """What a request that gives a vector gives, with its end."""
    return Output(
        request.request_id,
        request.stream_id,
        request.choice,
        [],
        "",
        first=Begun(request.num_prompt, request.num_cached, request.token_ids, request.seed),
        end=_good_end(request, FinishReason.STOP),
        is_degraded=request.is_degraded,
        embedding=embedding,
    )


def _scores_with_bytes(request: Request, vocabulary: Vocabulary) -> list[TokenLogprob] | None:
    """What its prompt scored, where that was asked for; the request keeps it no longer."""
    scores, request.scores = request.scores, None
    if scores is None:
        return None
    prompt = request.token_ids[: request.num_prompt]
    told = zip(prompt, [NOTHING_SAID, *scores], strict=True)
    return [_with_bytes(token_id, score, vocabulary) for token_id, score in told]


def _with_bytes(token_id: int, found: Logprobs, vocabulary: Vocabulary) -> TokenLogprob:
    logprob, ids, values = found
    name = vocabulary.bytes_of
    top = [(i, name(i), value) for i, value in zip(ids, values, strict=True)]
    return TokenLogprob(token_id, name(token_id), logprob, top)


def _good_end(request: Request, finish_reason: FinishReason, stop_reason: int | str | None = None) -> End:
    return End(
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
    )
