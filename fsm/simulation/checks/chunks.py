"""How many prompt tokens a step holds beside requests that decode, by rule 2 of docs/fairness.md and a plain count.

What a step costs is read off the device's table anew each time, and the chunk is looked for token by token. That it is
not less than the rule gives is seen by `order` and `turns`, which take their tokens from here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from novainfer.fsm.messages.events import Configure, MakeBatch
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.checks.turns import is_decode
from novainfer.fsm.simulation.world.costs import COSTS

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

GRID = 4  # blocks
SHARE = 1.025  # of what a token costs in a whole chunk, by the flattest line from one token to a larger size
LARGER = 1 / 4  # of the largest, and more
SHORT_MS = 25.0
LATEST, MOST = 0.25, 4.0  # of a step in the pace, and as how many times the pace it counts


class Beside:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._table: list[tuple[int, float]] = []
        self._pace = 1.0

    def before(self, event: Any) -> None:
        """The scheduler is about to handle `event`."""
        if isinstance(event, Configure):
            self._table, self._pace = list(COSTS[self._world.shape.step_costs]), 1.0
            if event.step_costs != self._table:
                raise Violation(f"a worker comes up with costs of {event.step_costs}, and devices have {self._table}")
        if not isinstance(event, MakeBatch) or not isinstance(event.outcome, StepDone):
            return
        flight, took_ms = self._world.scheduler.oldest_flight, 1e3 * event.outcome.took_s
        if flight is None or flight.canary or not flight.num_prompt_tokens or not took_ms:
            return
        times = took_ms / self._costs(sum(count for _, count, _ in flight.rows))
        self._pace = (1 - LATEST) * self._pace + LATEST * min(times, MOST * self._pace)

    def after(self) -> None:
        """It has handled it."""
        flight = self._world.planned
        if flight is None or flight.canary:
            return
        num_decodes = sum(is_decode(request, start) for request, _, start in flight.rows)
        num_tokens = sum(count for request, count, start in flight.rows if not is_decode(request, start))
        if num_tokens > (most := self.tokens(num_decodes)):
            raise Violation(f"step {flight.step_id} holds {num_tokens} prompt tokens beside decodes, of {most}")
        target_ms = self._world.shape.inter_token_target_ms
        if target_ms is not None and self._table and flight.drafts and num_tokens:
            took_ms = self._pace * self._costs(sum(count for _, count, _ in flight.rows))
            if took_ms > target_ms * (1 + 1e-9):
                raise Violation(f"step {flight.step_id} takes {took_ms:.3f} ms with its drafts, of {target_ms}")
            self._world.counts["drafts beside prompts within a target"] += 1
        self._world.counts["chunks beside decodes"] += bool(num_decodes and num_tokens)
        self._world.counts["chunks as large as decodes let them be"] += bool(num_decodes) and num_tokens == most

    def tokens(self, num_decodes: int) -> int:
        """Of prompts, in a step with so many decodes."""
        shape = self._world.shape
        most, size, target_ms = shape.prefill_chunk_tokens, shape.block_size, shape.inter_token_target_ms
        if not num_decodes or not self._table:
            return most
        if target_ms is not None:
            fits = [n for n in range(size, most + 1, size) if self._pace * self._costs(num_decodes + n) <= target_ms]
            return most if len(fits) == most // size else min(max(fits, default=size), most)
        (one, first_ms), *others = self._table
        slopes = ((ms - first_ms) / (n - one) for n, ms in others if n >= LARGER * others[-1][0])
        slope = min(slopes, default=0.0)
        for num_tokens in range(GRID * size, most, GRID * size):
            is_longer = self._costs(num_tokens + GRID * size) > SHORT_MS
            if is_longer and first_ms / num_tokens + slope <= SHARE * (first_ms / most + slope):
                return num_tokens
        return most

    def _costs(self, num_tokens: int) -> float:
        if not self._table:
            return 1.0
        lines = list(pairwise(self._table))
        (left, left_ms), (right, right_ms) = next((line for line in lines if num_tokens <= line[1][0]), lines[-1])
        return left_ms + (right_ms - left_ms) * (num_tokens - left) / (right - left)
