"""What steps cost by their tokens, measured when a runner is warm: `fsm/schedule/costs.py` says who reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from novainfer.fsm.messages.step import SeqParams, StepDone, StepPlan

# Tokens of the steps whose time is measured: those that tell the curve first, and what lies between them.
TOKENS = (1, 16, 64, 128, 4, 32, 8, 2, 256, 3, 6, 12, 24, 48, 96)
SAMPLED = 32  # of them, at most: as many as decode beside a prompt; the logits of more are memory of their own
TRIES = 3
# For all of them, since each start waits for it: so many seconds, or so many steps of one token where those are longer,
# and the model so large that it took far longer to load.
LIMIT_S = 0.4
LIMIT_STEPS = 8


def measure_step_costs(
    execute: Callable[[StepPlan], StepDone], longest: int, block_size: int
) -> list[tuple[int, float]]:
    """(tokens, milliseconds) of steps of `longest` tokens at most: of each size the fastest of up to `TRIES`.

    Each round tries all sizes once, so that a moment in which the machine is busy spoils one try of some of them, and
    not all tries of one. A size that would probably take longer than the time that is left is not tried: where a step
    takes 20 ms there is one round, and whoever reads the table has to bear with sizes that were disturbed.
    """
    found: dict[int, float] = {}
    all_began_s = time.perf_counter()
    for _ in range(TRIES):
        for num_tokens in (n for n in TOKENS if n <= longest):
            began_s = time.perf_counter()
            if found:
                left_ms = 1e3 * (max(LIMIT_S, LIMIT_STEPS * found[1] / 1e3) - (began_s - all_began_s))
                if _expected_ms(found, num_tokens) > left_ms:
                    continue
            execute(_step_of(num_tokens, block_size))
            took_ms = 1e3 * (time.perf_counter() - began_s)
            found[num_tokens] = min(took_ms, found.get(num_tokens, took_ms))
    return [(num_tokens, round(ms, 3)) for num_tokens, ms in sorted(found.items())]


def _expected_ms(found: Mapping[int, float], num_tokens: int) -> float:
    """What a step will probably take: no longer than a larger one did, or in line with the two largest."""
    before, last = sorted((0, *found))[-2:]
    if num_tokens <= last:
        return min(ms for size, ms in found.items() if size >= num_tokens)
    each_ms = max(found[last] - found[before], 0.0) / (last - before) if before else 0.0
    return found[last] + each_ms * (num_tokens - last)


def _step_of(num_tokens: int, block_size: int) -> StepPlan:
    """A step of so many tokens of one request, in the first blocks; the last of them are sampled."""
    blocks = list(range(-(-num_tokens // block_size)))
    return StepPlan(
        slots=[0],
        query_lens=[num_tokens],
        context_lens=[num_tokens],
        input_ids=[0] * num_tokens,
        table_slots=[0] * len(blocks),
        table_indexes=blocks,
        table_blocks=blocks,
        sample_seqs=[0],
        num_drafts=[min(num_tokens, SAMPLED) - 1],
        admissions=[SeqParams(slot=0)],
    )
