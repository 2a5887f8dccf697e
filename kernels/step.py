"""From a plan of lists to the record of tensors that drives one forward pass.

The persistent block table and the arithmetic on positions live on the host, in numpy on memory that torch
shares: at one token a step, a numpy call costs a tenth of a torch call. On the CPU nothing is copied; on
CUDA two pinned buffers go over, one of each integer width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import gt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from novainfer.fsm.messages.step import SAMPLED, StepPlan

__all__ = ["StepBuffers", "StepTensors", "must_lie_in"]

Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]


def must_lie_in(name: str, numbers: Sequence[int], end: int, *, first: int = 0) -> None:
    """Raise ValueError when one of `numbers` lies outside [first, end)."""
    if numbers and not (first <= min(numbers) and max(numbers) < end):
        wrong = next(number for number in numbers if not first <= number < end)
        raise ValueError(f"{name} of a step must be {first} to {end - 1}, not {wrong}")


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The flat arrays of one step, on the device; valid until the next `StepBuffers.fill`."""

    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]: where each token's key and value go
    block_tables: Tensor  # int32 [num_seqs, blocks of the longest context]
    query_start: Tensor  # int32 [num_seqs + 1]
    context_lens: Tensor  # int32 [num_seqs]
    logit_rows: Tensor | None  # int64 [num_samples]; None when every token row is sampled, in order
    num_samples: int  # positions: one a sampled sequence, and one more for each of its drafts
    max_context_len: int
    token_pool: Tensor | None = None  # int64 [max_num_seqs]: what `-1 - slot` in input_ids stands for; None: none does


