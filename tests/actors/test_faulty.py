"""Injected faults: each comes when it is due, as often as was asked, and no longer."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from novainfer.actors.device import faulty
from novainfer.actors.device.fake import FakeDevice
from novainfer.actors.device.faulty import FaultyDevice, injection
from novainfer.actors.device.link import ThreadLink
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.step import SeqParams
from tests.actors.links import plan


def outcomes(device: FaultyDevice, *steps: tuple[int, ...]) -> list[str]:
    """What becomes of a step with these slots, one after the other."""
    found = []
    for slots in steps:
        try:
            device.run(plan(slots=slots))
            found.append("done")
        except Exception as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize(("kind", "error"), [("oom", "MemoryError"), ("exception", "RuntimeError")])
def test_as_many_steps_fail_as_were_asked(kind: str, error: str) -> None:
    device = FaultyDevice(FakeDevice())
    assert outcomes(device, (0,)) == ["done"]
    device.arm(injection(kind, {"num_steps": 2}))
    assert outcomes(device, (0,), (1,), (0,)) == [error, error, "done"]


@pytest.mark.parametrize("kind", ["oom", "exception", "eat_memory"])
def test_a_fault_of_one_slot_follows_it_until_it_stands_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MemoryError

    monkeypatch.setattr(faulty, "_eat_memory", refuse)
    device = FaultyDevice(FakeDevice())
    device.arm(injection(kind, {"slot": 2, "num_steps": 100}))
    steps = [(0, 1, 2, 3), (0, 1), (2, 3), (3,), (2,), (2,)]
    failed = "RuntimeError" if kind == "exception" else "MemoryError"
    assert outcomes(device, *steps) == [failed, "done", failed, "done", failed, "done"]


def test_a_fault_whose_request_has_left_holds_up_no_other_and_hits_nobody_who_gets_its_slot() -> None:
    device = FaultyDevice(FakeDevice())
    device.arm(injection("exception", {"slot": 2, "num_steps": 100}))
    device.arm(injection("oom", {}))
    assert outcomes(device, (0,), (0,)) == ["MemoryError", "done"]
    device.run(msgspec.structs.replace(plan(slots=(2,)), admissions=[SeqParams(slot=2)]))
    assert outcomes(device, (2,)) == ["done"]


def test_faults_come_one_after_the_other() -> None:
    device = FaultyDevice(FakeDevice())
    device.arm(injection("oom", {}))
    device.arm(injection("exception", {}))
    assert outcomes(device, (0,), (0,), (0,)) == ["MemoryError", "RuntimeError", "done"]


def test_a_stall_is_a_step_that_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faulty.time, "sleep", slept.append)
    device = FaultyDevice(FakeDevice())
    device.arm(injection("stall", {"seconds": 7.5}))
    assert outcomes(device, (0,), (0,)) == ["done", "done"]
    assert slept == [7.5]


def test_a_stall_of_one_slot_slows_each_of_its_steps_also_those_that_hold_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faulty.time, "sleep", slept.append)
    device = FaultyDevice(FakeDevice())
    device.arm(injection("stall", {"seconds": 0.5, "num_steps": 3, "slot": 2}))
    assert outcomes(device, (2,), (0, 2), (0,)) == ["done", "done", "done"]
    assert slept == [0.5, 0.5]
    assert outcomes(device, (2,), (2,)) == ["done", "done"]
    assert slept == [0.5, 0.5, 0.5]


@pytest.mark.skipif(sys.platform != "linux", reason="limits address space")
def test_eaten_memory_is_a_real_refusal_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    device = FaultyDevice(FakeDevice())
    device.arm(injection("eat_memory", {}))
    with pytest.raises(MemoryError, match=r"no memory left after \d+ MiB"):
        device.run(plan())
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(2 * faulty.EATEN_MIB_MAX * faulty.MIB)) > 0
    assert outcomes(device, (0,)) == ["done"]


@pytest.mark.parametrize(
    ("kind", "how", "said"),
    [
        ("flood", {}, "there is no fault 'flood': it is one of oom, exception, stall"),
        ("oom", {"steps": 3}, "unknown field `steps`"),
        ("oom", {"num_steps": "3"}, "num_steps"),
        ("oom", {"num_steps": 0}, "num_steps must be more than 0"),
        ("stall", {"seconds": 1e9}, "seconds must be more than 0 and at most 3600"),
        ("stall", {"seconds": float("nan")}, "seconds must be"),
    ],
)
def test_a_fault_that_is_none_is_refused(kind: str, how: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        injection(kind, how)


@pytest.mark.parametrize("kind", ["hang", "freeze", "kill", "eat_memory"])
async def test_a_thread_refuses_what_would_take_the_engine_with_it(kind: str) -> None:
    link = ThreadLink(FakeDevice(), print)
    with pytest.raises(InvalidParameter, match=f'a fault "{kind}" needs a worker in a process of its own'):
        link.inject(kind)
