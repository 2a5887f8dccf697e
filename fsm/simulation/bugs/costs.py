"""Bugs planted in what is decided by what steps cost: chunks beside decodes, and when to come again at first."""

from __future__ import annotations

from novainfer.fsm.client.drain import DrainRate
from novainfer.fsm.device.roster import Roster
from novainfer.fsm.device.worker import Worker
from novainfer.fsm.schedule import costs
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.costs import Chunks, StepCosts
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

COSTS_MUTANTS = [
    Mutant(  # each prompt of a whole chunk holds up all who decode
        "prompts take whole chunks beside decodes",
        StepBuilder,
        "add_prefills",
        "planner.chunks.beside(self.num_decodes)",
        "planner.chunks.beside(0)",
    ),
    Mutant(  # prompts take longer for the sake of nobody
        "prompts have small chunks also where nothing decodes",
        StepBuilder,
        "add_prefills",
        "planner.chunks.beside(self.num_decodes)",
        "planner.chunks.beside(self.num_decodes or 1)",
    ),
    Mutant(
        "what a worker has measured says nothing of chunks",
        Scheduler,
        "_measured",
        "self.planner.chunks.measured(event.step_costs)",
        "pass",
    ),
    Mutant(
        "a chunk beside decodes costs prompts a third of their speed",
        Chunks,
        "_cheapest",
        "(1 + LOSS_MAX)",
        "1.5",
    ),
    Mutant(  # one try of the largest size is disturbed, and prompts go on in pieces
        "chunks are as small as the steepest line lets them be",
        StepCosts,
        "line",
        "min((",
        "max((",
    ),
    Mutant(  # a few tokens more cost nothing where weights are read, so that whole chunks seem to be free
        "small steps tell as much of the line as large ones",
        StepCosts,
        "line",
        "n > first and n * LARGER >= largest",
        "n > first",
    ),
    Mutant(
        "chunks are cut also where no step is long enough to be noticed",
        Chunks,
        "_cheapest",
        "self._costs.of(num_tokens + grid) > UNNOTICED_MS",
        "True",
        first=206,
    ),
    Mutant(  # prompts wait until nothing decodes any more
        "a target that no block keeps leaves prompts nothing",
        Chunks,
        "beside",
        "max(within, 1) * size",
        "within * size",
    ),
    Mutant(  # with 200 that decode the target is missed by what those take
        "those that decode take nothing of a target",
        Chunks,
        "beside",
        "self._costs.of(num_decodes + n * size)",
        "self._costs.of(n * size)",
    ),
    Mutant(  # a draft model's drafts make a step of 60 ms one of 120
        "drafts come on top of a target",
        StepBuilder,
        "add_drafts",
        "most = self.planner.chunks.room_for_drafts(num_tokens, most)",
        "pass",
    ),
    Mutant(  # and so finds what a machine costs on which another process computes
        "a spare measures what steps cost",
        Roster,
        "_went_ahead",
        "Warm(SPARE_EPOCH, measures=False)",
        "Warm(SPARE_EPOCH)",
    ),
    Mutant(  # chunks are whole from then on
        "with a spare that takes over costs are forgotten",
        Worker,
        "_warmed",
        "found.update(event.value or {})",
        'found.update({"step_costs": []} | (event.value or {}))',
    ),
    Mutant(  # over long contexts steps are as late as they are
        "what steps with prompts take does not count",
        Chunks,
        "took",
        "self._pace += PACE_WEIGHT * (found - self._pace)",
        "pass",
    ),
    Mutant(  # one step of a second, on a busy machine, and prompts go on block by block
        "one slow step counts in full",
        Chunks,
        "took",
        "min(ms / self._costs.of(num_tokens), PACE_MOST * self._pace)",
        "ms / self._costs.of(num_tokens)",
    ),
    Mutant(  # at the start all are told to come at once
        "prompts that wait take no time",
        costs,
        "wait_s",
        "(prompts_ms + answers_ms)",
        "answers_ms",
    ),
    Mutant(
        "those behind a full batch wait for no answer",
        costs,
        "wait_s",
        "(prompts_ms + answers_ms)",
        "prompts_ms",
    ),
    Mutant(
        "free slots are waited for",
        costs,
        "wait_s",
        "max(num_waiting + num_running - num_slots, 0)",
        "num_waiting",
    ),
    Mutant(
        "prompts on the overflow list are none",
        DrainRate,
        "wait_s",
        "gate.num_queued_tokens + gate.num_overflow_tokens",
        "gate.num_queued_tokens",
    ),
]
