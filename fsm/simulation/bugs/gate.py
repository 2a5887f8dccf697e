"""Bugs planted at the gate, in what the engine knows of cancels, and in stalls."""

from __future__ import annotations

from novainfer.fsm.client.gate import Gate, _Room
from novainfer.fsm.client.stream import Stream
from novainfer.fsm.engine import Engine
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

GATE_MUTANTS = [
    Mutant(
        "who waits for room is let in whether there is room or not",
        Gate,
        "_let_in_who_fits",
        "if not self._queue.has_room(self._waiting_room.held[stream_id]):",
        "if False:",
    ),
    Mutant(
        "nobody is let in when credits come back",
        Gate,
        "_departed",
        "return self._let_in_who_fits()",
        "return self.state",
    ),
    Mutant(
        "somebody overtakes those who wait for room",
        Gate,
        "_arrive",
        "if not self._overflow and self._queue.has_room(wanted):",
        "if self._queue.has_room(wanted):",
    ),
    Mutant(
        "who leaves the overflow list keeps its place",
        Gate,
        "_turn_away",
        "self._waiting_room.give_back(stream_id)",
        "pass",
    ),
    Mutant(
        "who leaves the overflow list is not told",
        Gate,
        "_turn_away",
        'self._send("streams", ended_early(stream_id, end))',
        "pass",
    ),
    Mutant(
        "a cancel on the overflow list goes to the engine",
        Gate,
        "_cancel",
        "if event.stream_id in self._overflow:",
        "if False:",
    ),
    Mutant(
        "a queue timeout does not reach who was let in",
        Gate,
        "_queue_over",
        "return self._cancel(Cancel(event.stream_id, Cause.QUEUE))",
        "return self._cancel(Cancel(event.stream_id, Cause.QUEUE)) if self._overflow else self.state",
    ),
    Mutant(
        "a queue timeout ends what has its first token",
        Scheduler,
        "_cancel",
        "self._siblings(request) if request.stream_id in self._hurried else []",
        "self._siblings(request)",
    ),
    Mutant(
        "a drain lets wait who waits for room",
        Gate,
        "_drain",
        "self._turn_all_away(End(cause=Cause.DRAIN))",
        "pass",
        seeds=0,
        small="a full queue, and who waits for it",
    ),
    Mutant(
        "cancel all forgets who waits for room",
        Gate,
        "_cancel_all",
        "self._turn_all_away(End(cause=event.cause))",
        "pass",
    ),
    Mutant(
        "a cancel does not say how many arrived before it",
        Gate,
        "_cancel",
        "event.cause, self._num_arrived)",
        "event.cause)",
    ),
    Mutant(
        "cancel all does not say how many arrived before it",
        Gate,
        "_cancel_all",
        "event.cause, self._num_arrived)",
        "event.cause)",
    ),
    Mutant(
        "a credit for a stream, not for its choices",
        Gate,
        "_let_in",
        "(event.params.n, event.num_tokens)",
        "(1, event.num_tokens)",
    ),
    Mutant(
        "what a prompt holds is never settled",
        Gate,
        "_settled",
        "self._queue.take(event.stream_id, (num_reqs, event.num_tokens))",
        "pass",
    ),
    Mutant(
        "credits are given back twice",
        _Room,
        "give_back",
        "self.held.pop(stream_id, (0, 0))",
        "self.held.get(stream_id, (0, 0))",
    ),
    Mutant(
        "tombstones of the ended stay for ever",
        Engine,
        "_cancelled_before",
        "if s != stream_id and t[1] > num_arrived}",
        "if s != stream_id}",
    ),
    Mutant(
        "cancel all misses those on their way",
        Engine,
        "_cancel_all",
        "self._cancelled_all = (event.cause, event.arrived)",
        "pass",
        seeds=0,
        small="all is ended at once",
    ),
    Mutant(
        "cancel all cancels also who comes later", Engine, "_cancelled_before", "self._cancelled_all = None", "pass"
    ),
    Mutant(
        "a stall has no timer that ends with it",
        Stream,
        "_set_timer",
        "self._until_left(",
        "self._after(",
    ),
    Mutant(
        "who stalled for too long keeps its requests",
        Stream,
        "_stall_over",
        'self._send("gate", Cancel(self.stream_id, Cause.STALLED), urgent=True)',
        "pass",
    ),
    Mutant("a stall has no end", Stream, "_output", "self._set_timer()", "pass"),
]
