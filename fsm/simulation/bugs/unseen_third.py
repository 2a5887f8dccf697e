"""Bugs planted by a third reader who had not read the checks, when all others had been found.

Of its twenty-one, six were planted already, and are not planted twice. One stood in a line that nothing needed, and the
line is gone.
"""

from __future__ import annotations

from novainfer.fsm.client.drain import DrainRate
from novainfer.fsm.device.worker import Worker
from novainfer.fsm.health import Watch
from novainfer.fsm.schedule.allowance import Allowance, Sizes
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.ladder import Ladder
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.recovery import FailurePolicy
from novainfer.fsm.simulation.bugs.mutants import Mutant

BLAME = [
    Mutant(  # a server of some weeks makes its steps smaller for each chance failure
        "steps out of memory are counted for ever",
        FailurePolicy,
        "step_done",
        "if self._good_steps % PATIENCE == 0:",
        "if False:",
        seeds=1000,
    ),
    Mutant(  # the inspector says SMALLER_BATCH for a second after the request to blame has ended
        "blame gives back the size but not the word that steps are short",
        Allowance,
        "excuse",
        "self._tried_after, self.is_short = self._before",
        "self._tried_after, _ = self._before",
    ),
]

LADDER = [
    Mutant(  # answers stay those of INT8 although all is well
        "a quiet time without a good step is forgotten",
        FailurePolicy,
        "quiet",
        "self._is_quiet_due = True",
        "pass",
    ),
    Mutant(  # a device that fails again right after a way up is given up for twice as long as promised
        "a way down counts twice as a try that failed",
        Ladder,
        "_down",
        "self._is_settling = False",
        "pass",
        seeds=1000,
    ),
]

SIZES = [
    Mutant(  # a try that fails is made again after two steps, and again
        "a first try that fails makes next to no patience",
        Allowance,
        "was_too_much",
        "2 * max(self._patience, PATIENCE // 2)",
        "2 * self._patience",
        seeds=1000,
        first=1099,
    ),
    Mutant(  # one step in some comes to its deadline, and its worker is killed
        "steps grow to all of what is slow",
        Sizes,
        "went_well",
        "self._most_tokens = int(num_tokens * self._slow_s / (2 * took_s))",
        "self._most_tokens = int(num_tokens * self._slow_s / took_s)",
    ),
]

TURNS = [
    Mutant(  # it is preempted again and again
        "what was preempted often needs no more room than what was once",
        Planner,
        "headroom",
        "min(request.num_preemptions, 2)",
        "min(request.num_preemptions, 1)",
    ),
    Mutant(  # a short prompt behind many long ones waits for all of them
        "looks in turn do not begin anew",
        StepBuilder,
        "_whom_to_look_at",
        "if len(in_turn) == LOOKS else -1",
        "if len(in_turn) == LOOKS else planner.looked_at",
        seeds=1000,
    ),
    Mutant(  # while memory is short, a client that reads nothing keeps out one that would
        "a paused request keeps its place while fewer may run",
        Planner,
        "_make_slots",
        "while self.waiting and not (self.free_slots and len(self.running) < self.max_running):",
        "while self.waiting and not self.free_slots:",
    ),
    Mutant(  # a short prompt waits for a long one that begins alike
        "a prefix is waited for that costs four times as much",
        StepBuilder,
        "_is_worth_waiting_for",
        "producer.work <= 2 * work",
        "producer.work <= 4 * work",
    ),
]

DOOR = [
    Mutant(  # the first clients that are refused come again much too early, and are refused again
        "what an idle engine takes at once counts as drain",
        DrainRate,
        "note",
        "if since_s is None and num_waiting:",
        "if since_s is None:",
        first=124,
    ),
]

PROCESSES = [
    Mutant(  # a server of some months gives up at a loss like any other
        "losses count beyond the window",
        Worker,
        "_lose",
        "if loss_s > at_s - policy.window_s]",
        "if loss_s > -1.0]",
    ),
    Mutant(  # an outage takes longer than is promised
        "the second restart waits twice as long",
        Worker,
        "_lose",
        "BACKOFF_S * 2 ** (nth - 2)",
        "BACKOFF_S * 2 ** (nth - 1)",
    ),
    Mutant(  # a large model on a slow disk never comes up
        "a load that gets on is late",
        Watch,
        "_update",
        " and entry.num_signs == seen.num_signs",
        "",
    ),
]

UNSEEN_THIRD_MUTANTS = [*BLAME, *LADDER, *SIZES, *TURNS, *DOOR, *PROCESSES]
