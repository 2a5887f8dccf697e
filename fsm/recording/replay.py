"""Runs a recording again: the same machines, and the same messages from outside, without model or device.

What was recorded in full is put where it arrived; what the machines said to each other they say again. At each entry
the actor must find that kind of message at the head of that lane, in that state, and come out of it in that state;
each step's plan and all texts must give the same hash; and where a new segment begins, and at the end, everything must
be as in the snapshot. The first thing that is not so is the *difference*, and ends the replay.

An exception that was recorded must come again: then the incident is *reproduced*. If it does not, it is *gone*, which
is what a fix looks like; nothing after it can be compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from contextlib import suppress
from typing import Any

import msgspec

from novainfer.fsm.client.stream import Stream
from novainfer.fsm.core.machine import After, Drop, Effect, Machine, Send
from novainfer.fsm.messages.events import Incident, Outputs, Read, Run, Stop
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.recording.compare import first_difference, short
from novainfer.fsm.recording.log import (
    ADDED,
    CALLED,
    CODES_FIRST,
    FORGOT,
    HASH,
    RAISED,
    READ,
    STEP,
    STREAMS,
    TIMER,
    TIMERS,
    Image,
    Parts,
    entries,
    hash_of_plan,
    hash_of_texts,
    known_of,
    lane_name,
    pack_parts,
)
from novainfer.fsm.recording.pack import Kinds, pack, step_logprobs, unpack
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.text import TokenTable, Vocabulary

STEP_FIELDS = 5  # of a step's entry behind the time it took; then what it has scored and pooled, if anything
LAST_TRANSITIONS = 20  # kept for people
SAID_CHARS_MAX = 300  # of an exception that damage has caused


class DamagedRecording(Exception):
    """The recording cannot be read; the message is one sentence that says why."""


class Difference(msgspec.Struct, frozen=True):
    """Where a replay went another way: the entry's number in its segment, seconds on its clock, and how."""

    segment: int
    entry: int
    at_s: float
    what: str

    def __str__(self) -> str:
        return f"segment {self.segment}, entry {self.entry}, {self.at_s:.6f} s after its beginning: {self.what}"


class Replayed(msgspec.Struct, kw_only=True):
    """What a replay saw: counts, seconds on the recording's clock, and how it ended."""

    segments: int = 0
    entries: int = 0
    events: int = 0
    steps: int = 0
    tokens: int = 0
    streams: int = 0
    incidents: list[str] = []
    span_s: float = 0.0
    transitions: dict[tuple[str, str, str, str], int] = {}  # actor, state before, kind of event, state after
    last: list[str] = []
    states: dict[str, str] = {}
    finished: dict[str, int] = {}
    difference: Difference | None = None
    reproduced: str | None = None  # the exception that was recorded, and came again
    is_gone: bool = False  # an exception was recorded, and did not come again
    violation: str | None = None  # what did not hold in the scheduler, and since when, as far as it was looked at

    @property
    def is_same(self) -> bool:
        """True when the same transitions were taken, to the end."""
        return self.difference is None and not self.is_gone


class _Differs(Exception):
    """The replay took another way."""


class _Gone(Exception):
    """A recorded exception did not come."""


def replay(image: Image, *, check: bool = False) -> Replayed:
    """Run `image` again. Raises `DamagedRecording` when it makes no sense.

    Who owns which block is checked at the end, and with `check` after each message to the scheduler.
    """
    run = None
    try:
        run = _Run(image)
        run.checks_all = check
        run.replay()
        return run.summary()
    except DamagedRecording:
        raise
    except Exception as error:  # a file says which objects there are, and objects with wrong fields may raise anything
        at = run.found.segments if run is not None else 0
        said = " ".join(_said(error).split())[:SAID_CHARS_MAX]
        if isinstance(error, AttributeError) and error.name:
            said = f"its {type(error.obj).__name__} has no {error.name!r}, so another version has written it"
        raise DamagedRecording(f"segment {at} of the recording cannot be read: {said}") from error


