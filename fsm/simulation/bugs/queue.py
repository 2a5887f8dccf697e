"""Bugs planted in who goes first: prompts, slots, what is parked, and the deadline of the first token."""

from __future__ import annotations

from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.order import Order
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

QUEUE_MUTANTS = [
    Mutant(
        "most work goes first",
        Order,
        "by_work",
        "request.work, request.request_id",
        "-request.work, request.request_id",
    ),
    Mutant(
        "a request that does not fit beside what the step has admitted is overtaken",
        StepBuilder,
        "_try_to_admit",
        "self.barrier = self.place(request)",
        "pass",
        seeds=1000,
    ),
    Mutant(
        "blocks that a hit takes out of the cache are thought to be free still",
        BlockCache,
        "room_for",
        "needed += sum(map(self.pool.is_cached, prefix.blocks)) - len(prefix.blocks)",
        "needed -= len(prefix.blocks)",
        seeds=1000,
    ),
    Mutant(
        "a prompt that is cached to its last token has nothing left to compute",
        BlockCache,
        "find_prefix",
        "range((len(request.token_ids) - 1) // size)",
        "range(len(request.token_ids) // size)",
    ),
    Mutant(
        "a request that comes back to the queue stands behind all others",
        Planner,
        "enqueue",
        "insort(self.waiting, request, key=arrival)",
        "self.waiting.append(request)",
    ),
    Mutant(
        "a request that is admitted leaves the queue at the wrong end",
        Planner,
        "dequeue",
        "del self.waiting[at]",
        "del self.waiting[0]",
    ),
    Mutant(
        "one parked request too few",
        Scheduler,
        "_end_longest_paused",
        "while len(parked) > self._parked_max:",
        "while len(parked) >= self._parked_max:",
        seeds=1000,
        first=77,
    ),
    Mutant(
        "the request that was paused last ends where too many are parked",
        Scheduler,
        "_end_longest_paused",
        "key=lambda r: r.paused_as)",
        "key=lambda r: -r.paused_as)",
        seeds=1000,
    ),
    Mutant(
        "a first token does not end the wait for it",
        Scheduler,
        "_note_first",
        "self._hurried.discard(request.stream_id)",
        "pass",
    ),
    Mutant(
        "a stream that ends while it waits for its first token is remembered",
        Scheduler,
        "_end",
        "self._hurried.discard(request.stream_id)",
        "pass",
    ),
]
