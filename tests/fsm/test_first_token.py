"""`max_queue_s` is a deadline for the first token, wherever a stream waits for it."""

from typing import Any

import msgspec
import pytest

from novainfer.fsm.messages.events import CancelRequest, Cause, Submit
from novainfer.fsm.messages.params import SamplingParams
from tests.fsm.helpers import Bench


def submit(bench: Bench, n: int = 1, **params: Any) -> list[int]:
    """A stream of `n` choices whose first token has a deadline; the ids of its requests."""
    first, bench._next_id = bench._next_id, bench._next_id + n
    wanted = SamplingParams(**{"max_queue_s": 1.0, "max_tokens": 4, "ignore_eos": True, "n": n, **params})
    submit = Submit(request_id=first, stream_id=first, choice=0, token_ids=[1, 2, 3], params=wanted, seed=1)
    for choice in range(n):
        bench.tell(msgspec.structs.replace(submit, request_id=first + choice, choice=choice))
    return list(range(first, first + n))


def is_late(bench: Bench, ids: list[int]) -> None:
    """Its time is over."""
    for request_id in ids:
        bench.tell(CancelRequest(request_id, Cause.QUEUE))


def causes(bench: Bench, ids: list[int]) -> list[Cause | None]:
    return [bench.end(i).end.cause for i in ids]


@pytest.mark.parametrize("n", [1, 3])
def test_one_that_waits_is_ended(n):
    bench = Bench()
    ids = submit(bench, n)
    is_late(bench, ids)
    assert causes(bench, ids) == [Cause.QUEUE] * n


@pytest.mark.parametrize("n", [1, 3])
def test_one_that_runs_and_has_no_token_is_ended(n):
    bench = Bench()
    ids = submit(bench, n)
    bench.start()
    is_late(bench, ids)
    assert causes(bench, ids) == [Cause.QUEUE] * n


def test_one_whose_first_step_failed_is_ended():
    bench = Bench()
    ids = submit(bench)
    bench.start()
    bench.fail()
    is_late(bench, ids)
    assert causes(bench, ids) == [Cause.QUEUE]


def test_one_whose_first_step_was_lost_with_its_worker_is_ended():
    bench = Bench()
    ids = submit(bench)
    bench.start()
    bench.lose()
    is_late(bench, ids)
    assert causes(bench, ids) == [Cause.QUEUE]


def test_a_stream_one_choice_of_which_has_a_token_goes_on_with_all():
    bench = Bench(max_num_seqs=1)
    ids = submit(bench, 2)
    bench.step()
    bench.step()
    is_late(bench, ids)
    bench.run()
    assert [bench.end(i).end.finish_reason for i in ids] == ["length"] * 2


def test_a_stream_one_choice_of_which_has_ended_well_goes_on_with_the_other():
    bench = Bench(max_num_seqs=1)
    ids = submit(bench, 2, max_tokens=1)
    bench.step()
    bench.step()
    assert ids[0] not in bench.scheduler.requests
    is_late(bench, ids)
    bench.run()
    assert [bench.end(i).end.finish_reason for i in ids] == ["length"] * 2


@pytest.mark.parametrize("cause", [Cause.QUEUE, Cause.CLIENT])
def test_nothing_is_kept_of_a_stream_that_has_ended(cause):
    bench = Bench()
    for request_id in submit(bench, 3):
        bench.tell(CancelRequest(request_id, cause))
    assert not bench.scheduler._hurried
