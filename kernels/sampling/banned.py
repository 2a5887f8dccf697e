"""Sequences of tokens that are not to be written: behind all but the last of its tokens, the last one is masked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from novainfer.fsm.messages.step import SAMPLED, SeqParams, StepPlan
from novainfer.kernels.masks import Masks, mask_words
from novainfer.kernels.sampling.verify import Positions

__all__ = ["BannedSequences"]


class _Row:
    """What is banned in one slot, by the token that stands before the last one, and the slot's tokens so far."""

    def __init__(self, params: SeqParams) -> None:
        if params.token_ids is None:
            raise ValueError("banned sequences need the tokens so far")
        self.tokens = list(params.token_ids)
        self._behind: dict[int, list[list[int]]] = {}
        self._everywhere = {sequence[0] for sequence in params.banned_sequences if len(sequence) == 1}
        for sequence in params.banned_sequences:
            if len(sequence) > 1:
                self._behind.setdefault(sequence[-2], []).append(sequence)

    def at(self, position: int) -> set[int]:
        """The tokens that may not stand at `position`, behind those before it."""
        found = set(self._everywhere)
        for sequence in self._behind.get(self.tokens[position - 1], ()) if position else ():
            begin = position - len(sequence) + 1
            if begin >= 0 and self.tokens[begin:position] == sequence[:-1]:
                found.add(sequence[-1])
        return found


class BannedSequences:
    """Those of all slots, and the masks that they are in a step. Tokens are followed as they are computed.

    A step that is computed again, or after one that was taken back, writes its tokens in their places again.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, _Row] = {}

    def admit(self, params: SeqParams) -> None:
        """A sequence takes a slot."""
        self._rows.pop(params.slot, None)
        if params.banned_sequences:
            self._rows[params.slot] = _Row(params)

    def masked(self, plan: StepPlan, at: Positions, last_token: Callable[[int], int]) -> Positions:
        """`at` with masks that also forbid what would complete a sequence; `last_token` says what `SAMPLED` is."""
        if not self._rows or self._rows.keys().isdisjoint(plan.slots):
            return at
        self._follow(plan, last_token)
        found: dict[int, set[int]] = {}
        for place, (slot, position) in enumerate(zip(at.slots, at.positions, strict=True)):
            row = self._rows.get(slot)
            if row is not None and (banned := row.at(position)):
                found[place] = banned
        return at._replace(masks=self._merged(at.masks, found)) if found else at

    def _follow(self, plan: StepPlan, last_token: Callable[[int], int]) -> None:
        end = 0
        for slot, count, context_len in zip(plan.slots, plan.query_lens, plan.context_lens, strict=True):
            begin, end = end, end + count
            row = self._rows.get(slot)
            if row is not None:
                ids = plan.input_ids[begin:end]
                row.tokens[context_len - count :] = [i if i != SAMPLED else last_token(slot) for i in ids]

    def _merged(self, masks: Masks | None, banned: dict[int, set[int]]) -> Masks:
        """`masks`, and one that allows all for each other row of `banned`; less what is banned there."""
        given = {} if masks is None else dict(zip(masks.rows, masks.words, strict=True))
        rows = sorted(given.keys() | banned.keys())
        words = np.full((len(rows), mask_words(self._vocab_size)), -1, dtype=np.int32)
        for at, row in enumerate(rows):
            if row in given:
                words[at] = given[row]
            for token_id in banned.get(row, ()):
                words[at, token_id // 32] &= ~np.int32(np.uint32(1 << token_id % 32).view(np.int32))
        return Masks(rows, words)
