"""Conversations whose KV is kept: what the next request finds, what makes room for whom, and when it is over."""

from __future__ import annotations

from novainfer.fsm.kv.blocks import BlockPool, Journal, block_name
from novainfer.fsm.kv.host import HostPool
from novainfer.fsm.messages.events import EndSession, SessionOver
from novainfer.fsm.messages.step import StepPlan
from novainfer.fsm.messages.tenant import Tenant
from tests.fsm.helpers import Bench

SIZE = 4
FIRST = list(range(1, 13))  # three blocks; with the answer's first tokens four
TTL_S = 60.0


def bench(**more) -> Bench:
    return Bench(**{"num_blocks": 8, "max_model_len": 32, "session_ttl_s": TTL_S, **more})


def run(on: Bench, token_ids: list[int], **params) -> tuple[list[int], int]:
    """What is known after the answer to `token_ids`, and how many of them were found in the cache."""
    begins = len(on.outputs)
    request_id = on.submit(token_ids, max_tokens=4, **params)
    while request_id in on.scheduler.requests:
        on.step()
    outputs = [output for output in on.outputs[begins:] if output.request_id == request_id]
    first = next(output.first for output in outputs if output.first is not None)
    return token_ids + [token for output in outputs for token in output.token_ids], first.num_cached_tokens


def fill(on: Bench, num_tokens: int = 24) -> None:
    """Others come, and what they have is evicted first next time."""
    for number in range(3):
        run(on, [20 + number] * num_tokens)


def test_a_kept_conversation_is_found_where_the_prefix_cache_alone_would_have_lost_it() -> None:
    found = {}
    for session_id in ("chat", None):
        on = bench(num_blocks=12)
        said, _ = run(on, FIRST, session_id=session_id)
        fill(on)
        _, found[session_id] = run(on, [*said, 7], session_id=session_id)
    assert found == {"chat": 12, None: 0}


def test_what_a_conversation_keeps_goes_to_the_host_when_its_blocks_are_wanted_and_comes_back() -> None:
    on = bench(num_blocks=6, num_host_blocks=4)
    said, _ = run(on, FIRST, session_id="chat")
    fill(on, 20)
    (session,) = on.scheduler.sessions.values()
    kept = on.scheduler.planner.cache.kept(session.names)
    assert (kept.num_tokens, kept.num_on_device, kept.num_on_host) == (12, 0, 12)
    assert run(on, [*said, 7], session_id="chat")[1] == 12
    assert on.scheduler.statistics().swapped_in_blocks_total == 3


def test_without_a_host_it_is_lost_when_everything_is_wanted_and_nobody_is_preempted_or_waits() -> None:
    on = bench(num_blocks=6, session_share=1.0)
    said, _ = run(on, FIRST, session_id="chat")
    fill(on, 20)
    assert on.scheduler.statistics().preemptions_total == 0
    assert run(on, [*said, 7], session_id="chat")[1] == 0


def test_beyond_their_share_conversations_make_room_before_what_nobody_keeps() -> None:
    on = bench(num_blocks=8, session_share=0.0)
    said, _ = run(on, FIRST, session_id="chat")  # 3 blocks
    other, _ = run(on, [30] * 12)  # 3 blocks
    run(on, [31] * 12)
    assert run(on, [*other, 7])[1] == 12
    assert run(on, [*said, 7], session_id="chat")[1] < 12


def test_the_next_request_may_go_on_from_the_middle() -> None:
    on = bench(num_blocks=6, num_host_blocks=4)
    run(on, FIRST, session_id="chat")
    fill(on, 20)
    assert run(on, [*FIRST[:8], 50, 51, 52, 53, 54], session_id="chat")[1] == 8


def test_what_the_device_still_has_behind_a_block_on_the_host_is_shared() -> None:
    on = bench(num_host_blocks=4, session_share=0.0)
    run(on, FIRST[:4], session_id="short")  # keeps the first block of the three
    run(on, FIRST)
    run(on, [30] * 20)  # six blocks: what is kept makes room first
    cache = on.scheduler.planner.cache
    (session,) = on.scheduler.sessions.values()
    assert cache.kept(session.names).num_on_host == 4
    assert run(on, [*FIRST, 7])[1] == 12
    assert on.scheduler.statistics().swapped_in_blocks_total == 1


def test_what_another_request_is_going_to_compute_behind_a_copy_is_waited_for() -> None:
    on = bench(num_host_blocks=4, prefill_chunk_tokens=4, max_num_batched_tokens=4)
    prompt = [*FIRST, 13, 14, 15, 16, 17]
    producer = on.request(on.submit(prompt))
    on.start()  # it computes its first block, and has promised the others
    cache = on.scheduler.planner.cache
    cache.host.keep(producer.kv.names[1], cache.host.take()[0])
    prefix = cache.find_prefix(on.request(on.submit(prompt)), 100)
    assert (len(prefix.blocks), list(prefix.copies), prefix.num_tokens) == (1, [1], 8)
    assert (prefix.awaited, prefix.producer_id) == (producer.kv.names[2], producer.request_id)


