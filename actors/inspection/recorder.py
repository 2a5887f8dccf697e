"""The recorder exists because what went wrong must be run again: it keeps the last minutes of an engine.

Actors write into it what they are told from outside and what they take (see `novainfer.fsm.recording.log`); on a fault,
or when asked, it writes what it holds to a file that `novainfer replay` runs again. Files hold prompts and answers:
they are readable by their owner only. A recorder that fails is off, says so, and begins anew after a while: what it
could not write has most likely left by then. The engine goes on.

A start that fails writes no file: its error is a sentence on the screen, and a server that is started again and again
with a bad flag would push out the recordings of real incidents.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from novainfer.fsm.client.stream import Stream
from novainfer.fsm.messages.errors import InvalidParameter, RecorderUnavailable
from novainfer.fsm.messages.step import StepPlan
from novainfer.fsm.recording.dumpfile import SUFFIX, About, encode_dump
from novainfer.fsm.recording.log import (
    RING_BYTES,
    SEGMENT_BYTES,
    STREAMS,
    Codes,
    Image,
    Layout,
    Parts,
    Recording,
    lane_name,
)
from novainfer.fsm.text import Vocabulary

if TYPE_CHECKING:
    from novainfer.actors.core.mailbox import Actor
    from novainfer.actors.core.streams import Streams
    from novainfer.actors.inspection.incidents import IncidentRecord

logger = logging.getLogger(__name__)

RESUME_S = 10.0  # until one that failed begins anew: a snapshot of a busy engine takes 22 ms, whether it fails or not
DUMP_INTERVAL_S = 60.0  # between files for one reason: what fails every second needs no file every second
FILES_MAX = 16  # files kept in the folder, a few MB each
# Incidents that are a way of working, or follow from another that was dumped.
QUIET_KINDS = frozenset(["ladder", "stall"])
PREFIX = "novainfer-"
LAYOUT: Layout = "actors"


class Recorder:
    """Records one engine. `folder` is where files without a name of their own go; without it, faults write none.

    All methods but the `async` ones are cheap, and called on the loop between two messages. One that is not
    `is_enabled` records nothing.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        is_enabled: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        ring_bytes: int = RING_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._is_enabled = is_enabled
        self._segment_bytes = segment_bytes
        self._ring_bytes = ring_bytes
        self._clock = clock
        self._actors: Mapping[str, Actor] = {}
        self._streams: Streams | None = None
        self._undelivered: Sequence[Any] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_dump_s: dict[str, float] = {}  # by reason
        self._wanted: tuple[str, str] | None = None  # a dump that is due, and why
        self._vocabulary: Vocabulary | None = None
        self._resuming: asyncio.TimerHandle | None = None  # set while it is off because it failed
        self._threads: list[threading.Thread] = []
        self._is_up = False  # the engine has been ready once
        self.recording: Recording | None = None
        self.log = bytearray()

    def check_folder(self) -> None:
        """Make the folder and a file in it, so that a fault need not find out; raises `InvalidParameter`."""
        if self._folder is None or not self._is_enabled:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise InvalidParameter(
                f"recorder_dir {self._folder} cannot be written: {error.strerror}", param="recorder_dir"
            ) from None

    def begin(
        self,
        actors: Mapping[str, Actor],
        streams: Streams,
        undelivered: Sequence[Any],
        vocabulary: Vocabulary,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Record these from now on; `undelivered` are messages on their way to the streams."""
        if not self._is_enabled:
            return
        self._actors, self._streams, self._undelivered, self._loop = actors, streams, undelivered, loop
        self._vocabulary = vocabulary
        self._begin()

    def _begin(self) -> None:
        assert self._vocabulary is not None
        self._resuming = None
        try:
            self.recording = Recording(
                self._parts,
                self._vocabulary,
                clock_ns=time.monotonic_ns,  # the clock of uvloop counts milliseconds
                segment_bytes=self._segment_bytes,
                ring_bytes=self._ring_bytes,
            )
        except Exception as error:
            self._resume_later("the flight recorder cannot begin", error)
            return
        self.log = self.recording.log
        self._attach(self)

    def _resume_later(self, what: str, error: Exception | BaseException) -> None:
        assert self._loop is not None
        logger.error("%s: %s; it is tried again in %g s", what, error, RESUME_S)
        self._resuming = self._loop.call_later(RESUME_S, self._begin)

    def _attach(self, recorder: Recorder | None) -> None:
        for actor in self._actors.values():
            actor.record(recorder)
        if self._streams is not None:
            self._streams.record(recorder)

    def _parts(self) -> Parts:
        """All that decides."""
        assert self._streams is not None
        lanes: dict[str, Sequence[Any]] = {STREAMS: self._undelivered}
        timers: list[tuple[str, Any]] = []
        for name, actor in self._actors.items():
            data, control, events = actor.waiting()
            lanes[lane_name(LAYOUT, "", name, False)] = data
            lanes[lane_name(LAYOUT, "", name, True)] = control
            timers += [(name, event) for event in events]
        machines = {name: actor.machine for name, actor in self._actors.items() if actor.machine is not None}
        return Parts(machines, lanes, self._streams.machines(), timers)

    def came_up(self) -> None:
        """The engine is ready: from now on an incident is worth a file."""
        self._is_up = True

    @property
    def is_on(self) -> bool:
        """True while it records."""
        return self.recording is not None

    # ---- what actors write ---------------------------------------------------------------------------------------

    def lane(self, actor: str, urgent: bool | None) -> Codes:
        """The codes of an actor's lane; None is for what it is handed directly."""
        assert self.recording is not None
        return self.recording.lane(actor, "" if urgent is None else lane_name(LAYOUT, "", actor, urgent))

    def timer(self, codes: Codes, event: Any) -> None:
        """A timer ran out."""
        self._write(Recording.timer, codes, event)

    def called(self, codes: Codes, event: Any) -> None:
        """`event` comes from outside, and will not wait."""
        self._write(Recording.called, codes, event)

    def adds(self, stream: Stream, is_alone: bool) -> None:
        """A stream will be added."""
        self._write(Recording.adds, stream, is_alone)

    def forgot(self, stream_id: int) -> None:
        """A stream was forgotten."""
        self._write(Recording.forgot, stream_id)

    def raised(self, codes: Codes, before: str, event: Any, error: BaseException) -> None:
        """A machine raised."""
        self._write(Recording.raised, codes, before, event, error)

    def launched(self, plan: StepPlan) -> None:
        """A step goes to the device."""
        if self.recording is not None:
            try:
                self.recording.launched(plan)
            except Exception as error:
                self.give_up(error)

    def _write(self, write: Callable[..., None], *what: Any) -> None:
        if self.recording is None:
            return
        try:
            write(self.recording, *what)
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """Record no more for `RESUME_S` seconds, because of `error`."""
        if self.recording is None:
            return
        self.recording = None
        self._attach(None)
        self._resume_later("the flight recorder is off: it cannot write what it was told", error)

    # ---- dumps ---------------------------------------------------------------------------------------------------

    def on_incident(self, incident: IncidentRecord) -> None:
        """Something went wrong, and was dealt with."""
        if incident.kind not in QUIET_KINDS:
            self.dump_soon(incident.kind, incident.message)

    def dump_soon(self, reason: str, message: str) -> None:
        """Something went wrong: write a file when this event has been handled, unless this reason had one just now."""
        if self.recording is None or self._folder is None or self._wanted is not None or self._loop is None:
            return
        if not self._is_up:
            return
        if self._loop.time() < self._next_dump_s.get(reason, 0.0):
            return
        self._wanted = (reason, message)
        self._loop.call_soon(self._dump_wanted)

    async def dump(self, path: Path | None = None, *, reason: str = "asked") -> Path:
        """Write all that is recorded to `path`, or to a new file in the folder; returns where it is.

        Raises `RecorderUnavailable` when there is nothing to write, or nowhere to.
        """
        where, content = self._content(path, reason, "")
        try:
            await asyncio.to_thread(_write_file, where, content, path is None)
        except OSError as error:
            raise RecorderUnavailable(f"the recording cannot be written to {where}: {error.strerror}") from None
        return where

    def close(self) -> None:
        """Record no more; a dump that is due is begun first."""
        self._dump_wanted()
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        if self.recording is not None:
            self.recording = None
            self._attach(None)

    async def wait_written(self) -> None:
        """Wait for the files that are being written because something went wrong."""
        while self._threads:
            await asyncio.to_thread(self._threads.pop().join)

    def _dump_wanted(self) -> None:
        """Write the file that is due, in a thread that the process waits for."""
        if self._wanted is None:
            return
        (reason, message), self._wanted = self._wanted, None
        assert self._loop is not None
        self._next_dump_s[reason] = self._loop.time() + DUMP_INTERVAL_S
        try:
            where, content = self._content(None, reason, message)
        except RecorderUnavailable:
            return

        def write() -> None:
            try:
                _write_file(where, content, True)
                logger.warning("the flight recorder has written %s (it holds prompts)", where)
            except OSError as error:
                logger.error("the flight recorder cannot write %s: %s", where, error)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=write, name="novainfer-recorder"))
        self._threads[-1].start()

    def _content(self, path: Path | None, reason: str, message: str) -> tuple[Path, tuple[Image, About]]:
        """Where a dump goes, and what is in it, taken now."""
        if self.recording is None:
            raise RecorderUnavailable("the flight recorder is off")
        now_s = self._clock()
        if path is None:
            if self._folder is None:
                raise RecorderUnavailable("the flight recorder has no folder: name a file, or set recorder_dir")
            stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_s)) + f"{int(now_s % 1 * 1000):03d}Z"
            path = self._folder / f"{PREFIX}{stamp}-{reason}{SUFFIX}"
        try:
            image = self.recording.image()
        except Exception as error:
            self.give_up(error)
            raise RecorderUnavailable(f"the flight recorder is off: {error}") from None
        return path, (image, About(version=_version(), created=now_s, reason=reason, message=message))


def _write_file(path: Path, content: tuple[Image, About], is_ours: bool) -> None:
    """Write the file whole or not at all; in the recorder's own folder others make room."""
    data = encode_dump(*content)
    if is_ours:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    if is_ours:
        with _making_room:
            _make_room(path.parent)


_making_room = threading.Lock()  # two threads that look at once would each leave a file too many


def _make_room(folder: Path) -> None:
    """Keep `FILES_MAX` recordings: the oldest of the most frequent reason goes, so that what happens every minute does
    not push out what happened once."""
    by_reason: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
        by_reason[_reason_of(path)].append(path)
    for _ in range(sum(map(len, by_reason.values())) - FILES_MAX):
        most = max(map(len, by_reason.values()))
        oldest = min(paths[0] for paths in by_reason.values() if len(paths) == most)
        by_reason[_reason_of(oldest)].pop(0)
        oldest.unlink(missing_ok=True)


def _reason_of(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def _version() -> str:
    try:
        return version("novainfer")
    except PackageNotFoundError:  # from a source tree that was never installed
        return "unknown"
