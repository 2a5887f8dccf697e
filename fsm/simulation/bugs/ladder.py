"""Bugs planted in how large steps are, what moves the ladder, how it comes back up, and what answers are called."""

from __future__ import annotations

from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.schedule.allowance import Allowance, Sizes
from novainfer.fsm.schedule.ladder import Ladder
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.recovery import FailurePolicy
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

LADDER_MUTANTS = [
    # ---- how large steps are
    Mutant(
        "what was too much is tried again after a few steps, for ever",
        Allowance,
        "was_too_much",
        "self._patience = min(2 * max(self._patience, PATIENCE // 2), PATIENCE_MAX)",
        "self._patience = 8",
    ),
    Mutant(
        "a try that fails leads back to what failed",
        Allowance,
        "was_too_much",
        "self._set(self._safe)\n    else:",
        "self._set(size)\n    else:",
    ),
    Mutant(
        "what failed is not made less",
        Allowance,
        "was_too_much",
        "self._safe = max(size // divisor, self.least)",
        "self._safe = max(size - 1, self.least)",
    ),
    Mutant(
        "steps stay small when the shortage is over",
        Allowance,
        "went_well",
        "elif self._num_good >= self._patience:",
        "elif False:",
    ),
    Mutant(
        "what failed once is never tried again",
        Allowance,
        "_next",
        "return 2 * self.limit",
        "return self.limit",
    ),
    Mutant(
        "steps that do not need more never lead to more",
        Allowance,
        "went_well",
        "if self.is_short and self._num_good >= PATIENCE_MAX:",
        "if False:",
        first=123,
    ),
    Mutant(
        "every good step leads to a larger one",
        Allowance,
        "went_well",
        "elif self._num_good >= self._patience:",
        "else:",
    ),
    Mutant(
        "steps that are too slow are as large again",
        Sizes,
        "went_well",
        "if took_s > self._slow_s and self.was_too_much(num_requests, num_tokens):",
        "if False:",
    ),
    Mutant(
        "prompts are made shorter when requests are too many",
        Sizes,
        "was_too_much",
        "if are_tokens:",
        "if num_tokens:",
    ),
    Mutant(
        "how many requests may run is not passed on",
        FailurePolicy,
        "_note_sizes",
        "self.planner.max_running = self.sizes.requests.limit",
        "pass",
    ),
    Mutant(
        "steps of several requests without memory are never made smaller",
        FailurePolicy,
        "step_failed",
        "self.sizes.was_too_much(num_rows, num_tokens)",
        "pass",
        first=73,
    ),
    Mutant(
        "a request alone without memory is not tried with fewer tokens",
        FailurePolicy,
        "step_failed",
        "elif is_short and self._shrink(flight, 2, outcome, effects):",
        "elif False:",
    ),
    # ---- what moves the ladder, and back
    Mutant(
        "a request that fails alone leads down the ladder, without a canary",
        FailurePolicy,
        "_blame",
        "self.trial = Trial(request.request_id, what, max(num_tokens, 1))",
        "self.climb(_trouble_of(what)(what.message), effects)",
    ),
    Mutant(
        "a canary without memory leads to plain kernels",
        FailurePolicy,
        "canary_failed",
        "self.climb(_trouble_of(outcome)(outcome.message), effects)",
        "self.climb(Broken(outcome.message), effects)",
    ),
    Mutant(
        "the ladder stays down after a quiet time",
        Ladder,
        "_up",
        'rung = self._go(self.exact_mode, "nothing went wrong for a while")',
        "rung = self.state",
    ),
    Mutant(
        "each quiet time is twice the last one",
        Ladder,
        "_down",
        "if self._is_settling:",
        "if True:",
    ),
    Mutant(
        "memory that is short leads back to the kernels that failed",
        Ladder,
        "_below",
        "elif mode.kernels == now.kernels and event is Pressure:",
        "elif event is Pressure:",
    ),
    Mutant(
        "memory that is short makes kernels plainer",
        Ladder,
        "_below",
        "if event is Broken or (now.kernels, mode.kernels) == (FAST, EAGER):",
        "if True:",
    ),
    Mutant(
        "graphs are kept where memory is short",
        Ladder,
        "_below",
        "if event is Broken or (now.kernels, mode.kernels) == (FAST, EAGER):",
        "if event is Broken:",
    ),
    Mutant(
        "kernels that fail are left for the plainest at once",
        Ladder,
        "_below",
        "for mode in self._modes[self._modes.index(now) + 1 :]:",
        "for mode in self._modes[:: -1]:",
    ),
    Mutant(
        "the way up leads to the best mode that there could be",
        Ladder,
        "_up",
        "self._go(self.exact_mode,",
        "self._go(Mode(),",
        seeds=1000,
    ),
    # ---- what answers are called
    Mutant(
        "an engine that was started quantised calls its answers degraded",
        Scheduler,
        "_commit",
        "if not flight.mode.computes_as(self.recovery.ladder.exact_mode):",
        "if not flight.mode.computes_as(Mode()):",
    ),
    Mutant(
        "everything is called degraded while the engine is",
        Scheduler,
        "_commit",
        "if not flight.mode.computes_as(self.recovery.ladder.exact_mode):",
        "if self.recovery.ladder.is_down:",
    ),
    Mutant(
        "what is computed without graphs is called degraded",
        Scheduler,
        "_commit",
        "if not flight.mode.computes_as(self.recovery.ladder.exact_mode):",
        "if flight.mode != self.recovery.ladder.exact_mode:",
    ),
    Mutant(
        "other kernels are taken for the same ones",
        Mode,
        "computes_as",
        "kernels == {FAST, EAGER}",
        "True",
    ),
    Mutant(
        "prefixes are forgotten with the graphs",
        Planner,
        "change_mode",
        "if mode.computes_as(before):",
        "if mode == before:",
    ),
    Mutant(
        "prefixes are kept for other kernels of the same precision",
        Planner,
        "change_mode",
        "if mode.computes_as(before):",
        "if mode.precision == before.precision:",
    ),
]
