"""The arrays of a step: positions, slots, block tables and rows to sample, for any mix of sequences."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from novainfer.fsm.messages.step import STEPS_IN_FLIGHT_MAX, StepPlan
from novainfer.kernels.step import StepBuffers

NUM_SLOTS, BLOCK = 6, 4


def buffers(*, staged: bool) -> StepBuffers:
    made = StepBuffers(
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=64,
        max_model_len=40,
        block_size=BLOCK,
        vocab_size=100,
        device=torch.device("cpu"),
        staged=staged,
    )
    made.begin(60)
    return made


def random_batch(draw: random.Random, tables: list[list[int]]) -> StepPlan:
    """Some slots in some order; their tables scattered, some decoding and some in chunks."""
    slots = draw.sample(range(NUM_SLOTS), draw.randint(1, NUM_SLOTS))
    if draw.random() < 0.4:
        slots = list(range(slots[0], NUM_SLOTS))
    decode_only = draw.random() < 0.5
    batch = StepPlan(slots, [], [], [])
    for index, slot in enumerate(slots):
        context = draw.randint(1, 40)
        query = 1 if decode_only else draw.randint(1, min(context, 9))
        for block in range(-(-context // BLOCK)):
            tables[slot][block] = draw.randrange(60)
            batch.table_slots.append(slot)
            batch.table_indexes.append(block)
            batch.table_blocks.append(tables[slot][block])
        batch.query_lens.append(query)
        batch.context_lens.append(context)
        batch.input_ids += [draw.randrange(100) for _ in range(query)]
        if draw.random() < 0.8:
            batch.sample_seqs.append(index)
    return batch


@pytest.mark.parametrize("few_tokens", [0, 3])  # up to so many are laid out one by one
@pytest.mark.parametrize("staged", [False, True])
def test_arrays_are_what_their_definition_says(staged: bool, few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("novainfer.kernels.step.FEW_TOKENS", few_tokens)
    draw = random.Random(1)
    made = buffers(staged=staged)
    tables = [[0] * 10 for _ in range(NUM_SLOTS)]
    for _ in range(200):
        batch = random_batch(draw, tables)
        step = made.fill(batch)
        positions, slots, ends, start = [], [], [], 0
        for slot, query, context in zip(batch.slots, batch.query_lens, batch.context_lens, strict=True):
            for position in range(context - query, context):
                positions.append(position)
                slots.append(tables[slot][position // BLOCK] * BLOCK + position % BLOCK)
            start += query
            ends.append(start)
        assert step.input_ids.tolist() == batch.input_ids
        assert step.positions.tolist() == positions
        assert step.slot_mapping.tolist() == slots
        assert step.query_start.tolist() == [0, *ends]
        assert step.context_lens.tolist() == batch.context_lens
        assert step.max_context_len == max(batch.context_lens)
        for row, slot, context in zip(step.block_tables.tolist(), batch.slots, batch.context_lens, strict=True):
            used = -(-context // BLOCK)
            assert row[:used] == tables[slot][:used]
        rows = [ends[seq] - 1 for seq in batch.sample_seqs]
        assert step.num_samples == len(rows)
        if step.logit_rows is None:
            assert rows == list(range(len(positions)))
        else:
            assert step.logit_rows.tolist() == rows


class Copied:
    """In the place of the event behind the copies of one staging; knows what was there when they were asked for."""

    def __init__(self, number: int, staging: Any, log: list[tuple[str, int]]) -> None:
        self.number, self.staging, self.log = number, staging, log
        self.sent = self.read()

    def read(self) -> tuple[bytes, bytes]:
        return self.staging.ints64.tobytes(), self.staging.ints32.tobytes()

    def synchronize(self) -> None:
        assert self.read() == self.sent, "it was written while it was read"
        self.log.append(("waited", self.number))

    def record(self) -> None:
        self.sent = self.read()
        self.log.append(("sent", self.number))


def test_pinned_buffers_take_turns_and_are_written_when_their_copies_have_ended() -> None:
    made, log = buffers(staged=True), list[tuple[str, int]]()
    for number, staging in enumerate(made._stagings):
        staging._copied = Copied(number, staging, log)  # type: ignore[assignment]
    for step in range(5):
        made.fill(StepPlan([step % 3], [1], [1 + step], [step], [step % 3], [0], [step]))
    assert len(made._stagings) == STEPS_IN_FLIGHT_MAX == 2
    turns = [0, 1, 0, 1, 0]
    assert log == [entry for turn in turns for entry in (("waited", turn), ("sent", turn))]
