"""The machines of one engine, the links between them, its clients, and what must hold after every event.

A link is FIFO from one sender to one receiver and lane; between links any order may happen. Everything that may
happen next is a `Move`; whoever drives the world (a seed, or the explorer) picks one. Checked after each:

    every block and slot has exactly its owners           free + cached + owned = total
    a step taken back leaves what was there before it     (exactly, when it was never launched)
    each token is the one its context demands             whatever was batched, preempted, shared or retried
    each stream ends exactly once, and says why           nothing comes after the end
    an idle engine has nothing left to do                 no wake-up is lost
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from novainfer.fsm.engine import Engine, EngineState
from novainfer.fsm.events import (
    Arrive,
    Begin,
    Cancel,
    Cause,
    Encode,
    Encoded,
    End,
    Fault,
    Finished,
    JobDone,
    MakeBatch,
    Output,
    Outputs,
    Read,
    Rejected,
    Run,
    StepDone,
    StepFailed,
    Stop,
)
from novainfer.fsm.gate import Gate
from novainfer.fsm.machine import After, Effect, Machine, Send, Start
from novainfer.fsm.outputs import Delta, FinishReason
from novainfer.fsm.params import SamplingParams
from novainfer.fsm.planner import Limits
from novainfer.fsm.request import ENDED
from novainfer.fsm.scheduler import Scheduler, SchedulerState
from novainfer.fsm.simulation.device import EOS, VOCAB_SIZE, ScriptedDevice, expected_token
from novainfer.fsm.stream import Stream
from novainfer.fsm.text import Vocabulary
from novainfer.fsm.worker import Worker

VOCABULARY = Vocabulary.build([bytes([65 + i % 26]) for i in range(VOCAB_SIZE)], frozenset([EOS]))


class Violation(AssertionError):
    """Something that must hold does not."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a world."""

    num_blocks: int = 12
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    prefill_chunk_tokens: int = 8
    max_model_len: int = 40
    max_num_queued_reqs: int = 64
    enable_prefix_caching: bool = True


class Move(msgspec.Struct, frozen=True):
    """One thing that may happen next: its kind, for weights and counts, and how to make it happen."""

    kind: str
    go: Callable[[], None]


class Client(msgspec.Struct):
    """What one client was told so far."""

    arrive: Arrive
    tokens: list[list[int]]
    finished: set[int]
    end: End | Finished | Rejected | None = None
    cancelled: bool = False


