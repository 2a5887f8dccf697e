"""Frames: what was said is what is heard, however the bytes come; what is no frame is refused in one sentence."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from novainfer.actors.device import wire
from novainfer.actors.device.faulty import Injection
from novainfer.actors.device.spec import FactorySpec
from novainfer.actors.device.wire import (
    FROM_DEVICE,
    TO_DEVICE,
    Beat,
    FrameReader,
    FrameWriter,
    Hello,
    LinkError,
    LogLine,
    UnsendableError,
)
from novainfer.fsm.messages.events import (
    Close,
    Fault,
    Fit,
    JobDone,
    JobFailed,
    Load,
    Run,
    StepFailed,
    Switch,
)
from novainfer.fsm.messages.step import SeqParams, StepDone, StepPlan
from novainfer.fsm.simulation.world.shape import LEAN, SAFE

PLAN = StepPlan(
    step_id=2**40,
    epoch=3,
    slots=[0, 1],
    query_lens=[2, 1],
    context_lens=[2, 9],
    input_ids=[1, 2, 3],
    table_slots=[0],
    table_indexes=[0],
    table_blocks=[5],
    sample_seqs=[0, 1],
    admissions=[
        SeqParams(
            slot=0,
            repetition_penalty=1.5,
            seed=2**64 - 1,
            num_prompt_tokens=2,
            stop_token_ids=[7],
            logit_bias={3: -1.5},
            token_ids=[1, 2],
        ),
        SeqParams(slot=1, seed=-(2**63)),
    ],
    num_drafts=[1, 0],
    num_drafts_wanted=[0, 3],
    mask_positions=[1],
    masks=b"\x00\xff\x01\x80" * 2,
    swap_out_blocks=[1],
    swap_out_hosts=[2],
    copy_from_blocks=[3],
    copy_to_blocks=[4],
    mode=LEAN,
)
TO = [
    Hello(FactorySpec("a:b", {"x": [1, "y"]}), 10),
    Load(3),
    Fit(3, 17),
    Fit(3),
    Run(PLAN),
    Switch(SAFE, 3),
    Injection(kind="exception", slot=4, num_steps=2),
    Close(3),
]
FROM = [
    Beat(),
    LogLine("novainfer.x", 20, "hello"),
    JobDone("Load", {"modes": ["full"], "n": 1}, 3),
    JobFailed("Fit", "too small", 3),
    StepDone(1, 3, [5], [(-0.5, [1, 2], [-0.5, float("-inf")]), None]),
    StepDone(1, 3, [5, 6, 7], num_tokens=[2, 1], draft_token_ids=[[8], []], draft_error="no"),
    StepFailed(1, 3, Fault.OOM, "short", launched=False),
]


@pytest.mark.parametrize(("kinds", "messages"), [(TO_DEVICE, TO), (FROM_DEVICE, FROM)], ids=["to", "from"])
@given(sizes=st.lists(st.integers(1, 40), min_size=1), epoch=st.integers(-1, 2**40))
def test_what_was_said_is_heard_however_the_bytes_come(
    kinds: dict[str, type], messages: list[Any], sizes: list[int], epoch: int
) -> None:
    writer, reader = FrameWriter(), FrameReader(kinds)
    data = b"".join(writer.frame(epoch, message) for message in messages)
    heard: list[Any] = []
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        heard += reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert heard == [(epoch, message) for message in messages]


def frame(*body: Any) -> bytes:
    data = msgspec.msgpack.encode(list(body))
    return struct.pack("!I", len(data)) + data


NO_FRAMES: dict[str, tuple[bytes, str]] = {
    "too long": (struct.pack("!I", 2**28 + 1), "a frame of 268435457 bytes"),
    "no msgpack": (struct.pack("!I", 3) + b"\xc1\xc1\xc1", "cannot be read"),
    "no array": (struct.pack("!I", 1) + b"\x05", "cannot be read"),
    "unknown": (frame(0, 0, "Hello", {}), "a message 'Hello', which is not known here"),
    "wrong body": (frame(0, 0, "StepDone", {"step_id": "x"}), "cannot be read"),
    "out of order": (frame(0, 1, "Beat", {}), "frame 1 came where frame 0 was due"),
    "twice": (frame(0, 0, "Beat", {}) * 2, "frame 0 came where frame 1 was due"),
}


@pytest.mark.parametrize("name", NO_FRAMES)
def test_what_is_no_frame_is_refused_in_one_sentence(name: str) -> None:
    data, said = NO_FRAMES[name]
    with pytest.raises(LinkError, match=said):
        list(FrameReader(FROM_DEVICE).feed(data))


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_waits_for_more(data: bytes) -> None:
    try:
        heard = list(FrameReader(FROM_DEVICE).feed(data))
    except LinkError:
        return
    assert not heard


def test_what_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 100)
    writer = FrameWriter()
    with pytest.raises(UnsendableError, match=r"a Run of \d+ bytes is too large"):
        writer.frame(0, Run(PLAN))
    assert list(FrameReader(FROM_DEVICE).feed(writer.frame(0, Beat()))) == [(0, Beat())], "and no number is missing"
