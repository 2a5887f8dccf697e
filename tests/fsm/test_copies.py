"""Requests with one prompt share the block that it does not fill, until they write what is their own."""

from novainfer.fsm.messages.events import PauseRequest, ResumeRequest
from novainfer.fsm.schedule.request import RequestState
from novainfer.fsm.simulation.world.shape import BEST, LEAN
from tests.fsm.helpers import Bench

PROMPT = [3, 4, 5, 6, 7, 8, 9]  # one block of four, and three tokens of the next


def planned(bench: Bench) -> list[tuple[int, int]]:
    assert bench.plan is not None
    return list(zip(bench.plan.copy_from_blocks, bench.plan.copy_to_blocks, strict=True))


def blocks_of(bench: Bench, request_id: int) -> list[int]:
    return bench.scheduler.planner.cache.table_of(bench.request(request_id))


def alone(prompt: list[int] = PROMPT) -> str:
    bench = Bench()
    request = bench.submit(prompt)
    bench.run()
    return bench.text(request)


def test_choices_that_begin_in_one_step_compute_the_prompt_once_and_part_where_they_write():
    bench = Bench()
    ids = [bench.submit(PROMPT) for _ in range(3)]
    bench.start()
    assert bench.rows() == dict(zip(ids, [7, 1, 1], strict=True))
    assert blocks_of(bench, ids[0]) == blocks_of(bench, ids[1]) == blocks_of(bench, ids[2])
    assert planned(bench) == []
    bench.step()
    first = blocks_of(bench, ids[0])[1]
    copies = [blocks_of(bench, i)[1] for i in ids[1:]]
    assert planned(bench) == [(first, copies[0]), (first, copies[1])]
    assert len({first, *copies}) == 3
    bench.run()
    assert [bench.text(i) for i in ids] == [alone()] * 3
    assert bench.scheduler.statistics().copied_blocks_total == 2
    assert [bench.first(i).num_cached_tokens for i in ids] == [0, 6, 6]


def test_the_last_owner_of_a_shared_block_writes_into_it():
    bench = Bench()
    first, second = bench.submit(PROMPT), bench.submit(PROMPT)
    bench.start()
    cache = bench.scheduler.planner.cache
    assert cache.room_for(bench.request(second), len(PROMPT) + 1) == 1
    bench.cancel(first)
    bench.step()
    assert planned(bench) == []
    bench.run()
    assert bench.text(second) == alone()


def test_the_last_owner_needs_no_room_to_write_also_while_a_step_copies_from_it():
    prompt = PROMPT[:6]  # its first token does not fill the block, which would give it a name
    bench = Bench()
    first, second = bench.submit(prompt), bench.submit(prompt)
    bench.start()
    bench.step()
    bench.tell(PauseRequest(second))
    bench.fail(launched=False)
    bench.cancel(first)
    bench.step()
    later = bench.submit(prompt)
    bench.start()
    mine = blocks_of(bench, second)[1]
    assert [source for source, _ in planned(bench)] == [mine]
    assert bench.request(second).kv.is_tail_shared
    assert bench.scheduler.planner.cache.room_for(bench.request(second), len(prompt) + 1) == 0
    bench.tell(ResumeRequest(second))
    bench.step()
    assert planned(bench) == []
    assert blocks_of(bench, second)[1] == mine
    bench.run()
    assert [bench.text(i) for i in (second, later)] == [alone(prompt)] * 2


def test_the_last_owner_copies_a_block_that_others_can_find_by_its_name():
    """The first one has filled the block with its own tokens, and left, while the second one's reader was away."""
    bench = Bench()
    first, second = bench.submit(PROMPT, max_tokens=4), bench.submit(PROMPT)
    bench.start()
    bench.step()
    bench.tell(PauseRequest(second))
    bench.fail(launched=False)
    assert bench.request(second).state is RequestState.PAUSED
    assert bench.request(second).kv.is_tail_shared
    while first in bench.scheduler.requests:
        bench.step()
    named = blocks_of(bench, second)[1]
    bench.tell(ResumeRequest(second))
    bench.start()
    assert [source for source, _ in planned(bench)] == [named]
    bench.run()
    assert bench.text(second) == alone()


def test_a_choice_that_begins_later_copies_at_once_and_computes_the_last_token():
    bench = Bench()
    first = bench.submit(PROMPT)
    bench.start()
    bench.step()
    bench.step()
    later = bench.submit(PROMPT)
    bench.step()
    assert bench.rows() == {first: 1, later: 1}
    assert planned(bench) == [(blocks_of(bench, first)[1], blocks_of(bench, later)[1])]
    bench.run()
    assert bench.text(later) == bench.text(first) == alone()


