"""How much a step may hold, by an account of its own: when that grows, and what becomes of it when a request is blamed.

The words are those of docs/reliability.md ("Who is blamed", 8) and of `allowance`, for requests and for prompt tokens
each:

    less         half of what failed, or what went well before it was tried
    by chance    a step of several requests that runs out of memory, and holds no more than went well before, makes
                 nothing smaller, unless another one did with fewer than `FIRST_TRY` good steps in a row after it
    more         once something was too much, `FIRST_TRY` good steps come before each growth
    as before    when a request ends with the error of its step, a step may hold what it might before the first of the
                 falls that came with fewer than `FIRST_TRY` good steps between them: those were for its sake
    short        the engine says SMALLER_BATCH only while something is short: from a fall on, until `FIRST_TRY` good
                 steps might hold all that was asked for, or until a request is to blame for that fall

What a lasting shortage costs is counted in `shortage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.messages.events import Batch, Fault, MakeBatch, Outputs, StepFailed, WorkerLost
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.ladder import Rung
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.schedule.batching import Flight
    from novainfer.fsm.simulation.world.world import World

FIRST_TRY = 64  # good steps
START = 128  # prompt tokens, before anything is known


class _Limit:
    """One limit: how it moved, and what it was before the falls of late."""

    def __init__(self, name: str, full: int, start: int, least: int) -> None:
        self._name = name
        self._full = full
        self._least = least
        self._well = start  # what went well, or may be believed to
        self._num_good = 0  # steps since it moved
        self._has_fallen = False
        self.is_short = False
        # The limit, `_well`, `_has_fallen` and `is_short`: before the falls of late.
        self._before: tuple[int, int, bool, bool] | None = None

    def is_try(self, held: int) -> bool:
        """Whether a step of so many holds more than what went well."""
        return held > self._well

    def moved(self, was: int, now: int, held: int, *, is_good: bool, is_blamed: bool) -> None:
        """An event was handled: of a step that held so much, and was good; or a request ended for its failures."""
        self._num_good += is_good
        if self._num_good >= FIRST_TRY:
            self._before = None
        if is_blamed:
            if self._before is not None:
                before, self._well, self._has_fallen, self.is_short = self._before
                self._before = None
                if now < before:
                    raise Violation(
                        f"a request was to blame, and steps may hold {now} {self._name} now, {before} before"
                    )
        elif now < was:
            if now > max(held // 2, self._least, self._well if held > self._well else 0):
                raise Violation(f"{held} {self._name} were too many, {self._well} went well, and the next may be {now}")
            self._before = self._before or (was, self._well, self._has_fallen, self.is_short)
            self._has_fallen = self.is_short = True
            self._num_good = 0
            self._well = now
            return
        elif now > was:
            if self._has_fallen and self._num_good < FIRST_TRY:
                raise Violation(f"steps may hold {now} {self._name} and not {was}, after {self._num_good} good steps")
            self._num_good = 0
        if is_good:
            self._well = max(self._well, held)
        if was == self._full and self._num_good >= FIRST_TRY:
            self.is_short = False


class Sizes:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        shape = world.shape
        num_tokens = shape.prefill_chunk_tokens
        self._limits = (
            _Limit("requests", shape.max_num_seqs, shape.max_num_seqs, 1),
            _Limit("prompt tokens", num_tokens, min(num_tokens, START), min(num_tokens, shape.block_size)),
        )
        self._before = 0, 0
        self._flight: Flight | None = None
        self._num_live = 0  # requests of its own that have not ended
        self._num_in_a_row = 0  # good steps
        self._num_oom = 0  # steps of several requests out of memory, lately

    def before(self) -> None:
        """The scheduler is about to handle an event."""
        self._flight = flight = self._world.scheduler.oldest_flight
        held = [*(row[0] for row in flight.rows), *flight.fetched] if flight is not None else []
        self._num_live = sum(not request.ended for request in held)
        self._before = self._now()

    def after(self, event: Any, effects: Sequence[Effect]) -> None:
        """The scheduler has handled `event`."""
        outcome = event.outcome if isinstance(event, MakeBatch) else None
        is_good = isinstance(outcome, StepDone) and self._flight is not None and not self._flight.canary
        is_blamed = not is_good and any(map(_is_blame, effects))  # a good step without a number is no step too large
        flight = self._flight
        held = (len(flight.rows), flight.num_prompt_tokens) if flight is not None else (0, 0)
        self._check_chance(outcome if not isinstance(event, WorkerLost) else event, held, is_blamed=is_blamed)
        moves = list(zip(self._limits, self._before, self._now(), held, strict=True))
        is_good = is_good and all(now >= was for _, was, now, _ in moves)  # else it was too slow
        for limit, was, now, num in moves:
            limit.moved(was, now, num, is_good=is_good, is_blamed=is_blamed)
        is_short = any(limit.is_short for limit in self._limits)
        if self._world.scheduler.recovery.ladder.state is Rung.SMALLER_BATCH and not is_short:
            raise Violation("steps may hold what they might before, and the engine says SMALLER_BATCH")

    def _check_chance(self, outcome: Any, held: tuple[int, int], *, is_blamed: bool) -> None:
        """A step that ran out of memory by chance has made no other one smaller."""
        is_canary = self._flight is not None and bool(self._flight.canary)
        if isinstance(outcome, StepFailed | WorkerLost) or (is_canary and _has_no_number(outcome)):
            self._num_in_a_row = 0
        elif isinstance(outcome, StepDone) and not is_canary:
            self._num_in_a_row += 1
        if is_blamed or self._num_in_a_row >= FIRST_TRY:
            self._num_oom = 0
        if not isinstance(outcome, StepFailed) or outcome.fault is not Fault.OOM or self._num_live < 2:
            return
        self._num_oom += 1
        is_try = any(limit.is_try(num) for limit, num in zip(self._limits, held, strict=True))
        now = self._now()
        if self._num_oom == 1 and not is_try and (now[0] < self._before[0] or now[1] < self._before[1]):
            raise Violation(f"one step of {held} ran out of memory, steps might hold {self._before}, and now {now}")

    def _now(self) -> tuple[int, int]:
        scheduler = self._world.scheduler
        return scheduler.planner.max_running, scheduler.recovery.chunk


def _has_no_number(outcome: Any) -> bool:
    return isinstance(outcome, StepDone) and outcome.token_ids[0] < 0


def _is_blame(effect: Effect) -> bool:
    """Whether it ends a request for its failures."""
    if not isinstance(effect, Send) or not isinstance(effect.event, Batch | Outputs):
        return False
    ends = [output.end for output in effect.event.outputs if output.end is not None]
    return any(end.error is not None and end.code == "step_failed" for end in ends)
