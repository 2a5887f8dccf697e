"""Worlds in which many prompts begin alike and differ in length, so that it matters who waits for whose prefix.

In some of them so many wait that a step does not look at all of them: what a request deep in the queue has to compute
becomes little while it waits, when another one has computed their common beginning.
"""

from __future__ import annotations

import random

import msgspec

from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.simulation.world.shape import Shape

TOKENS = range(1, 200)
ELDER_EVERY, DEEP = 8, 40  # places in the queue
CROWD = (200, 260)  # clients that come at once; a step looks at 96 of those that wait


class Kin:
    """What one such world draws."""

    def __init__(self, seed: int, *, is_crowd: bool) -> None:
        self._rng = rng = random.Random(seed * 1_000_003 + 2)  # of its own: every other draw stays what it was
        self.is_crowd = is_crowd
        self.num_clients = rng.randint(*CROWD)
        self._num_prompts = 0
        lengths = (48, 72) if is_crowd else (10, 60)
        self._heads = [self._tokens(rng.randint(*lengths)) for _ in range(3 if is_crowd else rng.choice([2, 4]))]
        self._tail = rng.choice([(1, 40), (1, 3), (1, 3), (1, 3)]) if is_crowd else (1, 90)

    def shape(self, shape: Shape) -> Shape:
        """Room for all of them, so that tokens alone are short."""
        common = msgspec.structs.replace(shape, enable_prefix_caching=True, max_model_len=192, num_blocks=1600)
        if not self.is_crowd:
            return common
        return msgspec.structs.replace(
            common,
            block_size=8,
            num_blocks=3600,
            max_num_seqs=256,
            max_num_batched_tokens=512,
            prefill_chunk_tokens=64,
            max_num_queued_reqs=512,
            max_num_queued_tokens=1 << 20,
            num_host_blocks=0,
        )

    def prompt(self) -> list[int]:
        """A beginning that others have too and an end of its own, or a prompt of its own."""
        rng = self._rng
        at, self._num_prompts = self._num_prompts, self._num_prompts + 1
        which = at % len(self._heads)
        if self.is_crowd:  # one of each beginning comes early, the others deep in the queue
            which, is_elder = (at // ELDER_EVERY, True) if not at % ELDER_EVERY else (which, False)
            if which >= len(self._heads) or not (is_elder or (at >= DEEP and rng.random() < 0.85)):
                return self._tokens(rng.randint(30, 60))
        if not self.is_crowd and rng.random() < 0.3:
            return self._tokens(rng.choice([rng.randint(1, 8), rng.randint(30, 120)]))
        head = self._heads[which]
        if not self.is_crowd and rng.random() < 0.3:
            head = head[: rng.randint(1, len(head))]
        return [*head, *self._tokens(rng.choice([rng.randint(*self._tail), rng.randint(1, min(8, self._tail[1]))]))]

    def params(self) -> SamplingParams:
        """A client of a crowd asks for little: what counts is when it comes."""
        return SamplingParams(max_tokens=self._rng.choice([1, 1, 2]), ignore_eos=True, temperature=0.0)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.choice(TOKENS) for _ in range(count)]
