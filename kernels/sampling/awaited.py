"""Masks that come while their step is computed: given by one thread, and taken by the one that samples.

Nothing is waited for before the logits are being computed, and then no longer than others may be held up for it. What
has not come by then leaves its row without a token (`NO_MASK`), and so is a row that goes on from such a one, in a step
that was planned ahead: what it would be the mask of never came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

import numpy as np

from novainfer.fsm.messages.step import NO_MASK, SAMPLED, StepMasks, StepPlan
from novainfer.kernels.masks import Masks, Words, mask_words
from novainfer.kernels.sampling.verify import Positions, Sampled

__all__ = ["MASKS_LIMIT_S", "AwaitedMasks", "without"]

# Behind what comes before the draw, or as long as that took where it took longer: requests without a grammar, which are
# sampled in the same step, wait for no more than twice their time.
MASKS_LIMIT_S = 0.01


class AwaitedMasks:
    """`give` may be called by any thread; all else by the one that computes steps."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = mask_words(vocab_size)
        self._came = threading.Condition()
        self._given: dict[int, dict[int, Words | None]] = {}  # by step, and place among its masks; None: it is none
        self._last_step_id = -1  # that was begun
        self._began_s = 0.0
        self._unsampled: set[int] = set()  # slots whose last row got no token

    def give(self, masks: StepMasks) -> None:
        """Masks of a step that has begun, or will; raises ValueError where they are not as many as their places."""
        num_bytes = 4 * self._num_words
        if len(masks.masks) not in (0, num_bytes * len(masks.places)):
            raise ValueError(f"{len(masks.places)} masks of {num_bytes} bytes each are not {len(masks.masks)} bytes")
        words = np.frombuffer(masks.masks, dtype="<i4").reshape(-1, self._num_words)
        with self._came:
            if masks.step_id >= self._last_step_id:
                found = self._given.setdefault(masks.step_id, {})
                found.update(zip(masks.places, words if masks.masks else [None] * len(masks.places), strict=True))
                self._came.notify()

    def begin(self, plan: StepPlan) -> None:
        """The step is computed from now on."""
        self._began_s = time.monotonic()
        with self._came:
            self._last_step_id = plan.step_id
            for step_id in [step_id for step_id in self._given if step_id < plan.step_id]:
                del self._given[step_id]

    def complete(self, plan: StepPlan, at: Positions) -> tuple[Positions, list[int]]:
        """`at`, the positions that `plan` samples, with the masks that were to come; and those that get no token."""
        void = self._void(plan) if self._unsampled else []
        late: list[int] = []
        if plan.masks_to_come:
            wanted = [place for place in plan.masks_to_come if plan.mask_positions[place] not in void]
            found = self._wait(plan.step_id, wanted)
            late = [plan.mask_positions[place] for place in wanted if found.get(place) is None]
            at = _with_masks(plan, at, found)
        self._unsampled.difference_update(at.slots)
        self._unsampled.update(at.slots[position] for position in (*void, *late))
        return at, sorted((*void, *late))

    def _void(self, plan: StepPlan) -> list[int]:
        """The positions whose row goes on from a token that never came."""
        if not plan.after:
            return []
        ends = np.cumsum(plan.query_lens)
        return [
            position
            for position, seq in enumerate(plan.sample_seqs)
            if plan.input_ids[ends[seq] - 1] == SAMPLED and plan.slots[seq] in self._unsampled
        ]

    def _wait(self, step_id: int, wanted: Collection[int]) -> dict[int, Words | None]:
        now_s = time.monotonic()
        deadline_s = now_s + max(MASKS_LIMIT_S, now_s - self._began_s)
        with self._came:
            while True:
                found = self._given.get(step_id, {})
                left_s = deadline_s - time.monotonic()
                if found.keys() >= set(wanted) or left_s <= 0:
                    return dict(found)
                self._came.wait(left_s)


def without(sampled: Sampled, late: Sequence[int]) -> Sampled:
    """`sampled` as if nothing had been drawn at these positions."""
    if late:
        for position in late:
            sampled.token_ids[position] = NO_MASK
            if sampled.logprobs:
                sampled.logprobs[position] = None
    return sampled


def _with_masks(plan: StepPlan, at: Positions, found: dict[int, Words | None]) -> Positions:
    """`at` with the masks that have come; a position whose mask has not is drawn from without one, for nothing."""
    here = {} if at.masks is None else dict(zip(at.masks.rows, at.masks.words, strict=True))
    for place in plan.masks_to_come:
        if (mask := found.get(place)) is not None:
            here[plan.mask_positions[place]] = mask
    if not here:
        return at
    rows = sorted(here)
    return at._replace(masks=Masks(rows, np.stack([here[row] for row in rows])))
