"""Requests of a world that want a vector of their prompt, and no tokens."""

from __future__ import annotations

from random import Random

from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.pooling import KINDS, Pooling

POOLED_EVERY = 7  # one seed of so many has such requests


def pooled(own: Random, params: SamplingParams) -> SamplingParams:
    """In the place of `params`: most of them want a vector, and have what deadlines these have."""
    if own.random() < 0.4:
        return params
    pooling = Pooling(kind=own.choice(KINDS), dimensions=own.choice([None, None, 1, 2]), normalize=own.random() < 0.5)
    return SamplingParams(pooling=pooling, timeout_s=params.timeout_s, max_queue_s=params.max_queue_s)
