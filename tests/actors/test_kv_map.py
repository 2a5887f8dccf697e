"""The map of blocks against an account of its own: by the tables of all requests and what the pool says."""

from __future__ import annotations

import random

import pytest

from novainfer.actors.inspection import kv_map as module
from novainfer.actors.inspection.frames import KvChange
from novainfer.actors.inspection.kv_map import CACHED, FREE, INDEX, OF_ENDED, STATES, STEP, KvPicture
from novainfer.fsm.schedule.request import Request
from tests.fsm.helpers import Bench


def owners(bench: Bench) -> list[Request]:
    """All requests that may have blocks."""
    departed = [request for flight in bench.scheduler.flights for request in flight.departed]
    return [*bench.scheduler.planner.running.values(), *departed]


class Account:
    """The map as a page has it, and what each block must be."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cache = bench.scheduler.planner.cache
        self.picture = KvPicture(self.cache)
        first = self.picture.map(4)
        self.owner, self.readers = bytearray(first.owner), bytearray(first.readers)
        self.evicted: list[int] = []

    def update(self) -> KvChange | None:
        change = self.picture.update(owners(self.bench))
        if change is not None:
            for block, owner, readers in change.blocks:
                self.owner[block], self.readers[block] = owner, readers
            self.evicted += change.evicted
        return change

    def check(self) -> None:
        now = self.picture.map(4)
        assert (now.owner, now.readers) == (bytes(self.owner), bytes(self.readers)), "changes add up to the map"
        having: dict[int, set[int]] = {}
        for request in owners(self.bench):
            for block in self.cache.table_of(request):
                having.setdefault(block, set()).add(INDEX.get(request.state, OF_ENDED))
        counts = [0] * len(self.owner)
        for request in owners(self.bench):
            for block in self.cache.table_of(request):
                counts[block] += 1
        assert list(self.readers) == counts
        for block, owner in enumerate(self.owner):
            num_owners, name = self.cache.look(block)
            if block in having:
                assert owner in having[block], (block, STATES[owner])
            else:
                assert owner == (STEP if num_owners else CACHED if name else FREE), (block, STATES[owner])


def some_requests(bench: Bench, chance: random.Random) -> None:
    """Prompts that begin alike, so that blocks are shared, and are not alike, so that they are evicted."""
    for _ in range(chance.randrange(3)):
        stem = [1 + chance.randrange(3)] * chance.choice((4, 8, 13))
        bench.submit(
            stem + [chance.randrange(1, 9) for _ in range(chance.randrange(1, 9))], max_tokens=chance.randrange(1, 20)
        )


@pytest.mark.parametrize("seed", range(12))
def test_the_map_is_right_after_every_step_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(num_blocks=24, num_host_blocks=8 if seed % 2 else 0)
    account = Account(bench)
    for _ in range(120):
        some_requests(bench, chance)
        live = list(bench.scheduler.requests)
        if live and chance.random() < 0.15:
            bench.cancel(chance.choice(live))
        if chance.random() < 0.1 and bench.plan is None:
            bench.start()
        if bench.plan is not None and chance.random() < 0.1:
            bench.fail()
        else:
            bench.step()
        if chance.random() < 0.7:  # what happens between two pictures is told by the next
            account.update()
            account.check()
    assert account.evicted
    assert max(account.readers) <= 8


def test_a_prefix_that_is_found_again_is_no_eviction_and_one_that_makes_room_is() -> None:
    bench = Bench(num_blocks=8)
    account = Account(bench)
    bench.submit([1] * 12, max_tokens=1)
    for _ in range(3):
        bench.step()
    account.update()
    assert bytes(account.owner).count(CACHED) >= 2
    bench.submit([1] * 12, max_tokens=1)
    bench.step()
    account.update()
    assert account.evicted == []
    for _ in range(3):
        bench.step()
    account.update()
    bench.submit([2] * 28, max_tokens=1)
    bench.step()
    account.update()
    assert account.evicted
    account.check()


def test_what_nobody_has_is_looked_at_in_turn_and_faster_where_the_counts_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOKED_AT_MAX", 2)
    monkeypatch.setattr(module, "LOOKED_AT_MORE", 8)
    bench = Bench(num_blocks=16)
    account = Account(bench)
    bench.submit([1] * 20, max_tokens=1)
    for _ in range(3):
        bench.step()
    account.update()
    assert CACHED in account.owner
    bench.scheduler.planner.cache.forget()  # cached blocks lose their names, and no request changes
    for _ in range(3):
        account.update()
    assert CACHED not in account.owner
    account.check()


def test_a_cache_of_another_size_is_another_one() -> None:
    bench = Bench(num_blocks=8)
    picture = KvPicture(bench.scheduler.planner.cache)
    assert picture.is_of(bench.scheduler.planner.cache)
    bench.scheduler.planner.cache.refit(12, 0)
    assert not picture.is_of(bench.scheduler.planner.cache)


def test_a_cache_without_blocks_as_while_a_worker_starts_is_a_map_of_none() -> None:
    account = Account(Bench(num_blocks=0))
    assert account.update() is None
    account.check()
    assert account.picture.map(4).total == 0
