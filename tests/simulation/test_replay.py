"""Recordings of simulated worlds: every kind of fault, replayed to the same transitions, or told where they differ."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import msgspec
import pytest

from novainfer.fsm.messages.events import Cancel, Cause
from novainfer.fsm.recording.dumpfile import About, decode_dump, encode_dump
from novainfer.fsm.recording.log import CALLED, CODES_FIRST, CODES_MAX, RAISED, Image, Recording, entries, varint
from novainfer.fsm.recording.pack import Kinds, pack
from novainfer.fsm.recording.replay import DamagedRecording, Replayed, replay, slim
from novainfer.fsm.simulation.bugs.mutants import Mutant, planted
from novainfer.fsm.simulation.bugs.planted import MUTANTS
from novainfer.fsm.simulation.swarm.recorded import RecordedWorld
from novainfer.fsm.simulation.swarm.swarm import Seed
from novainfer.fsm.text import TokenTable

pytestmark = pytest.mark.timeout(1800)
ABOUT = About(version="0.1.0", created=1.8e9, reason="test")
WRAPPED_BYTES = 6000  # a segment of a few dozen messages: most worlds go round their ring


class SmallRing(RecordedWorld):
    """A world whose ring holds a handful of short segments."""

    segment_bytes = WRAPPED_BYTES
    ring_bytes = 6 * WRAPPED_BYTES


class Wrapped(RecordedWorld):
    """A world whose ring drops nearly everything."""

    segment_bytes = 1000
    ring_bytes = 4000


def record(seed: int, world_type: type[RecordedWorld] = SmallRing) -> tuple[Image, Counter[str]]:
    """What one seed's recorder holds at its end, and the faults that there were."""
    drawn = Seed(seed, world_type=world_type)
    with suppress(AssertionError):  # a finding of the simulator's tests; its recording must be as good as any
        drawn.run()
    assert isinstance(drawn.world, RecordedWorld)
    return drawn.world.image(), drawn.world.counts


def through_a_file(image: Image) -> Image:
    return decode_dump(encode_dump(image, ABOUT))[0]


def assert_same(
    seeds: Iterable[int], world_type: type[RecordedWorld] = SmallRing
) -> tuple[list[Replayed], Counter[str]]:
    found: list[Replayed] = []
    faults: Counter[str] = Counter()
    for seed in seeds:
        image, counts = record(seed, world_type)
        found.append(replay(through_a_file(image)))
        assert found[-1].is_same, f"seed {seed}: {found[-1].difference}"
        faults += counts
    return found, faults


@pytest.mark.slow
def test_replays_of_worlds_full_of_faults_take_the_same_transitions() -> None:
    found, faults = assert_same(range(40))
    assert sum(r.events for r in found) > 10_000
    assert {"oom", "exception", "cancel", "duplicate"} <= faults.keys()


@pytest.mark.slow
def test_a_ring_that_was_wrapped_is_replayed_from_its_oldest_segment() -> None:
    found, _ = assert_same(range(40, 60), Wrapped)
    assert sum(r.segments > 1 for r in found) >= 15


@pytest.mark.long
def test_a_thousand_random_worlds_are_replayed_without_a_difference() -> None:
    found, faults = assert_same(range(1000))
    assert sum(r.segments > 1 for r in found) > 300
    assert all(faults[kind] > 50 for kind in ("oom", "exception", "cancel", "duplicate", "timeout", "stop", "drain"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "a rollback keeps the slot",
        "a slot is not given back",
        "the engine takes a late StepDone for the current one",
        "part of a stop string is sent",
        "a character is split",
        "min_tokens is not heeded",
        "nobody resumes a request",
        "a stop does not reach the streams",
    ],
)
def test_a_machine_that_was_changed_is_told_from_the_one_that_was_recorded(name: str) -> None:
    (mutant,) = [m for m in MUTANTS if m.name == name]
    assert any(differs_under(mutant, seed) for seed in range(60)), f"nothing was seen of: {name}"


def differs_under(mutant: Mutant, seed: int) -> bool:
    image, _ = record(seed)
    with planted(mutant):
        found = replay(image)
    if found.difference is not None:
        assert str(found.difference).startswith(f"segment {found.segments}, entry ")
        assert len(found.difference.what) > 20
    return not found.is_same


def crashed() -> tuple[Mutant, Image]:
    """A recording of a machine that raised, and the bug that made it raise."""
    (mutant,) = [m for m in MUTANTS if m.name == "the engine takes a late StepDone for the current one"]
    with planted(mutant):
        for seed in range(60):
            image, _ = record(seed)
            if replay(image).reproduced is not None:
                return mutant, image
    raise AssertionError("nothing raised")


@pytest.mark.slow
def test_an_exception_that_was_recorded_comes_again_until_it_is_fixed() -> None:
    mutant, image = crashed()
    with planted(mutant):
        found = replay(image)
    assert found.is_same
    assert found.reproduced is not None
    assert found.reproduced.startswith("scheduler in FULL when MakeBatch came: AssertionError: ")
    fixed = replay(image)
    assert fixed.reproduced is None
    assert fixed.difference is not None or fixed.is_gone
    assert not fixed.is_same


