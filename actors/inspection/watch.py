"""What the page of the inspector watches: frames of what has changed, made while somebody looks, and free otherwise.

    machines, requests, KV blocks, steps ──twenty times a second──▶ Frame ──▶ each watcher: told, or joined to what it
                                                                              has not taken yet

Frames take four thousandths of the loop's CPU time at most: where one takes longer, the next comes later. The times of
tokens, of a sample of streams, take as much where 256 requests run. A watcher that is slow gets fewer frames, with the
same states and counts; of steps, evictions and incidents, which only grow, the newest, and how many it has lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import msgspec

from novainfer.actors.core.streams import Streams
from novainfer.actors.inspection.changes import RequestChanges
from novainfer.actors.inspection.frames import (
    ActorNow,
    Frame,
    MachineNow,
    Rates,
    Snapshot,
    StepLimits,
    StepNow,
)
from novainfer.actors.inspection.incidents import IncidentRecord, Incidents
from novainfer.actors.inspection.inspector import Inspector
from novainfer.actors.inspection.joining import INCIDENTS_MAX, bounded, empty, joined, tells
from novainfer.actors.inspection.kv_map import KvPicture
from novainfer.actors.inspection.recent import RecentCount, RecentTimes
from novainfer.actors.inspection.rows import Row, row_counts
from novainfer.actors.inspection.steps import StepLog
from novainfer.fsm.client.stream import Stream
from novainfer.fsm.core.machine import Machine
from novainfer.fsm.messages.events import Output
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.request import Request

logger = logging.getLogger(__name__)

FRAME_S = 0.05
SHARE = 0.004  # of the loop's time
LATEST_S = 1.0  # between two frames, whatever they take
SLOWLY_S = 0.2  # between two looks at what only people read: actors, rates, streams
SNAPSHOT_STEPS = 256
GONE_MAX = 4096  # of those that a slow watcher has not heard: then it begins anew
TIMED_MAX = 32  # streams whose tokens are timed: a sample of them, where there are more


class Sources(msgspec.Struct, frozen=True):
    """Where a `Watch` looks. `machines()` are all but requests and streams, `planner()` is None while a model loads.

    `generated()` is how many tokens there were since the start.
    """

    inspector: Inspector
    steps: StepLog
    incidents: Incidents
    streams: Streams
    actors: Callable[[], list[ActorNow]]
    machines: Callable[[], Iterable[Machine]]
    planner: Callable[[], Planner | None]
    generated: Callable[[], int]
    limits: Callable[[], StepLimits]
    is_running: Callable[[], bool]


class Watch:
    """Of one engine; on its loop. `clock` is monotonic, in seconds."""

    def __init__(self, sources: Sources, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._of = sources
        self._clock = clock
        self._watchers: list[Watcher] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._spent_s = 0.0  # since the last frame was begun
        self._inter_token = RecentTimes()
        self._last_s: dict[tuple[int, int], float] = {}  # when a choice that is timed got its last token
        self._tokens = RecentCount()
        self._stop_incidents: Callable[[], None] = lambda: None
        self._begin()

    def _begin(self) -> None:
        """Nothing is told yet."""
        self._requests = RequestChanges(self._of.inspector)
        self._rows: defaultdict[type[Machine], dict[Row, int]] = defaultdict(dict)
        self._states: dict[type[Machine], dict[str, int]] = {}
        self._actors: dict[str, ActorNow] = {}
        self._rates = Rates(tokens_s=0.0, running=0, waiting=0, ttft_ms=None, inter_token_ms=None)
        self._kv: KvPicture | None = None
        self._next_step = self._of.steps.num_launched
        self._looked_s = float("-inf")
        self._streams: dict[str, int] = {}

    # ---- watchers ------------------------------------------------------------------------------------------------

    def subscribe(self, owner: str | None) -> Watcher:
        """Begin to watch: a snapshot comes first. `owner` is as in `Inspector.requests`."""
        is_first = not self._watchers
        if is_first:
            self._start()
        watcher = Watcher(self, owner)
        try:
            self._tell_all(self._frame())
            watcher.show(self.snapshot())
        except BaseException:
            if is_first:
                self._stop()
            raise
        self._watchers.append(watcher)
        if self._is_closed:
            watcher.end()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """This one watches no more."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._stop()

    def close(self) -> None:
        """There will be no more frames: watchers get what is there, and then their end."""
        self._is_closed = True
        for watcher in tuple(self._watchers):
            watcher.end()

    def spent(self, seconds: float) -> None:
        """So much time was taken for a watcher: what was told has been made bytes."""
        self._spent_s += seconds

    @property
    def is_watched(self) -> bool:
        """Whether there is anybody."""
        return bool(self._watchers)

    def _start(self) -> None:
        self._begin()
        of = self._of
        of.inspector.rows.look()
        self._stop_incidents = of.incidents.subscribe(self._incident)
        if not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(FRAME_S, self._tick)

    def _stop(self) -> None:
        self._stop_incidents()
        self._last_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        began_s = time.thread_time()  # a thread that waits for its CPU takes none of the loop's
        try:
            self._tell_all(self._frame())
        except Exception:
            # To be told nothing for ever would look like an engine that stands still: they come again, and begin anew.
            logger.exception("a frame could not be made: those who watch are let go")
            for watcher in tuple(self._watchers):
                watcher.end()
        spent_s, self._spent_s = time.thread_time() - began_s + self._spent_s, 0.0
        self._timer = asyncio.get_running_loop().call_later(pause_s(spent_s), self._tick)

    def _tell_all(self, frame: Frame | None) -> None:
        """None: what there is to see is another, and everybody begins anew."""
        if frame is None:
            snapshot = self.snapshot()
            for watcher in self._watchers:
                watcher.show(snapshot)
        elif tells(frame):
            for watcher in self._watchers:
                watcher.push(frame)

    def incidents_of(self, owner: str) -> list[IncidentRecord]:
        """The newest that this one may know of."""
        return self._of.incidents.records(owner)[-INCIDENTS_MAX:]

    def _incident(self, record: IncidentRecord) -> None:
        for watcher in self._watchers:
            seen = record if watcher.owner is None else self._of.incidents.seen_by(watcher.owner, record)
            if seen is not None:
                watcher.push(empty(time.time(), incidents=[seen]))

    # ---- times of tokens -----------------------------------------------------------------------------------------

    def delivered(self, outputs: Sequence[Output]) -> None:
        """Clients have been given these: of a sample of them it is noted how long a token took."""
        each = 1 + len(outputs) // TIMED_MAX
        now_s, last_s = self._clock(), self._last_s
        for output in outputs:
            if output.stream_id % each:
                continue
            key = output.stream_id, output.choice
            before_s = last_s.pop(key, None)
            if (count := len(output.token_ids)) and before_s is not None:
                self._inter_token.observe(now_s, (now_s - before_s) / count, count)
            if output.end is None:
                last_s[key] = now_s

    # ---- what there is to tell -----------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All that was told by now; right behind a frame, so that there is nothing else."""
        of = self._of
        planner = of.planner()
        return Snapshot(
            time=time.time(),
            limits=of.limits(),
            machines=[
                MachineNow(kind.__name__, states, row_counts(self._rows[kind], {}))
                for kind, states in self._states.items()
            ],
            actors=list(self._actors.values()),
            requests=self._requests.all(planner),
            kv=self._kv.map(planner.limits.block_size) if self._kv is not None and planner is not None else None,
            steps=self._told_steps(),
            rates=self._rates,
            incidents=of.incidents.records()[-INCIDENTS_MAX:],
        )

    def _told_steps(self) -> list[StepNow]:
        begin, budget = max(self._next_step - SNAPSHOT_STEPS, 0), self._of.limits().max_num_batched_tokens
        steps, number, _ = self._of.steps.told(begin, budget, is_running=self._of.is_running())
        return steps[: len(steps) - (number - self._next_step)]

    def _frame(self) -> Frame | None:
        """What has changed since the last one; None where the KV cache is another one."""
        of, now_s = self._of, self._clock()
        planner = of.planner()
        requests, progress, gone = self._requests.update(planner)
        steps, self._next_step, num_lost = of.steps.told(
            self._next_step, of.limits().max_num_batched_tokens, is_running=of.is_running()
        )
        is_another = self._look_at_cache(planner)
        kv = self._kv.update(of.inspector.owners()) if self._kv is not None and not is_another else None
        actors, rates = list[ActorNow](), None
        if now_s - self._looked_s >= SLOWLY_S:
            self._looked_s = now_s
            actors, rates = self._look_at_actors(), self._look_at_rates(now_s)
            self._streams = dict(Counter(str(stream.state) for stream in of.streams.machines().values()))
        machines = self._look_at_machines()
        if is_another:
            return None
        return bounded(
            Frame(
                time=time.time(),
                machines=machines,
                actors=actors,
                requests=requests,
                progress=progress,
                gone=gone,
                kv=kv,
                steps=steps,
                rates=rates,
                incidents=[],
                lost=num_lost,
            )
        )

    def _look_at_cache(self, planner: Planner | None) -> bool:
        """Whether the KV cache is another one than it was."""
        before = self._kv
        if planner is None:
            self._kv = None
        elif before is None or not before.is_of(planner.cache):
            self._kv = KvPicture(planner.cache)
            self._kv.update(self._of.inspector.owners())
        return self._kv is not before

    def _look_at_machines(self) -> list[MachineNow]:
        states: dict[type[Machine], dict[str, int]] = {}
        for machine in self._of.machines():
            of_kind = states.setdefault(type(machine), {})
            of_kind[str(machine.state)] = of_kind.get(str(machine.state), 0) + 1
        states[Request] = dict(self._requests.states)
        states[Stream] = self._streams
        before, self._states = self._states, states
        found = []
        for kind, now in states.items():
            rows = row_counts(self._of.inspector.rows.counts(kind), self._rows[kind])
            if rows or now != before.get(kind):
                found.append(MachineNow(kind.__name__, now, rows))
        found += [MachineNow(kind.__name__, {}, []) for kind in before if kind not in states]
        return found

    def _look_at_actors(self) -> list[ActorNow]:
        found = [now for now in self._of.actors() if self._actors.get(now.name) != now]
        self._actors.update((now.name, now) for now in found)
        return found

    def _look_at_rates(self, now_s: float) -> Rates | None:
        rates = Rates(
            tokens_s=round(self._tokens.rate(now_s, self._of.generated()), 2),
            running=self._requests.num_running,
            waiting=self._requests.num_waiting,
            ttft_ms=self._of.inspector.first_tokens_ms(),
            inter_token_ms=self._inter_token.percentiles_ms(now_s),
        )
        if rates == self._rates:
            return None
        self._rates = rates
        return rates