def test_who_goes_on_from_a_copy_behind_its_prompt_does_not_share_the_prompts_last_block() -> None:
    on = bench(num_host_blocks=4)
    on.submit(FIRST[:6])
    on.step()
    on.step()  # it has computed its prompt, the end of which others with the same one may copy
    again = on.request(on.submit(FIRST[:6]))
    again.token_ids += FIRST[6:9]  # as after a preemption
    cache = on.scheduler.planner.cache
    cache.begin(StepPlan())
    assert cache.find_prefix(again, 100).tail >= 0
    cache.host.keep(block_name(again.kv.names[0], FIRST[4:8]), cache.host.take()[0])
    prefix = cache.find_prefix(again, 100)
    assert (len(prefix.blocks), list(prefix.copies), prefix.tail, prefix.num_tokens) == (1, [1], -1, 8)


def test_the_end_of_a_conversation_is_evicted_before_its_beginning() -> None:
    pool, journal = BlockPool(3, SIZE), Journal()
    names = [b"a", b"b", b"c"]
    pool.open(journal)
    blocks = [pool.allocate() for _ in names]
    pool.close()
    for block, name in zip(blocks, names, strict=True):
        pool.name(block, name)
    pool.release(blocks)
    pool.keep(names)
    pool.open(journal)
    pool.allocate()
    pool.close()
    assert journal.evicted == [b"c"]
    pool.unkeep(names)
    pool.open(journal)
    pool.allocate()
    assert journal.evicted == [b"c", b"b"]


def test_of_one_that_has_ended_the_beginning_is_found_longest() -> None:
    on = bench()
    run(on, FIRST, session_id="chat")
    on.tell(EndSession("", "chat"))
    run(on, [30] * 20)  # takes one of its blocks
    assert run(on, [*FIRST, 7])[1] == 8


def test_it_ends_with_its_time_when_it_is_ended_and_when_there_are_too_many() -> None:
    on = bench(max_sessions=2)
    for name in ("a", "b", "c"):
        run(on, FIRST, session_id=name)
    assert [name for _, name in on.scheduler.sessions] == ["b", "c"]
    assert [(timer.delay_s, type(timer.event)) for timer in on.timers] == [(TTL_S, SessionOver)] * 2
    on.tell(on.timers[0].event)
    assert [name for _, name in on.scheduler.sessions] == ["c"]
    on.tell(EndSession("", "c"))
    assert not on.scheduler.sessions
    assert not on.timers
    assert not on.scheduler.planner.cache.pool.keeps
    on.tell(EndSession("", "c"))  # it has ended meanwhile


def test_one_that_is_ended_while_it_is_answered_keeps_nothing() -> None:
    on = bench()
    on.submit(FIRST, session_id="chat")
    on.step()
    on.tell(EndSession("", "chat"))
    while on.scheduler.requests:
        on.step()
    assert not on.scheduler.sessions
    assert not on.scheduler.planner.cache.pool.keeps


def test_two_tenants_have_a_conversation_each_under_one_name() -> None:
    on = bench(num_blocks=16)
    one, other = Tenant("one"), Tenant("other")
    said, _ = run(on, FIRST, session_id="chat", tenant=one)
    assert run(on, [*said, 7], session_id="chat", tenant=other)[1] == 0
    assert len(on.scheduler.sessions) == 2
    on.tell(EndSession("other", "chat"))
    assert list(on.scheduler.sessions) == [("one", "chat")]
    assert run(on, [*said, 7], session_id="chat", tenant=one)[1] == 12


def test_with_the_worker_goes_what_was_on_its_device_and_on_its_host() -> None:
    on = bench(num_host_blocks=4)
    said, _ = run(on, FIRST, session_id="chat")
    on.lose()
    on.recover()
    (session,) = on.scheduler.sessions.values()
    assert on.scheduler.planner.cache.kept(session.names).num_tokens == 0
    assert run(on, [*said, 7], session_id="chat")[1] == 0


def test_with_no_time_nothing_is_kept() -> None:
    on = bench(session_ttl_s=0.0)
    run(on, FIRST, session_id="chat")
    assert not on.scheduler.sessions
    assert not on.scheduler.planner.cache.pool.keeps


def test_a_copy_that_a_step_in_flight_reads_makes_room_for_nothing() -> None:
    host = HostPool(2)
    for name in (b"a", b"b"):
        host.keep(name, host.take()[0])
    block = host.read(b"a")
    assert host.num_available == 1
    assert host.take()[1] == b"b"
    host.drop([b"a"])  # it is kept no longer, and is read yet
    assert host.num_available == 0
    host.end_read(b"a", block, was_used=True)
    assert host.num_available == 1