def slim(image: Image) -> Image:
    """`image`, once it was replayed, without the bytes of tokens that nothing looked at: most of a vocabulary."""
    run = _Run(image)
    used: set[int] = set()
    table = run.vocabulary.token_bytes
    run.vocabulary = Vocabulary(_Noting(table.data, table.ends, used), run.vocabulary.special_ids)
    run.known = known_of(run.vocabulary)
    with suppress(_Differs, _Gone):
        run.run()
    kept = TokenTable.of(found if at in used else b"" for at, found in enumerate(table))
    return msgspec.structs.replace(image, token_bytes=kept)


class _Noting(TokenTable, frozen=True):
    """A table that remembers what was looked up."""

    used: set[int]

    def __getitem__(self, token_id: int) -> bytes:
        self.used.add(token_id)
        return super().__getitem__(token_id)


class _Run:
    def __init__(self, image: Image) -> None:
        self.image = image
        self.found = Replayed(transitions={}, last=[], incidents=[])
        self.checks_all = False
        self.entry = 0
        self.vocabulary = Vocabulary(image.token_bytes, frozenset(image.special_ids))
        self.known = known_of(self.vocabulary)
        self._now_us = self._began_us = 0
        self._machines: dict[str, Machine] = {}
        self._streams: dict[int, Stream] = {}
        self._lanes: defaultdict[str, deque[Any]] = defaultdict(deque)
        self._timers: dict[tuple[str, Any], None] = {}
        self._dead: set[str] = set()
        self._direct: Any = None  # what an actor is about to be handed directly
        self._plans: deque[Run] = deque()
        self._hash = 0
        self._taken: Counter[tuple[str, str, str, str]] = Counter()
        self._last: deque[tuple[int, str, str, str, str]] = deque(maxlen=LAST_TRANSITIONS)

    @property
    def seconds(self) -> float:
        """On the recording's clock, since its first segment began."""
        return (self._now_us - self._began_us) / 1e6

    # ---- the whole -----------------------------------------------------------------------------------------------

    def replay(self) -> None:
        """All segments, up to the first difference."""
        try:
            self.run()
            if self.found.reproduced is None:
                self.check()
        except _Differs as difference:
            self.found.difference = Difference(self.found.segments, self.entry, self.seconds, str(difference))
        except _Gone:
            self.found.is_gone = True

    def run(self) -> None:
        """All segments."""
        segments = self.image.segments
        if not segments:
            raise DamagedRecording("the recording holds no segment")
        self._began_us = segments[0].began_us
        self._restore(segments[0].snapshot)
        for at, segment in enumerate(segments):
            self.found.segments = at + 1
            self._now_us = segment.began_us
            if at:
                self._compare(segment.snapshot)
            self._hash = 0
            self.entry = 0
            for tag, body in entries(segment.log):
                self.entry += 1
                self.found.entries += 1
                self._take(tag, body)
        self._now_us = max(self._now_us, self.image.ended_us)
        self._compare(self.image.now)

    def check(self) -> None:
        """Look whether everything has the owner it should have; the first time that it has not is kept."""
        scheduler = self._machines.get("scheduler")
        if self.found.violation is not None or not isinstance(scheduler, Scheduler) or scheduler.state == "STARTING":
            return
        try:
            scheduler.check()
        except AssertionError as error:
            where = f"segment {self.found.segments}, entry {self.entry}, {self.seconds:.6f} s after its beginning"
            self.found.violation = f"{where}: {short(str(error))}"

    def summary(self) -> Replayed:
        """What was seen."""
        found = self.found
        found.span_s = self.seconds
        found.transitions = dict(sorted(self._taken.items()))
        found.last = [
            f"{(at - self._began_us) / 1e6:.6f} s  {actor}: {before} --{kind}--> {after}"
            for at, actor, before, kind, after in self._last
        ]
        found.states = {name: str(machine.state) for name, machine in sorted(self._machines.items())}
        scheduler = self._machines.get("scheduler")
        if isinstance(scheduler, Scheduler):
            found.finished = {state: n for state, n in scheduler.statistics().finished_total.items() if n}
        return found

    def _restore(self, snapshot: bytes) -> None:
        machines, lanes, streams, timers = unpack(snapshot, self.image.kinds, self.known)
        self._machines = dict(machines)
        self._streams = dict(streams)
        for name, events in lanes:
            self._lanes[name].extend(events)
        self._timers = dict.fromkeys(timers)
        self.found.streams = len(self._streams)

    def _compare(self, snapshot: bytes) -> None:
        """Everything must be as it was: a dead actor's messages are gone."""
        kinds = Kinds(self.image.kinds)
        now = pack_parts(Parts(self._machines, self._lanes, self._streams, list(self._timers)), kinds, self.known)
        if now != snapshot:
            was = unpack(snapshot, self.image.kinds, self.known)
            if now == pack(was, kinds, self.known):
                return  # an older version has other names for some of it
            there = unpack(now, kinds.names, self.known)
            titles = ("machine", "mailbox", "stream", "timers")
            found = (first_difference(a, b, title) for title, a, b in zip(titles, there, was, strict=True))
            raise _Differs("what is there is not what was there: " + next(filter(None, found), "in another order"))

    # ---- one entry -----------------------------------------------------------------------------------------------

    def _take(self, tag: int, body: Any) -> None:
        if tag >= CODES_FIRST:
            self._take_code(tag - CODES_FIRST)
        elif tag == READ:
            self._read(body)
        elif tag == HASH:
            self._check_hash(body)
        elif tag == FORGOT:
            self._streams.pop(body, None)
        elif tag == ADDED:
            stream: Stream = unpack(body, self.image.kinds, self.known)
            self._streams[stream.stream_id] = stream
            self.found.streams += 1
        elif tag == RAISED:
            self._take_raised(*_decode(body))
        elif tag == STEP:
            passed_us, lane, step_id, epoch, token_ids, counts, took_s, *more = _decode(body)
            self._now_us += passed_us
            self.found.steps += 1
            self.found.tokens += len(token_ids)
            known, (scores, pooled) = more[:STEP_FIELDS], (*more[STEP_FIELDS:], [], [])[:2]
            done = StepDone(step_id, epoch, token_ids, step_logprobs(counts or ()), took_s, *known)
            done = msgspec.structs.replace(done, scores=[tuple(one) for one in scores], pooled=pooled)
            self._put(self.image.lanes[lane][0], done)
        else:
            passed_us, lane, packed = _decode(body)
            self._now_us += passed_us
            name, actor = self.image.lanes[lane]
            event = unpack(packed, self.image.kinds, self.known)
            if tag == CALLED:
                self._direct = event
                return
            if tag == TIMER and actor != STREAMS:
                self._stop_timer(actor, event)
            self._put(name, event)

    def _take_code(self, number: int) -> None:
        """An actor takes what is first in a lane."""
        lane, kind, after = self.image.codes[number]
        name, actor = self.image.lanes[lane]
        event = self._next_event(name, actor, kind)
        before = "" if actor == STREAMS else str(self._machines[actor].state)
        self.found.events += 1
        self._taken[actor, before, kind, after] += 1
        self._last.append((self._now_us, actor, before, kind, after))
        if actor == STREAMS:
            try:
                self._to_streams(event)
            except Exception as error:
                raise _Differs(f"a stream raised {_said(error)} when {kind} came") from None
            return
        machine = self._machines[actor]
        try:
            effects = machine.handle(event)
        except Exception as error:
            raise _Differs(f"{actor} raised {_said(error)} in {before} when {kind} came; it went to {after}") from None
        if machine.state != after:
            raise _Differs(f"{actor} went from {before} to {after} when {kind} came, and goes to {machine.state}")
        self._perform(actor, effects)
        if self.checks_all and actor == "scheduler":
            self.check()

    def _next_event(self, name: str, actor: str, kind: str) -> Any:
        if name == "":
            event, self._direct = self._direct, None
        else:
            lane = self._lanes[name]
            event = lane.popleft() if lane else None
        if type(event).__name__ != kind:
            there = "nothing" if event is None else f"a {type(event).__name__}"
            raise _Differs(f"{actor} took a {kind} from {name or 'outside'}, where there is {there}")
        return event

    def _take_raised(self, lane: int, before: str, kind: str, error_type: str, message: str) -> None:
        """A machine raised."""
        name, actor = self.image.lanes[lane]
        event = self._next_event(name, actor, kind)
        said = f"{error_type}: {message}" if message else error_type
        try:
            if actor == STREAMS:
                self._to_streams(event)
            else:
                self._machines[actor].handle(event)
        except Exception as error:
            if _said(error) != said:
                raise _Differs(
                    f"{actor} raised {said!r} in {before} when {kind} came, and raises {_said(error)!r}"
                ) from None
        else:
            raise _Gone
        self.found.reproduced = f"{actor} in {before} when {kind} came: {said}"
        if self.image.layout != "actors":  # a world ends where something raises
            return
        self._dead.add(actor)
        for other, owner in self.image.lanes:
            if owner == actor:
                self._lanes[other].clear()
        self._timers = {timer: None for timer in self._timers if timer[0] != actor}

    def _read(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            raise _Differs(f"stream {stream_id} was read, and is not there")
        try:
            effects = stream.handle(Read())
        except Exception as error:
            raise _Differs(f"stream {stream_id} raised {_said(error)} when it was read") from None
        if not effects:
            raise _Differs(f"stream {stream_id} had something to read, and has nothing")
        self.found.events += 1
        self._perform(STREAMS, effects)

    def _to_streams(self, event: Any) -> None:
        if isinstance(event, Outputs):
            self._hash = hash_of_texts(event.outputs, self._hash)
            for output in event.outputs:
                if (stream := self._streams.get(output.stream_id)) is not None:
                    self._perform(STREAMS, stream.handle(output))
        elif isinstance(event, Stop):
            for stream in list(self._streams.values()):
                self._perform(STREAMS, stream.handle(event))
        elif (one := self._streams.get(event.stream_id)) is not None:
            self._perform(STREAMS, one.handle(event))

    def _check_hash(self, recorded: int) -> None:
        if not self._plans:
            raise _Differs("a step went to the device, and none does")
        plan = self._plans.popleft().plan
        self._hash = hash_of_plan(plan, self._hash)
        if self._hash != recorded:
            raise _Differs(
                f"step {plan.step_id} is planned otherwise than it was, or a text since the step before is another"
            )

    # ---- effects -------------------------------------------------------------------------------------------------

    def _perform(self, source: str, effects: list[Effect]) -> None:
        for effect in effects:
            if type(effect) is Send:
                if effect.to in self._machines or effect.to == STREAMS:
                    self._put(lane_name(self.image.layout, source, effect.to, effect.urgent), effect.event, effect.to)
                elif isinstance(effect.event, Incident):
                    incident = effect.event
                    text = f"{self.seconds:.6f} s  {incident.kind}: {incident.message}; {incident.action}"
                    self.found.incidents.append(text)
            elif type(effect) is After:
                self._drop_timer(source, effect.event)
                if source != STREAMS:
                    self._timers[source, effect.event] = None
            elif type(effect) is Drop:
                self._drop_timer(source, effect.event)
            elif type(effect.job) is Run:  # type: ignore[union-attr]
                self._plans.append(effect.job)  # type: ignore[union-attr]

    def _put(self, lane: str, event: Any, actor: str = "") -> None:
        if actor not in self._dead:
            self._lanes[lane].append(event)

    def _drop_timer(self, actor: str, event: Any) -> None:
        """It is stopped; or it has run out, and its event is taken from where it waits."""
        lane = self._lanes[lane_name(self.image.layout, TIMERS, actor, True)]
        if (actor, event) in self._timers:
            del self._timers[actor, event]
        elif event in lane:
            lane.remove(event)

    def _stop_timer(self, actor: str, event: Any) -> None:
        try:
            del self._timers[actor, event]
        except KeyError:
            if actor == "gate" and event.stream_id not in self._streams:  # no snapshot holds it
                return
            raise _Differs(f"a timer of {actor} ran out that was never set: {event}") from None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_decode = msgspec.msgpack.Decoder().decode
