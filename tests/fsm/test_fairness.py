"""Who gets the prompt tokens of a step: the bounds of docs/fairness.md, written from its words."""

from __future__ import annotations

import random

import pytest

from tests.fsm.helpers import Bench

BLOCK = 16
CHUNK = 512


def bench_with_room(**limits: int) -> Bench:
    """Blocks and slots for everything, so that only tokens are scarce."""
    fields = {"max_num_seqs": 256, "block_size": BLOCK, "max_num_batched_tokens": 2048, "prefill_chunk_tokens": CHUNK}
    bench = Bench(num_blocks=1 << 13, max_model_len=1 << 17, **{**fields, **limits})
    bench.scheduler.check = lambda: None  # every owner of every block, after every event: another test's work
    return bench


def prompt(bench: Bench, num_tokens: int, *, prefix: list[int] | None = None) -> list[int]:
    """Tokens that begin with `prefix`, and share nothing else with any other prompt."""
    own = bench._next_id
    return [*(prefix or []), *([own % 7 + 1, own // 7 % 7 + 1, own // 49 + 1] * num_tokens)][:num_tokens]


def steps_until_first_token(bench: Bench, request_id: int, at_most: int = 1000) -> int:
    """Steps from now until `request_id` has its first token."""
    for count in range(at_most + 1):
        if any(o.request_id == request_id and o.first for o in bench.outputs):
            return count
        bench.step()
    raise AssertionError(f"no token in {at_most} steps")


def bound(work: int, age_work: int, rank_work: int, chunk: int = CHUNK) -> int:
    """Steps to the first token, by the words of docs/fairness.md."""
    pace = max(chunk // 2 - BLOCK, 1)
    return -(-(min(age_work, rank_work) + work) // pace) + 2


@pytest.mark.parametrize("size", [1, 15, 16, 17, 127, 128, 129, 150, 256, 257, 500, 1000, 4000])
@pytest.mark.parametrize("num_long", [1, 5])
def test_a_prompt_behind_long_ones_waits_for_its_own_work_and_not_for_theirs(size, num_long):
    bench = bench_with_room()
    for _ in range(num_long):
        bench.submit(prompt(bench, 16_000), max_tokens=1)
    bench.start()
    behind = bench.submit(prompt(bench, size), max_tokens=1)
    assert steps_until_first_token(bench, behind) <= bound(size, num_long * 16_000 + size, size)


@pytest.mark.parametrize(("size", "num_cached"), [(150, 144), (1000, 992), (8000, 7984)])
def test_what_is_cached_counts_as_done_for_those_that_wait(size, num_cached):
    bench = bench_with_room()
    prefix = prompt(bench, num_cached)
    bench.submit(prefix, max_tokens=1)
    bench.run()
    bench.submit(prompt(bench, 16_000), max_tokens=1)
    bench.start()
    behind = bench.submit(prompt(bench, size, prefix=prefix), max_tokens=1)
    assert steps_until_first_token(bench, behind) == 2


@pytest.mark.parametrize("size", [256, 3000, 9000])
@pytest.mark.parametrize("short", [10, 40, 200])
def test_a_long_prompt_is_not_held_up_by_short_ones_that_keep_coming(size, short):
    bench = bench_with_room()
    long = bench.submit(prompt(bench, size), max_tokens=1)
    bench.start()
    for _ in range(bound(size, size, 1 << 60)):
        for _ in range(CHUNK // short):
            bench.submit(prompt(bench, short), max_tokens=1)
        bench.step()
    assert any(o.request_id == long and o.first for o in bench.outputs)


@pytest.mark.parametrize("seed", range(8))
def test_every_request_of_a_crowd_has_its_first_token_within_the_bound(seed):
    rng = random.Random(seed)
    chunk = rng.choice([64, 200, 512])
    bench = bench_with_room(prefill_chunk_tokens=chunk)
    work: dict[int, int] = {}
    for _ in range(60):
        size = rng.choice([1, 20, 60, 130, 129, 400, 3000])
        work[bench.submit(prompt(bench, size), max_tokens=1)] = size
    bench.start()
    first: dict[int, int] = {}
    for step in range(1, 2000):
        bench.step()
        for output in bench.outputs:
            if output.first is not None:
                first.setdefault(output.request_id, step)
        if len(first) == len(work):
            break
    for request_id, own in work.items():
        age_work = sum(w for other, w in work.items() if other <= request_id)
        rank_work = sum(w for w in work.values() if w <= 2 * own)
        assert first[request_id] <= bound(own, age_work, rank_work, chunk)


def test_more_short_ones_than_are_looked_at_in_a_step_are_found_behind_longer_ones():
    bench = bench_with_room()
    for _ in range(200):
        bench.submit(prompt(bench, 2000), max_tokens=1)
    bench.start()
    short = bench.submit(prompt(bench, 30), max_tokens=1)
    assert steps_until_first_token(bench, short) == 2


def test_a_short_prompt_does_not_wait_for_a_prefix_that_a_long_one_computes_late():
    bench = bench_with_room()
    oldest = bench.submit(prompt(bench, 16_000), max_tokens=1)
    shared = prompt(bench, 640)
    producer = bench.submit(prompt(bench, 16_000, prefix=shared), max_tokens=1)
    bench.start()
    bench.step()
    bench.step()
    assert producer not in bench.rows() or bench.rows()[producer] < 640
    short = bench.submit(prompt(bench, 660, prefix=shared), max_tokens=1)
    assert oldest in bench.rows()
    assert steps_until_first_token(bench, short) <= bound(660, 1 << 60, 660)


def test_the_half_by_age_goes_to_the_next_in_age_where_an_older_request_comes_to_wait_for_a_prefix():
    bench = bench_with_room(block_size=4, prefill_chunk_tokens=32)
    bench._next_id = 10
    oldest_in_prefill = bench.submit([1] * 60)
    bench.start()
    bench._next_id = 1  # it was preempted, say, and is computed again
    shared = [2, 3, 4, 5] * 5
    older = bench.submit([*shared, *[6] * 20])
    bench._next_id = 11
    producer = bench.submit([*shared, *[7] * 4])
    by_work = bench.submit([8] * 30)
    bench.step()
    assert bench.rows() == {oldest_in_prefill: 16, producer: 16}
    assert {older, by_work} <= {request.request_id for request in bench.scheduler.planner.waiting}
