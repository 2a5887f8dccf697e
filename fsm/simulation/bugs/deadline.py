"""Bugs planted in deadlines, and in what must not outlive a request."""

from __future__ import annotations

from novainfer.fsm.client.gate import Gate
from novainfer.fsm.client.stream import Stream
from novainfer.fsm.engine import Engine
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

DEADLINE_MUTANTS = [
    Mutant(
        "a deadline is twice as long as it was asked for",
        Gate,
        "_arrive",
        "self._after(params.timeout_s,",
        "self._after(params.timeout_s * 2,",
    ),
    Mutant(
        "who waits for room has no deadline",
        Gate,
        "_arrive",
        "if params.timeout_s is not None:",
        "if params.timeout_s is not None and event.stream_id not in self._overflow:",
    ),
    Mutant(
        "a deadline passes while a prompt is at the tokenizer",
        Engine,
        "_cancel",
        "elif self._encoding.pop(event.stream_id, None) is not None:",
        "elif event.cause is not Cause.TIMEOUT and self._encoding.pop(event.stream_id, None) is not None:",
    ),
    Mutant(
        "a deadline passes while there is no worker",
        Scheduler,
        "_cancel",
        "if request is None:",
        "if request is None or (event.cause is Cause.TIMEOUT and self.state is S.RECOVERING):",
    ),
    Mutant(
        "a deadline passes while a request is preempted",
        Scheduler,
        "_cancel",
        "if request is None:",
        "if request is None or (event.cause is Cause.TIMEOUT and request.state is RequestState.PREEMPTED):",
        first=372,
    ),
    Mutant(
        "a stall may last for twice as long as it may",
        Stream,
        "_set_timer",
        "self._until_left(self._stall_timeout_s,",
        "self._until_left(2 * self._stall_timeout_s,",
    ),
    Mutant(
        "what a paused request keeps is kept for ten times as long",
        Scheduler,
        "_pause",
        "self._after(self._stall_keep_s,",
        "self._after(10 * self._stall_keep_s,",
    ),
    Mutant(
        "the timer of a pause outlives it",
        Scheduler,
        "_resume",
        "self._drop(KeepOver(request.request_id))",
        "pass",
    ),
    Mutant(
        "a request that ends in a pause leaves its timer",
        Scheduler,
        "_end",
        "self._drop(KeepOver(request.request_id))",
        "pass",
    ),
    # ---- containers
    Mutant(
        "who was parked is known after its end",
        Planner,
        "remove",
        "self.parked.pop(request.request_id, None)",
        "self.parked.get(request.request_id, None)",
    ),
    Mutant(
        "a cancel that overtook its Submit is remembered",
        Scheduler,
        "_submit",
        "self._tombstones.pop(event.request_id, None)",
        "self._tombstones.get(event.request_id, None)",
        seeds=1000,
    ),
]
