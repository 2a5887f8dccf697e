"""A bounded pool of KV blocks in the host's memory, and the copies between it and the device's cache.

A block is copied whole, in the layout it has on the device, so it comes back bit for bit whichever kernels
compute on it. Nothing is allocated by a copy: it must work where memory has just run out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from novainfer.kernels.memory import lazy_zeros, page_locked_zeros
from novainfer.kernels.ops.registry import BlockMover
from novainfer.kernels.step import must_lie_in

__all__ = ["STAGING_BYTES", "HostPool"]

STAGING_BYTES = 32 * 1024**2  # on the device: more than half a millisecond of its link, so launches do not count


class HostPool:
    """`num_blocks` host blocks for a cache of parts [num_layers, num_blocks, ...] (`AttentionBackend.parts`).

    They outlive the cache: another one of the same blocks, however many, may take its place (`detach`, `attach`).

    On the CPU the pool's pages become resident when they are first written. Beside a CUDA device they are locked, and
    with a `mover` blocks go through a staging area on the device, as many at once as it holds: gathered there by one
    launch, and to the host with one copy for all whose host blocks follow each other; and likewise back. All of it is
    asked for on the stream of the computation: no block is overwritten, and no host block is read or written, before
    what was asked for earlier is done. The host itself never reads one. Raises what the allocator raises.
    """

    def __init__(self, parts: Sequence[Tensor], num_blocks: int, mover: BlockMover | None = None) -> None:
        """`mover` is that of these parts, where kernels move blocks."""
        self.num_blocks = num_blocks
        device = parts[0].device
        shapes: list[tuple[tuple[int, ...], torch.dtype]]
        if mover is None:
            shapes = [((num_blocks, part.shape[0], part[0, 0].numel()), part.dtype) for part in parts]
        else:  # a block of all parts and layers lies together
            shapes = [((num_blocks, mover.record_bytes), torch.uint8)]
            size = min(max(1, STAGING_BYTES // mover.record_bytes), mover.blocks_max, num_blocks)
            self._staging = torch.empty(size, mover.record_bytes, dtype=torch.uint8, device=device)
        self._host = [_allocate(shape, dtype, device) for shape, dtype in shapes]
        self._is_written = np.zeros(num_blocks, dtype=np.bool_)
        # Between devices torch copies what is contiguous on both sides directly, anything else through a temporary.
        self._by_layer = device.type != "cpu"
        self.attach(parts, mover)

    @staticmethod
    def bytes_per_block(parts: Sequence[Tensor], mover: BlockMover | None = None) -> int:
        """What one host block takes."""
        if mover is not None:
            return mover.record_bytes
        return sum(part.shape[0] * part[0, 0].numel() * part.element_size() for part in parts)

    def attach(self, parts: Sequence[Tensor], mover: BlockMover | None = None) -> None:
        """Copy from and to this cache, of the same kind as the one before."""
        self._device = [part.flatten(2) for part in parts]  # [num_layers, num_device_blocks, elements of a block]
        self._num_device_blocks = parts[0].shape[1]
        self._mover = mover
        if mover is not None:  # so that it is compiled while there is memory for that; nothing is in the cache yet
            mover.gather([0], self._staging[:1])
            mover.scatter(self._staging[:1], [0])

    def detach(self) -> None:
        """Let the cache go; what the host blocks hold stays."""
        self._device, self._num_device_blocks, self._mover = [], 0, None

    @property
    def unwritten_bytes(self) -> int:
        """What the host blocks that were never written will take on the CPU, and do not yet."""
        per_block = sum(part[0].nbytes for part in self._host)
        return int(self.num_blocks - self._is_written.sum()) * per_block

    def swap_out(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Copy device block `blocks[i]` to host block `hosts[i]`, one after the other."""
        self._check(blocks, hosts)
        self._is_written[hosts] = True
        if self._mover is not None:
            (host_records,) = self._host
            for records, part_blocks, part_hosts in self._pieces(blocks, hosts):
                self._mover.gather(part_blocks, records)
                for run, host_run in _runs(part_hosts):
                    host_records[host_run].copy_(records[run], non_blocking=True)
            return
        for device, host in zip(self._device, self._host, strict=True):
            for block, at in zip(blocks, hosts, strict=True):
                self._copy(host[at], device[:, block])

    def swap_in(self, hosts: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy host block `hosts[i]` to device block `blocks[i]`, one after the other."""
        self._check(blocks, hosts)
        if self._mover is not None:
            (host_records,) = self._host
            for records, part_blocks, part_hosts in self._pieces(blocks, hosts):
                for run, host_run in _runs(part_hosts):
                    records[run].copy_(host_records[host_run], non_blocking=True)
                self._mover.scatter(records, part_blocks)
            return
        for device, host in zip(self._device, self._host, strict=True):
            for block, at in zip(blocks, hosts, strict=True):
                self._copy(device[:, block], host[at])

    def _pieces(
        self, blocks: Sequence[int], hosts: Sequence[int]
    ) -> Iterator[tuple[Tensor, Sequence[int], Sequence[int]]]:
        """As many at once as the staging area holds: room for their records, and both numbers of each.

        In the order of the host blocks, which are given back and taken in any order and are neighbours all the same.
        """
        order = sorted(range(len(hosts)), key=hosts.__getitem__)
        for first in range(0, len(order), len(self._staging)):
            piece = order[first : first + len(self._staging)]
            yield self._staging[: len(piece)], [blocks[at] for at in piece], [hosts[at] for at in piece]

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


def _runs(hosts: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Where ascending `hosts` follow each other: their places in the list, and the host blocks."""
    begin = 0
    for end in range(1, len(hosts) + 1):
        if end == len(hosts) or hosts[end] != hosts[end - 1] + 1:
            yield slice(begin, end), slice(hosts[begin], hosts[end - 1] + 1)
            begin = end


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, beside: torch.device) -> Tensor:
    if beside.type == "cuda":
        return page_locked_zeros(shape, dtype)
    return lazy_zeros(shape, dtype, torch.device("cpu"))
