"""From a plan of lists to the record of tensors that drives one forward pass.

The persistent block table and the arithmetic on positions live on the host, in numpy on memory that torch
shares: at one token a step, a numpy call costs a tenth of a torch call. On the CPU nothing is copied.

On CUDA ("staged") two pinned buffers go over, one of each integer width, and nothing is waited for: while a step is
computed, the next one is laid out in other pinned buffers. The device's own buffers are single, since copies run on the
stream of the computation, behind the step before. There the block table lies on the device as well, and only what
changes of it goes over; and sampled tokens stay in a pool of one a slot, where the next step finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import gt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from novainfer.fsm.messages.step import SAMPLED, STEPS_IN_FLIGHT_MAX, StepPlan
from novainfer.kernels.masks import check_masks

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
    """The flat arrays of one step, on the device; valid until the next `StepBuffers.fill`.

    Where the step is padded to `bucket` rows of one token each (a CUDA graph is captured for so many), num_tokens and
    num_seqs are `bucket`: a row that is none has `slot_mapping` -1 (nothing is written) and `context_lens` 0.
    """

    input_ids: Tensor  # int64 [num_tokens]; below 0: see `token_pool`
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]: where each token's key and value go
    block_tables: Tensor  # int32 [num_seqs, blocks of the longest context]; padded: [num_seqs, blocks of any context]
    query_start: Tensor  # int32 [num_seqs + 1]
    context_lens: Tensor  # int32 [num_seqs]
    logit_rows: Tensor | None  # int64 [num_samples]; None when every row that is one is sampled, in order
    # Positions: one a sampled sequence, and one more for each of its drafts; then those scored, then those pooled
    num_samples: int
    max_context_len: int
    min_query_len: int  # token rows of a sequence, at least and at most: what kernels launch depends on them
    max_query_len: int
    token_pool: Tensor | None = None  # int64 [max_num_seqs]: what `-1 - slot` in input_ids stands for; None: none does
    bucket: int = 0  # the rows that the step is padded to; 0: it is not
    sample_slots: Tensor | None = None  # int64 [num_samples]: whose they are; beside a token pool, without drafts


# One by one, tokens are laid out in 30 us in place of 120 between two steps of a model of 0.5 GB (one sequence, CPU).
FEW_TOKENS = 8


class _Staging:
    """Pinned memory of one step on its way to the device; free again when that has copied it."""

    def __init__(self, num64: int, num32: int, device: torch.device) -> None:
        self.host64 = torch.zeros(num64, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.host32 = torch.zeros(num32, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.ints64: Ints64 = self.host64.numpy()
        self.ints32: Ints32 = self.host32.numpy()
        self._copied: torch.cuda.Event | None = None  # without CUDA `copy_` returns when it is done
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until it may be written: at once, unless more steps are in flight than there are stagings."""
        if self._copied is not None:
            self._copied.synchronize()

    def sent(self) -> None:
        """All copies from it are on the stream."""
        if self._copied is not None:
            self._copied.record()


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
        num_rows = max(max_num_batched_tokens, max_num_seqs)  # a step may be padded to as many as there are slots
        num_cells = max_num_seqs * max_blocks
        num64 = 4 * num_rows + (2 * num_rows + max_num_seqs + num_cells if self._staged else 0)
        num32 = 2 * max_num_seqs + 1 + num_cells
        self._stagings = [_Staging(num64, num32, device) for _ in range(STEPS_IN_FLIGHT_MAX if self._staged else 1)]
        self._table_tensor = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32)
        self.block_table: Ints32 = self._table_tensor.numpy()
        self.token_pool: Tensor | None = None
        first = self._stagings[0]
        self._device64, self._device32 = first.host64, first.host32
        if self._staged:
            self.token_pool = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
            self._device64 = torch.zeros_like(first.host64, device=device)
            self._device32 = torch.zeros_like(first.host32, device=device)
            self._device_table = torch.zeros_like(self._table_tensor, device=device)
            self._table_rows = torch.zeros_like(self._table_tensor, device=device)  # in the order of the step
        self.written: Ints64 = first.ints64[:0]  # the slot mapping of the last step, on the host
        self._changed: list[Ints64] = []  # cells of the block table that the device does not have yet, as they are now
        self._arange: Ints64 = np.arange(max_num_batched_tokens, dtype=np.int64)
        # Of each slot: the token that it was given last, and where that stands; nowhere before the first one.
        self._last_tokens: Ints64 = np.zeros(max_num_seqs, dtype=np.int64)
        self._last_positions: Ints64 = np.full(max_num_seqs, -1, dtype=np.int64)

    def begin(self, num_blocks: int) -> None:
        """There is a new KV cache, of so many blocks: what tables say of the one before points to nothing in it."""
        self.num_blocks = num_blocks
        self.block_table[:] = 0
        self._changed.clear()
        if self._staged:
            self._device_table.zero_()

    def update_table(self, plan: StepPlan) -> None:
        """Apply the block-table updates; raises ValueError for a place or a block that is not there."""
        if plan.table_slots:
            num_slots, num_indexes = self.block_table.shape
            must_lie_in("table_slots", plan.table_slots, num_slots)
            must_lie_in("table_indexes", plan.table_indexes, num_indexes)
            must_lie_in("table_blocks", plan.table_blocks, self.num_blocks)
            self.block_table[plan.table_slots, plan.table_indexes] = plan.table_blocks
            if self._staged:
                cells = np.array(plan.table_slots, dtype=np.int64) * num_indexes
                cells += plan.table_indexes
                self._changed.append(cells)

    def keep_on_device(self, plan: StepPlan, step: StepTensors, token_ids: Tensor) -> None:
        """As `keep`, of tokens that the device has drawn or is going to draw: int64 [num_samples], without drafts."""
        assert self.token_pool is not None
        assert step.sample_slots is not None, "beside drafts the host keeps what was sampled"
        slots = [plan.slots[seq] for seq in plan.sample_seqs]
        self._last_positions[slots] = -1
        self.token_pool.index_copy_(0, step.sample_slots, token_ids)
        self._last_positions[slots] = [plan.context_lens[seq] for seq in plan.sample_seqs]

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
        if self.token_pool is not None and slots:
            device = self.token_pool.device
            self._last_positions[slots] = -1
            self.token_pool[torch.tensor(slots, device=device)] = torch.from_numpy(tokens).to(device)
        self._last_tokens[slots] = tokens
        self._last_positions[slots] = positions

    def last_token(self, slot: int) -> int:
        """What stands for `SAMPLED` in this slot; where the device runs beside the host, it is waited for."""
        if self.token_pool is not None:
            return max(int(self.token_pool[slot]), 0)
        return max(int(self._last_tokens[slot]), 0)

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
        if self._staged:
            np.subtract(-1, slots, out=slots)
            ids[at] = slots
        else:
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
        num_scores = len(plan.score_rows)
        if not num_scores == len(plan.score_ids) == len(plan.score_tops):
            raise ValueError("score_rows, score_ids and score_tops of a step must be of one length")
        must_lie_in("score_rows", plan.score_rows, num_tokens)
        must_lie_in("score_ids", plan.score_ids, self.vocab_size)
        must_lie_in("score_tops", plan.score_tops, self.vocab_size)
        self._check_pools(plan)
        if len(plan.sample_seqs) + sum(plan.num_drafts) + num_scores + sum(plan.pool_lens) > num_tokens:
            raise ValueError("a step samples, scores and pools more positions than it holds")
        if plan.mask_positions or plan.masks or plan.masks_to_come:
            check_masks(plan, self.vocab_size)

    def _check_pools(self, plan: StepPlan) -> None:
        if len(plan.pool_seqs) != len(plan.pool_lens):
            raise ValueError("pool_seqs and pool_lens of a step must be of one length")
        must_lie_in("pool_seqs", plan.pool_seqs, len(plan.slots))
        must_lie_in("pool_lens", plan.pool_lens, self.max_num_batched_tokens + 1, first=1)
        if any(plan.query_lens[seq] < count for seq, count in zip(plan.pool_seqs, plan.pool_lens, strict=True)):
            raise ValueError("a step pools more tokens of a sequence than it computes")
        if plan.pool_seqs and len({*plan.pool_seqs, *plan.sample_seqs}) < len(plan.pool_seqs) + len(plan.sample_seqs):
            raise ValueError("a step pools a sequence twice, or one that it samples")

    def fill(self, plan: StepPlan, *, bucket: int = 0) -> StepTensors:
        """Apply the block-table updates and lay out the step; raises ValueError for a plan over the limits.

        `bucket` pads a step of one token a row to so many rows, at most `max_num_seqs`, on a device. Each array of such
        a step has the address and the strides that it has in every other step of this bucket.
        """
        num_seqs, num_tokens = len(plan.slots), len(plan.input_ids)
        num_drawn = len(plan.sample_seqs) + sum(plan.num_drafts)
        num_known = num_drawn + len(plan.score_rows)
        num_samples = num_known + sum(plan.pool_lens)
        self._check(plan)
        max_context_len, max_query_len = max(plan.context_lens), max(plan.query_lens)
        is_decode = max_query_len == 1
        if bucket and not (self._staged and is_decode and num_seqs <= bucket <= self.max_num_seqs):
            raise ValueError(
                f"a step of {num_seqs} sequences and {num_tokens} tokens cannot be padded to {bucket} rows"
            )
        self.update_table(plan)

        staging = self._stagings[0]
        self._stagings.append(self._stagings.pop(0))
        staging.wait()
        i64, i32 = staging.ints64, staging.ints32
        num_rows, num_places = bucket or num_tokens, bucket or num_seqs
        logit_rows = i64[3 * num_rows : 3 * num_rows + num_samples]
        if is_decode and num_tokens == num_rows <= FEW_TOKENS and not plan.after:
            self._put_few(plan, i64, i32)
        else:
            self._put_many(plan, i64, i32, num_rows, num_places)
        self.written = i64[2 * num_rows : 2 * num_rows + num_tokens]
        all_rows = num_drawn == num_tokens and plan.sample_seqs == list(range(num_seqs))
        if not all_rows:
            ends = i32[1 : num_places + 1]
            if plan.num_drafts:
                self._put_last(ends[plan.sample_seqs], [count + 1 for count in plan.num_drafts], logit_rows[:num_drawn])
            else:
                np.subtract(ends[plan.sample_seqs], 1, out=logit_rows[:num_drawn])
            logit_rows[num_drawn:num_known] = plan.score_rows
            if plan.pool_seqs:
                self._put_last(ends[plan.pool_seqs], plan.pool_lens, logit_rows[num_known:])

        num_blocks = -(-max_context_len // self.block_size)
        num32 = 2 * num_places + 1
        first = plan.slots[0]
        sample_slots = None
        if self._staged:
            i64[num_tokens:num_rows] = i64[num_rows + num_tokens : 2 * num_rows] = 0
            i64[2 * num_rows + num_tokens : 3 * num_rows] = -1
            i32[num_places + 1 + num_seqs : num32] = 0
            sample_slots = self._send(staging, plan, num_rows, num_places)
            tables = self._table_rows[:num_places] if bucket else self._table_rows[:num_seqs, :num_blocks]
        elif plan.slots == list(range(first, first + num_seqs)):
            tables = self._table_tensor[first : first + num_seqs, :num_blocks]
        else:
            rows = i32[num32 : num32 + num_seqs * num_blocks].reshape(num_seqs, num_blocks)
            rows[:] = self.block_table[plan.slots, :num_blocks]
            tables = self._device32[num32 : num32 + num_seqs * num_blocks].view(num_seqs, num_blocks)
        bounds = min(plan.query_lens), max_query_len
        return self._tensors(
            num_rows, num_places, tables, num_samples, all_rows, max_context_len, bounds, bucket, sample_slots
        )

    def _put_last(self, ends: Ints32, lens: Sequence[int], out: Ints64) -> None:
        """Of each sequence, which ends before row `ends[i]`, its last `lens[i]` rows."""
        counts = np.array(lens, dtype=np.int64)
        np.add(self._arange[: len(out)], np.repeat(ends - counts.cumsum(), counts), out=out)

    def _put_few(self, plan: StepPlan, i64: Ints64, i32: Ints32) -> None:
        """What `_put_many` lays out, of a few sequences of one token each, without padding, number by number.

        Between two steps the caches hold weights, and each of numpy's functions comes from memory when it is called.
        """
        size, table, num_seqs = self.block_size, self.block_table, len(plan.slots)
        positions = [length - 1 for length in plan.context_lens]
        slots = [
            int(table[slot, at // size]) * size + at % size for slot, at in zip(plan.slots, positions, strict=True)
        ]
        i64[: 3 * num_seqs] = plan.input_ids + positions + slots
        i32[: 2 * num_seqs + 1] = [*range(num_seqs + 1), *plan.context_lens]

    def _put_many(self, plan: StepPlan, i64: Ints64, i32: Ints32, num_rows: int, num_places: int) -> None:
        """Ids, positions and slot mapping, `num_rows` each; where each of `num_places` sequences begins; contexts."""
        num_seqs, num_tokens = len(plan.slots), len(plan.input_ids)
        ids, positions = i64[:num_tokens], i64[num_rows : num_rows + num_tokens]
        slots = i64[2 * num_rows : 2 * num_rows + num_tokens]
        starts, contexts = i32[: num_places + 1], i32[num_places + 1 : num_places + 1 + num_seqs]
        ids[:] = plan.input_ids
        contexts[:] = plan.context_lens
        starts[0] = 0
        token_slots: Ints64 = np.array(plan.slots, dtype=np.int64)
        if max(plan.query_lens) == 1:
            starts[1:] = (
                self._arange[1 : num_places + 1] if num_places < len(self._arange) else range(1, num_places + 1)
            )
            np.subtract(contexts, 1, out=positions, casting="unsafe")
        else:
            query_lens = np.array(plan.query_lens, dtype=np.int64)
            np.cumsum(query_lens, out=starts[1:], dtype=np.int32)
            first_positions = contexts - query_lens - starts[:-1]
            np.add(self._arange[:num_tokens], np.repeat(first_positions, query_lens), out=positions)
            token_slots = np.repeat(token_slots, query_lens)
        if plan.after:
            self._put_sampled(ids, token_slots, positions)
        blocks = self.block_table[token_slots, positions // self.block_size]
        np.multiply(blocks, self.block_size, out=slots, casting="unsafe")
        slots += positions % self.block_size

    def blank(self, bucket: int) -> StepTensors:
        """The tensors of a step padded to `bucket` rows of which none is one: to capture a CUDA graph with."""
        assert self._staged, "on the CPU no step is padded"
        self._device64[: 2 * bucket] = 0
        self._device64[2 * bucket : 3 * bucket] = -1
        self._device32[: bucket + 1] = torch.arange(bucket + 1, dtype=torch.int32, device=self._device32.device)
        self._device32[bucket + 1 : 2 * bucket + 1] = 0
        self._table_rows[:bucket] = 0
        return self._tensors(bucket, bucket, self._table_rows[:bucket], 0, True, 0, (1, 1), bucket, None)

    def _tensors(
        self,
        num_rows: int,
        num_places: int,
        tables: Tensor,
        num_samples: int,
        all_rows: bool,
        max_context_len: int,
        query_lens: tuple[int, int],
        bucket: int,
        sample_slots: Tensor | None,
    ) -> StepTensors:
        """Views of the device's buffers, laid out for `num_rows` tokens of `num_places` sequences."""
        d64, d32 = self._device64, self._device32
        return StepTensors(
            input_ids=d64[:num_rows],
            positions=d64[num_rows : 2 * num_rows],
            slot_mapping=d64[2 * num_rows : 3 * num_rows],
            block_tables=tables,
            query_start=d32[: num_places + 1],
            context_lens=d32[num_places + 1 : 2 * num_places + 1],
            logit_rows=None if all_rows else d64[3 * num_rows : 3 * num_rows + num_samples],
            num_samples=num_samples,
            max_context_len=max_context_len,
            min_query_len=query_lens[0],
            max_query_len=query_lens[1],
            token_pool=self.token_pool,
            bucket=bucket,
            sample_slots=sample_slots,
        )

    def _send(self, staging: _Staging, plan: StepPlan, num_rows: int, num_places: int) -> Tensor | None:
        """Copy what is laid out, with what has changed of the block table, and put the table's rows in order.

        Gives the slots that are sampled. Cells whose copy fails go with the next step.
        """
        i64, i32 = staging.ints64, staging.ints32
        num_seqs, num_samples = len(plan.slots), 0 if plan.num_drafts else len(plan.sample_seqs)
        seq_slots = np.array(plan.slots, dtype=np.int64)
        begin = 4 * num_rows
        at_samples = begin + num_places
        at_cells, at_blocks = at_samples + num_samples, 2 * num_places + 1
        i64[begin : begin + num_seqs] = seq_slots
        i64[begin + num_seqs : at_samples] = 0
        if num_samples:
            i64[at_samples:at_cells] = seq_slots[plan.sample_seqs]
        table = self.block_table.reshape(-1)
        cells: Ints64 = np.concatenate(self._changed) if self._changed else self._arange[:0]
        if len(cells) > len(table):  # of many plans without a step
            cells = np.arange(len(table), dtype=np.int64)
        end_cells, end_blocks = at_cells + len(cells), at_blocks + len(cells)
        i64[at_cells:end_cells] = cells
        i32[at_blocks:end_blocks] = table[cells]
        d64, d32 = self._device64, self._device32
        d64[:end_cells].copy_(staging.host64[:end_cells], non_blocking=True)
        d32[:end_blocks].copy_(staging.host32[:end_blocks], non_blocking=True)
        staging.sent()
        if len(cells):
            self._device_table.view(-1).index_copy_(0, d64[at_cells:end_cells], d32[at_blocks:end_blocks])
        rows = self._table_rows[:num_places]
        torch.index_select(self._device_table, 0, d64[begin:at_samples], out=rows)
        self._changed.clear()
        return d64[at_samples:at_cells] if num_samples else None
