"""What the memory of a GPU is for: what a model and its largest steps take, and how much is left for the KV cache.

`gpu_memory_utilization` is vLLM's: the share of all memory of the device that may be in use. The rest of it is worked
out as there: what stays allocated when the model is loaded (weights, tables, the sampler's buffers for `max_num_seqs`
requests), the peak of the largest steps beside it, which are run before the cache is made, what CUDA graphs will take,
and what torch knows nothing of: the CUDA context, libraries, and other programs on the device. What is left is the KV
cache. On a CPU nothing of this applies: there the share is one of the free memory (`ModelRunner.fit`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from novainfer.fsm.messages.step import SeqParams, StepPlan

__all__ = ["GpuMemory", "MemoryUse", "Snapshot", "graph_bytes", "largest_steps"]

MIB, GIB = 1024**2, 1024**3
BYTES_PER_GRAPH = 4 * MIB  # beside its activations, of which all graphs have one set: nodes, parameters, workspaces
# Every filter is on: of the ways to sample it takes the most memory.
COSTLY = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "logprobs": 1}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the driver and torch's allocator say at one moment, in bytes."""

    total_bytes: int
    free_bytes: int
    allocated_bytes: int  # of tensors
    reserved_bytes: int  # by torch, those among them
    peak_bytes: int  # the most that was allocated since `begin_peak`


class GpuMemory:
    """The memory of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def snapshot(self) -> Snapshot:
        """Now, when all that was asked for is done."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return Snapshot(
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            reserved_bytes=torch.cuda.memory_reserved(self._device),
            peak_bytes=torch.cuda.max_memory_allocated(self._device),
        )

    def begin_peak(self) -> None:
        """Look for a new peak from now on."""
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a GPU's memory is used for, in bytes; for people, and to find the size of the KV cache."""

    total_bytes: int
    model_bytes: int  # what stays: weights, tables, the sampler's and the steps' buffers
    activation_bytes: int  # the peak of the largest steps beside that
    graph_bytes: int  # that CUDA graphs are expected to take
    other_bytes: int  # in use on the device, and not by torch here
    kv_cache_bytes: int = 0
    free_bytes: int = 0  # when the cache was there

    def left(self, utilization: float, share: float = 1.0) -> int:
        """Bytes for the KV cache where so large a part of all memory may be in use; negative where it is too small.

        Of that part, `share` is for all that this model needs, where others are to have the rest.
        """
        left = int(self.total_bytes * utilization) - self.total_bytes_needed
        if share < 1:
            left = min(left, int(self.total_bytes * utilization * share) - self.total_bytes_needed + self.other_bytes)
        return left

    @property
    def total_bytes_needed(self) -> int:
        """All but the KV cache."""
        return self.model_bytes + self.activation_bytes + self.graph_bytes + self.other_bytes

    def utilization_for(self, kv_cache_bytes: int) -> float | None:
        """The share, rounded up to hundredths, that leaves so much for the KV cache; None where none does."""
        share = math.ceil(100 * (self.total_bytes_needed + kv_cache_bytes) / self.total_bytes) / 100
        return share if share <= 1 else None

    def with_cache(self, kv_cache_bytes: int, free_bytes: int) -> MemoryUse:
        """The same when the cache is there."""
        return replace(self, kv_cache_bytes=kv_cache_bytes, free_bytes=free_bytes)

    def __str__(self) -> str:
        return (
            f"{self.model_bytes / GIB:.2f} GiB of weights and buffers, {self.activation_bytes / GIB:.2f} of "
            f"activations, {self.graph_bytes / GIB:.2f} for CUDA graphs and {self.other_bytes / GIB:.2f} that others "
            "hold"
        )


def graph_bytes(max_num_seqs: int, decode_peak_bytes: int) -> int:
    """What the graphs of all batch sizes take: they share the activations of the largest, and each has its own rest."""
    return decode_peak_bytes + (max_num_seqs // 8 + 4) * BYTES_PER_GRAPH


def largest_steps(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> tuple[StepPlan, StepPlan]:
    """The step with the most tokens, and the one with the most requests that decode; all of them are sampled.

    Sequences share their blocks, from block 0 on: what a step computes does not matter, nor what it leaves there.
    """
    query_lens: list[int] = []
    while sum(query_lens) < max_num_batched_tokens and len(query_lens) < max_num_seqs:
        query_lens.append(min(max_model_len, max_num_batched_tokens - sum(query_lens)))
    return _step(query_lens, block_size), _step([1] * max_num_seqs, block_size)


def _step(query_lens: list[int], block_size: int) -> StepPlan:
    slots = list(range(len(query_lens)))
    tables = [(slot, at) for slot, count in enumerate(query_lens) for at in range(-(-count // block_size))]
    return StepPlan(
        slots=slots,
        query_lens=query_lens,
        context_lens=list(query_lens),
        input_ids=[0] * sum(query_lens),
        table_slots=[slot for slot, _ in tables],
        table_indexes=[at for _, at in tables],
        table_blocks=[at for _, at in tables],
        sample_seqs=slots,
        admissions=[SeqParams(slot=slot, **COSTLY) for slot in slots],  # type: ignore[arg-type]
    )
