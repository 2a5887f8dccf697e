"""What is remembered of requests that have ended: their names, and not more for one that had many prompts."""

from __future__ import annotations

import tracemalloc

from novainfer.server.directory import FINISHED_MAX, RequestDirectory


def test_an_ended_request_is_found_by_its_names_and_by_those_of_its_prompts() -> None:
    directory = RequestDirectory()
    live = directory.open("cmpl", "mine", 3, owner="alice")
    found = live.engine_ids
    assert found == ["0.cmpl-mine-0", "0.cmpl-mine-1", "0.cmpl-mine-2"]
    directory.close(live)
    alone = directory.open("cmpl", "other", 1, owner="alice")
    directory.close(alone)
    for sees in ("alice", None):
        assert directory.engine_ids("mine", sees) == directory.engine_ids("cmpl-mine", sees) == set(found)
        assert directory.engine_ids("cmpl-mine-1", sees) == {found[1]}
        assert directory.engine_ids("other", sees) == {"1.cmpl-other"}
    assert directory.engine_ids("mine", "bob") == set()


def test_requests_of_many_prompts_that_have_ended_are_as_small_as_others() -> None:
    directory = RequestDirectory()
    tracemalloc.start()
    try:
        for number in range(100):
            directory.close(directory.open("cmpl", f"{number}", 2048))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(directory.engine_ids("99")) == 2048
    assert held_bytes < 200_000  # a kilobyte for each of 200 names; each of the prompts would take some 70 bytes more


def test_the_oldest_names_are_forgotten() -> None:
    directory = RequestDirectory()
    for number in range(FINISHED_MAX // 2 + 1):  # each has two
        directory.close(directory.open("cmpl", f"{number}", 1))
    assert directory.engine_ids("0") == set()
    assert directory.engine_ids("1") == {"1.cmpl-1"}