def test_a_copy_of_a_copy_comes_from_what_is_there_before_the_step():
    bench = Bench(max_num_batched_tokens=9)
    first, second = bench.submit(PROMPT), bench.submit(PROMPT)
    bench.start()
    bench.cancel(first)
    third = bench.submit(PROMPT)
    fourth = bench.submit(PROMPT)
    bench.step()
    sources = {source for source, _ in planned(bench)}
    assert sources.isdisjoint({block for _, block in planned(bench)})
    bench.run()
    assert [bench.text(i) for i in (second, third, fourth)] == [alone()] * 3


def test_prompts_that_differ_in_their_last_token_share_full_blocks_only():
    bench = Bench()
    ids = [bench.submit(PROMPT), bench.submit([*PROMPT[:-1], 10])]
    bench.start()
    assert bench.rows() == dict(zip(ids, [7, 3], strict=True))
    bench.run()
    assert bench.scheduler.statistics().copied_blocks_total == 0


def test_without_a_prefix_cache_nothing_is_shared():
    bench = Bench(enable_prefix_caching=False)
    ids = [bench.submit(PROMPT) for _ in range(2)]
    bench.start()
    assert bench.rows() == dict.fromkeys(ids, 7)


def test_a_step_that_copies_is_taken_back_exactly_and_copies_when_it_is_tried_again():
    bench = Bench()
    ids = [bench.submit(PROMPT) for _ in range(2)]
    bench.start()
    bench.step()
    wanted = planned(bench)
    assert len(wanted) == 1
    bench.fail(launched=False)  # tried again, one after the other
    found = planned(bench)
    while bench.plan is not None:
        bench.step()
        found += planned(bench) if bench.plan is not None else []
    assert found == wanted
    assert bench.scheduler.statistics().copied_blocks_total == 1
    assert [bench.text(i) for i in ids] == [alone()] * 2


def test_a_launched_step_that_fails_leaves_what_it_wanted_to_copy():
    bench = Bench()
    ids = [bench.submit(PROMPT) for _ in range(3)]
    bench.start()
    bench.step()
    bench.fail()
    bench.run()
    assert [bench.text(i) for i in ids] == [alone()] * 3


def test_what_was_preempted_and_computed_again_serves_later_choices_too():
    bench = Bench()
    first = bench.submit(PROMPT)
    bench.start()
    bench.step()
    bench.lose()
    bench.recover()
    bench.step()
    later = bench.submit(PROMPT)
    bench.step()
    assert bench.rows()[later] == 1
    bench.run()
    assert bench.text(later) == bench.text(first) == alone()


def test_what_was_computed_in_another_mode_is_not_copied():
    bench = Bench(modes=(BEST, LEAN))
    bench.submit([3, 4])
    bench.start()
    bench.step()
    bench.scheduler.planner.change_mode(LEAN)
    later = bench.submit([3, 4])
    bench.step()
    assert bench.rows()[later] == 2
    assert planned(bench) == []


def test_room_for_the_copy_is_made_where_there_is_none():
    """The first one has taken all that is free, while the reader of the second one was away."""
    bench = Bench(num_blocks=5, max_model_len=20)
    first, second = bench.submit([3, 4], max_tokens=18), bench.submit([3, 4], max_tokens=4)
    bench.start()
    bench.step()
    bench.tell(PauseRequest(second))
    bench.fail(launched=False)
    while bench.scheduler.planner.cache.room:
        bench.step()
    assert bench.request(second).kv.is_tail_shared
    bench.tell(ResumeRequest(second))
    bench.run()
    assert len(bench.text(first)) > 0
    assert bench.end(second).end.finish_reason == bench.end(first).end.finish_reason == "length"
    assert bench.text(first).startswith(bench.text(second))


def test_what_a_step_wanted_to_copy_is_free_when_its_owner_has_left_and_the_step_is_taken_back():
    bench = Bench()
    first = bench.submit(PROMPT)
    bench.start()
    bench.step()
    bench.tell(PauseRequest(first))
    bench.fail(launched=False)
    assert bench.plan is None
    later = bench.submit(PROMPT)
    bench.start()
    assert [source for source, _ in planned(bench)] == blocks_of(bench, first)[1:2]
    bench.cancel(first)
    bench.fail(launched=False)
    bench.run()
    assert bench.text(later) == alone()
    assert bench.scheduler.statistics().blocks.num_owned == 0


def test_the_device_is_told_when_a_copy_that_was_taken_back_is_not_made_again():
    bench = Bench()
    first, second = bench.submit(PROMPT), bench.submit(PROMPT)
    bench.start()
    bench.step()
    assert len(planned(bench)) == 1
    bench.cancel(first)
    bench.fail()  # the device has the copy in its table, and garbage in it
    assert planned(bench) == []
    bench.run()
    assert bench.text(second) == alone()
