"""Recordings that are damaged in every way: a sentence and exit code 2, or a replay; and bounded memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from functools import cache
from pathlib import Path

import pytest

from novainfer.fsm.recording.dumpfile import INFLATED_BYTES_FREE, MAGIC, About, decode_dump, encode_dump
from novainfer.fsm.recording.replay import DamagedRecording, replay
from novainfer.server.cli.main import main
from tests.simulation.test_replay import record

HEAD = struct.Struct(">4sII")
NAMES = [b"meta", b"code", b"voca", b"segm", b"now.", b"end."]
NESTED = b"\x91" * 3000  # msgpack: lists in lists
SMALL = [b"", b"\x00", b"\xff" * 9, b"\xc0", b"\x90", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"{}", NESTED]
WORDS = [
    b"\xc4\xff",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7,
    b"\xa2\xed\xa0",
    b"\xa1\x1b",
    b"\x80",
    b"\xcb\x7f\xf8",
]


@cache
def recording() -> bytes:
    return encode_dump(record(1)[0], About(version="0.1.0", created=1.8e9, reason="test", message="a message"))


def sections(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], len(MAGIC)
    while at < len(data):
        name, size, _ = HEAD.unpack_from(data, at)
        at += HEAD.size
        found.append((name, zlib.decompress(data[at : at + size])))
        at += size
    return found


def joined(parts: list[tuple[bytes, bytes]]) -> bytes:
    """A file whose checksums are right, whatever it holds."""
    packed = [(name, zlib.compress(body, 1)) for name, body in parts]
    return MAGIC + b"".join(HEAD.pack(n, len(p), zlib.crc32(p, zlib.crc32(n))) + p for n, p in packed)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """`data` with bytes changed, taken out, put in, or said twice."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at, size = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 4, 30])
        kind = rng.randrange(5)
        if kind == 0 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + size :]
        elif kind == 2:
            data = data[:at] + rng.choice([*WORDS, *SMALL]) + data[at + size * rng.randrange(2) :]
        elif kind == 3:
            data = data[:at] + data[at : at + size] + data[at:]
        else:
            data = data[:at]
    return data


def mutation(seed: int) -> bytes:
    """A damaged recording: half of them at the surface, half with checksums that are right."""
    rng = random.Random(seed)
    if rng.random() < 0.3:
        return damaged(rng, recording())
    parts = sections(recording())
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(parts))
        name, body = parts[at]
        kind = rng.randrange(8)
        if kind == 0:
            parts.pop(at)
        elif kind == 1:
            parts.insert(rng.randrange(len(parts) + 1), (rng.choice(NAMES), body))
        elif kind == 2:
            parts[at] = (name, rng.choice([*SMALL, parts[rng.randrange(len(parts))][1]]))
        else:
            parts[at] = (name, damaged(rng, body))
        parts = parts or [(b"end.", b"")]
    return joined(parts)


def is_told(data: bytes) -> bool:
    """Whether `data` was refused in one sentence; if not, its replay had an end."""
    try:
        image, _ = decode_dump(data)
        replay(image, check=True)
    except DamagedRecording as error:
        return len(str(error).splitlines()) == 1
    return False


def said_of(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `novainfer replay` says of a file that it cannot read."""
    assert main(["replay", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.slow
def test_damaged_recordings_are_told_in_a_sentence_or_replayed() -> None:
    told = sum(is_told(mutation(seed)) for seed in range(250))
    assert 125 < told < 250  # the others were damaged where it shows as a difference


@pytest.mark.long
def test_twenty_thousand_damaged_recordings_are_told_in_a_sentence_or_replayed() -> None:
    assert sum(is_told(mutation(seed)) for seed in range(20_000)) > 10_000


def test_text_that_is_no_utf_8_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = b"\x95\xa1\xff\x90\x90\x90\x00"
    path = tmp_path / "x.novarec"
    path.write_bytes(joined([(name, code if name == b"code" else body) for name, body in sections(recording())]))
    assert "do not fit together" in said_of(path, capsys)


def test_a_small_file_takes_no_more_memory_than_a_recording_of_its_size() -> None:
    bomb = joined([(b"segm", bytes(3 * INFLATED_BYTES_FREE))] * 4)
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(DamagedRecording, match="too large to be true"):
            decode_dump(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * INFLATED_BYTES_FREE + 128 * len(bomb)
    finally:
        tracemalloc.stop()


def test_lists_in_lists_without_end_are_told() -> None:
    for name in (b"code", b"voca", b"segm", b"now."):
        parts = [(n, NESTED if n == name else body) for n, body in sections(recording())]
        assert is_told(joined(parts))


def test_what_has_no_end_is_no_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a recording" in said_of(Path("/dev/zero"), capsys)


def test_what_a_file_says_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.novarec"
    image, _ = decode_dump(recording())
    path.write_bytes(encode_dump(image, About(version="\x1b[2J", created=1.8e9, reason="\x1b]0;", message="a\nb\x07")))
    assert main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "\\x1b[2J" in out
