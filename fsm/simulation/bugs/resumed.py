"""Bugs planted in requests that go on with tokens that another engine gave them."""

from __future__ import annotations

from novainfer.fsm.engine import Engine
from novainfer.fsm.schedule import answer
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

RESUMED_MUTANTS = [
    Mutant(
        "what a request came with is not told again",
        Scheduler,
        "_goes_on",
        'self._send("engine", Outputs(found))',
        "pass",
    ),
    Mutant(  # it is planned, though nothing is left of it to be sampled
        "a request that came with its end goes on",
        Scheduler,
        "_goes_on",
        "return end is not None",
        "return False",
    ),
    Mutant(
        "the choices of a stream all go on with what the first one had",
        Engine,
        "_submit",
        "arrival.committed[choice] if goes_on",
        "arrival.committed[0] if goes_on",
    ),
    Mutant(
        "a grammar does not hear of the tokens that its request came with",
        Scheduler,
        "_constrain",
        "committed = request.token_ids[request.num_prompt :]",
        "committed = []",
    ),
    Mutant(
        "a request that goes on has a deadline for its first token, which it has",
        Scheduler,
        "_submit",
        "and event.committed is None",
        "",
    ),
    Mutant(
        "log probabilities that a request came with are lost",
        answer,
        "outputs_again",
        "output.logprobs = [committed.logprobs[at]]",
        "pass",
    ),
    Mutant(  # it waits in the queue, though it runs, until it has ended
        "the gate does not hear that a request that goes on runs",
        Scheduler,
        "_plan",
        "if r.awaits_first]",
        "if r.is_first_output]",
    ),
]
