"""A device whose next token depends on what its KV blocks really hold, so that no accounting mistake goes unseen.

It keeps the block table and the blocks as a real one does, but stores token ids instead of keys and values. The token
it samples is a function of the whole context as read back through the block table. A block that was shared, evicted,
overwritten or freed wrongly changes a context, and with it a token; `expected_token` says what it should have been.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from novainfer.fsm.events import StepDone, StepPlan

VOCAB_SIZE = 64
EOS = 0
GARBAGE = 255  # what a failed step leaves in the blocks it had begun to write; no token id


def expected_token(context: Sequence[int]) -> int:
    """The token that follows `context`, any ids below 256: a fixed function, EOS about once in 64."""
    return zlib.crc32(bytes(context)) % VOCAB_SIZE


class ScriptedDevice:
    """`num_blocks` blocks of `block_size` tokens and `num_slots` rows of block table."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._kv = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self._tables: list[dict[int, int]] = [{} for _ in range(num_slots)]

    def run(self, plan: StepPlan) -> StepDone:
        """Compute one step."""
        self._write(plan, None)
        tokens = []
        for seq in plan.sample_seqs:
            context = self._read(plan.slots[seq], plan.context_lens[seq])
            assert GARBAGE not in context, f"step {plan.step_id} attends to what was never computed, or overwritten"
            tokens.append(expected_token(context))
        return StepDone(plan.step_id, plan.epoch, tokens)

    def spoil(self, plan: StepPlan) -> None:
        """Fail in the middle of a step: its blocks hold garbage where it would have written."""
        self._write(plan, GARBAGE)

    def _write(self, plan: StepPlan, value: int | None) -> None:
        for slot, index, block in zip(plan.table_slots, plan.table_indexes, plan.table_blocks, strict=True):
            self._tables[slot][index] = block
        at = 0
        for slot, count, end in zip(plan.slots, plan.query_lens, plan.context_lens, strict=True):
            table = self._tables[slot]
            for position in range(end - count, end):
                block, offset = table[position // self.block_size], position % self.block_size
                self._kv[block][offset] = plan.input_ids[at] if value is None else value
                at += 1
        assert at == len(plan.input_ids), "input_ids do not match query_lens"

    def _read(self, slot: int, length: int) -> list[int]:
        table, size = self._tables[slot], self.block_size
        return [self._kv[table[p // size]][p % size] for p in range(length)]
