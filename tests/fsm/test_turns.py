"""What one turn may cost, in operations: names worked out, keys compared, requests and blocks admitted."""

from __future__ import annotations

from typing import Any

import pytest

import novainfer.fsm.kv.block_cache
import novainfer.fsm.schedule.planner
from novainfer.fsm.kv.block_cache import HASH_UNITS
from novainfer.fsm.messages.events import CancelRequest, Cause, WorkerLost
from novainfer.fsm.schedule.batching import ADMISSIONS, ADMITTED_BLOCKS, LOOK_UNITS, LOOKS
from tests.fsm.helpers import Bench

BLOCK = 16


class Counter:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter(novainfer.fsm.kv.block_cache.block_name)
    monkeypatch.setattr(novainfer.fsm.kv.block_cache, "block_name", counter)
    return counter


def large_bench(max_num_seqs: int = 256) -> Bench:
    bench = Bench(
        num_blocks=1 << 14,
        max_model_len=1 << 16,
        max_num_seqs=max_num_seqs,
        block_size=BLOCK,
        max_num_batched_tokens=2048,
        prefill_chunk_tokens=512,
    )
    bench.scheduler.check = lambda: None  # it takes longer than everything else here
    bench.scheduler.recovery.sizes.prompt_tokens.limit = 512  # the device is known to be fast
    return bench


def distinct(at: int, length: int) -> list[int]:
    return [at % 8, at // 8 % 8, at // 64 % 8, *([1] * (length - 3))]


def test_planning_works_out_few_names_of_new_prompts_that_share_nothing(hashes):
    bench = large_bench()
    for at in range(512):
        bench.submit(distinct(at, 1024))
    bench.start()
    per_prompt = 1024 // BLOCK
    assert hashes.calls <= 3 * LOOKS + 4 * per_prompt


def test_planning_works_out_a_bounded_number_of_names_of_prompts_whose_prefix_is_cached(hashes):
    bench = large_bench()
    shared = [2] * 4096
    bench.submit(shared, max_tokens=1)
    bench.run()
    for at in range(512):
        bench.submit([*shared, *distinct(at, 8)])
    hashes.calls = 0
    per_prompt = len(shared) // BLOCK + 1
    bench.start()
    assert hashes.calls <= 2 * (LOOK_UNITS // HASH_UNITS + per_prompt)
    assert bench.rows(), "what was looked at is served, whatever is left to be looked at"
    before = hashes.calls
    bench.step()
    assert hashes.calls - before <= 2 * (LOOK_UNITS // HASH_UNITS + per_prompt)


def test_one_prompt_of_more_names_than_a_step_works_out_is_planned_all_the_same():
    bench = large_bench()
    tokens = [3] * (BLOCK * (LOOK_UNITS // HASH_UNITS) * 3)
    bench.submit(tokens, max_tokens=1)
    bench.run()
    again = bench.submit(tokens, max_tokens=1)
    bench.start()
    assert bench.rows() == {again: BLOCK}


def test_a_step_admits_so_many_requests_and_no_more():
    bench = large_bench()
    for at in range(256):
        bench.submit(distinct(at, 4))
    bench.start()
    assert len(bench.rows()) == ADMISSIONS


def test_a_step_stops_admitting_when_it_has_many_table_entries():
    bench = large_bench()
    shared = [2] * 4096
    bench.submit(shared, max_tokens=1)
    bench.run()
    for at in range(64):
        bench.submit([*shared, *distinct(at, 4)])
    bench.start()
    assert len(bench.plan.table_blocks) <= ADMITTED_BLOCKS + len(shared) // BLOCK + 1
    assert len(bench.rows()) > 1


class NoScans(list[Any]):
    """A list that nothing is looked for in from its beginning."""

    def _scan(self, *args: Any) -> Any:
        raise AssertionError("the whole queue was looked through")

    remove = index = count = __contains__ = _scan


def test_nothing_is_looked_for_from_the_beginning_of_a_long_queue(monkeypatch):
    bench = large_bench(max_num_seqs=1)
    count = 4096
    for _ in range(count):
        bench.submit([1, 2, 3])
    bench.scheduler.planner.waiting = NoScans(bench.scheduler.planner.waiting)
    bench.start()
    key = Counter(novainfer.fsm.schedule.planner.arrival)
    monkeypatch.setattr(novainfer.fsm.schedule.planner, "arrival", key)
    for request_id in range(count):
        bench.tell(CancelRequest(request_id, Cause.DRAIN))
    assert not bench.scheduler.planner.waiting
    assert key.calls <= 2 * count * (count.bit_length() + 1)


def test_looking_at_a_long_queue_looks_at_a_bounded_number(hashes):
    bench = large_bench()
    for at in range(4096):
        bench.submit([at % 50 + 1, at // 50 + 1, *([1] * 100)])
    bench.start()
    assert hashes.calls <= 3 * LOOKS + ADMISSIONS * 102 // BLOCK


def test_a_lost_worker_costs_no_names(hashes):
    bench = large_bench()
    for at in range(512):
        bench.submit(distinct(at, 64))
    bench.start()
    hashes.calls = 0
    bench.tell(WorkerLost(0, "lost", "killed", bench.plan.step_id))
    assert hashes.calls == 0
