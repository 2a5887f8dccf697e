"""Guesses for a world: of what comes next, each right or wrong as a digest of its place says, and none by chance.

They go on behind the request's own end, as a draft model's do: nothing knows yet that a stop string is complete.
"""

from __future__ import annotations

from random import Random

import msgspec

from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.speculation import DraftModel, Speculation
from novainfer.fsm.simulation.checks.oracle import device_params
from novainfer.fsm.simulation.world.device import Sampler, guesses
from novainfer.fsm.simulation.world.grammars import allowed
from novainfer.fsm.simulation.world.shape import Shape

SPECULATING_EVERY = 4  # one seed of so many guesses


class Guesses:
    """Proposes what the device is going to sample, and now and then something else."""

    def __init__(self, wrong_of_16: int) -> None:
        self._wrong_of_16 = wrong_of_16

    def propose(self, request: Request, count: int) -> list[int]:
        """Between none and `count` tokens."""
        prompt = request.token_ids[: request.num_prompt]
        sampler = Sampler(device_params(prompt, request.params, request.seed, set(request.stop_ids)))
        grammar = request.params.structured_outputs
        if grammar is None:
            return guesses(sampler, request.token_ids, count, self._wrong_of_16)
        follow = lambda token_ids: allowed(grammar, token_ids[request.num_prompt :])  # noqa: E731
        return guesses(sampler, request.token_ids, count, self._wrong_of_16, follow)


def speculating(seed: int, shape: Shape) -> Shape:
    """`shape`, or one that guesses; every other draw of the seed stays what it was."""
    if seed % SPECULATING_EVERY != SPECULATING_EVERY // 2:
        return shape
    own = Random(seed * 1_000_003 + 7)
    return msgspec.structs.replace(
        shape,
        num_speculative_tokens=own.choice([1, 2, 3, 5]),
        wrong_drafts_of_16=own.choice([0, 2, 8, 15]),
        step_costs=own.choice([0, 0, 1, 2]),
        drafts_on_device=own.random() < 0.5,
    )


def going_ahead(seed: int, shape: Shape) -> Shape:
    """`shape`, or one with two steps in flight, where nothing is guessed; every other draw stays what it was."""
    own = Random(seed * 1_000_003 + 11)
    if shape.num_speculative_tokens or own.random() < 0.5:
        return shape
    return msgspec.structs.replace(shape, max_in_flight=2, computes_beside=own.random() < 0.5)


def speculation_of(shape: Shape) -> Speculation | None:
    """What the scheduler of a world of this shape guesses with."""
    if not shape.num_speculative_tokens:
        return None
    proposer = DraftModel() if shape.drafts_on_device else Guesses(shape.wrong_drafts_of_16)
    return Speculation(proposer, shape.num_speculative_tokens)
