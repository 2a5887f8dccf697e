"""Bugs planted in requests that give a vector: which hidden states are summed, how often, and when it is given."""

from __future__ import annotations

from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

POOLING_MUTANTS = [
    Mutant(  # what was cached is missing in the mean
        "a mean is taken of what the prefix cache has left to compute",
        StepBuilder,
        "_look",
        "request.needs_every_row",
        "request.is_unscored",
    ),
    Mutant(  # after a preemption, or a lost worker
        "hidden states that are computed again count again",
        Request,
        "first_to_pool",
        "max(start, self.num_pooled)",
        "start",
    ),
    Mutant(
        "the vector is that of the token before the last",
        Request,
        "first_to_pool",
        "self.num_prompt - 1 if",
        "max(self.num_prompt - 2, 0) if",
    ),
    Mutant(
        "only the last chunk of a prompt counts",
        Request,
        "note_pooled",
        "added(self.pool_sum, found)",
        "found",
    ),
    Mutant(
        "a vector is given when its first chunk is computed",
        Scheduler,
        "_note_pooled",
        "if request.num_pooled < request.num_prompt:",
        "if False:",
    ),
    Mutant(  # it goes on, and is planned without anything left to compute
        "a request that has its vector does not end",
        Scheduler,
        "_note_pooled",
        "self._end(request, RequestState.FINISHED_STOPPED, output.end)",
        "pass",
    ),
    Mutant(
        "a vector is given to a request that was cancelled while its step was on the device",
        Scheduler,
        "_note_pooled",
        "if request.ended:",
        "if False:",
    ),
    Mutant(
        "a vector of what is not a number is given",
        Scheduler,
        "_note_pooled",
        "outputs.append(self._end_not_a_number(request, outcome))",
        "self._end(request, RequestState.FINISHED_STOPPED, answer.pooled_output(request, b'').end)",
    ),
    Mutant(
        "a request that is to give a vector is sampled as well",
        StepBuilder,
        "_prefill",
        "elif end == total:",
        "if end == total:",
    ),
    Mutant(
        "a step behind one that ends a prompt decodes what gives a vector",
        StepBuilder,
        "add_decodes",
        "not (is_ahead and request.is_prefill_planned)",
        "not (is_ahead and request.num_planned >= len(request.token_ids))",
    ),
    Mutant(
        "a mean is a sum, where it is not normalised",
        Scheduler,
        "_note_pooled",
        '1 if pooling.kind == "last" else request.num_prompt',
        "1",
    ),
]
