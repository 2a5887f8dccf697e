"""A device with something wrong that no request brings along: kernels that fail, or too little memory, for a while.

Faults by chance strike a step here and there, and a canary hardly ever. Here the same steps fail each time: those in
some mode, with so many tokens or requests. A lower precision needs less memory and runs on the same kernels; plain
kernels are other ones and need as much memory. On a GPU graphs may be what takes the memory or fails, or attention.
Some kernels that fail make no number of a canary, which holds tokens of no prompt.
"""

from __future__ import annotations

import random

import msgspec

from novainfer.fsm.messages.events import Fault
from novainfer.fsm.messages.mode import EAGER, FAST, INT8, KERNELS, PLAIN, SDPA, Mode
from novainfer.fsm.messages.step import StepPlan
from novainfer.fsm.simulation.world.shape import ALL_MODES, BEST, LEAN, SAFE, Shape, on_gpu

SHARE = 0.2  # of all seeds
NO_NUMBER = "no number"  # what becomes of a canary


class Broken:
    """What is wrong with the device of one seed, if anything is."""

    def __init__(self, seed: int, *, may_be: bool = True) -> None:
        rng = random.Random(seed * 1_000_003 + 1)  # of its own: every other draw stays what it was
        self.is_there = rng.random() < SHARE and may_be
        self._faults = rng.choice([[Fault.OOM], [Fault.EXCEPTION], [Fault.EXCEPTION, Fault.OOM]])  # in turn
        self._counts_rows = rng.random() < 0.5
        self._least = rng.choice([1, 1, 2, 3, 5, 9])  # prompt tokens or requests
        self._lasts_s = 10 ** rng.uniform(-2, 2)
        self._well_s = 10 ** rng.uniform(-3, 2)  # between two such times
        self._begins_s = self._well_s * rng.random()
        self._quiet_s = 10 ** rng.uniform(-2.5, 1)
        self._has_all_modes = rng.random() < 0.8
        self._by_step = rng.random() < 0.3  # the faults take turns step by step, and not time by time
        self._makes_no_number = rng.random() < 0.5
        self._is_quantised = rng.random() < 0.15  # from the start
        self._is_gpu = rng.random() < 0.3
        self._is_eager = rng.random() < 0.15  # from the start
        self._works_from = rng.choice([EAGER, SDPA, PLAIN])  # of the kernels, best first
        self._graphs_are_much = rng.random() < 0.5  # without them there is memory enough
        self._warms_with_less = rng.random() < 0.5

    def shape(self, shape: Shape) -> Shape:
        """The shape of a world that has the time to go down and up again."""
        modes = shape.modes
        if self.is_there:
            modes = ALL_MODES if self._has_all_modes else modes
            if self._is_quantised:
                modes = tuple(mode for mode in modes if mode.precision == INT8) or (LEAN,)
        if self._is_gpu:
            modes = on_gpu(modes, is_eager=self._is_eager)
            shape = msgspec.structs.replace(shape, warms_with_less=self._warms_with_less)
        if not self.is_there:
            return msgspec.structs.replace(shape, modes=modes)
        return msgspec.structs.replace(shape, modes=modes, ladder_quiet_s=self._quiet_s)

    def fault_of(self, plan: StepPlan, now_s: float, *, is_canary: bool) -> Fault | str:
        """How this step fails now; empty if it does not."""
        since_s = now_s - self._begins_s
        if not self.is_there or since_s < 0:
            return ""
        nth, within_s = divmod(since_s, self._lasts_s + self._well_s)
        fault = self._faults[(plan.step_id if self._by_step else int(nth)) % len(self._faults)]
        size = len(plan.slots) if self._counts_rows else len(plan.input_ids)
        if within_s >= self._lasts_s or size < self._least or self._bears(fault, plan.mode):
            return ""
        return NO_NUMBER if is_canary and self._makes_no_number and fault is Fault.EXCEPTION else fault

    def _bears(self, fault: Fault, mode: Mode) -> bool:
        """Whether steps of `mode` go well all the same."""
        if fault is Fault.OOM:
            return mode.precision == INT8 or (self._is_gpu and self._graphs_are_much and mode.kernels != FAST)
        return KERNELS.index(mode.kernels) >= KERNELS.index(self._works_from)


class Relapse:
    """A device whose best mode is broken for good, as it seems: the first step fails again each time it is tried.

    Its plain kernels find no memory in the best precision, and a lower one works. After so many ways up that come to
    nothing all is well.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed * 1_000_003 + 6)  # of its own: every other draw stays what it was
        self._num_visits = rng.randint(2, 5)  # to the best mode, that fail
        self._mode: Mode | None = None  # of the last step
        self._num_full = 0  # visits to the best mode
        self._quiet_s = 10 ** rng.uniform(-0.5, 1.5)
        self.burst = rng.choice([2, 4, 8])
        self.burst_gap_s = self._quiet_s * rng.choice([0.3, 0.7])

    def shape(self, shape: Shape) -> Shape:
        """Room for all of them, and for a canary."""
        return msgspec.structs.replace(
            shape,
            num_blocks=32 * 48,
            max_num_seqs=32,
            max_num_batched_tokens=128,
            max_num_queued_reqs=64,
            max_num_queued_tokens=1 << 20,
            stall_high=64,
            modes=ALL_MODES,
            ladder_quiet_s=self._quiet_s,
        )

    def fault_of(self, plan: StepPlan) -> Fault | str:
        """How this step fails; empty if it does not."""
        self._num_full += plan.mode == BEST != self._mode
        self._mode = plan.mode
        if plan.mode == BEST:
            return Fault.EXCEPTION if self._num_full <= self._num_visits else ""
        return Fault.OOM if plan.mode == SAFE else ""
