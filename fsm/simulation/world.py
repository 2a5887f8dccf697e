"""The machines of one engine, the links between them, its clients, and everything that may happen to them.

A link is FIFO from one sender to one receiver and lane; between links any order may happen. Whatever may happen next
is a *move*, a tuple of its kind and arguments; whoever drives the world (a seed, or the explorer) picks one and has
it made. Moves of the machine room (`moves`) go on until nothing is left to do; clients and faults come on top.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from novainfer.fsm.engine import Engine
from novainfer.fsm.events import (
    Arrive,
    Begin,
    Cancel,
    CancelAll,
    Cause,
    Close,
    Drain,
    Encode,
    Encoded,
    EncodeFailed,
    End,
    Fault,
    Finished,
    JobDone,
    JobFailed,
    Outputs,
    QueueOver,
    Read,
    Rejected,
    Run,
    StepDone,
    StepFailed,
    Stop,
)
from novainfer.fsm.gate import Gate
from novainfer.fsm.machine import After, Effect, Machine, Send, Start
from novainfer.fsm.outputs import Delta
from novainfer.fsm.params import SamplingParams
from novainfer.fsm.planner import Limits
from novainfer.fsm.request import Request
from novainfer.fsm.scheduler import Scheduler
from novainfer.fsm.simulation.checks import Checks
from novainfer.fsm.simulation.client import Client
from novainfer.fsm.simulation.device import EOS, VOCAB_SIZE, ScriptedDevice
from novainfer.fsm.simulation.oracle import VOCABULARY, Violation
from novainfer.fsm.stream import Stream
from novainfer.fsm.worker import Worker, WorkerState

Link = tuple[str, str, bool]  # sender, receiver, whether it is the control lane
Move = tuple[Any, ...]  # the name of a method of World, then its arguments

TO_WORKER: Link = ("device", "worker", False)
FROM_WORKER: Link = ("worker", "engine", False)
_encode = msgspec.msgpack.Encoder().encode


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a world."""

    num_blocks: int = 12
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    prefill_chunk_tokens: int = 8
    max_model_len: int = 40
    max_num_queued_reqs: int = 64
    max_num_queued_tokens: int = 1 << 20
    max_num_overflow_reqs: int = 4
    enable_prefix_caching: bool = True
    stall_high: int = 4
    stall_low: int = 1

    @property
    def context_len(self) -> int:
        """Tokens that one request may hold, prompt included."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class Rows(Counter[tuple[str, str, str]]):
    """How often each row was taken, by (machine, state, event)."""


class _Watched(Request):
    """A request whose transitions are counted."""

    __slots__ = ("_taken",)
    _taken: Rows

    def handle(self, event: Any) -> list[Effect]:
        """As `Request.handle`."""
        self._taken["Request", self.state, type(event).__name__] += 1
        return super().handle(event)


class World:
    """See the module. `trace` is given the bytes of every event that a machine takes."""

    def __init__(self, shape: Shape, trace: Callable[[bytes], None] | None = None) -> None:
        self.shape = shape
        limits = Limits(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            prefill_chunk_tokens=shape.prefill_chunk_tokens,
            block_size=shape.block_size,
            enable_prefix_caching=shape.enable_prefix_caching,
        )
        self.gate = Gate(shape.max_num_queued_reqs, shape.max_num_queued_tokens, shape.max_num_overflow_reqs)
        self.engine = Engine()
        self.scheduler = Scheduler(limits, VOCABULARY)
        self.scheduler.request_type = self._new_request
        self.worker = Worker()
        self.machines: dict[str, Machine] = {
            "gate": self.gate,
            "engine": self.engine,
            "scheduler": self.scheduler,
            "worker": self.worker,
        }
        self.device = ScriptedDevice(shape.num_blocks, shape.block_size, shape.max_num_seqs)
        self.links: dict[Link, deque[Any]] = {}
        self.jobs: deque[Any] = deque()  # at the device
        self.encodings: list[Encode] = []  # at the tokenizer
        self.timers: list[tuple[str, Any]] = []
        self.late: list[tuple[Link, Any]] = []  # what came, and will come once more
        self.streams: dict[int, Stream] = {}
        self.clients: dict[int, Client] = {}
        self.is_draining = self.is_stopped = False
        self.budget: dict[str, int] = {}  # what the explorer may still do to this world
        self.counts: Counter[str] = Counter()  # what happened, by kind
        self.taken = Rows()
        self.checks = Checks(self)
        self._trace = trace
        self.perform("shell", [Send("worker", Begin())])

    def _new_request(self, *args: Any) -> Request:
        request = _Watched(*args)
        request._taken = self.taken
        return request

    # ---- what the world does with effects ------------------------------------------------------------------------

    def perform(self, source: str, effects: Sequence[Effect]) -> None:
        """Put each effect where it belongs."""
        for effect in effects:
            if type(effect) is Send:
                link = (source, effect.to, effect.urgent)
                queue = self.links.get(link)
                if queue is None:
                    queue = self.links[link] = deque()
                queue.append(effect.event)
            elif type(effect) is Start:
                self.jobs.append(effect.job)
            elif type(effect) is After:
                self.timers.append((source, effect.event))

    def handle(self, name: str, machine: Machine, event: Any) -> None:
        """One event for one machine, and its effects."""
        kind = type(event).__name__
        self.taken[type(machine).__name__, machine.state, kind] += 1
        if self._trace is not None:
            self._trace(_encode((name, kind, event)))
        self.perform(name, machine.handle(event))

    def _deliver(self, to: str, event: Any) -> None:
        if to == "scheduler":
            self._to_scheduler(event)
        elif to == "streams":
            self._to_streams(event)
        elif to == "tokenizer":
            self.encodings.append(event)
        elif to == "incidents":
            self.counts[f"incident: {event.kind}"] += 1
        elif to != "client":  # who hears that the worker is up, or will not come up
            self.checks.before(to, event)
            if isinstance(event, CancelAll):
                self._everybody(event.cause, self.clients)
            elif isinstance(event, Drain):
                self._everybody(Cause.DRAIN, self.gate.overflow)
            self.handle(to, self.machines[to], event)
            if to == "engine":
                self.checks.after_engine(event)
            if self.worker.state is WorkerState.FAILED and not self.is_stopped:
                self._stopped()

    def _to_scheduler(self, event: Any) -> None:
        self.checks.before_scheduler(event)
        self.handle("scheduler", self.scheduler, event)
        self.checks.after_scheduler(event)

    def _to_streams(self, event: Stop | Outputs) -> None:
        if isinstance(event, Stop):
            for stream in self.streams.values():
                self.handle("streams", stream, event)
            return
        for output in event.outputs:
            self.checks.output(output)
            if output.stream_id in self.streams:
                self.handle("streams", self.streams[output.stream_id], output)

    # ---- moves of the machine room -------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """What may happen next: each link's first message, the device's oldest job, any prompt at the tokenizer."""
        moves: list[Move] = [("deliver", link) for link, queue in self.links.items() if queue]
        if self.jobs:
            moves.append(("finish_job",))
        if self.encodings:
            moves += [("encode", at) for at in range(len(self.encodings))]
        return moves

    def make(self, move: Move) -> None:
        """Make `move`."""
        getattr(self, move[0])(*move[1:])

    def deliver(self, link: Link) -> None:
        """The first message of `link` arrives."""
        self._deliver(link[1], self.links[link].popleft())

    def finish_job(self) -> None:
        """The device does its oldest job, well."""
        job = self.jobs.popleft()
        if isinstance(job, Run):
            self.counts["steps"] += 1
            self._answer(self.device.run(job.plan))
            return
        if isinstance(job, Close):
            self.device.is_closed = True
        shape = self.shape
        found = {
            "num_blocks": shape.num_blocks,
            "max_model_len": shape.max_model_len,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": [EOS],
        }
        self._answer(JobDone(type(job).__name__, found))

    def _answer(self, event: StepDone | StepFailed | JobDone | JobFailed) -> None:
        self.perform("device", [Send("worker", event)])

    def encode(self, at: int) -> None:
        """The tokenizer answers one of its prompts."""
        event = self.encodings.pop(at)
        assert isinstance(event.prompt, str)
        self.perform("tokenizer", [Send("engine", Encoded(event.stream_id, [ord(c) for c in event.prompt]))])

    def fire_timer(self, at: int) -> None:
        """A timer runs out."""
        name, event = self.timers.pop(at)
        self.counts["timeout"] += 1
        if isinstance(event, QueueOver | Cancel):
            self.clients[event.stream_id].causes.add(Cause.QUEUE if isinstance(event, QueueOver) else event.cause)
        self.perform("timer", [Send(name, event, urgent=True)])

    # ---- faults --------------------------------------------------------------------------------------------------

    def fail_step(self, fault: Fault, launched: bool) -> None:
        """The device fails its oldest job, which is a step; a launched one leaves garbage behind."""
        job = self.jobs.popleft()
        if launched:
            self.device.spoil(job.plan)
        self.counts[fault if launched else f"{fault} before launch"] += 1
        self._answer(StepFailed(job.plan.step_id, job.plan.epoch, fault, "injected", launched))

    def fail_job(self) -> None:
        """The device fails its oldest job, which is no step."""
        job = self.jobs.popleft()
        if isinstance(job, Close):
            self.device.is_closed = True
        self.counts[f"{type(job).__name__} failed"] += 1
        self._answer(JobFailed(type(job).__name__, "injected"))

    def fail_encode(self, at: int) -> None:
        """The tokenizer cannot do one of its prompts."""
        event = self.encodings.pop(at)
        self.counts["encode failed"] += 1
        self.clients[event.stream_id].encoding_failed = True
        self.perform("tokenizer", [Send("engine", EncodeFailed(event.stream_id, "injected", "prompt"))])

    def duplicate(self, link: Link) -> None:
        """What is first on `link` will come once more, at any later time."""
        event = self.links[link][0]
        self.late.append((link, event))
        self.counts["duplicate"] += 1

    def contradict(self, link: Link) -> None:
        """The job that is done will be called failed as well, when its device dies a little later."""
        self.late.append((link, JobFailed(self.links[link][0].job, "injected")))
        self.counts["contradiction"] += 1

    def come_late(self, at: int) -> None:
        """A duplicate arrives."""
        link, event = self.late.pop(at)
        self._deliver(link[1], event)

    def repeatable(self) -> list[Link]:
        """Links whose first message may come twice: the device's, which may be another process, and the worker's."""
        found = [TO_WORKER] if self.links.get(TO_WORKER) else []
        queue = self.links.get(FROM_WORKER)
        if queue and isinstance(queue[0], StepDone | StepFailed):
            found.append(FROM_WORKER)
        return found

    # ---- clients -------------------------------------------------------------------------------------------------

    def arrive(self, prompt: str | list[int], params: SamplingParams, seed: int = 1) -> int:
        """A client asks for something; returns its stream id. The gate answers at once."""
        stream_id = len(self.clients)
        arrive = Arrive(stream_id=stream_id, prompt=prompt, params=params, seed=seed, num_tokens=len(prompt))
        client = self.clients[stream_id] = Client(arrive, self.shape.context_len)
        shape = self.shape
        self.streams[stream_id] = Stream(
            stream_id, str(stream_id), params.n, stall_high=shape.stall_high, stall_low=shape.stall_low
        )
        if self.is_stopped:
            client.causes.add(Cause.DRAIN)
        waiting, tokens = self.gate.num_queued + params.n, self.gate.num_queued_tokens + len(prompt)
        was_full = waiting > shape.max_num_queued_reqs or tokens > shape.max_num_queued_tokens
        was_full = was_full or bool(self.gate.overflow)
        self.handle("gate", self.gate, arrive)
        self.checks.answered()
        answers = self.links.get(("gate", "client", False))
        if answers:
            rejected: Rejected = answers.popleft()
            client.end = rejected
            self.counts[f"rejected: {rejected.reason}"] += 1
            self.checks.rejection(rejected, was_full)
        else:
            client.was_let_in = True
        return stream_id

    def cancel(self, stream_id: int, cause: Cause = Cause.CLIENT) -> None:
        """A client gives up, or its connection is lost; it may do so twice, and when its stream has ended."""
        self.clients[stream_id].causes.add(cause)
        self.counts["cancel"] += 1
        self.handle("gate", self.gate, Cancel(stream_id, cause))

    def cancel_all(self) -> None:
        """Somebody ends every stream."""
        self.counts["cancel all"] += 1
        self._everybody(Cause.CLIENT, self.clients)
        self.handle("gate", self.gate, CancelAll(Cause.CLIENT))

    def drain(self) -> None:
        """The owner takes no new streams."""
        self.is_draining = True
        self.counts["drain"] += 1
        self.perform("owner", [Send("gate", Drain())])

    def stop(self, error: str | None, to: Sequence[str] = ("engine",)) -> None:
        """The owner ends everything now: tells the engine, or everybody at once, as the shell does when it dies."""
        self._stopped()
        self.counts["stop"] += 1
        self.perform("owner", [Send(name, Stop(error), urgent=True) for name in to])

    def abandon(self, stream_id: int) -> None:
        """A client goes away without reading on: its stream is forgotten, and its requests are cancelled."""
        self.cancel(stream_id, Cause.DISCONNECT)
        self.clients[stream_id].end = End(cause=Cause.DISCONNECT)
        del self.streams[stream_id]

    def _stopped(self) -> None:
        """The engine stops, or will: every client may be told so from now on."""
        self.is_stopped = True
        self._everybody(Cause.DRAIN, self.clients)

    def _everybody(self, cause: Cause, stream_ids: Iterable[int]) -> None:
        for stream_id in stream_ids:
            self.clients[stream_id].causes.add(cause)

    def news(self) -> list[int]:
        """Streams that a read would give something."""
        clients = self.clients
        return [s for s, stream in self.streams.items() if clients[s].end is None and stream.has_news]

    def read(self, stream_id: int) -> None:
        """A client takes what is there, and checks it."""
        client, stream = self.clients[stream_id], self.streams[stream_id]
        self.taken["Stream", stream.state, "Read"] += 1
        effects = stream.handle(Read())
        if not effects:
            raise Violation(f"stream {stream_id} had news, and a read gave nothing")
        for effect in effects:
            assert isinstance(effect, Send)
            if effect.to != "reader":
                self.perform("streams", [effect])
            elif isinstance(effect.event, Delta):
                client.take(effect.event)
            else:
                assert isinstance(effect.event, End | Finished)
                client.take_end(effect.event)