class StepBuffers:
    """The buffers behind `StepTensors`, allocated once, and the block table that persists from step to step."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        staged: bool | None = None,
    ) -> None:
        """`staged` (default: on any device but the CPU) says that the arrays go over in two copies."""
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.num_blocks = 0  # of the KV cache, when it has been fitted
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._staged = device.type != "cpu" if staged is None else staged
        pinned = device.type == "cuda"
        num64 = 4 * max_num_batched_tokens
        num32 = 2 * max_num_seqs + 1 + max_num_seqs * max_blocks
        self._host64 = torch.zeros(num64, dtype=torch.int64, pin_memory=pinned)
        self._host32 = torch.zeros(num32, dtype=torch.int32, pin_memory=pinned)
        self._device64 = torch.zeros_like(self._host64, device=device) if self._staged else self._host64
        self._device32 = torch.zeros_like(self._host32, device=device) if self._staged else self._host32
        self._ints64: Ints64 = self._host64.numpy()
        self._ints32: Ints32 = self._host32.numpy()
        self._table_tensor = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32)
        self.block_table: Ints32 = self._table_tensor.numpy()
        self.written: Ints64 = self._ints64[:0]  # the slot mapping of the last step, on the host
        self._arange: Ints64 = np.arange(max_num_batched_tokens, dtype=np.int64)
        # Of each slot: the token that it was given last, and where that stands; nowhere before the first one.
        self._last_tokens: Ints64 = np.zeros(max_num_seqs, dtype=np.int64)
        self._last_positions: Ints64 = np.full(max_num_seqs, -1, dtype=np.int64)

    def begin(self, num_blocks: int) -> None:
        """There is a new KV cache, of so many blocks: what tables say of the one before points to nothing in it."""
        self.num_blocks = num_blocks
        self.block_table[:] = 0

    def update_table(self, plan: StepPlan) -> None:
        """Apply the block-table updates; raises ValueError for a place or a block that is not there."""
        if plan.table_slots:
            num_slots, num_indexes = self.block_table.shape
            must_lie_in("table_slots", plan.table_slots, num_slots)
            must_lie_in("table_indexes", plan.table_indexes, num_indexes)
            must_lie_in("table_blocks", plan.table_blocks, self.num_blocks)
            self.block_table[plan.table_slots, plan.table_indexes] = plan.table_blocks

    def keep(self, plan: StepPlan, token_ids: Sequence[int], num_tokens: Sequence[int]) -> None:
        """The step has ended well, and given these tokens; a step handed over meanwhile may say `SAMPLED` for the last.

        As in `StepDone`: `num_tokens` [num_samples] of `token_ids` are each row's, one where that is empty.
        """
        slots = [plan.slots[seq] for seq in plan.sample_seqs]
        positions: Ints64 = np.array([plan.context_lens[seq] for seq in plan.sample_seqs], dtype=np.int64)
        tokens: Ints64 = np.array(token_ids, dtype=np.int64)
        if num_tokens:
            counts = np.array(num_tokens, dtype=np.int64)
            positions += counts - 1 - np.array(plan.num_drafts, dtype=np.int64)
            tokens = tokens[counts.cumsum() - 1]
        self._last_tokens[slots] = tokens
        self._last_positions[slots] = positions

    def _put_sampled(self, ids: Ints64, slots: Ints64, positions: Ints64) -> None:
        """Put the token that its slot was given last in the place of each `SAMPLED` of the step [num_tokens]."""
        at = np.flatnonzero(ids == SAMPLED)
        slots = slots[at]
        wrong = np.flatnonzero(self._last_positions[slots] != positions[at])
        if len(wrong):
            raise ValueError(
                f"a step wants the token that slot {slots[wrong[0]]} was given at position {positions[at[wrong[0]]]}, "
                f"but its last one stands at {self._last_positions[slots[wrong[0]]]}"
            )
        ids[at] = np.maximum(self._last_tokens[slots], 0)  # NO_TOKEN is none that can be computed with

    def _check(self, plan: StepPlan) -> None:
        """Kernels read what these numbers point to without asking: a wrong one must not get that far."""
        num_seqs, num_tokens = len(plan.slots), len(plan.input_ids)
        if not num_seqs == len(plan.query_lens) == len(plan.context_lens):
            raise ValueError("slots, query_lens and context_lens of a step must be of one length")
        if num_tokens != sum(plan.query_lens):
            raise ValueError(f"query_lens sum to {sum(plan.query_lens)}, but there are {num_tokens} input_ids")
        if num_seqs > self.max_num_seqs or num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"a step of {num_seqs} sequences and {num_tokens} tokens, but there is room for {self.max_num_seqs} "
                f"and {self.max_num_batched_tokens}"
            )
        must_lie_in("slots", plan.slots, self.max_num_seqs)
        must_lie_in("query_lens", plan.query_lens, self.max_num_batched_tokens + 1, first=1)
        must_lie_in("context_lens", plan.context_lens, self.max_model_len + 1, first=1)
        if any(map(gt, plan.query_lens, plan.context_lens)):
            raise ValueError("a sequence of a step has more query tokens than context")
        must_lie_in("input_ids", plan.input_ids, self.vocab_size, first=SAMPLED if plan.after else 0)
        must_lie_in("sample_seqs", plan.sample_seqs, num_seqs)
        if plan.num_drafts:
            if len(plan.num_drafts) != len(plan.sample_seqs):
                raise ValueError("sample_seqs and num_drafts of a step must be of one length")
            must_lie_in("num_drafts", plan.num_drafts, self.max_num_batched_tokens)
            if any(plan.query_lens[seq] <= count for seq, count in zip(plan.sample_seqs, plan.num_drafts, strict=True)):
                raise ValueError("a sequence of a step has no token before its drafts")
        if len(plan.sample_seqs) + sum(plan.num_drafts) > num_tokens:
            raise ValueError("a step samples more positions than it holds")

    def fill(self, plan: StepPlan) -> StepTensors:
        """Apply the block-table updates and lay out the step; raises ValueError for a plan over the limits."""
        num_seqs, num_tokens = len(plan.slots), len(plan.input_ids)
        num_samples = len(plan.sample_seqs) + sum(plan.num_drafts)
        self._check(plan)
        max_context_len = max(plan.context_lens)
        self.update_table(plan)

        i64, i32 = self._ints64, self._ints32
        ids, positions = i64[:num_tokens], i64[num_tokens : 2 * num_tokens]
        slots, logit_rows = i64[2 * num_tokens : 3 * num_tokens], i64[3 * num_tokens : 3 * num_tokens + num_samples]
        starts, contexts = i32[: num_seqs + 1], i32[num_seqs + 1 : 2 * num_seqs + 1]
        ids[:] = plan.input_ids
        contexts[:] = plan.context_lens
        starts[0] = 0
        seq_slots = np.array(plan.slots, dtype=np.int64)
        if max(plan.query_lens) == 1:
            starts[1:] = self._arange[1 : num_seqs + 1] if num_seqs < len(self._arange) else range(1, num_seqs + 1)
            np.subtract(contexts, 1, out=positions, casting="unsafe")
            token_slots = seq_slots
        else:
            query_lens = np.array(plan.query_lens, dtype=np.int64)
            np.cumsum(query_lens, out=starts[1:], dtype=np.int32)
            first_positions = contexts - query_lens - starts[:-1]
            np.add(self._arange[:num_tokens], np.repeat(first_positions, query_lens), out=positions)
            token_slots = np.repeat(seq_slots, query_lens)
        if plan.after:
            self._put_sampled(ids, token_slots, positions)
        blocks = self.block_table[token_slots, positions // self.block_size]
        np.multiply(blocks, self.block_size, out=slots, casting="unsafe")
        slots += positions % self.block_size
        self.written = slots
        all_rows = num_samples == num_tokens and plan.sample_seqs == list(range(num_seqs))
        if not all_rows:
            ends = starts[1:][plan.sample_seqs]
            if plan.num_drafts:
                counts = np.array(plan.num_drafts, dtype=np.int64) + 1
                np.add(self._arange[:num_samples], np.repeat(ends - counts.cumsum(), counts), out=logit_rows)
            else:
                np.subtract(ends, 1, out=logit_rows)

        num_blocks = -(-max_context_len // self.block_size)
        num32 = 2 * num_seqs + 1
        first = plan.slots[0]
        if not self._staged and plan.slots == list(range(first, first + num_seqs)):
            tables = self._table_tensor[first : first + num_seqs, :num_blocks]
        else:
            rows = i32[num32 : num32 + num_seqs * num_blocks].reshape(num_seqs, num_blocks)
            rows[:] = self.block_table[seq_slots, :num_blocks]
            tables = self._device32[num32 : num32 + num_seqs * num_blocks].view(num_seqs, num_blocks)
        if self._staged:
            used64, used32 = 3 * num_tokens + num_samples, num32 + num_seqs * num_blocks
            self._device64[:used64].copy_(self._host64[:used64], non_blocking=True)
            self._device32[:used32].copy_(self._host32[:used32], non_blocking=True)
        d64, d32 = self._device64, self._device32
        return StepTensors(
            input_ids=d64[:num_tokens],
            positions=d64[num_tokens : 2 * num_tokens],
            slot_mapping=d64[2 * num_tokens : 3 * num_tokens],
            block_tables=tables,
            query_start=d32[: num_seqs + 1],
            context_lens=d32[num_seqs + 1 : num32],
            logit_rows=None if all_rows else d64[3 * num_tokens : 3 * num_tokens + num_samples],
            num_samples=num_samples,
            max_context_len=max_context_len,
        )