class World:
    """See the module. `perform` effects, list `moves`, `check`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        limits = Limits(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            prefill_chunk_tokens=shape.prefill_chunk_tokens,
            block_size=shape.block_size,
            enable_prefix_caching=shape.enable_prefix_caching,
        )
        self.gate = Gate(shape.max_num_queued_reqs, 1 << 20)
        self.engine = Engine()
        self.scheduler = Scheduler(limits, VOCABULARY)
        self.worker = Worker()
        self.machines: dict[str, Machine] = {
            "gate": self.gate,
            "engine": self.engine,
            "scheduler": self.scheduler,
            "worker": self.worker,
        }
        self.device = ScriptedDevice(shape.num_blocks, shape.block_size, shape.max_num_seqs)
        self.links: dict[tuple[str, str, bool], deque[Any]] = {}
        self.jobs: deque[Any] = deque()  # at the device
        self.timers: list[Any] = []
        self.streams: dict[int, Stream] = {}
        self.clients: dict[int, Client] = {}
        self.counts: Counter[str] = Counter()
        self.taken: Counter[tuple[str, str, str]] = Counter()  # (machine, state, event): rows taken
        self._ended: set[int] = set()  # requests
        self._quiet = False  # nothing but MakeBatch reached the scheduler since its last savepoint
        self._deliver("worker", Begin())

    # ---- what the world does with effects ------------------------------------------------------------------------

    def perform(self, source: str, effects: Sequence[Effect]) -> None:
        """Put each effect where it belongs."""
        for effect in effects:
            if type(effect) is Send:
                self.links.setdefault((source, effect.to, effect.urgent), deque()).append(effect.event)
            elif type(effect) is Start:
                self.jobs.append(effect.job)
            elif type(effect) is After:
                self.timers.append((source, effect.event))

    def handle(self, name: str, machine: Machine, event: Any) -> None:
        """One event for one machine, and its effects."""
        self.taken[type(machine).__name__, machine.state, type(event).__name__] += 1
        self.perform(name, machine.handle(event))

    def _deliver(self, to: str, event: Any) -> None:
        if to == "tokenizer":
            assert isinstance(event, Encode)
            assert isinstance(event.prompt, str)
            self.perform("tokenizer", [Send("engine", Encoded(event.stream_id, [ord(c) for c in event.prompt]))])
        elif to == "streams":
            self._to_streams(event)
        elif to == "client":
            if isinstance(event, Rejected):
                self.clients[event.stream_id].end = event
        elif to == "scheduler":
            self._to_scheduler(event)
        else:
            self.handle(to, self.machines[to], event)

    def _to_scheduler(self, event: Any) -> None:
        scheduler = self.scheduler
        flight = scheduler.flight
        was_quiet, self._quiet = self._quiet, self._quiet and isinstance(event, MakeBatch)
        failed = isinstance(event, MakeBatch) and isinstance(event.outcome, StepFailed)
        if failed and flight is not None:
            self._check_rollback(flight, event.outcome, exact=was_quiet)
        self.handle("scheduler", scheduler, event)
        scheduler.planner.probe = scheduler.fingerprint
        if isinstance(event, MakeBatch):
            self._quiet = True

    def _check_rollback(self, flight: Any, outcome: StepFailed, *, exact: bool) -> None:
        """Wrap the coming rollback: afterwards the state must be that of before the plan."""
        planner, rollback = self.scheduler.planner, self.scheduler.planner.rollback

        def checked(flight: Any, *, launched: bool) -> None:
            rollback(flight, launched=launched)
            del planner.rollback
            if exact and flight.before is not None:
                now, before = self.scheduler.fingerprint(), flight.before
                if launched:  # names of blocks that were evicted for the step stay lost
                    now, before = now[1:], before[1:]
                if now != before:
                    raise Violation(f"rollback of step {flight.step_id}: {before} became {now}")
                self.counts["rollbacks_checked"] += 1

        planner.rollback = checked  # type: ignore[method-assign]

    def _to_streams(self, event: Any) -> None:
        if isinstance(event, Stop):
            for stream in self.streams.values():
                self.handle("streams", stream, event)
            return
        assert isinstance(event, Outputs)
        for output in event.outputs:
            self._check_output(output)
            self.handle("streams", self.streams[output.stream_id], output)

    # ---- clients -------------------------------------------------------------------------------------------------

    def arrive(self, prompt: str | list[int], params: SamplingParams) -> int:
        """A client asks for something; returns its stream id."""
        stream_id = len(self.clients)
        arrive = Arrive(stream_id=stream_id, prompt=prompt, params=params, seed=1, num_tokens=len(prompt))
        self.clients[stream_id] = Client(arrive, [[] for _ in range(params.n)], set())
        self.streams[stream_id] = Stream(stream_id, str(stream_id), params.n)
        self.handle("gate", self.gate, arrive)
        return stream_id

    def cancel(self, stream_id: int, cause: Cause = Cause.CLIENT) -> None:
        """A client gives up, or its connection is lost."""
        self.clients[stream_id].cancelled = True
        self.counts["cancel"] += 1
        self.perform("client", [Send("engine", Cancel(stream_id, cause), urgent=True)])

    def read(self, stream_id: int) -> None:
        """A client takes what is there, and checks it."""
        client, stream = self.clients[stream_id], self.streams[stream_id]
        self.taken["Stream", stream.state, "Read"] += 1
        for effect in stream.handle(Read()):
            assert isinstance(effect, Send)
            if effect.to != "reader":
                self.perform("streams", [effect])
            elif isinstance(effect.event, Delta):
                self._check_delta(client, effect.event)
            else:
                client.end = effect.event
                if isinstance(client.end, Finished) and len(client.finished) != client.arrive.params.n:
                    raise Violation(f"stream {stream_id} finished before its choices had")

    # ---- moves ---------------------------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """What may happen next inside the engine: each link's first message, and the device's oldest job."""
        moves = [Move("deliver", partial(self._deliver_next, link)) for link, queue in self.links.items() if queue]
        if self.jobs:
            moves.append(Move("job", self.finish_job))
        return moves

    def _deliver_next(self, link: tuple[str, str, bool]) -> None:
        self._deliver(link[1], self.links[link].popleft())

    def finish_job(self) -> None:
        """The device does its oldest job, well."""
        job = self.jobs.popleft()
        if isinstance(job, Run):
            self.perform("device", [Send("worker", self.device.run(job.plan))])
            self.counts["steps"] += 1
        else:
            shape = self.shape
            found = {
                "num_blocks": shape.num_blocks,
                "max_model_len": shape.max_model_len,
                "vocab_size": VOCAB_SIZE,
                "eos_token_ids": [EOS],
            }
            self.perform("device", [Send("worker", JobDone(type(job).__name__, found))])

    def fail_job(self, fault: Fault, *, launched: bool) -> None:
        """The device fails its oldest job, which is a step; a launched one leaves garbage behind."""
        job = self.jobs.popleft()
        assert isinstance(job, Run)
        if launched:
            self.device.spoil(job.plan)
        self.counts[f"{fault}{'' if launched else ' before launch'}"] += 1
        failed = StepFailed(job.plan.step_id, job.plan.epoch, fault, "injected", launched)
        self.perform("device", [Send("worker", failed)])

    def duplicate(self, link: tuple[str, str, bool]) -> None:
        """The message at the head of `link` will come once more, later."""
        self.links[link].append(self.links[link][0])
        self.counts["duplicate"] += 1

    def duplicable(self) -> list[tuple[str, str, bool]]:
        """Links whose next message may come twice: those to and from a device that may be another process."""
        return [k for k, q in self.links.items() if q and k[0] == "device" and isinstance(q[0], StepDone | StepFailed)]

    def fire_timer(self, at: int) -> None:
        """A timer runs out."""
        name, event = self.timers.pop(at)
        self.counts["timeout"] += 1
        self.clients[event.stream_id].cancelled = True
        self._deliver(name, event)

    # ---- checkers ------------------------------------------------------------------------------------------------

    def _check_output(self, output: Output) -> None:
        if output.stream_id not in self.streams:
            raise Violation(f"output for stream {output.stream_id}, which nobody asked for")
        if output.request_id in self._ended:
            raise Violation(f"request {output.request_id} got something after its end")
        if output.end is not None and output.request_id >= 0:
            self._ended.add(output.request_id)

    def _check_delta(self, client: Client, delta: Delta) -> None:
        if delta.index in client.finished:
            raise Violation(f"choice {delta.index} of stream {delta.request_id} got something after its end")
        tokens = client.tokens[delta.index]
        prompt = client.arrive.prompt
        context = [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)  # type: ignore[arg-type]
        context += tokens
        for token in delta.token_ids:
            if token != (right := expected_token(context)):
                raise Violation(f"stream {delta.request_id}: token {len(tokens)} is {token}, not {right}")
            context.append(token)
            tokens.append(token)
        if delta.num_generated_tokens < len(tokens):
            raise Violation(
                f"stream {delta.request_id}: {len(tokens)} tokens came, {delta.num_generated_tokens} counted"
            )
        if delta.finish_reason is not None:
            client.finished.add(delta.index)
            limit = client.arrive.params.max_tokens
            right_end = FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH
            if delta.finish_reason is not right_end:
                raise Violation(f"stream {delta.request_id} ended with {delta.finish_reason}, not {right_end}")
            if right_end is FinishReason.LENGTH and limit is not None and len(tokens) != limit:
                raise Violation(f"stream {delta.request_id} ended with {len(tokens)} of {limit} tokens")

    def check(self) -> None:
        """What holds at every moment."""
        if self.scheduler.state is not SchedulerState.STARTING:
            self.scheduler.check()
            stats = self.scheduler.planner.pool.statistics()
            if stats.num_free + stats.num_cached + stats.num_owned != stats.num_blocks:
                raise Violation(f"blocks are missing: {stats}")

    def check_end(self) -> None:
        """What holds when nothing can happen any more."""
        if self.engine.state not in (EngineState.IDLE, EngineState.STOPPED):
            raise Violation(f"nothing can happen, but the engine is {self.engine.state}")
        for stream_id, client in self.clients.items():
            if client.end is None:
                raise Violation(f"stream {stream_id} never ended: {self.streams[stream_id].state}")
            if client.cancelled or isinstance(client.end, Finished | Rejected):
                continue
            if client.end.error is None or client.end.cause is Cause.SIBLING:
                raise Violation(f"stream {stream_id} ended with {client.end}, and nobody had asked for that")
        stats = self.scheduler.planner.pool.statistics()
        if stats.num_owned:
            raise Violation(f"{stats.num_owned} blocks are owned when every request has ended")
        if self.scheduler.requests or self.engine.num_streams or self.gate.num_queued:
            raise Violation("something is left behind")
        finished = self.scheduler.statistics().finished_total
        assert set(finished) == set(ENDED)
