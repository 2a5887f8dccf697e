"""What a request must bring, worked out from its parameters alone: the slow way, and by other means than the engine.

The text is decoded whole after each token, and searched whole; nothing is shared with the text assembler but the
bytes of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from novainfer.fsm.messages.outputs import FinishReason
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.pooling import Pooling
from novainfer.fsm.messages.step import NONE_ALLOWED, SeqParams
from novainfer.fsm.simulation.world.device import EOS, VOCAB_SIZE, Sampler, fold, hidden_state
from novainfer.fsm.simulation.world.grammars import allowed, error_code
from novainfer.fsm.text import Vocabulary

# Letters that meet in stop strings, characters cut in two and three, a stray continuation byte, and two specials.
_PIECES = [b"a", b"b", b"c", b"ab", b"bc", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"a\xf0\x9f", b"\x98\x80b", b" "]
SPECIAL = 1
SPECIALS = frozenset([EOS, SPECIAL])
TOKEN_BYTES = [b"<eos>", b"<sep>", *(_PIECES[i % len(_PIECES)] for i in range(2, VOCAB_SIZE))]
VOCABULARY = Vocabulary.build(TOKEN_BYTES, SPECIALS)


class Violation(AssertionError):
    """Something that must hold does not."""


class Expected(msgspec.Struct, frozen=True):
    """All that one choice must give."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error_code: str | None = None  # of the error that ends it, where its grammar does


def is_refused(num_prompt: int, params: SamplingParams, max_len: int) -> bool:
    """Whether a prompt of this length cannot be served within a context of `max_len` tokens."""
    num_new = 0 if params.pooling is not None else params.max_tokens or 1
    return num_prompt == 0 or num_prompt + num_new > max_len


def expected_embedding(prompt: Sequence[int], pooling: Pooling) -> list[float]:
    """The vector of a prompt, from its tokens alone."""
    context, states = 0, []
    for token_id in prompt:
        context = fold([token_id], context)
        states.append(hidden_state(context))
    wanted = states if pooling.kind == "mean" else states[-1:]
    mean = [sum(numbers) / len(wanted) for numbers in zip(*wanted, strict=True)][: pooling.dimensions]
    length = sum(number * number for number in mean) ** 0.5 if pooling.normalize else 1.0
    return [number / length for number in mean]


def expected_run(prompt: Sequence[int], params: SamplingParams, seed: int, choice: int, max_len: int) -> Expected:
    """Run the request alone, one token at a time."""
    limit = max_len - len(prompt) if params.max_tokens is None else params.max_tokens
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    sampler = Sampler(device_params(prompt, params, (seed + choice) % 2**64, stop_ids))
    tokens: list[int] = []
    searched_from = 0
    history, context = bytearray(prompt), fold(prompt)
    grammar, mask = params.structured_outputs, None
    while True:
        if grammar is not None and (mask := allowed(grammar, tokens)) is None:
            return Expected(tokens, _bytes(tokens, params).decode("utf-8", "replace"), None, None, error_code(tokens))
        token = NONE_ALLOWED
        if mask is None or sampler.allows(mask):
            token = sampler.token(context, len(history), history, mask)
        if token == NONE_ALLOWED:
            text = _bytes(tokens, params).decode("utf-8", "replace")
            return Expected(tokens, text, None, None, "no_token_allowed")
        history.append(token)
        context = fold([token], context)
        is_eos = token == EOS and not params.ignore_eos
        may_stop = len(tokens) + 1 >= params.min_tokens or (grammar is not None and is_eos)
        if may_stop and (is_eos or token in params.stop_token_ids):
            text = _bytes(tokens, params).decode("utf-8", "replace")
            if params.include_stop_str_in_output and token != EOS:
                text += TOKEN_BYTES[token].decode("utf-8", "replace")
            return Expected([*tokens, token], text, FinishReason.STOP, None if token == EOS else token)
        tokens.append(token)
        so_far = whole_characters(_bytes(tokens, params)) if params.stop_strings else ""
        if not may_stop:
            searched_from = len(so_far)
        elif met := sorted((at, s) for s in params.stop_strings if (at := so_far.find(s, searched_from)) >= 0):
            at, stop = met[0]
            end = at + len(stop) if params.include_stop_str_in_output else at
            return Expected(tokens, so_far[:end], FinishReason.STOP, stop)
        if len(tokens) == limit:
            return Expected(tokens, _bytes(tokens, params).decode("utf-8", "replace"), FinishReason.LENGTH, None)


def device_params(prompt: Sequence[int], params: SamplingParams, seed: int, stop_ids: set[int]) -> SeqParams:
    """What a device should be told: by name, where the engine copies field by field."""
    given = msgspec.structs.asdict(params)
    same = {name: given[name] for name in SeqParams.__struct_fields__ if name in given}
    return SeqParams(
        **same
        | {
            "slot": -1,
            "temperature": 0.0 if params.is_greedy else params.temperature,
            "top_k": 0 if params.top_k == -1 else params.top_k,
            "seed": seed,
            "num_prompt_tokens": len(prompt),
            "min_position": len(prompt) + params.min_tokens,
            "stop_token_ids": sorted(stop_ids),
        }
    )


def whole_characters(data: bytes) -> str:
    """The text of `data` without a last character that more bytes could still complete."""
    for length in range(1, min(3, len(data)) + 1):
        try:
            data[-length:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return data[:-length].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def _bytes(tokens: Sequence[int], params: SamplingParams) -> bytes:
    return b"".join(TOKEN_BYTES[t] for t in tokens if t not in SPECIALS or not params.skip_special_tokens)
