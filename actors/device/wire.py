"""What goes over the socket to a device's process: frames of four bytes of length and as much msgpack.

A frame is [epoch, seq, name, body]. The epoch says for which worker it is meant, or from which it comes; `seq` counts
the frames of one direction, so that one that is lost or comes twice is seen. The bodies are the jobs and answers of
`novainfer.fsm.messages.events`, and the few messages below that only the two ends of the link know.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from novainfer.actors.device.faulty import Injection
from novainfer.actors.device.location import ModelLocation
from novainfer.actors.device.spec import DeviceSpec
from novainfer.fsm.messages.events import (
    Close,
    Fit,
    JobDone,
    JobFailed,
    Load,
    Reclaim,
    Run,
    StepFailed,
    Switch,
    Warm,
)
from novainfer.fsm.messages.step import StepDone, StepMasks

# The largest is a plan that brings the tokens so far of many long requests with penalties (256 times 32k tokens are
# 40 MB); a length beyond this can only be garbage.
FRAME_BYTES_MAX = 2**28
LENGTH = struct.Struct("!I")
# What msgspec raises for what its format does not have: an integer beyond 64 bits, half of a surrogate pair (a
# ValueError), a type of its own, lists without end.
UNENCODABLE = (OverflowError, ValueError, TypeError, NotImplementedError, RecursionError)
RECV_BYTES = 2**18
# Exit codes of a device's process.
EXIT_ORPHANED = 70  # the process it worked for is gone
EXIT_LINK = 71  # it was told something it does not understand
EXIT_UNUSABLE = 72  # its device can compute nothing any more
EXIT_MEMORY = 73  # there was no memory for so much as to listen


class LinkError(Exception):
    """The other end does not speak this language; one sentence says what came."""


class UnsendableError(Exception):
    """A message that no frame can carry, in one sentence: nothing of it was sent, and the link goes on without it."""


class Hello(msgspec.Struct, frozen=True):
    """The first frame to a device's process: which device it is to be, and from which level on its log matters.

    `weights_fd` is a file in memory that the process has inherited, for the weights of all processes of this engine.
    """

    spec: DeviceSpec
    log_level: int
    weights_fd: int | None = None


class Beat(msgspec.Struct, frozen=True):
    """A sign of life."""


class Ping(msgspec.Struct, frozen=True):
    """Say something: a spare is asked so before it takes over, and answers with a Beat."""


class Unsent(msgspec.Struct, frozen=True):
    """A step that no frame can carry: `failed` is its answer, which comes back in its turn, behind those before it."""

    failed: StepFailed


class WithoutGraphs(msgspec.Struct, frozen=True):
    """The device is lost to the capture of CUDA graphs: the next one shall do without."""


class Progress(msgspec.Struct, frozen=True):
    """So many tensors of all have been read."""

    num_done: int
    num_all: int


class LogLine(msgspec.Struct, frozen=True):
    """A line for the log, which is the other process's."""

    logger: str
    level: int
    text: str


def _names(*kinds: type) -> dict[str, type]:
    return {kind.__name__: kind for kind in kinds}


TO_DEVICE = _names(Hello, Ping, Load, Fit, Warm, Run, StepMasks, Unsent, Switch, Reclaim, Close, Injection)
FROM_DEVICE = _names(Beat, Progress, WithoutGraphs, LogLine, JobDone, JobFailed, StepDone, StepFailed)


class FrameWriter:
    """Makes the frames of one direction."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_location)
        self._seq = 0

    def frame(self, epoch: int, message: Any) -> bytes:
        """The bytes of one message; raises `UnsendableError` when they are too many, or there are none for it."""
        name = type(message).__name__
        try:
            body = self._encoder.encode([epoch, self._seq, name, message])
        except UNENCODABLE as error:
            raise UnsendableError(f"a {name} cannot be sent to the device's process: {error}") from None
        if len(body) > FRAME_BYTES_MAX:
            raise UnsendableError(f"a {name} of {len(body)} bytes is too large for the device's process")
        self._seq += 1
        return LENGTH.pack(len(body)) + body


class FrameReader:
    """Takes the frames of one direction apart, however the bytes come; `kinds` are the messages it knows."""

    def __init__(self, kinds: dict[str, type]) -> None:
        self._header = msgspec.msgpack.Decoder(tuple[int, int, str, msgspec.Raw])
        self._bodies: dict[str, msgspec.msgpack.Decoder[Any]] = {
            name: msgspec.msgpack.Decoder(kind, dec_hook=_decode_location) for name, kind in kinds.items()
        }
        self._buffer = bytearray()
        self._seq = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, Any]]:
        """(epoch, message) of each frame that is complete with `data`; raises `LinkError` at the first that is none."""
        self.take(data)
        while (frame := self.next()) is not None:
            yield frame

    def take(self, data: bytes) -> None:
        """Keep `data` for `next`: all of it, or nothing when that raises MemoryError."""
        self._buffer += data

    def next(self) -> tuple[int, Any] | None:
        """The next frame, once it is complete; after a MemoryError it is the next one still. Raises `LinkError`."""
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > FRAME_BYTES_MAX:
            raise LinkError(f"a frame of {length} bytes")
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        frame = self._decode(bytes(memoryview(self._buffer)[LENGTH.size : end]))
        self._seq += 1
        del self._buffer[:end]
        return frame

    def _decode(self, body: bytes) -> tuple[int, Any]:
        try:
            epoch, seq, name, raw = self._header.decode(body)
            if seq != self._seq:
                raise LinkError(f"frame {seq} came where frame {self._seq} was due")
            decoder = self._bodies.get(name)
            if decoder is None:
                raise LinkError(f"a message {name!r}, which is not known here")
            return epoch, decoder.decode(raw)
        except msgspec.DecodeError as error:  # ValidationError is one
            raise LinkError(f"a frame that cannot be read: {error}") from None


def _encode_location(value: Any) -> str:
    if isinstance(value, ModelLocation):
        return str(value.path())  # found already
    raise NotImplementedError(f"the link carries no {type(value).__name__}")


def _decode_location(kind: type, value: Any) -> Any:
    if kind is ModelLocation:
        return ModelLocation(value)
    raise NotImplementedError(f"the link carries no {kind.__name__}")