class Watcher:
    """One who watches: an async iterator of a `Snapshot` and then of frames, to be closed (or used in `with`)."""

    def __init__(self, watch: Watch, owner: str | None) -> None:
        self._watch = watch
        self.owner = owner
        self._snapshot: Snapshot | None = None
        self._frame: Frame | None = None
        self._keys: set[str] = set()  # of the requests that it is told of
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None

    def show(self, snapshot: Snapshot) -> None:
        """Everything anew, in the place of what it has not taken."""
        if self.owner is not None:
            requests = [now for now in snapshot.requests if now.owner == self.owner]
            incidents = self._watch.incidents_of(self.owner)
            snapshot = msgspec.structs.replace(snapshot, requests=requests, incidents=incidents)
            self._keys = {now.key for now in requests}
        self._snapshot, self._frame = snapshot, None
        self._wake()

    def push(self, frame: Frame) -> None:
        """What has changed, behind what it has not taken."""
        if self.owner is not None:
            frame = self._own(frame)
            if not tells(frame):
                return
        self._frame = frame if self._frame is None else joined(self._frame, frame)
        if len(self._frame.gone) > GONE_MAX:
            self.show(self._watch.snapshot())
        self._wake()

    def _own(self, frame: Frame) -> Frame:
        requests = [now for now in frame.requests if now.owner == self.owner]
        self._keys.update(now.key for now in requests)
        progress = [one for one in frame.progress if one[0] in self._keys]
        gone = [key for key in frame.gone if key in self._keys]
        self._keys.difference_update(gone)
        return msgspec.structs.replace(frame, requests=requests, progress=progress, gone=gone)

    def spent(self, seconds: float) -> None:
        """As `Watch.spent`."""
        self._watch.spent(seconds)

    def close(self) -> None:
        """Watch no more."""
        self._watch.leave(self)

    def end(self) -> None:
        """Watch no more, and let the iteration end with what is there."""
        self._is_ended = True
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Snapshot | Frame:
        while self._snapshot is None and self._frame is None:
            if self._is_ended:
                raise StopAsyncIteration
            assert self._waiter is None, "a watcher has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if (snapshot := self._snapshot) is not None:
            self._snapshot = None
            return snapshot
        frame, self._frame = self._frame, None
        assert frame is not None
        return frame


def pause_s(spent_s: float) -> float:
    """Seconds until the next frame, where so many were spent on the last one."""
    return min(max(FRAME_S, spent_s / SHARE), LATEST_S)
