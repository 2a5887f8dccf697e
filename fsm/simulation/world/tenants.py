"""Worlds that several tenants share, or where some requests are urgent: whose each client is, and what it wishes."""

from __future__ import annotations

from random import Random

import msgspec

from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.tenant import Tenant
from novainfer.fsm.simulation.world.shape import Shape

TENANTED_EVERY = 6  # one seed of so many is such a world
WEIGHTS = (1.0, 1.0, 2.0, 0.5)
PRIORITIES = (-3, 0, 0, 0, 1, 7)
SALTS = (None, None, None, "salt", "pepper")


class Tenants:
    """What one such world draws."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = Random(seed * 1_000_003 + 19)  # of its own: every other draw stays what it was
        num_tenants = rng.choice([1, 2, 2, 3])
        self._by_priority = num_tenants == 1 or rng.random() < 0.4
        self._is_salted = rng.random() < 0.3
        self._tenants = [Tenant(name, rng.choice(WEIGHTS)) for name in ("", "b", "c")[:num_tenants]]
        # One tenant asks for most of what is asked for, so that the others wait behind it.
        self._shares = [rng.choice([1, 8]), 1, rng.choice([1, 8])][:num_tenants]

    def shape(self, shape: Shape) -> Shape:
        """The same world, with a policy."""
        rng = self._rng
        return msgspec.structs.replace(
            shape,
            scheduling_policy="priority" if self._by_priority else "fcfs",
            priority_wait_s=rng.choice([0.1, 1.0, 60.0]),
            share_prefix_cache=rng.random() < 0.3,
        )

    def next(self) -> Tenant:
        """Whose the next client is."""
        return self._rng.choices(self._tenants, self._shares)[0]

    def wishes(self, params: SamplingParams) -> SamplingParams:
        """How urgent it is to that one, and how secret."""
        priority = self._rng.choice(PRIORITIES) if self._by_priority else 0
        salt = self._rng.choice(SALTS) if self._is_salted else None
        return msgspec.structs.replace(params, priority=priority, cache_salt=salt)
