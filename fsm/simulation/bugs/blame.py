"""Bugs planted in which requests are suspected, which are forgiven, and when."""

from __future__ import annotations

from novainfer.fsm.schedule import answer
from novainfer.fsm.schedule.recovery import FailurePolicy
from novainfer.fsm.simulation.bugs.mutants import Mutant

BLAME_MUTANTS = [
    Mutant(
        "failures before a token still count after it",
        answer,
        "next_output",
        "request.losses = request.failures = 0",
        "request.losses = 0",
    ),
    Mutant(
        "lost workers before a token still count after it",
        answer,
        "next_output",
        "request.losses = request.failures = 0",
        "request.failures = 0",
    ),
    Mutant(
        "who shared a failed step is blamed when the others have left",
        FailurePolicy,
        "step_failed",
        "if not is_alone(flight):",
        "if False:",
        seeds=1000,
    ),
    Mutant(
        "a failed step is tried again as it was",
        FailurePolicy,
        "_bisect",
        "half = (len(ids) + 1) // 2",
        "half = len(ids)",
    ),
    Mutant(
        "only the first half of a failed step is tried apart",
        FailurePolicy,
        "_bisect",
        "self.suspects += [ids[:half], ids[half:]]",
        "self.suspects += [ids[:half]]",
    ),
    Mutant(
        "a new failure forgets those who were suspected",
        FailurePolicy,
        "_bisect",
        "self.suspects += [ids[:half], ids[half:]]",
        "self.suspects = deque([ids[:half], ids[half:]])",
    ),
    Mutant(
        "one lost worker is reason enough",
        FailurePolicy,
        "worker_lost",
        "if request.losses >= LOSSES_SUSPECT]",
        "if request.losses >= 1]",
    ),
    Mutant(
        "who failed alone is tried once more among the others",
        FailurePolicy,
        "_blame",
        "self.suspects.appendleft([request.request_id])",
        "pass",
    ),
    Mutant(  # what fails every other step convicts a request: its tries fall on the bad ones, the canary on a good one
        "the second try of who failed alone comes after those of others",
        FailurePolicy,
        "_blame",
        "self.suspects.appendleft([request.request_id])",
        "self.suspects.append([request.request_id])",
    ),
    Mutant(
        "who is on trial is computed among the others when the canary has failed",
        FailurePolicy,
        "_blame",
        "self.suspects.append([request.request_id])",
        "pass",
    ),
    Mutant(
        "a group that ran well is tried apart again",
        FailurePolicy,
        "step_done",
        "self.suspects.popleft()",
        "self.suspects.rotate(-1)",
    ),
]
