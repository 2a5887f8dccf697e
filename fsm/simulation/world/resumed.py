"""Clients of a world that go on with an answer which another engine began: they have the first of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from novainfer.fsm.messages.events import Arrive, Committed
from novainfer.fsm.messages.outputs import TokenLogprob
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.simulation.checks.oracle import TOKEN_BYTES, expected_run, is_refused
from novainfer.fsm.simulation.world.device import expected_logprob

RESUMED_EVERY = 8  # one seed of so many has such clients
MOST = 40  # tokens that one has; mostly few


def draw_committed(own: Random, params: SamplingParams) -> tuple[int, ...]:
    """How many tokens each choice has, as far as its answer goes; none: the client begins anew."""
    if own.random() < 0.4 or params.pooling is not None:
        return ()
    return tuple(own.choice([0, 1, 2, 3, 5, 9, MOST]) for _ in range(params.n))


def going_on(arrive: Arrive, num_committed: Sequence[int], max_len: int) -> Arrive:
    """`arrive` with the first tokens of its choices, as many as they have."""
    prompt, params = arrive.prompt, arrive.params
    assert isinstance(prompt, str | list)
    ids = [ord(c) for c in prompt] if isinstance(prompt, str) else prompt
    if is_refused(len(ids), params, max_len):
        return arrive
    found: list[Committed] = []
    for choice, count in enumerate(num_committed):
        token_ids = expected_run(ids, params, arrive.seed, choice, max_len).token_ids[:count]
        logprobs = None if params.logprobs is None else [_told(token_id, params.logprobs) for token_id in token_ids]
        found.append(Committed(token_ids=token_ids, logprobs=logprobs))
    return msgspec.structs.replace(arrive, committed=found)


def _told(token_id: int, num_top: int) -> TokenLogprob:
    logprob, ids, values = expected_logprob(token_id, num_top)
    top = [(i, TOKEN_BYTES[i], value) for i, value in zip(ids, values, strict=True)]
    return TokenLogprob(token_id, TOKEN_BYTES[token_id], logprob, top)
