"""The inspector exists because a request's own state does not say since when, why, or where it was before.

It observes the requests of the scheduler (a few transitions in the life of each, none per token), and remembers the
newest ended ones. Everything else is worked out when it is asked for: for what a waiting request waits,
which request has which blocks. Nothing here decides anything.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import StrEnum
from typing import Any

import msgspec

from novainfer.actors.core.mailbox import Actor
from novainfer.actors.core.streams import Streams
from novainfer.actors.inspection.feed import ActorEvent, Feed, FeedEvent, IncidentEvent, RequestEvent, Subscription
from novainfer.actors.inspection.frames import Percentiles, RequestNow, Taken
from novainfer.actors.inspection.incidents import IncidentRecord, Incidents
from novainfer.actors.inspection.notes import Choice, Note
from novainfer.actors.inspection.recent import RecentTimes
from novainfer.actors.inspection.records import ChoiceRecord, KvRecord, RequestRecord, Transition
from novainfer.actors.inspection.rows import Rows
from novainfer.actors.inspection.times import DECODE, TimeLog
from novainfer.fsm.client.gate import Gate
from novainfer.fsm.client.stream import Stream, StreamState
from novainfer.fsm.core.machine import Machine, Observer
from novainfer.fsm.engine import Engine, EngineState
from novainfer.fsm.machines import MACHINES
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.events import Submit
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.schedule.lifetimes import STATE_OF_CAUSE
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.request import ENDED, Request, RequestState
from novainfer.fsm.schedule.scheduler import Scheduler

ENDED_REQUESTS_MAX = 1024  # the newest: about 2 MB
ENDED_TOLD_MAX = 100  # to the page, each choice for itself
HISTORY_MAX = 64  # transitions of one request; when there are more, those after the first few go
HISTORY_KEPT_FIRST = 8

OVERFLOW = "OVERFLOW"  # the state of a stream that the gate has not let in yet; the scheduler does not know it
CAME = str(RequestState.WAITING)  # the state of one that was let in; at first it is being tokenised
QUEUED = (RequestState.WAITING, RequestState.PREEMPTED)
COUNTED = frozenset({"gate", "engine", "scheduler", "worker", "ladder", "session"})  # in `transitions`, with requests


class Inspector(Observer):
    """Answers what there is to know of requests and blocks; `clock` is monotonic, in seconds.

    `plans` is called when the scheduler has committed a step, and begins to plan.
    """

    def __init__(
        self,
        gate: Gate,
        engine: Engine,
        streams: Streams,
        incidents: Incidents,
        actors: dict[str, Actor],
        *,
        plans: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._engine = engine
        self._streams = streams
        self._incidents = incidents
        self._actors = actors
        self._clock = clock
        self._epoch_s = time.time() - clock()  # turns the clock into the time of day
        self._notes: dict[int, Note] = {}  # by stream, in order of arrival
        self._whose: dict[int, tuple[str, str]] = {}  # request id and owner of the streams that ended last
        self._ended: deque[tuple[str, RequestRecord]] = deque(maxlen=ENDED_REQUESTS_MAX)  # with its owner
        self._choices: dict[int, Choice] = {}  # by request, until it ends
        self._scheduler: Scheduler | None = None
        self.times = TimeLog()
        self.transitions: Counter[tuple[str, str, str]] = Counter()  # by actor and both states, which are few
        self.rows = Rows(self._now, self._who_is)
        self.ended: deque[RequestNow] = deque(maxlen=ENDED_TOLD_MAX)  # the newest last
        self.num_ended = 0
        self.first_tokens = RecentTimes()  # how long they took
        self._plans = plans
        self.feed = Feed(self._on_listened)
        self._stop_incidents: Callable[[], None] = lambda: None

    # ---- what happens --------------------------------------------------------------------------------------------

    def observe(self, *machines: Machine) -> None:
        """Look at these, and at what they make; before they take anything."""
        for machine in machines:
            machine.observer = self

    def watch(self, scheduler: Scheduler) -> None:
        """The scheduler is there: look at it, and at the requests that it makes."""
        self._scheduler = scheduler
        self.observe(scheduler)

    def plans(self) -> None:
        """As `Observer.plans`."""
        self._plans()

    def took(self, machine: Machine, before: StrEnum, event: Any) -> None:
        """As `Observer.took`."""
        kind = type(machine)
        self.rows.took(machine, before, event)
        if kind is Request:
            if machine.state is not before:
                self._moved(machine, before)  # type: ignore[arg-type]
            return
        if type(event) is Submit and (request := machine.requests.get(event.request_id)):  # type: ignore[attr-defined]
            self._choice_of(request)
        name = kind.__name__.lower()
        if name not in COUNTED:
            return
        if machine.state is not before:
            self.transitions[name, before, machine.state] += 1
        if machine.state is not before and self.feed.is_listened and name in self._actors:  # the ladder is none
            source, target, now = str(before), str(machine.state), self._now()
            moved = ActorEvent(
                time=now, actor=shown_name(name), source=source, target=target, event=type(event).__name__
            )
            self.feed.publish(moved)

    def arrived(self, stream_id: int, name: str, owner: str, params: SamplingParams) -> None:
        """A stream was let in, or waits to be."""
        came = Transition(OVERFLOW if self._gate.is_overflowed(stream_id) else CAME, self._now())
        note = self._notes[stream_id] = Note(stream_id, name, owner, params, came, self._clock())
        if self.feed.is_listened:
            self._publish(note, 0, None, came.state)

    def _choice_of(self, request: Request) -> Choice:
        """What is known of `request`; one that is new is in its first state from now on."""
        choice = self._choices.get(request.request_id)
        if choice is not None:
            return choice
        note = self._notes.get(request.stream_id)
        choice = self._choices[request.request_id] = Choice(request, note, self._clock())
        if note is None:
            return choice
        note.choices.append(choice)
        choice.history.append(note.came)
        if note.came.state == CAME:
            choice.since_s = note.arrived_s  # its time at the tokenizer was waiting, too
        else:
            choice.history.append(Transition(CAME, self._now()))
        if self.feed.is_listened and (request.choice or note.came.state != CAME):
            self._publish(note, request.choice, None if request.choice else note.came.state, CAME)
        return choice

    def _moved(self, request: Request, before: StrEnum) -> None:
        """A request has come into another state."""
        self.transitions["request", before, request.state] += 1
        choice = self._choice_of(request)
        choice.since_s = now_s = self._clock()
        history = choice.history
        if len(history) >= HISTORY_MAX:
            del history[HISTORY_KEPT_FIRST]
        has_ended = request.state in ENDED
        if before is RequestState.PREFILL and (request.state is RequestState.DECODE or request.num_generated):
            self._has_begun(choice, now_s)
        history.append(Transition(str(request.state), self._epoch_s + now_s))
        if has_ended:
            del self._choices[request.request_id]
            self.times.ended(history, request.num_generated)
        note = choice.note
        if note is None:
            return
        if self.feed.is_listened:
            self._publish(note, request.choice, str(before), str(request.state))
        if has_ended:
            self._tell_end(choice.now(None, self._epoch_s + now_s, 0))
            note.num_live -= 1
            if not note.num_live:
                self._notes.pop(request.stream_id, None)
                self._whose[request.stream_id] = note.id, note.owner
                if len(self._whose) > ENDED_REQUESTS_MAX:
                    del self._whose[next(iter(self._whose))]
                self._ended.append((note.owner, self._record(note, {}, now_s)))
                note.choices.clear()

    def _has_begun(self, choice: Choice, now_s: float) -> None:
        """A request has been prefilled; the first time, its first token is there."""
        if choice.note is not None and not any(one.state == DECODE for one in choice.history):
            self.first_tokens.observe(now_s, now_s - choice.note.arrived_s)

    def first_tokens_ms(self) -> Percentiles | None:
        """How long the first tokens of the last ten seconds took, from their requests' arrival."""
        return self.first_tokens.percentiles_ms(self._clock())

    def _tell_end(self, now: RequestNow) -> None:
        self.ended.append(now)
        self.num_ended += 1

    def forgotten(self, stream: Stream) -> None:
        """This stream is not read any more; one that never came to the scheduler has ended with that."""
        note = self._notes.get(stream.stream_id)
        if note is None or note.choices:
            return
        del self._notes[stream.stream_id]
        state, now_s = _end_of(stream), self._clock()
        history = [note.came, Transition(str(state), self._epoch_s + now_s)]
        self._ended.append((note.owner, self._bare(note, str(state), None, 0.0, history)))
        self._tell_end(note.bare(str(state), None, history[-1].time))
        if self.feed.is_listened:
            self._publish(note, 0, note.came.state, str(state))

    def who(self, stream_id: int) -> tuple[str, str] | None:
        """The request id that the client knows, and its owner; None when the stream is gone."""
        note = self._notes.get(stream_id)
        if note is not None:
            return note.id, note.owner
        return self._whose.get(stream_id)  # the incident that ends a request is told of after its end

    # ---- questions -----------------------------------------------------------------------------------------------

    def live(self) -> Iterator[tuple[Note, Choice | None]]:
        """Every choice that lives, in order of arrival; those of a stream that the scheduler has not got are one."""
        for note in self._notes.values():
            if not note.choices:
                yield note, None
            for choice in note.choices:
                if choice.request.state not in ENDED:
                    yield note, choice

    def now(self, note: Note, choice: Choice | None, *, is_next: bool = False) -> RequestNow:
        """One of `live`, as it is told; `is_next`: it is the first in the queue."""
        if choice is not None:
            waits_for = self._reason(choice.request, 0 if is_next else None)
            return choice.now(waits_for, self._epoch_s + choice.since_s, self.num_blocks(choice.request))
        overflow = {note.stream_id: 0} if self._gate.is_overflowed(note.stream_id) else {}
        record = self._unsubmitted(note.stream_id, note, overflow, self._clock())
        return note.bare(record.state, record.reason, note.came.time)

    def num_blocks(self, request: Request) -> int:
        """Blocks that a request has."""
        return len(self._scheduler.planner.cache.table_of(request)) if self._scheduler is not None else 0

    def requests(self, owner: str | None = None, ids: Collection[str] | None = None) -> list[RequestRecord]:
        """Those that live, in order of arrival, then those that ended, the newest first.

        `owner`: only this one's; None: all owners'. `ids`: only these.
        """
        now_s = self._clock()
        positions = self._positions()
        overflow = {stream_id: at for at, stream_id in enumerate(self._gate.overflow)}
        live = [
            self._record(note, positions, now_s)
            if note.choices
            else self._unsubmitted(stream_id, note, overflow, now_s)
            for stream_id, note in self._notes.items()
            if (owner is None or note.owner == owner) and (ids is None or note.id in ids)
        ]
        ended = [
            record
            for whose, record in reversed(self._ended)
            if (owner is None or whose == owner) and (ids is None or record.id in ids)
        ]
        return live + ended

    def slot_of(self, name: str) -> int:
        """The device's slot of a request that runs; raises `InvalidParameter` when it holds none."""
        for note in self._notes.values():
            if note.id == name:
                for choice in note.choices:
                    if choice.request.slot >= 0:
                        return choice.request.slot
        raise InvalidParameter(f"the request {name[:200]!r} does not run now: it holds no slot", param="request")

    def counts(self) -> Counter[str]:
        """Live requests by state, each choice counted; cheap."""
        found: Counter[str] = Counter()
        for stream_id, note in self._notes.items():
            if note.choices:
                states = [choice.request.state for choice in note.choices]
                found.update(str(state) for state in states if state not in ENDED)
            else:
                found[OVERFLOW if self._gate.is_overflowed(stream_id) else CAME] += note.num_choices
        return found

    def kv(self) -> KvRecord | None:
        """KV blocks by the state of their owner; None before there are any."""
        planner = self.planner
        if planner is None:
            return None
        cache = planner.cache
        pool = cache.statistics()
        blocks: Counter[str] = Counter(free=pool.num_free, cached=pool.num_cached)
        seen: set[int] = set()  # of a block with several owners the first one's state counts
        for request in self.owners():
            num_seen = len(seen)
            seen.update(cache.table_of(request))
            if len(seen) > num_seen:
                blocks["ENDED" if request.ended else str(request.state)] += len(seen) - num_seen
        return KvRecord(
            block_size=planner.limits.block_size,
            total=pool.num_blocks,
            blocks=dict(blocks),
            host_total=cache.num_host_blocks,
            host_used=cache.num_host_blocks - cache.num_host_blocks_free,
        )

    def taken(self, machine: str, state: str, event: str, to: str, owner: str | None) -> list[Taken]:
        """As `Rows.last`, by the name of the machine; raises `InvalidParameter` where there is none."""
        kind = next((kind for kind in MACHINES if kind.__name__ == machine), None)
        if kind is None:
            names = ", ".join(kind.__name__ for kind in MACHINES)
            raise InvalidParameter(f"there is no machine {machine[:80]!r}: it is one of {names}", param="name")
        self.rows.look()
        return self.rows.last(kind, state, event, to, owner)

    def subscribe(self, owner: str | None, *, limit: int) -> Subscription:
        """Listen to transitions and incidents; `owner` as in `requests`."""

        def view(event: FeedEvent, whose: str) -> FeedEvent | None:
            if owner is None or isinstance(event, ActorEvent) or whose == owner:
                return event
            if isinstance(event, IncidentEvent):
                record = self._incidents.seen_by(owner, event.incident)
                return None if record is None else msgspec.structs.replace(event, incident=record)
            return None

        return self.feed.subscribe(view, limit=limit)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _who_is(self, machine: Machine) -> tuple[str, str]:
        """The id that is shown for this machine, and its owner."""
        stream_id = getattr(machine, "stream_id", None)
        return (self.who(stream_id) if stream_id is not None else None) or ("", "")

    def _now(self) -> float:
        """The time of day, in seconds since 1970."""
        return self._epoch_s + self._clock()

    @property
    def planner(self) -> Planner | None:
        return self._scheduler.planner if self._scheduler is not None else None

    def owners(self) -> Iterator[Request]:
        """Every request that may own blocks."""
        assert self._scheduler is not None
        yield from self._scheduler.planner.running.values()
        for flight in self._scheduler.flights:
            yield from flight.departed

    def _positions(self) -> dict[int, int]:
        planner = self.planner
        waiting: Iterable[Request] = planner.waiting if planner is not None else ()
        return {request.request_id: at for at, request in enumerate(waiting)}

    def _reason(self, request: Request, position: int | None) -> str | None:
        """What keeps a live request from running; see `RequestRecord`."""
        state = request.state
        if state is RequestState.PAUSED:
            return "paused: slow reader"
        if state is RequestState.RECOVERING or (state in QUEUED and self._engine.state is EngineState.RECOVERING):
            return "recovering"
        if self._engine.state is EngineState.RECONFIGURING and state in QUEUED:
            return "reconfiguring"
        if state is RequestState.WAITING_FOR_REMOTE_KVS:
            return "swapped"
        if state not in QUEUED:
            return None
        planner = self.planner
        assert planner is not None
        if request.waits_for is not None and planner.cache.is_promised(request.waits_for):
            return "prefix"
        if not planner.free_slots or len(planner.running) >= planner.max_running:
            return "slots"
        needed = planner.cache.room_for(request, len(request.token_ids)) + 1
        if position == 0 and needed > planner.cache.room:
            return "blocks"
        return "queue"

    def _record(self, note: Note, positions: dict[int, int], now_s: float) -> RequestRecord:
        """Of a stream that the scheduler has (or had)."""
        choices = [self._choice(choice, positions, now_s) for choice in note.choices]
        at = next((at for at, choice in enumerate(note.choices) if not choice.request.ended), -1)
        shown, request = choices[at], note.choices[at].request
        is_one = len(choices) == 1
        return RequestRecord(
            id=note.id,
            state=shown.state,
            reason=shown.reason,
            position=positions.get(request.request_id),
            time=note.came.time,
            dwell_s=shown.dwell_s,
            prompt_tokens=request.num_prompt,
            cached_tokens=choices[0].cached_tokens,
            generated_tokens=shown.generated_tokens if is_one else sum(c.generated_tokens for c in choices),
            draft_tokens=sum(c.draft_tokens for c in choices),
            accepted_draft_tokens=sum(c.accepted_draft_tokens for c in choices),
            max_tokens=note.max_tokens,
            blocks=shown.blocks if is_one else sum(c.blocks for c in choices),
            host_blocks=shown.host_blocks if is_one else sum(c.host_blocks for c in choices),
            preemptions=shown.preemptions if is_one else sum(c.preemptions for c in choices),
            choices=choices,
            history=shown.history,
        )

    def _choice(self, choice: Choice, positions: dict[int, int], now_s: float) -> ChoiceRecord:
        request = choice.request
        ended = request.ended
        cache = None  # blocks go back right after the end of a request, or with its step
        if self._scheduler is not None and not ended:
            cache = self._scheduler.planner.cache
        return ChoiceRecord(
            index=request.choice,
            state=str(request.state),
            reason=None if ended else self._reason(request, positions.get(request.request_id)),
            dwell_s=round(now_s - choice.since_s, 6),
            cached_tokens=request.num_cached,
            generated_tokens=request.num_generated,
            draft_tokens=request.num_draft_tokens,
            accepted_draft_tokens=request.num_accepted_tokens,
            blocks=len(cache.table_of(request)) if cache is not None else 0,
            host_blocks=cache.num_copied(request) if cache is not None else 0,
            preemptions=request.num_preemptions,
            history=list(choice.history),
        )

    def _unsubmitted(self, stream_id: int, note: Note, overflow: dict[int, int], now_s: float) -> RequestRecord:
        """Of a stream that the scheduler has not got yet."""
        state, position = CAME, overflow.get(stream_id)
        reason: str | None = "queue"
        if position is not None:
            state, reason = OVERFLOW, "overflow"
        elif self._engine.is_encoding(stream_id):
            reason = "tokenizing"
        elif (stream := self._streams.find(stream_id)) is not None and stream.state is StreamState.CLOSED:
            state, reason = str(_end_of(stream)), None  # it only waits for its reader
        return self._bare(note, state, reason, now_s - note.arrived_s, [note.came], position)

    def _bare(
        self,
        note: Note,
        state: str,
        reason: str | None,
        dwell_s: float,
        history: list[Transition],
        position: int | None = None,
    ) -> RequestRecord:
        return RequestRecord(
            id=note.id,
            state=state,
            reason=reason,
            position=position,
            time=note.came.time,
            dwell_s=round(dwell_s, 6),
            prompt_tokens=None,
            cached_tokens=0,
            generated_tokens=0,
            draft_tokens=0,
            accepted_draft_tokens=0,
            max_tokens=note.max_tokens,
            blocks=0,
            host_blocks=0,
            preemptions=0,
            choices=[],
            history=history,
        )

    # ---- the feed ------------------------------------------------------------------------------------------------

    def _on_listened(self, is_listened: bool) -> None:
        if is_listened:
            self._stop_incidents = self._incidents.subscribe(self._incident)
        else:
            self._stop_incidents()

    def _publish(self, note: Note, choice: int, source: str | None, target: str) -> None:
        now = self._now()
        self.feed.publish(RequestEvent(time=now, id=note.id, choice=choice, source=source, target=target), note.owner)

    def _incident(self, record: IncidentRecord) -> None:
        self.feed.publish(IncidentEvent(time=record.time, incident=record))


def _end_of(stream: Stream) -> RequestState:
    """How a stream ended that the scheduler never saw."""
    if stream.end is None:
        return RequestState.FINISHED_ABORTED  # its reader left
    if stream.end.cause is not None:
        return STATE_OF_CAUSE[stream.end.cause]
    return RequestState.FINISHED_IGNORED  # its prompt cannot be used


def shown_name(actor: str) -> str:
    """What an actor is called outside: workers are numbered, though there is one of them yet."""
    return "worker-0" if actor == "worker" else actor
