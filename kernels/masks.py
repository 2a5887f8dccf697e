"""Masks of a step: which tokens may be drawn at some of its positions, one bit for each of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from novainfer.fsm.messages.step import StepPlan

__all__ = ["Masks", "check_masks", "mask_words", "masks_of", "packed_mask"]

Words = npt.NDArray[np.int32]


class Masks(NamedTuple):
    """Bit i % 32 of word i // 32 says that token i may be drawn; bits beyond the vocabulary say nothing."""

    rows: Sequence[int]  # [num_masks], ascending: of the positions that are drawn from, those that have a mask
    words: Words  # [num_masks, mask_words(vocab_size)], contiguous

    def part(self, begin: int, end: int) -> Masks | None:
        """Those of the rows from `begin` to `end`, counted from there; None where none of them has one."""
        first, last = np.searchsorted(self.rows, (begin, end)).tolist()
        if first == last:
            return None
        return Masks([row - begin for row in self.rows[first:last]], self.words[first:last])

    def addresses(self, begin: int, num_rows: int, vocab_size: int) -> npt.NDArray[np.int64]:
        """Where each row's mask lies when `words` lie at `begin`, or 0; raises ValueError for a wrong shape."""
        shape, words = (len(self.rows), mask_words(vocab_size)), self.words
        if words.shape != shape or words.dtype != np.int32 or not words.flags.c_contiguous:
            raise ValueError(
                f"masks must be int32 {list(shape)}, contiguous, not {words.dtype} {list(words.shape)} with strides "
                f"{list(words.strides)}"
            )
        found = np.zeros(num_rows, dtype=np.int64)
        found[list(self.rows)] = begin + np.arange(len(self.rows)) * (4 * shape[1])
        return found

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """The same as [num_masks, vocab_size]."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return bits.astype(np.bool_)


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits of a mask."""
    return -(-vocab_size // 32)


def packed_mask(token_ids: Sequence[int], vocab_size: int) -> Words:
    """The mask that allows these; [mask_words(vocab_size)]."""
    is_allowed = np.zeros(mask_words(vocab_size) * 32, dtype=np.uint8)
    is_allowed[list(token_ids)] = 1
    return np.packbits(is_allowed, bitorder="little").view("<i4").astype(np.int32)


def check_masks(plan: StepPlan, vocab_size: int) -> None:
    """Raise ValueError where the masks of `plan` are not those of positions that it samples, in their order."""
    positions, num_samples = plan.mask_positions, len(plan.sample_seqs) + sum(plan.num_drafts)
    to_come = plan.masks_to_come
    if to_come and (to_come[0] < 0 or to_come[-1] >= len(positions) or any(np.diff(to_come) <= 0)):
        raise ValueError(f"masks_to_come of a step must ascend from 0 to {len(positions) - 1} at most, not {to_come}")
    num_here = len(positions) - len(to_come)
    num_bytes = num_here * mask_words(vocab_size) * 4
    if len(plan.masks) != num_bytes:
        raise ValueError(
            f"masks of a step at {num_here} positions must be {num_bytes} bytes for a vocabulary of {vocab_size}, not "
            f"{len(plan.masks)}"
        )
    if positions and (positions[0] < 0 or positions[-1] >= num_samples or any(np.diff(positions) <= 0)):
        raise ValueError(f"mask_positions of a step must ascend from 0 to {num_samples - 1} at most, not {positions}")


def masks_of(plan: StepPlan) -> Masks | None:
    """The masks that `plan` has come with, and which have been checked; None where there are none."""
    if not plan.masks:
        return None
    to_come = set(plan.masks_to_come)
    rows = [position for place, position in enumerate(plan.mask_positions) if place not in to_come]
    words = np.frombuffer(plan.masks, dtype="<i4").astype(np.int32)  # a copy: torch wants memory that may be written
    return Masks(rows, words.reshape(len(rows), -1))
