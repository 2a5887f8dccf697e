from novainfer.fsm.messages.events import PauseRequest
from novainfer.fsm.schedule.request import RequestState
from tests.fsm.helpers import Bench


def test_a_long_prompt_is_cut_at_a_block_boundary_and_goes_on_in_the_next_step():
    bench = Bench(prefill_chunk_tokens=10, block_size=4)
    long = bench.submit([1] * 21)
    bench.start()
    sizes = []
    while bench.request(long).state is RequestState.PREFILL:
        sizes.append(bench.rows()[long])
        if sum(sizes) == 21:
            break
        bench.step()
    assert sizes == [8, 8, 5]


def test_a_chunk_smaller_than_a_block_still_makes_progress():
    bench = Bench(prefill_chunk_tokens=3, block_size=4)
    long = bench.submit([1] * 9, max_tokens=1)
    bench.start()
    assert bench.rows() == {long: 3}
    bench.run()
    assert bench.end(long).end.finish_reason == "length"


def test_a_quarter_of_the_chunk_is_kept_for_short_prompts_behind_a_long_one():
    bench = Bench(prefill_chunk_tokens=16, block_size=4, max_num_batched_tokens=64)
    long = bench.submit([1] * 40)
    bench.start()
    assert bench.rows() == {long: 16}  # nobody else is there
    short = bench.submit([2, 3])
    bench.step()
    assert bench.rows() == {long: 12, short: 2}


def test_everybody_who_decodes_takes_one_token_and_prompts_get_the_rest_of_the_budget():
    bench = Bench(max_num_batched_tokens=10, prefill_chunk_tokens=32)
    first, second = bench.submit([1, 2]), bench.submit([3, 4])
    bench.step()
    bench.step()
    third = bench.submit([5] * 20)
    bench.step()
    assert bench.rows() == {first: 1, second: 1, third: 8}


def test_prompts_run_first_come_first_served_and_nobody_overtakes_by_being_small():
    bench = Bench(num_blocks=12, block_size=4, max_model_len=32)
    running = bench.submit([1] * 15)
    bench.step()
    big, small = bench.submit([2] * 24), bench.submit([3])
    bench.step()
    assert bench.rows() == {running: 1}
    assert [r.request_id for r in bench.scheduler.planner.waiting] == [big, small]
    while running in bench.scheduler.requests:
        assert bench.rows() == {running: 1}
        bench.step()
    assert bench.rows() == {big: 24, small: 1}


def test_a_request_is_admitted_only_when_its_whole_prompt_and_one_block_more_fit():
    bench = Bench(num_blocks=6, block_size=4)
    bench.submit([1] * 8)  # 2 blocks, and soon a third
    bench.step()
    bench.submit([2] * 12)  # 3 and 1 more: it has 4 when the first has 2, and 3 when it has 3
    bench.step()
    assert len(bench.rows()) == 1


def test_a_prefix_that_is_planned_in_the_same_step_is_shared():
    bench = Bench(block_size=4)
    first, second = bench.submit([1, 2, 3, 4, 5]), bench.submit([1, 2, 3, 4, 6])
    bench.start()
    assert bench.rows() == {first: 5, second: 1}
    assert bench.request(first).kv.blocks[0] == bench.request(second).kv.blocks[0]
    bench.run()
    assert [o.first.num_cached_tokens for o in bench.outputs if o.first] == [0, 4]


def test_a_consumer_waits_for_its_producer_and_then_shares():
    bench = Bench(block_size=4, prefill_chunk_tokens=4)
    producer, consumer = bench.submit([1] * 9), bench.submit([1] * 9 + [2])
    bench.start()
    assert bench.rows() == {producer: 4}
    bench.step()
    assert bench.rows() == {producer: 4}
    bench.step()
    assert bench.rows() == {producer: 1, consumer: 2}
    bench.run()
    assert [o.first.num_cached_tokens for o in bench.outputs if o.first] == [0, 8]


def test_when_the_producer_ends_a_consumer_computes_the_prefix_itself():
    bench = Bench(block_size=4, prefill_chunk_tokens=4)
    producer, consumer = bench.submit([1] * 13), bench.submit([1] * 13)
    bench.start()
    bench.cancel(producer)
    bench.step()
    assert list(bench.rows()) == [consumer]
    bench.run()
    assert bench.end(consumer).end.finish_reason == "length"
    assert not bench.scheduler.planner.cache.producers


def test_without_prefix_caching_nothing_is_shared():
    bench = Bench(enable_prefix_caching=False)
    first, second = bench.submit([1] * 9), bench.submit([1] * 9)
    bench.start()
    assert bench.rows() == {first: 9, second: 9}
    assert not set(bench.request(first).kv.blocks) & set(bench.request(second).kv.blocks)


def three_running(num_blocks: int) -> Bench:
    """Three requests that decode, of 5, 3 and 1 prompt tokens, one token a block."""
    bench = Bench(num_blocks=num_blocks, block_size=1, max_model_len=num_blocks)
    for length, token in ((5, 1), (3, 2), (1, 3)):
        bench.submit([token] * length, max_tokens=6)
    bench.step()
    bench.step()
    return bench


def test_the_victim_of_a_preemption_is_the_one_that_loses_least():
    bench = three_running(13)
    states = []
    while all(r.state is RequestState.DECODE for r in bench.scheduler.requests.values()):
        bench.step()
    states = {i: r.state for i, r in bench.scheduler.requests.items()}
    assert states == {0: RequestState.DECODE, 1: RequestState.DECODE, 2: RequestState.PREEMPTED}
    assert bench.scheduler.statistics().preemptions_total == 1


def test_a_paused_request_is_the_first_victim_however_much_it_loses():
    bench = three_running(13)
    bench.tell(PauseRequest(1))
    assert bench.request(1).state is RequestState.PAUSED
    while bench.request(1).kv.blocks:
        bench.step()
    assert bench.request(1).state is RequestState.PAUSED
    assert all(bench.request(i).state is RequestState.DECODE for i in (0, 2))


def test_the_oldest_request_is_never_a_victim_even_if_it_loses_least():
    bench = Bench(num_blocks=8, block_size=1, max_model_len=8)
    oldest = bench.submit([1], max_tokens=7)
    bench.submit([2] * 4, max_tokens=4)
    bench.step()
    while oldest in bench.scheduler.requests:
        assert oldest in bench.rows()
        bench.step()
    assert bench.scheduler.statistics().preemptions_total == 1
    bench.run()
    assert [bench.end(i).end.finish_reason for i in range(2)] == ["length"] * 2


def test_preempted_requests_keep_their_place_by_arrival():
    bench = Bench(num_blocks=6, block_size=1, max_model_len=6, max_num_seqs=2)
    for token in (1, 2, 3):
        bench.submit([token], max_tokens=5)
    bench.run()
    assert [o.request_id for o in bench.outputs if o.end] == [0, 1, 2]


def test_paused_requests_that_own_nothing_do_not_hold_up_the_queue():
    bench = Bench(num_blocks=2, block_size=2, max_model_len=4)
    paused = bench.submit([1], max_tokens=3)
    bench.step()
    bench.step()
    bench.tell(PauseRequest(paused))
    whole = bench.submit([2, 3, 4], max_tokens=1)  # both blocks, and no third one to go on: the pool to itself
    bench.run()
    assert bench.end(whole).end.finish_reason == "length"
    assert bench.request(paused).kv.blocks == []
