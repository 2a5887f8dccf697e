"""A recording as a file: sections with a checksum each, so that a damaged one is told and nothing else is believed.

    "NOVAREC1" · (name, length, CRC-32, zlib data)… · an empty section "end."

The first section says what it is: JSON with the version, the date and the reason. Reading runs nothing that the file
says (see `pack`), and inflates no more than a recording of the file's size can hold.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgspec

from novainfer.fsm.recording.log import Image, Segment
from novainfer.fsm.recording.replay import DamagedRecording
from novainfer.fsm.text import TokenTable

MAGIC = b"NOVAREC1"
SUFFIX = ".novarec"
FILE_BYTES_MAX = 1 << 30  # the ring is 16 MiB; a snapshot of the largest engine is a tenth of this
# Inflated, all sections together: recordings shrink to a fourth or a tenth, zlib would allow a thousandth.
INFLATED_BYTES_MAX = 1 << 30
INFLATED_BYTES_FREE = 16 << 20
INFLATED_SHARE_MAX = 64
ZLIB_LEVEL = 3  # 16 MiB in a quarter of a second; 9 takes five times as long for 8 % less
_HEAD = struct.Struct(">4sII")


class About(msgspec.Struct, kw_only=True):
    """What a file says of itself; `created` in seconds since 1970."""

    version: str
    created: float
    reason: str
    message: str = ""


def encode_dump(image: Image, about: About) -> bytes:
    """The file's content."""
    encode = msgspec.msgpack.encode
    codes = (image.layout, image.lanes, image.codes, image.kinds, image.ended_us)
    parts = [MAGIC, _section(b"meta", msgspec.json.encode(about)), _section(b"code", encode(codes))]
    parts.append(_section(b"voca", encode((list(image.token_bytes), image.special_ids))))
    parts += [_section(b"segm", encode((s.began_us, s.snapshot, s.log))) for s in image.segments]
    parts += [_section(b"now.", image.now), _section(b"end.", b"")]
    return b"".join(parts)


def decode_dump(data: bytes) -> tuple[Image, About]:
    """What `encode_dump` wrote. Raises `DamagedRecording` with one sentence."""
    if data[: len(MAGIC)] != MAGIC:
        what = "an empty file" if not data else "another kind of file"
        raise DamagedRecording(f"this is not a recording of NovaInfer, but {what}")
    found: dict[bytes, list[bytes]] = {}
    at = len(MAGIC)
    room = min(INFLATED_BYTES_FREE + INFLATED_SHARE_MAX * len(data), INFLATED_BYTES_MAX)
    while b"end." not in found:
        name, body, at = _read_section(data, at, room)
        room -= len(body)
        found.setdefault(name, []).append(body)
    try:
        about = msgspec.json.decode(found[b"meta"][0], type=About)
        layout, lanes, codes, kinds, ended_us = _convert(found[b"code"][0], tuple[str, _Pairs, _Codes, _Kinds, int])
        token_bytes, special_ids = _convert(found[b"voca"][0], tuple[list[bytes], list[int]])
        segments = [Segment(*_convert(body, tuple[int, bytes, bytes])) for body in found[b"segm"]]
        image = Image(
            layout=layout,
            lanes=lanes,
            codes=codes,
            kinds=kinds,
            token_bytes=TokenTable.of(token_bytes),
            special_ids=special_ids,
            segments=segments,
            now=found[b"now."][0],
            ended_us=ended_us,
        )
    except (msgspec.MsgspecError, KeyError, ValueError, RecursionError) as error:
        raise DamagedRecording(f"the recording's parts do not fit together: {error}") from None
    return image, about


_Pairs = list[tuple[str, str]]
_Codes = list[tuple[int, str, str]]
_Kinds = list[tuple[str, list[str]]]


def _convert(data: bytes, kind: Any) -> Any:
    return msgspec.msgpack.decode(data, type=kind)


def _section(name: bytes, body: bytes) -> bytes:
    packed = zlib.compress(body, ZLIB_LEVEL)
    return _HEAD.pack(name, len(packed), zlib.crc32(packed, zlib.crc32(name))) + packed


def _read_section(data: bytes, at: int, room: int) -> tuple[bytes, bytes, int]:
    """A section's name and content, of at most `room` bytes, and where the next one begins."""
    begin = at + _HEAD.size
    if begin > len(data):
        raise DamagedRecording(f"the recording is cut off after {len(data)} bytes: its end is missing")
    name, length, checksum = _HEAD.unpack_from(data, at)
    if begin + length > len(data) and name in _NAMES:
        raise DamagedRecording(f"the recording is cut off after {len(data)} bytes: its end is missing")
    packed = data[begin : begin + length]
    if name not in _NAMES or zlib.crc32(packed, zlib.crc32(name)) != checksum:
        raise DamagedRecording(f"the recording is damaged: the checksum of what begins at byte {at} does not match")
    inflate = zlib.decompressobj()
    try:
        body = inflate.decompress(packed, room + 1)  # a limit of 0 would be none
    except zlib.error as error:
        raise DamagedRecording(f"the recording is damaged at byte {at}: {error}") from None
    if len(body) > room or inflate.unconsumed_tail:
        raise DamagedRecording(f"the recording is damaged: what begins at byte {at} is too large to be true")
    return name, body, begin + length


_NAMES = frozenset([b"meta", b"code", b"voca", b"segm", b"now.", b"end."])
