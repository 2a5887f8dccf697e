"""Bugs planted in speculation: what is planned of guesses, what is kept of them, and what is given back."""

from __future__ import annotations

from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.schedule.speculation import Speculation
from novainfer.fsm.simulation.bugs.mutants import Mutant

SPECULATION_MUTANTS = [
    Mutant("a right guess is not counted as computed", Planner, "commit_draft", "request.num_computed += 1", "pass"),
    Mutant("guesses count as computed before they are verified", Planner, "commit", "if drafts:", "if False:"),
    Mutant(
        "a block that right guesses fill cannot be found",
        Planner,
        "commit_draft",
        "self.cache.commit_row(request, request.num_computed)",
        "pass",
    ),
    Mutant(
        "room for guesses that were wrong is kept",
        Planner,
        "set_back",
        "self.cache.truncate(request, request.num_computed)",
        "pass",
    ),
    Mutant(
        "what comes after wrong guesses is computed behind them",
        Planner,
        "set_back",
        "request.num_planned = request.num_computed",
        "pass",
    ),
    Mutant(
        "one block too many is given back with wrong guesses",
        BlockCache,
        "truncate",
        "num_blocks = blocks_for(num_tokens, self._size)",
        "num_blocks = num_tokens // self._size",
    ),
    Mutant(
        "the last block of wrong guesses stays in the table",
        BlockCache,
        "truncate",
        "table.capacity = num_blocks * self._size",
        "table.capacity = max(table.capacity - self._size, num_blocks * self._size)",
    ),
    Mutant(
        "the room of wrong guesses is not given back to the pool",
        BlockCache,
        "truncate",
        "self.pool.release(reversed(table.blocks[num_blocks:]))",
        "pass",
    ),
    Mutant(
        "guesses go on behind the last token that a request may have",
        Speculation,
        "drafts",
        "request.max_len - len(request.token_ids) - 1)",
        "request.max_len - len(request.token_ids) + 1)",
    ),
    Mutant(
        "guesses are not counted into the budget of a step",
        StepBuilder,
        "add_drafts",
        "most = self.planner.limits.max_num_batched_tokens - num_tokens",
        "most = self.planner.limits.max_num_batched_tokens",
    ),
    Mutant(
        "guesses take the room that prompts were promised",
        StepBuilder,
        "add_drafts",
        "spare = cache.room - self.reserved - len(self.planner.running)",
        "spare = cache.room",
    ),
    Mutant(
        "guesses are computed without room for them",
        StepBuilder,
        "add_drafts",
        "del drafts[request.kv.capacity - end :]",
        "pass",
    ),
    Mutant(
        "what is planned of guesses is not undone",
        StepBuilder,
        "add_drafts",
        "flight.rows[at] = request, 1 + len(drafts), end - 1",
        "flight.rows[at] = request, 1 + len(drafts), end",
    ),
    Mutant(
        "guesses lie where the context is thought to end",
        StepBuilder,
        "add_drafts",
        "plan.context_lens[at] += len(drafts)",
        "pass",
    ),
    Mutant(
        "the guesses of one request are given to the next",
        StepBuilder,
        "add_drafts",
        "input_ids += drafts",
        "input_ids[-1:] = [*drafts, input_ids[-1]]",
    ),
    Mutant(
        "the token behind right guesses counts as one of them",
        Scheduler,
        "_note_drafts",
        "speculation.verified(request, num_drafts, count - 1)",
        "speculation.verified(request, num_drafts, min(count, num_drafts))",
    ),
    Mutant(
        "guesses for who has left while they were verified are counted",
        Scheduler,
        "_note_drafts",
        " or request in flight.departed",
        "",
    ),
    Mutant(
        "only the first token of a row is kept",
        Scheduler,
        "_commit",
        "if state in finished:",
        "if state in finished or request is was:",
    ),
    Mutant(
        "what follows the end of an answer in an accepted run is sent",
        Scheduler,
        "_commit",
        "if state in finished:",
        "if state in finished and request is not was:",
    ),
    Mutant(
        "the device's draft model is told no tokens of a request without penalties",
        Request,
        "sampling_spec",
        "if spec.needs_history or self.tells_tokens:",
        "if spec.needs_history:",
    ),
    Mutant(
        "a draft model that fails goes unseen",
        Scheduler,
        "_commit",
        "if outcome.draft_error is not None:",
        "if False:",
    ),
    Mutant(
        "a row of prompt counts where the device's drafts are handed out",
        Planner,
        "plan",
        "self.speculation.wanted(builder.flight.samples)",
        "self.speculation.wanted([row[0] for row in builder.flight.rows])",
    ),
    Mutant(
        "what fails is tried alone with guesses, which may be what fails",
        Planner,
        "plan",
        "if self.speculation is not None and only is None:",
        "if self.speculation is not None:",
    ),
]
