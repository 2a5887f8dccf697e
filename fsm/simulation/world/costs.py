"""What a world's device says that its steps cost, when it is warm; what they take is another matter, as on a device."""

from __future__ import annotations

from random import Random

import msgspec

from novainfer.fsm.simulation.world.shape import Shape

# Milliseconds of a step by its tokens. The first three: none measured, one that speculation pays in always, and by how
# many run. In the others a step is long enough to be noticed, and in the last the largest was disturbed: chunks beside
# decodes are a fourth of a whole one, a half, and more.
COSTS: tuple[tuple[tuple[int, float], ...], ...] = (
    (),
    ((1, 1.0), (64, 2.0)),
    ((1, 1.0), (8, 1.2), (64, 8.0)),
    ((1, 10.0), (4, 13.0), (64, 600.0)),
    ((1, 20.0), (16, 24.0), (64, 80.0), (128, 400.0)),
)
TARGETS_MS = (None, None, 2.0, 40.0, 1000.0)


def costing(seed: int, shape: Shape) -> Shape:
    """`shape` with costs and a target of them; every other draw of the seed stays what it was."""
    own = Random(seed * 1_000_003 + 13)
    costs = own.choice([1, 2, 3, 3, 4, 4]) if not shape.num_speculative_tokens else shape.step_costs
    return msgspec.structs.replace(shape, step_costs=costs, inter_token_target_ms=own.choice(TARGETS_MS))
