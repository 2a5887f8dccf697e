"""Steps that take their time by what they hold, by tokens or by requests: from the start, or for a while.

What the allowance promises of time (`fsm/schedule/allowance.py`) is looked at after each step of such a world:

    a step that took more than a quarter of its deadline    is followed by one with fewer tokens, or fewer requests
    what steps may hold grows                               to no more than would take an eighth, by the time of the
                                                            last step that held more than half of it
    prompts, until a step is too slow                       hold twice as much after each such step, as far as that
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec

from novainfer.fsm.messages.events import MakeBatch, StepFailed, WorkerLost
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.world.shape import Shape
from novainfer.fsm.simulation.world.shortage import TOO_SLOW_S, Phase, Shortage

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

TOKENS = range(1, 200)
MOST_S = TOO_SLOW_S / 2  # of a step that is larger than those before
FULL_STEP_S = (-0.5, 1.2)  # what a step that holds all it may would take, as a power of ten: 0.3 to 15 s,
TOO_SLOW_FULL_S = (16.0, 55.0)  # or so long


class Pace:
    """What one such world draws."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed * 1_000_003 + 3)  # of its own: every other draw stays what it was
        self._by_rows = rng.random() < 0.4
        self.num_clients = 40
        self._max_num_seqs = rng.choice([8, 16, 32])
        self._chunk = rng.choice([256, 512, 1024])

    def shape(self, shape: Shape) -> Shape:
        """Room for all of them, so that nothing but time makes steps small."""
        return msgspec.structs.replace(
            shape,
            num_blocks=self._max_num_seqs * 80,
            block_size=16,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._chunk + self._max_num_seqs,
            prefill_chunk_tokens=self._chunk,
            max_model_len=1024,
            max_num_queued_reqs=256,
            max_num_queued_tokens=1 << 20,
            stall_high=1024,
        )

    def shortage(self) -> Shortage:
        """How long steps take, and when."""
        rng = self._rng
        full_s = rng.uniform(*TOO_SLOW_FULL_S) if rng.random() < 0.6 else 10 ** rng.uniform(*FULL_STEP_S)
        slow = Phase(0, row_s=full_s / self._max_num_seqs) if self._by_rows else Phase(0, token_s=full_s / self._chunk)
        if rng.random() < 0.3:
            return Shortage("pace", [slow])
        well = Phase(rng.choice([5, 10, 20]))
        return Shortage("pace", [well, msgspec.structs.replace(slow, num_steps=rng.choice([10, 30, 100])), Phase(0)])

    def prompt(self) -> list[int]:
        """Long enough for the largest steps."""
        rng = self._rng
        length = rng.choice([10, 50]) if self._by_rows else rng.choice([50, 300, 900])
        return [rng.choice(TOKENS) for _ in range(length)]

    def params(self) -> SamplingParams:
        """Long enough for steps to grow again where requests make them slow."""
        most = self._rng.choice([60, 120] if self._by_rows else [4, 16])
        return SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0)


class Paces:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = 0, 0  # requests and prompt tokens, in the step on the device
        self._limits = 0, 0  # what it might hold
        self._most = [float("inf"), float("inf")]  # what would take an eighth of the deadline
        self._was_short = False  # a step failed, or was too slow

    def before(self) -> None:
        """The scheduler is about to hear of a step."""
        flight = self._world.scheduler.oldest_flight
        self._limits = self._now()
        self._held = (len(flight.rows), flight.num_prompt_tokens) if flight is not None else (0, 0)

    def _now(self) -> tuple[int, int]:
        recovery = self._world.scheduler.recovery
        return recovery.planner.max_running, recovery.chunk

    def after(self, event: Any) -> None:
        """The scheduler has heard of it, and planned the next one."""
        outcome = event.outcome if isinstance(event, MakeBatch) else event
        if isinstance(outcome, StepFailed | WorkerLost):
            self._was_short = True
        if not isinstance(outcome, StepDone) or not self._held[0]:
            return
        took_s = outcome.took_s
        at = next((at for at in (1, 0) if 2 * self._held[at] > self._limits[at]), None)
        if at is not None:
            self._most[at] = self._held[at] * MOST_S / took_s
        if took_s > TOO_SLOW_S:
            self._was_short = True
            self._check_less(took_s)
        names = "requests", "prompt tokens"
        for name, before, now, most in zip(names, self._limits, self._now(), self._most, strict=True):
            if now > max(before, most):
                raise Violation(f"a step may hold {now} {name} ({before} before), and {most:.0f} would be slow")
        full, (_, before), (_, now) = self._world.shape.prefill_chunk_tokens, self._limits, self._now()
        if at == 1 and not self._was_short and now < min(full, 2 * before, int(self._most[1])):
            raise Violation(
                f"{self._held[1]} prompt tokens took {took_s:.2f} s, and a step may hold {now} ({before} before)"
            )
        self._world.counts["paces checked"] += 1

    def _check_less(self, took_s: float) -> None:
        """What follows a step that was too slow holds less."""
        flight, (num_rows, num_tokens) = self._world.planned, self._held
        self._world.counts["steps too slow"] += 1
        if flight is None or (num_rows == 1 and num_tokens <= self._world.shape.block_size):
            return
        if len(flight.rows) >= num_rows and flight.num_prompt_tokens >= num_tokens:
            raise Violation(
                f"a step of {num_rows} requests and {num_tokens} prompt tokens took {took_s:.1f} s, and one of "
                f"{len(flight.rows)} and {flight.num_prompt_tokens} follows it"
            )
