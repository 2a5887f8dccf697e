"""What stays wrong for a while: room for so many rows or tokens in a step and no more, or steps that take too long.

A shortage is a list of phases, each so many steps long. In a phase a step that holds more than `room` fails, each time
it is tried: it runs out of memory, or its worker dies. Or every token of a step takes `token_s`: a step that would take
longer than its deadline never ends.

`Scarcity` counts what that costs. Its words are those of `allowance` and docs/reliability.md:

    until it has settled     at most log2(N) + 3 steps fail, or are too slow, for requests and for prompt tokens each
    from then on             one in `TRY_EVERY` good steps, of each
    when it is over          steps may hold as much as was asked for, after `TRY_EVERY` + 2 `FIRST_TRY` log2(N) good
                             steps that need what they may hold, or `TRY_EVERY` in a row that do not
    throughout               no request ends with an error: smaller steps would have done
"""

from __future__ import annotations

import random
from math import ceil, log2
from typing import TYPE_CHECKING, Any

import msgspec

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.messages.events import Batch, MakeBatch, Outputs, StepFailed, WorkerLost
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.schedule.outcomes import NOT_A_NUMBER
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from novainfer.fsm.simulation.world.shape import Shape
    from novainfer.fsm.simulation.world.world import World

TRY_EVERY = 1024  # good steps
FIRST_TRY = 64  # good steps
STEP_DEADLINE_S = 60.0  # of a step
TOO_SLOW_S = STEP_DEADLINE_S / 4
LOSSES_PER_FALL = 2  # a worker's first death under a request may be chance, and makes nothing smaller
KINDS = ("rows", "rows", "tokens", "tokens", "time", "slow", "deadly")


class Phase(msgspec.Struct, frozen=True):
    """For `num_steps`: what a step may hold, and how long a token and a request take; 0: nothing is wrong with that."""

    num_steps: int
    room: int = 0
    token_s: float = 0.0
    row_s: float = 0.0


class Shortage:
    """One shortage: its phases, and where it stands."""

    def __init__(self, kind: str, phases: Sequence[Phase]) -> None:
        self.kind = kind
        self.phases = list(phases)
        self.at = 0
        self._left = self.phases[0].num_steps

    @property
    def phase(self) -> Phase:
        """What holds now."""
        return self.phases[self.at]

    def step(self) -> None:
        """A step begins."""
        self._left -= 1
        if self._left < 0 and self.at + 1 < len(self.phases):
            self.at += 1
            self._left = self.phases[self.at].num_steps

    def took_s(self, plan: StepPlan) -> float:
        """How long this step takes, if that is what is wrong."""
        return self.phase.token_s * len(plan.input_ids) + self.phase.row_s * len(plan.slots)

    def is_too_much(self, plan: StepPlan) -> bool:
        """Whether this step cannot be computed."""
        size = len(plan.slots) if self.kind == "rows" else len(plan.input_ids)
        return 0 < self.phase.room < size