def test_an_exception_that_does_not_come_any_more_is_gone() -> None:
    image, _ = record(1)
    segment = image.segments[-1]
    lane = image.lanes.index(("", "gate"))
    # Somebody says that the gate raised at the last thing it was told.
    event = pack(Cancel(0, Cause.CLIENT), kinds := Kinds(image.kinds))
    called = msgspec.msgpack.encode((5, lane, event))
    raised = msgspec.msgpack.encode((lane, "CLOSED", "Cancel", "AssertionError", "a bug"))
    log = segment.log + entry(CALLED, called) + entry(RAISED, raised)
    wrong = msgspec.structs.replace(
        image, kinds=kinds.names, segments=[*image.segments[:-1], msgspec.structs.replace(segment, log=log)]
    )
    found = replay(wrong)
    assert found.is_gone
    assert not found.is_same
    assert found.difference is None


def entry(tag: int, body: bytes) -> bytes:
    return (tag << 32 | len(body)).to_bytes(5, "big") + body


def test_who_owns_what_is_checked_too() -> None:
    """A bug that no machine notices is a violation, at the end, or with `check` where it happens."""
    (mutant,) = [m for m in MUTANTS if m.name == "blocks are released twice"]
    assert replay(record(1)[0], check=True).violation is None
    with planted(mutant):
        for seed in range(20):
            found = replay(image := record(seed)[0], check=True)
            if found.violation is not None:
                break
        assert ": 'references " in str(found.violation)
        assert replay(image).violation is not None


def test_a_replay_needs_only_the_tokens_that_were_sampled() -> None:
    image = next(image for image, _ in map(record, range(100)) if 20 < replay(image).tokens < 60)
    small = slim(image)
    assert sum(map(bool, small.token_bytes)) < sum(map(bool, image.token_bytes))
    assert replay(small).is_same
    none = msgspec.structs.replace(image, token_bytes=TokenTable.of([b""] * len(image.token_bytes)))
    assert not replay(none).is_same


# ---- damage --------------------------------------------------------------------------------------------------------


def test_every_truncation_is_told() -> None:
    data = encode_dump(record(1)[0], ABOUT)
    for size in [*range(200), *range(200, len(data), 97), len(data) - 1]:
        with pytest.raises(DamagedRecording, match=r"cut off|not a recording"):
            decode_dump(data[:size])


def test_every_flipped_bit_is_told() -> None:
    data = encode_dump(record(1)[0], ABOUT)
    for at in range(0, len(data), 13):
        flipped = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        with pytest.raises(DamagedRecording, match=r"damaged|cut off|not a recording"):
            decode_dump(flipped)


def test_a_section_that_inflates_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_dump(record(1)[0], ABOUT)
    monkeypatch.setattr("novainfer.fsm.recording.dumpfile.INFLATED_BYTES_MAX", 50)
    with pytest.raises(DamagedRecording, match="too large"):
        decode_dump(data)


@pytest.mark.slow
def test_a_file_with_right_checksums_and_nonsense_in_it_is_damaged_and_nothing_worse() -> None:
    image, _ = record(1)
    for at in range(0, min(len(image.segments[0].log), 3000), 7):
        segment = image.segments[0]
        log = segment.log[:at] + bytes([segment.log[at] ^ 0x55]) + segment.log[at + 1 :]
        wrong = msgspec.structs.replace(image, segments=[msgspec.structs.replace(segment, log=log)])
        with suppress(DamagedRecording):
            replay(wrong)


def test_the_same_recording_gives_the_same_file() -> None:
    first, second = (encode_dump(record(5)[0], ABOUT) for _ in range(2))
    assert zlib.crc32(first) == zlib.crc32(second)


# ---- the encoding --------------------------------------------------------------------------------------------------


def test_codes_and_varints_of_every_size_are_read_back() -> None:
    image, _ = record(1)
    recording = Recording.__new__(Recording)
    recording._codes = []
    codes = [recording._new_code(0, str(i), "b") for i in range(CODES_MAX)]
    assert len(set(codes)) == CODES_MAX
    assert [tag - CODES_FIRST for tag, _ in entries(b"".join(codes))] == list(range(CODES_MAX))
    with pytest.raises(AssertionError):
        recording._new_code(0, "one too many", "b")
    for number in (0, 127, 128, 16_383, 16_384, 2**40):
        assert [body for _, body in entries(b"\x06" + varint(number))] == [number]
    assert image.codes


def test_what_another_version_has_written_is_told_as_such() -> None:
    """An attribute that this version's machines have, and its machines had not."""
    image, _ = record(0)
    kinds = [
        (name, ["_was_called_so" if x == "_finished" and name.endswith(":Scheduler") else x for x in fields])
        for name, fields in image.kinds
    ]
    with pytest.raises(DamagedRecording, match="its Scheduler has no '_finished', so another version"):
        replay(msgspec.structs.replace(image, kinds=kinds))
