"""Worlds in which conversations are kept: who goes on with one, from where, and when one is ended from outside."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.tenant import ANYONE, Tenant
from novainfer.fsm.simulation.world.shape import Shape

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

CONVERSING_EVERY = 8  # one seed of so many is such a world
NAMES = ("a", "b", "c", "d", "e")
Whose = tuple[Tenant, ...]  # one, where the world has several


class Conversations:
    """What one such world draws."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = Random(seed * 1_000_003 + 23)  # of its own: every other draw stays what it was
        self._share = rng.choice([0.5, 0.8, 0.95])  # of requests that belong to one
        self._names = NAMES[: rng.choice([1, 2, 3, 5])]
        self._ended_every = rng.choice([0, 0, 8, 20])
        self._gap_s = rng.choice([0.05, 1.0, 5.0, 20.0])  # from question to question
        self.num_more = rng.choice([8, 24, 40])  # questions, beside those of other worlds

    def shape(self, shape: Shape) -> Shape:
        """The same world, with sessions."""
        rng = self._rng
        return msgspec.structs.replace(
            shape,
            session_ttl_s=rng.choice([0.0, 1.0, 30.0, 600.0, 600.0, 600.0]),
            session_share=rng.choice([0.0, 0.25, 0.5, 1.0]),
            max_sessions=rng.choice([1, 2, 100, 100]),
            num_host_blocks=rng.choice([0, 4, 8, 16, 64]),
        )

    def goes_on(
        self, world: World, prompt: str | list[int], params: SamplingParams, whose: Whose
    ) -> tuple[str | list[int], SamplingParams]:
        """The question that a client asks instead: mostly one that goes on with what was said before."""
        rng = self._rng
        if params.pooling is not None or rng.random() >= self._share:
            return prompt, params
        name = rng.choice(self._names)
        params = msgspec.structs.replace(params, session_id=name)
        before = [
            client
            for client in world.clients.values()
            if client.arrive.params.session_id == name and (client.arrive.tenant,) == (whose or (ANYONE,))
        ]
        room = world.shape.context_len - (params.max_tokens or 1)
        new = [rng.randrange(1, 20) for _ in range(rng.randint(1, 6))]
        answered = [client for client in before if client.end is not None]
        if answered and rng.random() < 0.9:
            last = rng.choice((answered if rng.random() < 0.8 else before)[-2:])
            said = [*last.prompt, *last.tokens[0]]
            if said and len(said) + len(new) <= room:
                return [*said, *new], params
        return prompt, params

    def gap_s(self) -> float:
        """How long it is until somebody asks again."""
        return self._rng.expovariate(1 / self._gap_s)

    def ended(self) -> str | None:
        """The name that somebody ends now, if somebody does."""
        if not self._ended_every or self._rng.random() * self._ended_every >= 1:
            return None
        return self._rng.choice(self._names)
