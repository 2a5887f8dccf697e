"""Deadlines, to the tick: an account of what is due when, from what the clients asked for and when they came.

    timeout_s        ends a stream wherever it is
    max_queue_s      ends a stream that has no first token, wherever it is, and none that has
    stall_timeout_s  ends a stream of which nothing was read for so long while too much was unread
    stall_keep_s     is how long a paused request may keep its slot and its blocks

Looked at whenever nothing can happen before time goes on: what was due by now must have happened, whatever messages it
took. And nothing of it may happen earlier, unless the world itself has let a timer run out before its time.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from novainfer.fsm.client.stream import StreamState
from novainfer.fsm.messages.events import Cancel, Cause, End, KeepOver, Output, QueueOver, StallOver
from novainfer.fsm.messages.outputs import Delta
from novainfer.fsm.schedule.request import Request, RequestState
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

EPSILON_S = 1e-9  # sums of floats
TOP_LOGPROBS_PER_TOKEN = 4  # that many weigh as much as an unread token


class Reader:
    """What one stream has for its reader, in tokens, and since when that is too much."""

    __slots__ = ("arrived_s", "has_begun", "most", "stalled_s", "unread", "weights")

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.has_begun = False  # it has its first token
        self.unread = 0
        self.weights: dict[int, int] = {}  # by choice: what its unread tokens weigh
        self.most: int | None = None  # unread, when its requests were told that this is too much
        self.stalled_s: float | None = None  # since when nothing was read, while there is too much


class Deadlines:
    """What is due in one world, whose time is that of a clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._due: list[tuple[float, int, Cause]] = []
        self._readers: dict[int, Reader] = {}
        self._live: dict[int, Reader] = {}  # of streams that had not ended when they were looked at last
        self._paused: dict[int, tuple[Request, float, int]] = {}  # since when, and which pause that is
        self._early: set[tuple[int, int]] = set()  # pauses whose timer ran out before its time
        self._keeps = False  # the request whose timer has run out has a slot, and more time
        self.is_early = False  # the timer that runs out now does so before its time

    # ---- what happens --------------------------------------------------------------------------------------------

    def arrived(self, stream_id: int) -> None:
        """The gate has let this stream in, or lets it wait."""
        world = self._world
        params = world.clients[stream_id].arrive.params
        self._readers[stream_id] = self._live[stream_id] = Reader(world.now_s)
        if params.timeout_s is not None:
            heappush(self._due, (world.now_s + params.timeout_s, stream_id, Cause.TIMEOUT))
        if params.max_queue_s is not None:
            heappush(self._due, (world.now_s + params.max_queue_s, stream_id, Cause.QUEUE))

    def given(self, output: Output) -> None:
        """A stream was given `output`."""
        reader = self._readers[output.stream_id]
        stream = self._world.streams.get(output.stream_id)
        end = output.end
        if reader.has_begun and end is not None and end.cause is Cause.QUEUE:
            raise Violation(f"stream {output.stream_id} has its first token, and was ended because it waited for it")
        if not output.token_ids:
            return
        reader.has_begun = True
        if stream is None:
            return
        extra = sum(len(logprob.top) for logprob in output.logprobs or ()) // TOP_LOGPROBS_PER_TOKEN
        weight = len(output.token_ids) + extra
        reader.weights[output.choice] = reader.weights.get(output.choice, 0) + weight
        reader.unread += weight
        is_too_much = reader.unread > self._world.shape.stall_high
        if is_too_much and stream.state is StreamState.OPEN:
            raise Violation(f"stream {output.stream_id} has {reader.unread} unread, and is not stalled")
        if is_too_much and reader.stalled_s is None and stream.state is not StreamState.CLOSED:
            reader.stalled_s, reader.most = self._world.now_s, None

    def read(self, stream_id: int, what: Delta | Any) -> None:
        """A reader took `what`."""
        reader = self._readers[stream_id]
        if isinstance(what, Delta):
            reader.unread -= reader.weights.pop(what.index, 0)
        if reader.stalled_s is not None:
            reader.stalled_s = self._world.now_s if reader.unread > self._world.shape.stall_low else None

    def fired(self, event: Any) -> None:
        """A timer has run out."""
        if self.is_early:
            if isinstance(event, KeepOver):
                self._early.add((event.request_id, self._paused[event.request_id][2]))
            return
        world = self._world
        if isinstance(event, Cancel | QueueOver):
            params, reader = world.clients[event.stream_id].arrive.params, self._readers[event.stream_id]
            limit_s = params.timeout_s if isinstance(event, Cancel) else params.max_queue_s
            if limit_s is None or world.now_s < reader.arrived_s + limit_s - EPSILON_S:
                raise Violation(f"{event} after {world.now_s - reader.arrived_s:g} s: the limit is {limit_s}")

    def is_overdue(self, event: StallOver) -> bool:
        """Whether nothing was read for so long that this timer has something to say."""
        reader = self._readers[event.stream_id]
        if reader.stalled_s is None:
            return False
        return self.is_early or self._world.now_s >= reader.stalled_s + self._world.shape.stall_timeout_s - EPSILON_S

    def paused(self, request: Request | None) -> None:
        """The scheduler was told to pause `request`."""
        if request is None or request.state is not RequestState.PAUSED:
            return
        known = self._paused.get(request.request_id)
        if known is None or known[2] != request.paused_as:
            self._paused[request.request_id] = request, self._world.now_s, request.paused_as

    def keep_over(self, event: KeepOver) -> None:
        """The scheduler is about to hear that a request was paused for long."""
        request, since_s, serial = self._paused.get(event.request_id, (None, 0.0, 0))
        has_time = since_s + self._world.shape.stall_keep_s > self._world.now_s + EPSILON_S
        self._keeps = (
            request is not None
            and (request.state, request.paused_as) == (RequestState.PAUSED, serial)
            and (request.slot >= 0 and has_time and (event.request_id, serial) not in self._early)
        )

    def kept(self, event: KeepOver) -> None:
        """The scheduler has heard it."""
        request, _, _ = self._paused.get(event.request_id, (None, 0.0, 0))
        is_marked = event.request_id in self._world.scheduler.planner.overstayed
        if self._keeps and request is not None and (request.slot < 0 or is_marked):
            raise Violation(f"request {event.request_id} is paused for less than it may, and loses its slot")

    # ---- what must have happened ---------------------------------------------------------------------------------

    def still(self) -> None:
        """All messages have arrived, and time goes on."""
        world = self._world
        now_s, due = world.now_s, self._due
        while due and due[0][0] <= now_s:
            due_s, stream_id, cause = heappop(due)
            if self._has_ended(stream_id) or (cause is Cause.QUEUE and self._readers[stream_id].has_begun):
                continue
            raise Violation(f"stream {stream_id} should have ended at {due_s:.6f} ({cause}), and it is {now_s:.6f}")
        if not world.looks_closely:
            return
        timeout_s, keep_s = world.shape.stall_timeout_s, world.shape.stall_keep_s
        for stream_id, reader in list(self._live.items()):
            since_s = reader.stalled_s
            if self._has_ended(stream_id):
                del self._live[stream_id]
                continue
            if since_s is not None and reader.most is None:
                # What a step brings, of each choice that was not decoding and is told when it does, and the next steps.
                params = world.clients[stream_id].arrive.params
                shape, num_tokens = world.shape, 1 + world.shape.num_speculative_tokens
                weight = 1 + (params.logprobs or 0) // TOP_LOGPROBS_PER_TOKEN
                reader.most = reader.unread + (1 + shape.max_in_flight) * params.n * weight * num_tokens
            elif since_s is not None and reader.most is not None and reader.unread > reader.most:
                raise Violation(f"stream {stream_id} is stalled, and has {reader.unread} unread tokens")
            if since_s is not None and since_s + timeout_s + EPSILON_S <= now_s:
                raise Violation(f"stream {stream_id} is stalled for {now_s - since_s:g} s, and goes on")
        for request_id, (request, since_s, serial) in list(self._paused.items()):
            is_due = since_s + keep_s + EPSILON_S <= now_s
            if request.state is not RequestState.PAUSED or request.paused_as != serial:
                del self._paused[request_id]
            elif is_due and (request.kv.blocks or request.slot >= 0) and not request.is_in_flight:
                raise Violation(f"request {request_id} is paused for {now_s - since_s:g} s, and keeps its blocks")

    def _has_ended(self, stream_id: int) -> bool:
        world = self._world
        stream = world.streams.get(stream_id)
        return stream is None or stream.state is StreamState.CLOSED or isinstance(world.clients[stream_id].end, End)
