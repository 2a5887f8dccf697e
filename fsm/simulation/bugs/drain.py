"""Bugs planted in when a client that is refused is told to come again."""

from __future__ import annotations

from novainfer.fsm.client.drain import DrainRate
from novainfer.fsm.simulation.bugs.mutants import Mutant

DRAIN_MUTANTS = [
    Mutant(  # after a quiet hour clients are told what was right before it
        "what left the queue is never forgotten",
        DrainRate,
        "per_s",
        "while bursts and bursts[0][0] < now_s - DRAIN_RATE_WINDOW_S:",
        "while False:",
    ),
    Mutant(  # with eight slots clients wait for eight times as long as they need
        "all that leave at once count as one",
        DrainRate,
        "note",
        "self._bursts.append((now_s, num_left, since_s))",
        "self._bursts.append((now_s, 1, since_s))",
    ),
    Mutant(  # a time without a queue makes the next one look slow
        "the time in which the queue is empty counts",
        DrainRate,
        "note",
        "self._since_s = now_s if num_waiting else None",
        "self._since_s = now_s",
    ),
    Mutant(  # while the worker comes up again clients are told that all is as fast as before
        "a queue that stands still drains as fast as before",
        DrainRate,
        "per_s",
        "elapsed_s += max(now_s - since_s - max(intervals_s), 0.0)",
        "pass",
    ),
    Mutant(  # clients that are refused come before those on the overflow list have left it
        "those on the overflow list are before nobody",
        DrainRate,
        "wait_s",
        "gate.num_queued + gate.num_overflow",
        "gate.num_queued",
    ),
    Mutant(
        "a stream whose choices all wait counts as one request",
        DrainRate,
        "departs",
        "sum(map(gate.num_credits, new))",
        "len(new)",
    ),
    Mutant(  # thousands of clients come again within a millisecond
        "a client may be told to come again at once",
        DrainRate,
        "wait_s",
        "max(found_s, RETRY_AFTER_S_MIN)",
        "found_s",
    ),
    Mutant(  # clients give up that were told to wait for an hour
        "a client may be told to come again at any time",
        DrainRate,
        "wait_s",
        "min(max(found_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)",
        "max(found_s, RETRY_AFTER_S_MIN)",
        first=55,
    ),
    Mutant(
        "what leaves counts again until the gate has heard of it",
        DrainRate,
        "departs",
        "if gate.num_credits(i)} - leaving",
        "if gate.num_credits(i)}",
    ),
    Mutant(
        "a queue that fills again and stands still drains as fast as before",
        DrainRate,
        "per_s",
        "since_s = self._filled_s if self._since_s is None else self._since_s",
        "since_s = self._since_s",
    ),
    Mutant(
        "the time before the first one leaves counts for none",
        DrainRate,
        "note",
        "since_s = self._filled_s",
        "since_s = now_s",
    ),
]
