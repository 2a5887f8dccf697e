"""Copies of blocks inside a device's KV cache: in all layers at once, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from novainfer.kernels.ops.registry import BlockMover
from novainfer.kernels.step import must_lie_in

__all__ = ["copy_blocks"]


def copy_blocks(
    parts: Sequence[Tensor], sources: Sequence[int], blocks: Sequence[int], mover: BlockMover | None = None
) -> None:
    """Copy block `sources[i]` to block `blocks[i]`, in parts [num_layers, num_blocks, ...] (`AttentionBackend.parts`).

    By the `mover` of these parts where there is one: then nothing is allocated, and in no order, as none is needed.
    Raises ValueError for blocks that are not there, and where the order of the copies would matter.
    """
    if len(sources) != len(blocks):
        raise ValueError(f"{len(sources)} blocks cannot be copied to {len(blocks)}")
    must_lie_in("copy_from_blocks", sources, parts[0].shape[1])
    must_lie_in("copy_to_blocks", blocks, parts[0].shape[1])
    if len(set(blocks)) < len(blocks) or not set(blocks).isdisjoint(sources):
        raise ValueError("a block that a step copies to is copied to twice, or copied from as well")
    if mover is not None:
        mover.copy(sources, blocks)
        return
    at = torch.tensor([sources, blocks], device=parts[0].device)
    for part in parts:
        part.index_copy_(1, at[1], part.index_select(1, at[0]))
