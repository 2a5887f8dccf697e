"""The KV cache of a model: as many blocks as there is memory for, on its device, and on the host for what is swapped.

How many those are is asked for (`fixed`) or found: on a CPU by what is free, on a GPU by what the largest steps leave
(capacity.py). What steps move of it is moved here, too: blocks that are copied, swapped out and fetched again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from novainfer.fsm.messages.step import StepPlan
from novainfer.kernels.errors import LoadError
from novainfer.kernels.memory import free_bytes, is_out_of_memory, total_bytes
from novainfer.kernels.models.decoder import Decoder
from novainfer.kernels.ops.registry import AttentionBackend, BlockMover
from novainfer.kernels.ops.selection import GRAPHS, Selection
from novainfer.kernels.runtime.capacity import GpuMemory, MemoryUse, graph_bytes, largest_steps
from novainfer.kernels.runtime.copies import copy_blocks
from novainfer.kernels.runtime.model_info import ModelInfo
from novainfer.kernels.runtime.modes import Modes
from novainfer.kernels.runtime.proposer import Proposer
from novainfer.kernels.runtime.swap import STAGING_BYTES, HostPool
from novainfer.kernels.step import StepBuffers
from novainfer.kernels.weights.loader import GIB

__all__ = ["FittedCache"]


class FittedCache:
    """The blocks that a model computes on, and those that the host keeps copies in; none before `fit`."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: Selection,
        modes: Modes,
        info: ModelInfo,
        buffers: StepBuffers,
        proposer: Proposer | None,
    ) -> None:
        self.num_blocks = 0
        self.num_host_blocks = 0
        self.memory: MemoryUse | None = None  # of a GPU, when the cache was fitted to it
        self.parts: tuple[Tensor, ...] = ()  # of the cache
        self.proposer = proposer  # which has keys and values of its own in as many blocks; None: there is none any more
        self._decoder = decoder
        self._kernels = kernels
        self._modes = modes
        self._info = info
        self._buffers = buffers
        self._max_blocks = -(-info.max_model_len // info.block_size)  # of one sequence
        self._gpu = GpuMemory(kernels.device) if kernels.device.type == "cuda" else None
        self._mover: BlockMover | None = None  # of its blocks, where kernels move them
        self._host_pool: HostPool | None = None

    def fit(
        self,
        *,
        mode: Literal["auto", "fixed"],
        num_blocks: int | None,
        memory_utilization: float,
        memory_share: float,
        swap_space_bytes: int,
        again: bool,
        run: Callable[[StepPlan], object],
        sampler_bytes: int,
    ) -> int:
        """As `ModelRunner.fit`; on a GPU `run` computes the largest steps, beside `sampler_bytes` of the sampler."""
        if mode == "fixed":
            if num_blocks is None:
                raise LoadError('the KV cache capacity mode "fixed" needs a number of blocks')
            wanted = num_blocks
            self._must_hold_a_sequence(wanted, f"{wanted} KV blocks")
            is_lazy = again and self._kernels.device.type == "cpu"  # pages count when they are written
            if not is_lazy:
                self._check_room(wanted, freed=self._cache_bytes(self.num_blocks) if self.parts else 0)
            self.let_go()
            if not is_lazy:
                self._check_room(wanted)
        elif self._gpu is not None:
            self.let_go()
            self.memory = self._profile(self._gpu, run, sampler_bytes)
            staging_bytes = STAGING_BYTES if swap_space_bytes else 0
            wanted = self._blocks_left(self.memory, memory_utilization, memory_share, staging_bytes)
        else:
            self.let_go()
            free = free_bytes(self._kernels.device)
            if memory_share < 1:
                free = min(free, max(int(total_bytes() * memory_share) - self._info.weight_bytes, 0))
            budget = int(free * memory_utilization)
            limit = max(budget - self._cache_bytes(0), 0) // self._bytes_per_block
            self._must_hold_a_sequence(limit, f"{budget / GIB:.2f} GiB ({memory_utilization:g} of the free memory)")
            wanted = min(limit, self._buffers.max_num_seqs * self._max_blocks)
        cache = self._put_cache(wanted)
        on_device = self._cache_bytes(wanted) if self._kernels.device.type == "cpu" else 0
        self._fit_host_pool(cache, swap_space_bytes, free_bytes(torch.device("cpu")) - on_device)
        if self._gpu is not None and self.memory is not None:
            self.memory = self.memory.with_cache(self._cache_bytes(wanted), self._gpu.snapshot().free_bytes)
        return wanted

    def let_go(self) -> None:
        """Give the memory of the KV cache back, if there is one; nothing can be computed until there is another."""
        self._decoder.detach()
        if self.proposer is not None:
            self.proposer.detach()
        if self._host_pool is not None:
            self._host_pool.detach()
        self.parts, self._mover = (), None
        self.num_blocks = 0
        if self._kernels.device.type == "cuda":
            torch.cuda.empty_cache()

    def move(self, plan: StepPlan) -> None:
        """Swap and copy the blocks that a step says, before it is computed."""
        if plan.swap_out_blocks or plan.swap_in_blocks:
            if self._host_pool is None:
                raise ValueError("a step swaps blocks, but there is no swap space")
            self._host_pool.swap_out(plan.swap_out_blocks, plan.swap_out_hosts)
            self._host_pool.swap_in(plan.swap_in_hosts, plan.swap_in_blocks)
        if plan.copy_to_blocks or plan.copy_from_blocks:
            copy_blocks(self.parts, plan.copy_from_blocks, plan.copy_to_blocks, self._mover)

    def close(self) -> None:
        """Let all of it go, what the host keeps among it."""
        self.let_go()
        self._host_pool, self.proposer = None, None
        del self._decoder, self._kernels, self._modes, self._buffers

    def _put_cache(self, num_blocks: int) -> AttentionBackend:
        """Allocate a cache of so many blocks and compute on it from now on."""
        shape = self._decoder.attention_shape(self._info.block_size)
        kernel = self._kernels.attention(shape)
        try:
            cache: AttentionBackend = kernel.allocate(shape, num_blocks, self._kernels.dtype, self._kernels.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size = num_blocks * self._info.kv_bytes_per_block
            raise LoadError(f"{num_blocks} KV blocks ({size / GIB:.2f} GiB) cannot be allocated: {error}") from None
        self._modes.attach(cache)
        self.parts = cache.parts
        self._mover = self._kernels.block_mover(cache.parts)
        if self.proposer is not None:
            self.proposer.fit(num_blocks, self._info.max_model_len)
        self.num_blocks = num_blocks
        self._buffers.begin(num_blocks)
        return cache

    def _profile(self, gpu: GpuMemory, run: Callable[[StepPlan], object], sampler_bytes: int) -> MemoryUse:
        """Run the largest steps over a small cache, which goes again, and say what they took; there is no cache yet."""
        limits = {
            "max_num_seqs": self._buffers.max_num_seqs,
            "max_num_batched_tokens": self._buffers.max_num_batched_tokens,
        }
        plans = largest_steps(**limits, max_model_len=self._info.max_model_len, block_size=self._info.block_size)
        peaks, loaded = [], gpu.snapshot().allocated_bytes
        try:
            self._put_cache(1 + max(max(plan.table_blocks) for plan in plans))
            before = gpu.snapshot()
            for plan in plans:
                gpu.begin_peak()
                run(plan)
                peaks.append(gpu.snapshot().peak_bytes - before.allocated_bytes)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise LoadError(
                f"the largest step (max_num_batched_tokens {limits['max_num_batched_tokens']}, max_num_seqs "
                f"{limits['max_num_seqs']}) finds no memory beside the weights: make it smaller, or run a smaller model"
            ) from None
        finally:
            self.let_go()
        found = gpu.snapshot()
        has_graphs = self._kernels.names.get("forward", "").startswith(GRAPHS)
        return MemoryUse(
            total_bytes=found.total_bytes,
            model_bytes=loaded + max(sampler_bytes, found.allocated_bytes - loaded),
            activation_bytes=max(peaks),
            graph_bytes=graph_bytes(self._buffers.max_num_seqs, peaks[1]) if has_graphs else 0,
            other_bytes=max(found.total_bytes - found.free_bytes - found.reserved_bytes, 0),
        )

    def _blocks_left(self, use: MemoryUse, utilization: float, memory_share: float, staging_bytes: int) -> int:
        """How many blocks fit into what is left; raises `LoadError` where one sequence would not fit."""
        besides = self._cache_bytes(0) + staging_bytes
        left = use.left(utilization, memory_share) - besides
        num_blocks = max(left, 0) // self._bytes_per_block
        if num_blocks < self._max_blocks:
            share = use.utilization_for(self._max_blocks * self._bytes_per_block + besides)
            enough = (
                "no share of it is enough" if share is None else f"gpu_memory_utilization must be at least {share:g}"
            )
            self._must_hold_a_sequence(
                num_blocks,
                f"{max(left, 0) / GIB:.2f} GiB (gpu_memory_utilization {utilization:g} of {use.total_bytes / GIB:.2f} "
                f"GiB, beside {use})",
                f"; for that length {enough}",
            )
        return num_blocks

    @property
    def _bytes_per_block(self) -> int:
        """What one block takes on the device, the draft model's keys and values among it."""
        return self._info.kv_bytes_per_block + (self.proposer.bytes_per_block if self.proposer is not None else 0)

    def _cache_bytes(self, num_blocks: int) -> int:
        """What a cache of so many blocks takes on the device, with the draft model's scratch blocks."""
        scratch_bytes = self.proposer.scratch_bytes if self.proposer is not None else 0
        return num_blocks * self._bytes_per_block + scratch_bytes

    def _must_hold_a_sequence(self, num_blocks: int, where: str, more: str = "") -> None:
        info = self._info
        if num_blocks < self._max_blocks:
            raise LoadError(
                f"one sequence of max_model_len {info.max_model_len} needs {self._max_blocks} KV blocks of "
                f"{info.block_size} tokens, but {where} hold {num_blocks}: max_model_len must be at most "
                f"{num_blocks * info.block_size}{more}"
            )

    def _check_room(self, num_blocks: int, freed: int = 0) -> None:
        """Raise `LoadError` unless there is room for so many blocks; `freed` bytes more will be free at most."""
        device, pool = self._kernels.device, self._host_pool
        promised = pool.unwritten_bytes if pool is not None and device.type == "cpu" else 0
        free = max(free_bytes(device) + freed - self._cache_bytes(0) - promised, 0)
        needed = num_blocks * self._bytes_per_block
        if needed > free:
            raise LoadError(
                f"{num_blocks} KV blocks need {needed / GIB:.2f} GiB, but only {free / GIB:.2f} GiB are free: at "
                f"most {free // self._bytes_per_block} blocks fit"
            )

    def _fit_host_pool(self, cache: AttentionBackend, swap_space_bytes: int, free: int) -> None:
        """`free` bytes of the host's memory are left beside the KV cache."""
        num_host_blocks = swap_space_bytes // HostPool.bytes_per_block(cache.parts, self._mover)
        if self._host_pool is not None and num_host_blocks == self.num_host_blocks:
            self._host_pool.attach(cache.parts, self._mover)
            return
        self.num_host_blocks, self._host_pool = num_host_blocks, None
        if num_host_blocks == 0:
            return
        if swap_space_bytes > free:
            raise LoadError(
                f"a swap space of {swap_space_bytes / GIB:.2f} GiB was asked for, but only {max(free, 0) / GIB:.2f} "
                "GiB of the host's memory are free beside the KV cache"
            )
        try:
            self._host_pool = HostPool(cache.parts, self.num_host_blocks, self._mover)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise LoadError(f"{swap_space_bytes / GIB:.2f} GiB of swap space cannot be allocated: {error}") from None
