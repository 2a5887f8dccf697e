"""The size of a world."""

from __future__ import annotations

import msgspec

from novainfer.fsm.messages.events import Fault
from novainfer.fsm.messages.mode import INT8, PLAIN, Mode

BEST = Mode()
LEAN = Mode(precision=INT8)  # needs less memory
SAFE = Mode(kernels=PLAIN)  # runs on other kernels
ALL_MODES = (BEST, SAFE, LEAN, Mode(PLAIN, INT8))


def mode_against(fault: Fault, mode: Mode) -> Mode:
    """The mode that a ladder leads to from `mode` when a canary fails by `fault`; the same where there is none."""
    return Mode(mode.kernels, INT8) if fault is Fault.OOM else Mode(PLAIN, mode.precision)


def modes_in(precision: str | None, modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
    """What a device offers that offers `modes`, when it is loaded in `precision` (None: as it was first)."""
    if precision in (None, modes[0].precision):
        return modes
    return tuple(
        mode for mode in ALL_MODES if mode.precision == precision and mode.kernels in (modes[0].kernels, PLAIN)
    )


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of everything in a world; `EngineConfig` says what they mean."""

    num_blocks: int = 12
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    prefill_chunk_tokens: int = 8
    max_model_len: int = 40
    max_num_queued_reqs: int = 64
    max_num_queued_tokens: int = 1 << 20
    max_num_overflow_reqs: int = 4
    enable_prefix_caching: bool = True
    stall_high: int = 4
    stall_low: int = 1
    stall_keep_s: float = 10.0
    stall_timeout_s: float = 300.0
    num_host_blocks: int = 0
    modes: tuple[Mode, ...] = (BEST,)
    ladder_quiet_s: float = 60.0
    max_restarts: int = 5  # 0: the device is a thread, and cannot be replaced
    restart_window_s: float = 60.0
    processes: bool = False  # the device is in a process that a roster looks after
    warm_spare: bool = False
    kv_is_lazy: bool = True  # a KV cache takes memory when it is written
    shows_death: bool = True  # a process shows that it dies before its memory is free
    num_speculative_tokens: int = 0
    wrong_drafts_of_16: int = 0
    drafts_on_device: bool = False
    step_costs: int = 0  # which of `drafts.COSTS`
    max_in_flight: int = 1  # steps

    @property
    def context_len(self) -> int:
        """Tokens that one request may hold, prompt included."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def num_blocks_least(self) -> int:
        """Blocks that a KV cache must have: one request as long as may be has room."""
        return -(-self.context_len // self.block_size)

    @property
    def num_blocks_most(self) -> int:
        """Blocks that the device has memory for."""
        return 2 * self.num_blocks
