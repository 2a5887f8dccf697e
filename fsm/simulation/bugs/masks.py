"""Bugs planted in requests that are held to grammars: which mask a plan names, who waits for one, and who is woken."""

from __future__ import annotations

from novainfer.fsm.engine import Engine
from novainfer.fsm.schedule import answer
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.schedule.speculation import Speculation
from novainfer.fsm.simulation.bugs.mutants import Mutant

MASKS_MUTANTS = [
    Mutant(  # the mask of the token before
        "a mask is kept when a token has come",
        Scheduler,
        "_commit",
        "request.mask_id = AWAITED",
        "pass",
    ),
    Mutant(
        "masks stand one position too late",
        StepBuilder,
        "_add_masks",
        "plan.mask_positions.append(at)",
        "plan.mask_positions.append(at + 1)",
    ),
    Mutant(  # it is drawn without a mask, or with the one before
        "a request decodes before its mask has come",
        StepBuilder,
        "add_decodes",
        "if request.mask_id < 0:",
        "if False:",
    ),
    Mutant(
        "a request is admitted before its mask has come",
        StepBuilder,
        "_admissible",
        "allowed(r, only) and r.mask_id >= 0",
        "allowed(r, only)",
    ),
    Mutant(
        "drafts are verified that the grammar has not seen",
        Speculation,
        "drafts",
        "0 if request.mask_id else",
        "0 if False else",
    ),
    Mutant(  # the engine sleeps until something else happens
        "a mask that comes wakes nothing",
        Engine,
        "_masked",
        "self._work_sent += 1",
        "pass",
    ),
    Mutant(
        "the end of a request that others were held up by wakes nothing",
        Scheduler,
        "_cancel",
        "Outputs(outputs, wakes)",
        "Outputs(outputs)",
        small="a request that is held to a grammar, and one that is not",
    ),
    Mutant(
        "grammars are not told that a request has ended",
        Scheduler,
        "_release",
        'self._send("grammars", Release(request.request_id))',
        "pass",
    ),
    Mutant(
        "an end that comes too early is text, where it is all that a grammar has left",
        answer,
        "next_output",
        "request.mask_id > 0 and token_id in eos_token_ids",
        "False and token_id in eos_token_ids",
    ),
    Mutant(
        "those whose masks are about to come lose their blocks to others",
        Planner,
        "plan",
        "if self.has_awaited:",
        "if False:",
    ),
]
