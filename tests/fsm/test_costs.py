"""What steps cost: the table, chunks beside decodes, and when to come again while nothing has left the queue."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import pytest

from novainfer.fsm.schedule.costs import ANSWER_TOKENS, Chunks, StepCosts, wait_s
from novainfer.fsm.schedule.speculation import Lookup, Speculation
from tests.fsm.helpers import Bench

# A CPU: 20 ms read all weights, and from 24 tokens on each takes another 0.75 ms.
MEASURED = [(1, 20.0), (2, 20.0), (8, 20.5), (16, 21.0), (32, 27.0), (64, 51.0), (128, 99.0)]
CURVED = [(1, 22.4), (4, 23.9), (16, 28.9), (32, 42.4), (64, 65.8), (128, 115.9)]  # as one was measured
WHOLE_MS = 408.9  # of 512 tokens there, and of some smaller chunks
CHUNKS_MS = {64: 65.8, 128: 115.9, 192: 161.0, 256: 209.5, 320: 259.5, 384: 309.5, 448: 359.2, 512: WHOLE_MS}
FAST = [(n, ms / 20) for n, ms in MEASURED]  # of a model twenty times as small
FLAT = [(1, 4.0), (64, 4.4), (128, 5.0), (256, 8.0)]  # a GPU


def chunks(measured: list[tuple[int, float]], most: int = 512, target_ms: float | None = None) -> Chunks:
    """Chunks of blocks of 16 tokens, by what was measured."""
    found = Chunks(most, 16, target_ms)
    found.measured(measured)
    return found


def test_what_lies_between_and_behind_the_measured_sizes_is_on_straight_lines() -> None:
    costs = StepCosts(MEASURED)
    assert [costs.of(n) for n in (1, 32, 48, 128)] == [20.0, 27.0, 39.0, 99.0]
    assert costs.of(512) == pytest.approx(99.0 + 384 * 0.75)


def test_a_size_that_was_disturbed_costs_no_more_than_a_larger_one() -> None:
    costs = StepCosts([(1, 20.0), (2, 35.0), (4, 21.0), (8, 22.0)])
    assert [costs.of(n) for n in (1, 2, 3, 4)] == [20.0, 21.0, 21.0, 21.0]


def test_what_a_step_takes_corrects_its_neighbours_most_and_no_size_ever_costs_less_than_a_smaller_one() -> None:
    costs = StepCosts([(1, 10.0), (4, 10.0), (8, 20.0), (16, 40.0)])
    costs.took(6, 30.0)  # twice the 15 of the line between 4 and 8
    found = [costs.of(n) for n in (1, 4, 8, 16)]
    assert found == pytest.approx([10.75, 11.0, 22.0, 43.0])
    costs.took(17, 500.0)  # no size that was measured
    assert [costs.of(n) for n in (1, 4, 8, 16)] == found
    flat = StepCosts([(1, 10.0), (4, 10.0), (8, 10.0)])
    flat.took(4, 20.0)
    assert [flat.of(n) for n in (1, 4, 8)] == pytest.approx([10.75, 11.0, 11.0])


def test_one_step_at_most_doubles_what_its_size_costs() -> None:
    costs = StepCosts([(1, 10.0), (8, 10.0)])
    costs.took(8, 10_000.0)
    assert [costs.of(1), costs.of(8)] == pytest.approx([17.5, 20.0])


def test_beside_decodes_a_chunk_is_the_least_that_loses_prompts_next_to_nothing() -> None:
    found = chunks(CURVED)
    assert found.beside(0) == 512, "nobody waits for its end"
    assert found.beside(1) == found.beside(200) == 384
    assert loss(384) < 0.01
    first_ms, each_ms = StepCosts(CURVED).line()
    assert first_ms == 22.4
    assert each_ms == pytest.approx((42.4 - 22.4) / 31), "the flattest one to 32, 64 and 128 tokens"
    whole_ms = first_ms / 512 + each_ms
    assert first_ms / 384 + each_ms <= 1.025 * whole_ms < first_ms / 320 + each_ms


def loss(num_tokens: int) -> float:
    """What prompts lose in such chunks, of the speed that they have in whole ones."""
    return CHUNKS_MS[num_tokens] / num_tokens / (WHOLE_MS / 512) - 1


def test_prompts_lose_next_to_nothing_whichever_sizes_were_disturbed() -> None:
    """Each on its own, and any two of them, as a program beside it does: by a tenth, a half, or three times as long."""
    for one, other in combinations_with_replacement(range(len(CURVED)), 2):
        for times in (1.1, 1.5, 3.0):
            table = [(n, ms * times if at in (one, other) else ms) for at, (n, ms) in enumerate(CURVED)]
            assert loss(chunks(table).beside(8)) < 0.05, (one, other, times)
    slower = [(n, 3 * ms) for n, ms in CURVED]
    assert chunks(slower).beside(8) == 384, "a machine that is busy all the time tells the same"


def test_prompts_lose_next_to_nothing_where_a_busy_machine_left_no_time_for_the_larger_sizes() -> None:
    for num_sizes in (3, 4, 5):
        assert loss(chunks(CURVED[:num_sizes]).beside(8)) < 0.02


def test_chunks_are_whole_where_steps_are_short_or_their_time_is_unknown() -> None:
    assert chunks(FAST).beside(8) == 512, "20 ms for all of it"
    assert chunks(FLAT).beside(8) == 512
    assert chunks([]).beside(8) == 512
    assert chunks(MEASURED[:1]).beside(8) == 512, "one size tells of no other"
    assert Chunks(512, 16).beside(8) == 512, "no worker has come up yet"
    assert chunks(MEASURED, most=48).beside(8) == 48


def test_a_chunk_is_as_long_as_nobody_notices_and_no_longer_where_prompts_lose_next_to_nothing() -> None:
    assert chunks([(1, 0.5), (64, 20.0), (128, 40.0)]).beside(8) == 64, "with 128 tokens a step would be noticed"
    assert chunks([(1, 0.5), (64, 10.0), (128, 20.0), (192, 30.0)]).beside(8) == 128


def test_a_table_of_a_busy_machine_leaves_chunks_of_four_blocks_at_least() -> None:
    """All but the first were disturbed, so that all smaller ones seem to pay."""
    assert chunks([(1, 20.0), (16, 700.0), (32, 900.0), (64, 2000.0)]).beside(8) == 64
    assert chunks([(1, 20.0), (16, 20.0), (64, 20.0)]).beside(8) == 512, "and tokens that seem to cost nothing are many"


def test_a_target_is_kept_with_those_that_decode_in_whole_blocks() -> None:
    found = chunks(MEASURED, target_ms=60.0)
    assert found.beside(12) == 64, "76 tokens take exactly so long"
    assert found.beside(13) == 48
    assert found.beside(60) == 16
    assert found.beside(200) == 16, "a block at least: prompts go on"
    assert found.beside(0) == 512
    assert chunks(MEASURED, target_ms=1000.0).beside(8) == 512
    assert chunks(MEASURED, most=200, target_ms=1000.0).beside(8) == 200, "and no block is asked of the last one"
    assert chunks(MEASURED, most=8, target_ms=1.0).beside(8) == 8


def test_a_target_leaves_drafts_what_prompts_do_not_take() -> None:
    found = chunks(MEASURED, target_ms=60.0)
    assert found.room_for_drafts(70, 100) == 6, "76 tokens take exactly so long"
    assert found.room_for_drafts(70, 4) == 4
    assert found.room_for_drafts(76, 100) == found.room_for_drafts(90, 100) == 0
    found.took(76, 120.0)
    assert found.room_for_drafts(60, 100) == 0, "by what such steps take"
    assert chunks(MEASURED).room_for_drafts(70, 100) == chunks([], target_ms=60.0).room_for_drafts(70, 100) == 100


def test_a_target_is_kept_also_where_steps_take_longer_than_was_measured() -> None:
    """Over a long context a step takes twice as long; one of a second does not make the next ones small for long."""
    found = chunks(MEASURED, target_ms=60.0)
    costs = StepCosts(MEASURED)
    for _ in range(20):
        num_tokens = 12 + found.beside(12)
        found.took(num_tokens, 2.0 * costs.of(num_tokens))
    assert 2.0 * costs.of(12 + found.beside(12)) <= 60.0 * 1.01
    assert 2.0 * costs.of(12 + found.beside(12) + 16) > 60.0
    once = chunks(MEASURED, target_ms=100.0)
    once.took(76, 60_000.0)
    assert once.beside(12) >= 48, "it counts as four times what was known"
    found.took(76, 0.0)  # a device that says no time
    found.measured(MEASURED)
    assert found.beside(12) == 64, "another worker may be as fast as it was"


def test_without_a_target_chunks_are_as_they_were_measured_whatever_steps_take() -> None:
    found = chunks(CURVED)
    found.took(140, 5000.0)
    assert found.beside(12) == 384


def bench_with_costs(**limits: Any) -> Bench:
    """Steps of 144 prompt tokens and more cost hardly anything but those."""
    costs = [(1, 5.0), (64, 52.0), (128, 100.0)]
    sizes = {"max_num_batched_tokens": 512, "prefill_chunk_tokens": 256, "max_num_seqs": 2} | limits
    return Bench(num_blocks=2000, max_model_len=4000, step_costs=costs, **sizes)


def num_prompt_tokens(bench: Bench) -> int:
    """Of the step that is planned."""
    assert bench.plan is not None
    return sum(count for count in bench.plan.query_lens if count > 1)


def test_steps_hold_small_chunks_while_requests_decode_and_whole_ones_else() -> None:
    bench = bench_with_costs()
    bench.submit([1] * 1000, max_tokens=1)
    sizes = []
    for _ in range(4):
        bench.step(took_s=0.01)
        sizes.append(num_prompt_tokens(bench))
    assert sizes[1:] == [256, 256, 256], "nothing waits for it"
    while bench.plan is not None:
        bench.step(took_s=0.01)
    bench.submit([1, 2], max_tokens=100)
    bench.step()
    bench.step()
    bench.submit([2] * 1000, max_tokens=1)
    sizes = []
    for _ in range(6):
        bench.step(took_s=0.01)
        sizes.append(num_prompt_tokens(bench))
    assert set(sizes) == {144}, sizes


def test_small_chunks_end_with_the_last_request_that_decodes() -> None:
    bench = bench_with_costs()
    first = bench.submit([1, 2], max_tokens=100)
    bench.step()
    bench.step()
    bench.submit([1] * 2000, max_tokens=1)
    bench.step()
    bench.step()
    assert num_prompt_tokens(bench) == 144
    bench.cancel(first)
    for _ in range(3):
        bench.step()
    assert num_prompt_tokens(bench) == 256


def test_a_target_of_the_configuration_is_kept() -> None:
    bench = bench_with_costs(inter_token_target_ms=52.0)
    bench.submit([1, 2], max_tokens=100)
    bench.step()
    bench.step()
    bench.submit([1] * 3000, max_tokens=1)
    bench.step()
    assert num_prompt_tokens(bench) == 60, "with the one that decodes 61 tokens, in blocks of 4"
    for _ in range(20):
        bench.step(took_s=0.1)
    assert 0 < num_prompt_tokens(bench) < 20, "steps take twice as long as was measured, and more"


def test_another_worker_brings_its_own_costs() -> None:
    bench = bench_with_costs()
    bench.submit([1, 2], max_tokens=100)
    bench.step()
    assert bench.scheduler.planner.chunks.beside(1) == 144
    bench.lose()
    bench.configuration.step_costs.clear()
    bench.recover()
    assert bench.scheduler.planner.chunks.beside(1) == 256, "it could not measure any"
    assert bench.scheduler.wait_s(10, 1000) is None


def test_what_speculation_finds_steps_to_take_corrects_the_costs_that_all_go_by() -> None:
    bench = Bench(step_costs=[(1, 5.0), (64, 52.0)], speculation=Speculation(Lookup(1, 2), 3))
    bench.submit([1, 2], max_tokens=40)
    for _ in range(20):
        bench.step(took_s=0.05)
    assert bench.scheduler.costs.of(1) > 10.0, "steps of one token take 50 ms"


# ---- when to come again --------------------------------------------------------------------------------------------


def expected_s(num_waiting: int, num_prompt_tokens: int, num_running: int = 0, answer_tokens: float = 100.0) -> float:
    """By the costs of a CPU, with 16 slots."""
    return wait_s(
        StepCosts(MEASURED),
        num_waiting=num_waiting,
        num_prompt_tokens=num_prompt_tokens,
        num_running=num_running,
        num_slots=16,
        answer_tokens=answer_tokens,
        chunk=128,
    )


def test_those_for_whom_slots_are_free_wait_for_prompts_alone() -> None:
    assert expected_s(4, 1280) == expected_s(4, 1280, num_running=12) == pytest.approx(0.99)


def test_those_behind_wait_for_as_many_answers() -> None:
    assert expected_s(16, 0, num_running=16) == pytest.approx(2.1), "sixteen answers end in 100 steps of 21 ms"
    assert expected_s(8, 0, num_running=16) == pytest.approx(1.05)
    assert expected_s(8, 0, num_running=12) == pytest.approx(0.525), "four find a slot"
    assert expected_s(16, 0, num_running=16, answer_tokens=10.0) == pytest.approx(0.21)


def test_a_scheduler_expects_answers_as_long_as_they_were() -> None:
    bench = bench_with_costs()
    assert bench.scheduler.wait_s(0, 0) == 0.0
    assert bench.scheduler.wait_s(1, 256) == pytest.approx(0.196)
    before = bench.scheduler.wait_s(4, 0)
    assert before == pytest.approx(2 / 2 * ANSWER_TOKENS * StepCosts([(1, 5.0), (64, 52.0)]).of(2) / 1e3)
    for _ in range(200):
        bench.submit([1, 2], max_tokens=3)
        while bench.scheduler.requests:
            bench.step()
    assert bench.scheduler.answer_tokens == pytest.approx(3.0, abs=0.5)
    assert bench.scheduler.wait_s(4, 0) == pytest.approx(before * bench.scheduler.answer_tokens / ANSWER_TOKENS)
    length = bench.scheduler.answer_tokens
    bench.cancel(bench.submit([1, 2]))
    assert bench.scheduler.answer_tokens == length, "one that never ran says nothing of answers"


def test_a_scheduler_expects_those_that_run_to_end_first() -> None:
    bench = bench_with_costs()
    assert bench.scheduler.wait_s(2, 0) == 0.0, "there are slots for both"
    bench.submit([1, 2], max_tokens=100)
    bench.step()
    of_both_ms = StepCosts([(1, 5.0), (64, 52.0)]).of(2)
    assert bench.scheduler.wait_s(2, 0) == pytest.approx(1 / 2 * ANSWER_TOKENS * of_both_ms / 1e3)
