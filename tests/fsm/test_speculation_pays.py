"""Speculation in a time of its own: as fast as plain decoding where guesses are wrong, and faster where they are right.

Steps take what a table says, and guesses are right by chance; nothing is measured, and no clock is read.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from random import Random

import pytest

from novainfer.fsm.messages.events import Submit
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.speculation import DraftModel, Speculation
from novainfer.fsm.simulation.checks.oracle import VOCABULARY

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Milliseconds of a step by its tokens: about those of Qwen2.5-0.5B on two cores, of memory alone, and of arithmetic.
MACHINES: dict[str, Callable[[int], float]] = {
    "two cores": lambda n: 20 + 0.35 * (n - 1) + 0.6 * max(0, n - 8),
    "memory-bound": lambda n: 20 + 0.1 * n,
    "compute-bound": lambda n: 10 + 4.0 * (n - 1),
}
NUM_PROMPT, NUM_OUTPUT, ROUNDS = 64, 96, 4


class Guesses:
    def propose(self, request: Request, count: int) -> list[int]:
        return [7] * count


def request(request_id: int) -> Request:
    params = SamplingParams(max_tokens=None)
    submit = Submit(request_id=request_id, stream_id=0, choice=0, token_ids=[5] * NUM_PROMPT, params=params, seed=1)
    return Request(submit, VOCABULARY, [0], NUM_PROMPT + NUM_OUTPUT)


def decode(
    speculation: Speculation,
    ms_of: Callable[[int], float],
    batch: int,
    right: float,
    pass_ms: float,
    chance: Random,
    missed_ms: float = 0.0,
) -> float:
    """How many times as fast as plain decoding so many requests at a time are: one that ends makes room for another.

    A draft model takes `pass_ms` for a pass, and `missed_ms` for each token that it has not seen before.
    """
    rows, spent_ms, num_tokens = [request(at) for at in range(batch)], 0.0, 0
    seen: dict[int, int] = {}  # tokens that the draft model knows, by what the row is to Python
    while num_tokens < ROUNDS * NUM_OUTPUT * batch:
        found: list[list[int]] = [[] for _ in rows]
        wanted: list[int] = []
        if speculation.begin_step(batch):
            found, wanted = speculation.drafts(rows, batch, 2048), speculation.wanted(rows)
        size, num_passes = batch + sum(map(len, found)), max(wanted, default=0)
        step_ms, draft_ms = ms_of(size), pass_ms * num_passes
        for row in compress(rows, wanted):
            draft_ms += missed_ms * (len(row.token_ids) - seen.get(id(row), 0))
            seen[id(row)] = len(row.token_ids)
        kept = [next((at for at in range(len(drafts)) if chance.random() >= right), len(drafts)) for drafts in found]
        outcome = StepDone(
            1,
            1,
            [5] * (batch + sum(kept)),
            took_s=(step_ms + draft_ms) / 1e3,
            draft_s=draft_ms / 1e3,
            draft_token_ids=[[7] * count for count in wanted],
        )
        if speculation.is_noted:
            speculation.took(outcome, size, batch, num_passes)
        for row, drafts, count in zip(rows, found, kept, strict=True):
            row.token_ids += [5] * (1 + count)
            if drafts:
                speculation.verified(row, len(drafts), count)
        if speculation.is_noted:
            speculation.proposed(rows, outcome)
        for at, row in enumerate(rows):
            if len(row.token_ids) >= row.max_len:
                seen.pop(id(row), None)
                rows[at] = request(row.request_id)
        spent_ms += step_ms + draft_ms
        num_tokens += len(outcome.token_ids)
    return num_tokens / batch * ms_of(batch) / spent_ms


@pytest.mark.parametrize("pass_ms", [0.0, 1.0, 4.0, 10.0], ids="passes of {} ms".format)
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_never_slower_by_more_than_3_percent_whatever_share_of_guesses_is_right(
    machine: str, pass_ms: float
) -> None:
    """After a text that all guesses were right of: what is known misleads."""
    ms_of = MACHINES[machine]
    for batch in (1, 4, 16, 64):
        for right in (0.0, 0.3, 0.6):
            proposer = DraftModel() if pass_ms else Guesses()
            speculation = Speculation(proposer, 4, [(size, ms_of(size)) for size in SIZES])
            chance = Random(batch)
            decode(speculation, ms_of, batch, 0.9, pass_ms, chance)
            found = decode(speculation, ms_of, batch, right, pass_ms, chance)
            assert found >= 0.97, (batch, right)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.8], ids="{} of what the target takes".format)
@pytest.mark.parametrize("machine", MACHINES)
def test_what_a_draft_model_has_to_catch_up_on_counts_as_well(machine: str, share: float) -> None:
    ms_of = MACHINES[machine]
    missed_ms = share * (ms_of(128) - ms_of(64)) / 64
    for batch in (1, 8, 16):
        speculation = Speculation(DraftModel(), 4, [(size, ms_of(size)) for size in SIZES])
        chance = Random(batch)
        decode(speculation, ms_of, batch, 0.9, 1.0, chance, missed_ms)
        found = decode(speculation, ms_of, batch, 0.0, 1.0, chance, missed_ms)
        assert found >= 0.97, (batch, found)


def test_it_is_faster_where_guesses_are_right() -> None:
    for machine, batch, pass_ms, least in (
        *(("two cores", 1, 0.0, 3.2), ("two cores", 4, 0.0, 2.2), ("two cores", 16, 0.0, 1.2)),
        *(("two cores", 1, 1.0, 2.7), ("memory-bound", 16, 1.0, 2.4), ("memory-bound", 64, 4.0, 1.4)),
    ):
        ms_of = MACHINES[machine]
        proposer = DraftModel() if pass_ms else Guesses()
        speculation = Speculation(proposer, 4, [(size, ms_of(size)) for size in SIZES])
        assert decode(speculation, ms_of, batch, 0.9, pass_ms, Random(1)) >= least, (machine, batch, pass_ms)


def test_it_is_as_fast_again_after_a_text_of_which_all_guesses_were_wrong() -> None:
    for machine, batch, pass_ms, least in (
        *(("two cores", 1, 0.0, 3.2), ("two cores", 4, 0.0, 2.2), ("memory-bound", 16, 1.0, 2.2)),
        *(("two cores", 1, 1.0, 2.4), ("two cores", 1, 10.0, 1.15), ("memory-bound", 64, 4.0, 1.3)),
    ):
        ms_of = MACHINES[machine]
        speculation = Speculation(DraftModel() if pass_ms else Guesses(), 4, [(size, ms_of(size)) for size in SIZES])
        chance = Random(1)
        decode(speculation, ms_of, batch, 0.0, pass_ms, chance)
        assert decode(speculation, ms_of, batch, 0.9, pass_ms, chance) >= least, (machine, batch, pass_ms)


def test_it_is_faster_where_most_guesses_are_right_though_half_of_the_steps_give_one_token() -> None:
    """What steps bring is their tokens by their time: by the average of what each brings it would not pay."""
    ms_of = MACHINES["two cores"]
    speculation = Speculation(DraftModel(), 4, [(size, ms_of(size)) for size in SIZES])
    assert decode(speculation, ms_of, 1, 0.6, 1.0, Random(1)) >= 1.4
