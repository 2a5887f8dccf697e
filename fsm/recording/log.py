"""The flight recorder's memory: what came to the machines from outside, and in which order they took it.

Machines decide by nothing but the events they are given, so a run is known when three things are: what they held when
it began (a *snapshot*), what came from outside (in full), and which actor took its next message from which lane when
(a byte each). What actors said to each other need not be kept: a replay says it again. The state after each message
is kept with it (it is part of that byte's meaning), and a hash over all plans and texts at each step, so that a replay
which goes another way is told where.

The log is a ring of segments, each with a snapshot of its own, so that the oldest one that is left can be replayed.
Nothing here knows a file or a clock; `replay` reads what `Recording.image` gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal
from zlib import crc32

import msgspec

from novainfer.fsm.client.stream import Stream
from novainfer.fsm.core.machine import Machine
from novainfer.fsm.messages.events import Output
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.recording.pack import Kinds, counts_of, pack
from novainfer.fsm.text import TokenTable, Vocabulary

# A token costs about 10 bytes of log, so a segment holds some 400,000 tokens, minutes of a busy server. A snapshot
# (22 ms and 2 MB for 256 requests of 1,000 tokens on 32,768 blocks) then comes to 0.05 us a token.
SEGMENT_BYTES = 4 << 20
RING_BYTES = 16 << 20  # logs and snapshots together; the newest whole segment is kept even if it is larger

# The first byte of each entry. READ and FORGOT are followed by a varint, HASH by 4 bytes, TOLD to RAISED by 4 bytes
# of length and so many of msgpack; all other bytes are codes: which actor took which kind of message from which lane.
TOLD, STEP, TIMER, CALLED, ADDED, RAISED, READ, FORGOT, HASH = range(9)
CODES_FIRST = 16
CODES_PREFIX = 240  # above it, a code has a second byte
CODES_MAX = CODES_PREFIX - CODES_FIRST + (256 - CODES_PREFIX) * 256
STREAMS = "streams"  # the actor that holds the streams; what it takes is taken by each stream
TIMERS = "timer"  # where the simulator says that a timer's event comes from
_encode = msgspec.msgpack.Encoder().encode


class Parts(msgspec.Struct):
    """Everything of an engine that decides: machines by name, messages waiting by lane, streams, and timers set.

    The name of a lane is `lane_name`'s; a timer is the actor it belongs to and its event.
    """

    machines: dict[str, Machine]
    lanes: Mapping[str, Sequence[Any]]
    streams: dict[int, Stream]
    timers: Sequence[tuple[str, Any]]


class Segment(msgspec.Struct):
    """What happened after a snapshot was taken, `began_us` microseconds on a clock that only grows."""

    began_us: int
    snapshot: bytes
    log: bytes


class Image(msgspec.Struct, kw_only=True):
    """A recording, to be kept: segments, oldest first, what their numbers mean, and what the machines hold now."""

    layout: str
    lanes: list[tuple[str, str]]  # name, actor
    codes: list[tuple[int, str, str]]  # lane, kind of event, state after
    kinds: list[tuple[str, list[str]]]
    token_bytes: TokenTable
    special_ids: list[int]
    segments: list[Segment]
    now: bytes
    ended_us: int


# How messages wait: actors have two lanes each, the simulator has one for each sender as well.
Layout = Literal["actors", "links"]


def lane_name(layout: str, source: str, to: str, urgent: bool) -> str:
    """Where a message from `source` to `to` waits."""
    name = to if layout == "actors" else f"{source}>{to}"
    return f"{name}!" if urgent and (layout == "links" or to != STREAMS) else name


def pack_parts(parts: Parts, kinds: Kinds, known: Mapping[str, Any]) -> bytes:
    """The snapshot: equal for parts that hold the same."""
    # The timers of streams are not compared, nor the gate's of streams that are gone: their shell stops such a timer,
    # which would be ignored.
    streams = parts.streams
    timers = [
        (to, event) for to, event in parts.timers if to != STREAMS and (to != "gate" or event.stream_id in streams)
    ]
    timers.sort(key=lambda t: (t[0], pack(t[1], kinds, known)))
    machines = [(name, parts.machines[name]) for name in sorted(parts.machines)]
    lanes = [(name, list(parts.lanes[name])) for name in sorted(parts.lanes) if parts.lanes[name]]
    return pack([machines, lanes, list(parts.streams.items()), timers], kinds, known)


def known_of(vocabulary: Vocabulary) -> dict[str, Any]:
    """What snapshots name instead of holding it."""
    return {"vocabulary": vocabulary}


class Codes(dict[tuple[type, str], bytes]):
    """The code of each (kind of event, state after) in one lane, made when it first happens.

    The state before is that after the message before, so it need not be part of it. `short` has the codes of one byte
    once more, by kind and state: two plain dictionaries are looked up in half the time that this one takes.
    """

    def __init__(self, lane: int, make: Callable[[int, str, str], bytes]) -> None:
        super().__init__()
        self.lane = lane
        self._make = make
        self.short: dict[type, dict[str, int]] = {}

    def __missing__(self, key: tuple[type, str]) -> bytes:
        kind, after = key
        code = self[key] = self._make(self.lane, kind.__name__, str(after))
        if len(code) == 1:
            self.short.setdefault(kind, {})[after] = code[0]
        return code


class Recording:
    """The ring. `parts` gives the machines when a snapshot is due, `clock_ns` nanoseconds that only grow.

    The hot path is the caller's: `log += codes[type(event), after]`, or `log.append(codes.short[type(event)][after])`,
    for each message, and `log += read_code(id)` for each read. All methods are called between two messages, never while
    a machine handles one.
    """

    def __init__(
        self,
        parts: Callable[[], Parts],
        vocabulary: Vocabulary,
        *,
        clock_ns: Callable[[], int],
        layout: Layout = "actors",
        segment_bytes: int = SEGMENT_BYTES,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        self._last_us = 0
        self._hash = 0  # of what went to the device and to readers, in this segment
        self.log = bytearray()  # the one being written, always this object
        self._parts = parts
        self._vocabulary = vocabulary
        self._known = known_of(vocabulary)
        self._clock_ns = clock_ns
        self._layout = layout
        self._segment_bytes = segment_bytes
        self._ring_bytes = ring_bytes
        self._kinds = Kinds()
        self._lanes: list[tuple[str, str]] = []
        self._lane_of: dict[tuple[str, str], Codes] = {}
        self._codes: list[tuple[int, str, str]] = []
        self._whole: deque[Segment] = deque()
        self.bytes_total = 0  # ever written, snapshots included
        self.snapshots_total = 0
        self._begin()

    # ---- what is written -----------------------------------------------------------------------------------------

    def lane(self, actor: str, name: str) -> Codes:
        """The codes of what `actor` takes from the lane of this name; "" is for what it is handed directly."""
        codes = self._lane_of.get((actor, name))
        if codes is None:
            codes = self._lane_of[actor, name] = Codes(len(self._lanes), self._new_code)
            self._lanes.append((name, actor))
        return codes

    def told(self, codes: Codes, event: Any) -> None:
        """`event` came from outside, and will wait in a lane."""
        log = self.log
        if len(log) >= self._segment_bytes:
            self._turn_over()
        if type(event) is not StepDone:
            self._write(TOLD, codes, event)
            return
        now_us = self._clock_ns() // 1000
        passed_us, self._last_us = now_us - self._last_us, now_us
        counts = counts_of(event.logprobs) if event.logprobs else None
        fields = (event.step_id, event.epoch, event.token_ids, counts, event.took_s, event.num_tokens)
        drafts = event.draft_token_ids, event.draft_error, event.draft_s, event.cycle_s
        more = (event.scores, event.pooled) if event.scores or event.pooled else ()
        body = _encode((passed_us, codes.lane, *fields, *drafts, *more))
        log += (STEP << 32 | len(body)).to_bytes(5, "big") + body

    def timer(self, codes: Codes, event: Any) -> None:
        """A timer ran out: its event will wait in a lane. Whether it is still among those set makes no difference."""
        self._write(TIMER, codes, event)

    def called(self, codes: Codes, event: Any) -> None:
        """`event` came from outside, and will be taken at once: the next entry is its code."""
        if len(self.log) >= self._segment_bytes:
            self._turn_over()
        self._write(CALLED, codes, event)

    def adds(self, stream: Stream, is_alone: bool) -> None:
        """A new stream will be there; `is_alone`: it is the only one."""
        if is_alone and len(self.log) > self._segment_bytes // 2:
            self._turn_over()  # no message waits now, and the snapshot is small
        self._put(ADDED, pack(stream, self._kinds, self._known))

    def forgot(self, stream_id: int) -> None:
        """This stream is not read any more."""
        self.log += bytes([FORGOT]) + varint(stream_id)

    def raised(self, codes: Codes, before: str, event: Any, error: BaseException) -> None:
        """A machine raised while it handled `event`; its actor is dead now."""
        fields = (codes.lane, str(before), type(event).__name__, type(error).__name__, str(error))
        self._put(RAISED, _encode(fields))

    def took(self, outputs: Sequence[Output]) -> None:
        """The streams take `outputs`: their texts go into the hash."""
        texts = "".join([output.text for output in outputs])  # as `hash_of_texts`, and no call more: it is every step
        self._hash = crc32(texts.encode("utf-8", "surrogatepass"), self._hash)

    def launched(self, plan: StepPlan) -> None:
        """A step goes to the device: its plan goes into the hash, and the hash into the log."""
        found = self._hash = crc32(_encode(plan), self._hash)
        log = self.log
        log += (HASH << 32 | found).to_bytes(5, "big")

    # ---- what is kept --------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """What the ring holds now."""
        return len(self.log) + len(self._snapshot) + sum(len(s.log) + len(s.snapshot) for s in self._whole)

    def image(self) -> Image:
        """All that is recorded up to now."""
        now = pack_parts(self._parts(), self._kinds, self._known)
        return Image(
            layout=self._layout,
            lanes=list(self._lanes),
            codes=list(self._codes),
            kinds=list(self._kinds.names),
            token_bytes=self._vocabulary.token_bytes,
            special_ids=sorted(self._vocabulary.special_ids),
            segments=[*self._whole, Segment(self._began_us, self._snapshot, bytes(self.log))],
            now=now,
            ended_us=self._clock_ns() // 1000,
        )

    def _begin(self) -> None:
        """A new segment: what is there before anything happens in it."""
        self._began_us = self._last_us = self._clock_ns() // 1000
        self._hash = 0
        self._snapshot = pack_parts(self._parts(), self._kinds, self._known)
        self.snapshots_total += 1
        self.bytes_total += len(self._snapshot)

    def _turn_over(self) -> None:
        self.bytes_total += len(self.log)
        self._whole.append(Segment(self._began_us, self._snapshot, bytes(self.log)))
        self.log.clear()
        self._begin()
        while len(self._whole) > 1 and self.num_bytes > self._ring_bytes:
            self._whole.popleft()

    def _write(self, tag: int, codes: Codes, event: Any) -> None:
        now_us = self._clock_ns() // 1000
        passed_us, self._last_us = now_us - self._last_us, now_us
        self._put(tag, _encode((passed_us, codes.lane, pack(event, self._kinds, self._known))))

    def _put(self, tag: int, payload: bytes) -> None:
        self.log += (tag << 32 | len(payload)).to_bytes(5, "big") + payload

    def _new_code(self, lane: int, kind: str, after: str) -> bytes:
        number = len(self._codes)
        assert number < CODES_MAX, "more kinds of transitions than rows in all tables"
        self._codes.append((lane, kind, after))
        number += CODES_FIRST
        if number < CODES_PREFIX:
            return bytes([number])
        high, low = divmod(number - CODES_PREFIX, 256)
        return bytes([CODES_PREFIX + high, low])


def hash_of_texts(outputs: Sequence[Output], before: int) -> int:
    """`before`, and all texts of `outputs`, as one number."""
    return crc32("".join([output.text for output in outputs]).encode("utf-8", "surrogatepass"), before)


def hash_of_plan(plan: StepPlan, before: int) -> int:
    """`before`, and everything in `plan`, as one number."""
    return crc32(_encode(plan), before)


def read_code(stream_id: int) -> bytes:
    """The entry of a read of this stream, made once for each stream."""
    return bytes([READ]) + varint(stream_id)


def varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last byte have the eighth set."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def entries(log: bytes) -> Iterator[tuple[int, Any]]:
    """Each entry's tag (or `CODES_FIRST` plus the number of its code) and what follows it."""
    at, end = 0, len(log)
    while at < end:
        tag = log[at]
        at += 1
        if tag >= CODES_PREFIX:
            yield CODES_PREFIX + (tag - CODES_PREFIX) * 256 + log[at], None
            at += 1
        elif tag >= CODES_FIRST:
            yield tag, None
        elif tag in (READ, FORGOT):
            number = shift = 0
            while True:
                byte = log[at]
                at += 1
                number |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            yield tag, number
        elif tag == HASH:
            yield tag, int.from_bytes(log[at : at + 4], "big")
            at += 4
        else:
            size = int.from_bytes(log[at : at + 4], "big")
            at += 4 + size
            yield tag, log[at - size : at]
