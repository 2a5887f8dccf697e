"""A bounded pool of KV blocks in the host's memory, and the copies between it and the device's cache.

A block is copied whole, in the layout it has on the device, so it comes back bit for bit whichever kernels
compute on it. Nothing is allocated by a copy: it must work where memory has just run out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from novainfer.kernels.memory import lazy_zeros
from novainfer.kernels.step import must_lie_in

__all__ = ["HostPool"]


class HostPool:
    """`num_blocks` host blocks for a cache of parts [num_layers, num_blocks, ...] (`AttentionBackend.parts`).

    They outlive the cache: another one of the same blocks, however many, may take its place (`detach`, `attach`).

    On the CPU the pool's pages become resident when they are first written; beside a CUDA device they are
    pinned, and the copies run on the stream of the computation: no host block is read or written before what
    was asked for earlier is done. Raises what the allocator raises.
    """

    def __init__(self, parts: Sequence[Tensor], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.attach(parts)
        self._host = [_allocate((num_blocks, part.shape[0], part.shape[2]), part) for part in self._device]
        self._is_written = np.zeros(num_blocks, dtype=np.bool_)
        # Between devices torch copies what is contiguous on both sides directly, anything else through a temporary.
        self._by_layer = parts[0].device.type != "cpu"

    def attach(self, parts: Sequence[Tensor]) -> None:
        """Copy from and to this cache."""
        self._device = [part.flatten(2) for part in parts]  # [num_layers, num_device_blocks, elements of a block]
        self._num_device_blocks = parts[0].shape[1]

    def detach(self) -> None:
        """Let the cache go; what the host blocks hold stays."""
        self._device, self._num_device_blocks = [], 0

    @property
    def unwritten_bytes(self) -> int:
        """What the host blocks that were never written will take on the CPU, and do not yet."""
        per_block = sum(part[0].nbytes for part in self._host)
        return int(self.num_blocks - self._is_written.sum()) * per_block

    def swap_out(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Copy device block `blocks[i]` to host block `hosts[i]`, one after the other."""
        self._check(blocks, hosts)
        self._is_written[hosts] = True
        for device, host in zip(self._device, self._host, strict=True):
            for block, at in zip(blocks, hosts, strict=True):
                self._copy(host[at], device[:, block])

    def swap_in(self, hosts: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy host block `hosts[i]` to device block `blocks[i]`, one after the other."""
        self._check(blocks, hosts)
        for device, host in zip(self._device, self._host, strict=True):
            for block, at in zip(blocks, hosts, strict=True):
                self._copy(device[:, block], host[at])

    def _copy(self, to: Tensor, source: Tensor) -> None:
        if not self._by_layer:
            to.copy_(source)
            return
        for layer in range(len(to)):
            to[layer].copy_(source[layer], non_blocking=True)

    def _check(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Raises ValueError for a block that is not there; a negative number would be another sequence's."""
        if len(blocks) != len(hosts):
            raise ValueError(f"{len(blocks)} blocks cannot be copied to or from {len(hosts)} host blocks")
        must_lie_in("swapped blocks", blocks, self._num_device_blocks)
        must_lie_in("host blocks", hosts, self.num_blocks)


def _allocate(shape: tuple[int, int, int], like: Tensor) -> Tensor:
    if like.device.type == "cuda":
        return torch.empty(shape, dtype=like.dtype, pin_memory=True)
    return lazy_zeros(shape, like.dtype, torch.device("cpu"))