def draw_shortage(rng: random.Random, shape: Shape, *, is_brief: bool) -> Shortage:
    """One that smaller steps survive: there is always room for a block of one request."""
    kind = rng.choice([k for k in KINDS if k != "slow"] if is_brief else KINDS)
    most = shape.max_num_seqs if kind == "rows" else shape.prefill_chunk_tokens
    least = 1 if kind == "rows" else shape.block_size

    def phase(num_steps: int) -> Phase:
        if kind in ("time", "slow"):  # each request's token is in time, and so is half a chunk at most
            return Phase(num_steps, token_s=TOO_SLOW_S / rng.randint(2 * shape.max_num_seqs, most))
        return Phase(num_steps, room=rng.randint(least, rng.choice([most // 2, most - 1])))

    if kind == "slow":
        return Shortage(kind, [phase(0)])
    lengths = [150] if is_brief else [rng.choice([50, 300, 600]) for _ in range(rng.choice([1, 1, 2]))]
    phases = [Phase(0 if is_brief else rng.choice([0, 20, 50])), *map(phase, lengths)]
    return Shortage(kind, [*phases, Phase(0)])


class Scarcity:
    """The account of one world that has a shortage, and no other fault."""

    def __init__(self, world: World, shortage: Shortage) -> None:
        self._world = world
        self._shortage = shortage
        self._at = 0  # the phase that the counts are of
        self._num_bad = 0
        self._num_good = 0
        shape = world.shape
        falls = ceil(log2(shape.max_num_seqs)) + 3 + ceil(log2(shape.prefill_chunk_tokens)) + 3
        self._bad_max = falls * (LOSSES_PER_FALL if shortage.kind == "deadly" else 1)
        self._sizes = shape.max_num_seqs, shape.prefill_chunk_tokens
        self._needing = [0, 0]  # good steps since the shortage was over, of requests and of prompt tokens
        self._idle = [0, 0]  # the same, in a row
        self._held = 0, 0  # requests and prompt tokens, in the step on the device
        self._limits = 0, 0  # what it might have held: a good step may raise that
        self._was_full = [False, False]

    def scheduled(self, event: Any, effects: Sequence[Effect]) -> None:
        """The scheduler has handled `event`."""
        outcome = event.outcome if isinstance(event, MakeBatch) else event
        if self._shortage.at != self._at:
            self._at, self._num_bad, self._num_good = self._shortage.at, 0, 0
        elif isinstance(outcome, StepFailed | WorkerLost):
            self._bad(str(outcome.fault))
        elif isinstance(outcome, StepDone):
            if outcome.took_s > TOO_SLOW_S:
                self._bad(f"it took {outcome.took_s:.1f} s")
            else:
                self._good()
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.event, Batch | Outputs):
                for output in effect.event.outputs:
                    end = output.end
                    if end is not None and end.code == "step_failed" and end.error not in (None, NOT_A_NUMBER):
                        raise Violation(f"request {output.request_id} ended with {output.end}: smaller steps would do")

    def _bad(self, why: str) -> None:
        self._num_bad += 1
        self._world.counts["steps that were too much"] += 1
        if self._num_bad > self._bad_max + 2 * self._num_good // TRY_EVERY:
            raise Violation(
                f"{self._num_bad} steps were too much ({why}), and {self._num_good} went well: "
                f"{self._shortage.kind} {self._shortage.phase}"
            )

    def before(self) -> None:
        """The scheduler is about to hear of a step."""
        flight, recovery = self._world.scheduler.oldest_flight, self._world.scheduler.recovery
        self._limits = recovery.planner.max_running, recovery.chunk
        self._held = (len(flight.rows), flight.num_prompt_tokens) if flight is not None else (0, 0)

    def _good(self) -> None:
        self._num_good += 1
        phase, world = self._shortage.phase, self._world
        if phase.room or phase.token_s or phase.row_s:
            self._needing, self._idle, self._was_full = [0, 0], [0, 0], [False, False]
            return
        recovery = world.scheduler.recovery
        limits = recovery.planner.max_running, recovery.chunk
        for at, (held, limit, full) in enumerate(zip(self._held, limits, self._sizes, strict=True)):
            is_needed = 2 * held > self._limits[at]
            self._needing[at] += is_needed
            self._idle[at] = 0 if is_needed else self._idle[at] + 1
            is_due = self._needing[at] > TRY_EVERY + 2 * FIRST_TRY * ceil(log2(full)) or self._idle[at] > TRY_EVERY
            if is_due and limit < full:
                raise Violation(
                    f"nothing is short, {self._needing[at]} good steps needed what they may hold, {self._idle[at]} in "
                    f"a row did not, and they may hold {limit} of {full}"
                )
            if is_due and not self._was_full[at]:
                self._was_full[at] = True
                world.counts["back to full size"] += 1
