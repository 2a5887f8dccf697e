"""The store of responses: what it holds is counted, and bounded, whatever is done to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from novainfer.server.http.errors import ResponseNotFound, StoreFull
from novainfer.server.store import EVENT_BYTES, ITEM_BYTES, RECORD_BYTES, Record, ResponseStore, Turn

MOST, MOST_BYTES, TTL_S = 4, 16_000, 10.0


def held_bytes(store: ResponseStore) -> int:
    """All that the store holds, counted anew."""
    turns: dict[int, Turn] = {}
    num_bytes = 0
    for record in store._all.values():
        num_bytes += RECORD_BYTES + sum(len(event) + EVENT_BYTES for event in record.events or ())
        num_bytes += len(record.answer or b"") + ITEM_BYTES * len(record.item_ids)
        turns |= {id(turn): turn for turn in record.turn}
    return num_bytes + sum(len(turn.given) + len(turn.made) for turn in turns.values())


class Stores(RuleBasedStateMachine):
    running: Bundle[Record] = Bundle("running")
    ended: Bundle[Record] = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_opened = 0
        self.store = ResponseStore(MOST, MOST_BYTES, TTL_S, lambda: self.now_s)
        self.is_beyond = False  # one that has failed for want of room has an end all the same

    def _open(self, before: Turn | None, size: int) -> Any:
        self.num_opened += 1
        try:
            return self.store.open(f"r{self.num_opened}", "", before=before, given=b"x" * size, has_events=True)
        except StoreFull:
            assert all(not record.is_over for record in self.store._all.values())
            return None

    @rule(target=running, size=st.integers(2, 3000))
    def begin(self, size: int) -> Any:
        return self._open(None, size)

    @rule(target=running, record=ended, size=st.integers(2, 3000))
    def go_on(self, record: Record, size: int) -> Any:
        return None if record is None or record.is_dropped else self._open(record.turn, size)

    @rule(record=running, size=st.integers(0, 3000))
    def grow(self, record: Record, size: int) -> None:
        if record is not None and not record.is_over:
            try:
                record.add(b"x" * size)
            except StoreFull:
                assert all(not one.is_over for one in self.store._all.values())
                record.drop()

    @rule(target=ended, record=consumes(running), size=st.integers(2, 3000))
    def end(self, record: Record, size: int) -> Any:
        if record is not None and not record.is_dropped:
            record.end(b"x" * size, b"x" * size, [f"{record.id}-a"])
            assert not record.is_dropped, "others make room for it"
            assert self.store.find_maker(f"{record.id}-a", None) is record
            self.is_beyond = len(self.store._ended) == 1
        return record

    @rule(record=ended)
    def look(self, record: Record) -> None:
        if record is None:
            return
        try:
            assert self.store.find(record.id, None) is record
        except ResponseNotFound:
            assert record.is_dropped
        else:
            assert not record.is_dropped

    @rule(record=consumes(ended))
    def drop(self, record: Record) -> None:
        if record is not None:
            record.drop()
            record.drop()

    @rule(seconds=st.floats(0.1, 6.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.store.sweep()
        assert all(record.used_s + TTL_S > self.now_s for record in self.store._ended.values())

    @invariant()
    def all_is_counted(self) -> None:
        assert self.store.num_bytes == held_bytes(self.store)
        assert set(self.store._ended) == {one.id for one in self.store._all.values() if one.is_over}
        assert set(self.store._makers.values()) == set(self.store._ended.values())

    @invariant()
    def all_is_bounded(self) -> None:
        assert len(self.store) <= MOST
        assert self.store.num_bytes <= MOST_BYTES or self.is_beyond


Stores.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStores = Stores.TestCase


def test_a_conversation_is_there_once_however_many_hold_it():
    store = ResponseStore(100, 1_000_000, TTL_S)
    first = store.open("a", "", given=b"x" * 1000)
    first.end(b"{}", b"y" * 1000, [])
    one = store.num_bytes
    others = [store.open(f"b{i}", "", before=first.turn) for i in range(10)]
    assert store.num_bytes == one + 10 * (RECORD_BYTES + 4)
    first.drop()
    assert [turn.given[:1] for turn in others[0].turn] == [b"x", b"["]
    for other in others:
        other.drop()
    assert store.num_bytes == 0


def test_of_others_there_is_none():
    store = ResponseStore(10, 1_000_000, TTL_S)
    store.open("a", "me")
    assert store.find("a", "me") is store.find("a", None)
    with pytest.raises(ResponseNotFound, match="Response with id 'a' not found"):
        store.find("a", "you")


def test_who_reads_on_keeps_it():
    store = ResponseStore(2, 1_000_000, TTL_S)
    first, second = store.open("a", ""), store.open("b", "")
    for record in (first, second):
        record.end(b"{}", b"[]", [])
    first.use()
    store.open("c", "")
    assert (first.is_dropped, second.is_dropped) == (False, True)


def test_who_is_asked_for_goes_after_those_who_are_not_and_lives_longer():
    now_s = 0.0
    store = ResponseStore(2, MOST_BYTES, TTL_S, lambda: now_s)
    for name in ("a", "b"):
        store.open(name, "").end(b"{}", b"[]", [f"{name}-item"])
    store.find("a", None)
    store.open("c", "").end(b"{}", b"[]", [])
    with pytest.raises(ResponseNotFound):
        store.find("b", None)
    now_s = TTL_S - 1
    store.find_maker("a-item", None)
    now_s = TTL_S + 1
    store.find("a", None)
    with pytest.raises(ResponseNotFound):
        store.find("c", None)
