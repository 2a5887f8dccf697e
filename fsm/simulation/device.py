"""A device whose next token depends on what its KV blocks really hold, so that no accounting mistake goes unseen.

It keeps the block table and the blocks as a real one does, but stores token ids instead of keys and values. The token
it samples is a function of the whole context as read back through the block table, and of the seed and choice that
the slot was given. A block that was shared, evicted, overwritten, swapped or freed wrongly changes a context, and with
it a token; a slot with another's parameters changes it too; `expected_token` says what it should have been.

One device is one epoch: whoever replaces it begins with garbage in every block, on the device and on the host.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from novainfer.fsm.events import SamplingSpec, StepDone, StepPlan

VOCAB_SIZE = 64
EOS = 0
GARBAGE = 255  # what a failed step leaves in the blocks it had begun to write; no token id
CHOICES_MAX = 8  # choices and seeds must not meet in one number
FULL = "full"  # the mode every device comes up in

# Prompt tokens that a device cannot compute, each time it tries: what becomes of the step.
POISON_LOST, POISON_EXCEPTION, POISON_OOM, POISON_HANG = POISONS = (251, 252, 253, 254)

Logprob = tuple[float, list[int], list[float]]


def expected_token(context: Sequence[int], seed: int, choice: int) -> int:
    """The token that follows `context`, any ids below 256: a fixed function, EOS about once in 64."""
    return zlib.crc32(bytes(context), seed * CHOICES_MAX + choice) % VOCAB_SIZE


def expected_logprob(token_id: int, num_top: int) -> Logprob:
    """What the device says of `token_id` and the `num_top` it competed with."""
    return -token_id / 8, [(token_id + i) % VOCAB_SIZE for i in range(num_top)], [-i / 4 for i in range(num_top)]


class ScriptedDevice:
    """`num_slots` rows of block table over blocks of `block_size` tokens, and `num_host_blocks` to swap them to."""

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int, *, num_host_blocks: int = 0, epoch: int = 0
    ) -> None:
        self.block_size = block_size
        self.epoch = epoch
        self.mode = FULL
        self.is_closed = False
        self._kv = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self._host = [[GARBAGE] * block_size for _ in range(num_host_blocks)]
        self._tables: list[dict[int, int]] = [{} for _ in range(num_slots)]
        self._specs: list[SamplingSpec | None] = [None] * num_slots

    def run(self, plan: StepPlan) -> StepDone:
        """Compute one step."""
        self._write(plan, None)
        tokens: list[int] = []
        logprobs: list[Logprob | None] = []
        for seq in plan.sample_seqs:
            slot = plan.slots[seq]
            context = self._read(slot, plan.context_lens[seq])
            spec = self._specs[slot]
            assert spec is not None, f"step {plan.step_id} samples in slot {slot}, which was never given parameters"
            assert GARBAGE not in context, f"step {plan.step_id} attends to what was never computed, or overwritten"
            token = expected_token(context, spec.seed, spec.choice)
            tokens.append(token)
            num_top = spec.params.logprobs
            logprobs.append(None if num_top is None else expected_logprob(token, num_top))
        return StepDone(plan.step_id, plan.epoch, tokens, logprobs if any(logprobs) else [])

    def spoil(self, plan: StepPlan) -> None:
        """Fail in the middle of a step: its blocks hold garbage where it would have written."""
        self._write(plan, GARBAGE)

    def poison(self, plan: StepPlan) -> int | None:
        """The poison in this step, if there is any."""
        return next((token for token in plan.input_ids if token in POISONS), None)

    def _write(self, plan: StepPlan, value: int | None) -> None:
        assert plan.epoch == self.epoch, f"step {plan.step_id} is of epoch {plan.epoch}, the device of {self.epoch}"
        assert plan.mode == self.mode, f"step {plan.step_id} is for mode {plan.mode}, the device is in {self.mode}"
        self._swap(plan, value)
        for spec in plan.admissions:
            self._specs[spec.slot] = spec
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

    def _swap(self, plan: StepPlan, value: int | None) -> None:
        """All copies out, then all copies in; of a step that fails nobody knows how far they came."""
        for block, host in zip(plan.swap_out_blocks, plan.swap_out_hosts, strict=True):
            self._host[host] = list(self._kv[block]) if value is None else [value] * self.block_size
        for host, block in zip(plan.swap_in_hosts, plan.swap_in_blocks, strict=True):
            self._kv[block] = list(self._host[host]) if value is None else [value] * self.block_size

    def _read(self, slot: int, length: int) -> list[int]:
        table, kv, size = self._tables[slot], self._kv, self.block_size
        context: list[int] = []
        for index in range(-(-length // size)):
            context += kv[table[index]]
        return context[:length]
