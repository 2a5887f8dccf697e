"""The size of a world."""

from __future__ import annotations

from typing import Literal

import msgspec

from novainfer.fsm.messages.events import Fault
from novainfer.fsm.messages.mode import EAGER, FAST, INT8, KERNELS, PLAIN, PRECISIONS, SDPA, Mode

BEST = Mode()
LEAN = Mode(precision=INT8)  # needs less memory
SAFE = Mode(kernels=PLAIN)  # runs on other kernels
ALL_MODES = (BEST, SAFE, LEAN, Mode(PLAIN, INT8))
GPU_MODES = tuple(Mode(kernels, precision) for precision in PRECISIONS for kernels in KERNELS)


def modes_against(fault: Fault, mode: Mode) -> tuple[Mode, ...]:
    """Where a ladder may lead from `mode` when a canary fails by `fault`: to the first of these that is there."""
    if fault is not Fault.OOM:
        return tuple(Mode(kernels, mode.precision) for kernels in KERNELS[KERNELS.index(mode.kernels) + 1 :])
    without_graphs = [Mode(EAGER, mode.precision)] if mode.kernels == FAST else []
    return (*without_graphs, *(Mode(mode.kernels, low) for low in PRECISIONS[PRECISIONS.index(mode.precision) + 1 :]))


def is_exact(mode: Mode, first: Mode) -> bool:
    """Whether `mode` computes what a device computes that came up in `first`: a graph is the same kernels."""
    return mode.precision == first.precision and (
        mode.kernels == first.kernels or not {mode.kernels, first.kernels} & {SDPA, PLAIN}
    )


def on_gpu(modes: tuple[Mode, ...], *, is_eager: bool) -> tuple[Mode, ...]:
    """What a device offers that captures graphs, or may not (`is_eager`), where another one offers `modes`."""
    found: list[Mode] = []
    for mode in modes:
        if mode.kernels == FAST:
            found += [] if is_eager else [mode]
            found.append(Mode(EAGER, mode.precision))
            found += [Mode(SDPA, mode.precision)] if Mode(PLAIN, mode.precision) in modes else []
        else:
            found.append(mode)
    return tuple(found)


def modes_in(precision: str | None, modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
    """What a device offers that offers `modes`, when it is loaded in `precision` (None: as it was first)."""
    if precision in (None, modes[0].precision):
        return modes
    kernels = {PLAIN, *(mode.kernels for mode in modes)}
    return tuple(mode for mode in GPU_MODES if mode.precision == precision and mode.kernels in kernels)


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
    step_costs: int = 0  # which of `costs.COSTS`
    inter_token_target_ms: float | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    priority_wait_s: float = 10.0
    share_prefix_cache: bool = False
    session_ttl_s: float = 0.0
    session_share: float = 0.5
    max_sessions: int = 100
    max_in_flight: int = 1  # steps
    warms_with_less: bool = False  # a process that is not the first may find no memory for its first step
    computes_beside: bool = False  # the device is told of a step before the one before it has ended

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
