"""What a server holds when it is ready is left out of its garbage collections."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from novainfer.server.operate import garbage


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_there_when_the_server_is_ready_is_never_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    garbage.settle()
    assert gc.get_freeze_count() > 10_000
    assert not gc.get_objects(generation=2)
    assert gc.get_threshold() == (garbage.YOUNG, garbage.MIDDLE, garbage.OLD)


def test_a_server_whose_device_is_in_its_own_process_collects_what_a_mode_leaves_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    thresholds = gc.get_threshold()
    garbage.settle()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds


def test_what_the_last_requests_left_goes_while_the_server_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Knot:
        def __init__(self) -> None:
            self.itself = self

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    garbage.settle()
    knot = Knot()
    gone = weakref.ref(knot)
    gc.collect(1)  # it has outlived two collections
    del knot
    gc.collect(0)
    assert gone() is not None, "it waits for a full one"
    garbage.collect_when_idle()
    assert gone() is None


def test_a_model_that_was_there_for_good_and_is_let_go_is_collected_while_the_server_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Knot:
        def __init__(self) -> None:
            self.itself = self

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    knot = Knot()
    garbage.settle()
    gone = weakref.ref(knot)
    del knot
    garbage.collect_when_idle()
    gc.collect()
    assert gone() is not None, "it is left out of every collection"
    garbage.let_go()
    assert gone() is not None, "nothing stands still for it while requests wait"
    garbage.collect_when_idle()
    assert gone() is None
    assert gc.get_freeze_count() > 10_000
