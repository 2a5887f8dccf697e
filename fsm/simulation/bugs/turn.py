"""Bugs planted in what goes first: tokens, slots and blocks."""

from __future__ import annotations

from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.simulation.bugs.mutants import Mutant

_KEY = "key=lambda r: (r.state is not paused, loss(r), r.num_computed, -r.request_id)"

TURN_MUTANTS = [
    Mutant(
        "prompts are computed by age alone",
        StepBuilder,
        "add_prefills",
        "half = -(-self.left // 2)",
        "half = self.left",
        seeds=1000,
    ),
    Mutant(
        "prompts are computed by work alone",
        StepBuilder,
        "add_prefills",
        "half = -(-self.left // 2)",
        "half = 0",
        seeds=1000,
    ),
    Mutant(
        "an admission leaves half of the pool free",
        Planner,
        "headroom",
        "(len(self.running) // 2 + 2)",
        "self.cache.pool.num_blocks // 2",
    ),
    Mutant(
        "the first promise outlives who gave it",
        BlockCache,
        "_break_promises",
        "for name in sorted(self._promises.pop(request_id, ())):",
        "for name in sorted(self._promises.pop(request_id, ()))[1:]:",
    ),
    Mutant(
        "what was waited for is not forgotten",
        StepBuilder,
        "_look",
        "request.waits_for = None",
        "if request.waits_for is not None: return hits",
    ),
    Mutant(
        "the one that has most to lose is preempted",
        Planner,
        "_first_to_go",
        _KEY,
        "key=lambda r: (r.state is not paused, loss(r), -r.num_computed, -r.request_id)",
    ),
    Mutant(
        "of two that lose as much the older one is preempted",
        Planner,
        "_first_to_go",
        _KEY,
        "key=lambda r: (r.state is not paused, loss(r), r.num_computed, r.request_id)",
    ),
    Mutant(
        "who is paused keeps its blocks, and others lose theirs",
        Planner,
        "_first_to_go",
        _KEY,
        "key=lambda r: (loss(r), r.num_computed, -r.request_id)",
    ),
    Mutant(
        "the oldest is preempted like everybody",
        Planner,
        "_preempt_one",
        "if r is not keep and r.kv.capacity]",
        "if r.kv.capacity]",
        first=54,
    ),
    Mutant(
        "somebody is preempted while there are blocks",
        Planner,
        "_short_of_room",
        "return None if needed <= cache.room else first",
        "return None if needed < cache.room // 2 else first",
    ),
    Mutant(
        "paused requests keep their slots for those that wait",
        Planner,
        "_make_slots",
        "if paused is None:",
        "if True:",
    ),
    Mutant(
        "who comes back is younger than it was",
        Planner,
        "unpark",
        "self.enqueue(request)",
        "self.waiting.append(request)",
    ),
]
