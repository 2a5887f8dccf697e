"""Whole blocks of a KV cache moved on a GPU, one launch for each part of the cache and not a copy a layer and block.

A block of all parts and layers is a *record*: bytes that lie together, so that the host's memory is reached with one
copy for all records that follow each other there. (A record of Qwen2.5-0.5B in bf16, 16 tokens, is 192 KiB: where host
blocks lie apart, a copy of one still takes longer than its launch.)

Everything is asked for on the current stream, the one that computes, so a block is read when all that was asked for
before has been written, and what is asked for afterwards finds it moved. Nothing is allocated by a move, on the device
or on the host: block ids go over in pinned rows that take turns, and a row is written again when its copy has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from novainfer.kernels.cuda.jit import blocks as jit
from novainfer.kernels.cuda.language import element
from novainfer.kernels.cuda.variant import Config, Variant

__all__ = ["BlockMover", "variants"]

IDS_MAX = 256  # blocks of one launch
NUM_ROWS = 8  # of ids: launches until the copy of the first one's must have ended
ALIGNMENT = 16  # bytes, of each part in a record: what a thread reads at once
WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


class BlockMover:
    """See `kernels.ops.registry`; each part is moved in the widest words that its blocks are made of."""

    blocks_max = IDS_MAX

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = [_in_words(part) for part in parts]  # each [num_layers, num_blocks, words of a block]
        self._offsets: list[int] = []  # of each part in a record, in bytes
        self.record_bytes = 0
        for part in self._parts:
            self._offsets.append(self.record_bytes)
            num_bytes = part.shape[0] * part.shape[2] * part.element_size()
            self.record_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._ids = _Ids(parts[0].device)
        self.copy([0], [0])  # so that it is compiled while there is memory for that

    def gather(self, blocks: Sequence[int], records: Tensor) -> None:
        """As `BlockMover.gather`."""
        ids, _ = self._ids.put(blocks, ())
        for part, offset in zip(self._parts, self._offsets, strict=True):
            self._launch(part, _of_part(records, part, offset), ids, None, len(blocks))

    def scatter(self, records: Tensor, blocks: Sequence[int]) -> None:
        """As `BlockMover.scatter`."""
        _, ids = self._ids.put((), blocks)
        for part, offset in zip(self._parts, self._offsets, strict=True):
            self._launch(_of_part(records, part, offset), part, None, ids, len(blocks))

    def copy(self, sources: Sequence[int], blocks: Sequence[int]) -> None:
        """As `BlockMover.copy`."""
        for first in range(0, len(blocks), IDS_MAX):
            piece = slice(first, first + IDS_MAX)
            source_ids, target_ids = self._ids.put(sources[piece], blocks[piece])
            for part in self._parts:
                self._launch(part, part, source_ids, target_ids, len(blocks[piece]))

    @staticmethod
    def _launch(source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None, n: int) -> None:
        """`source` and `target` are [num_layers, blocks, words]."""
        if not n:
            return
        num_layers, _, num_words = source.shape
        config = _config(num_words, from_ids=source_ids is not None, to_ids=target_ids is not None)
        grid = (n, num_layers, -(-num_words // config.constants["BLOCK"]))
        some_ids = source_ids if source_ids is not None else target_ids
        jit.move_blocks[grid](
            source,
            target,
            some_ids,
            target_ids if target_ids is not None else some_ids,
            num_words,
            source.stride(1),
            source.stride(0),
            target.stride(1),
            target.stride(0),
            **config.arguments,
        )


class _Ids:
    """Block ids on their way to the device, in rows that take turns."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(NUM_ROWS, 2, IDS_MAX, dtype=torch.int32, pin_memory=is_cuda)
        self._rows = self._host.numpy()
        self._device = torch.zeros_like(self._host, device=device) if is_cuda else self._host
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(NUM_ROWS)] if is_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def put(self, sources: Sequence[int], targets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Both on the device, int32 [IDS_MAX]; valid until NUM_ROWS more were put."""
        turn = self._turn = (self._turn + 1) % NUM_ROWS
        if self._copied:
            self._copied[turn].synchronize()
        self._rows[turn, 0, : len(sources)] = sources
        self._rows[turn, 1, : len(targets)] = targets
        if self._copied:
            self._device[turn].copy_(self._host[turn], non_blocking=True)
            self._copied[turn].record()
        return self._device[turn, 0], self._device[turn, 1]


def _in_words(part: Tensor) -> Tensor:
    """[num_layers, num_blocks, ...] -> the same memory as [num_layers, num_blocks, words]."""
    blocks = part.view(part.shape[0], part.shape[1], -1)
    sizes = (blocks.shape[2], blocks.stride(0), blocks.stride(1), part.storage_offset())
    for word in WORDS:
        if all(size * part.element_size() % word.itemsize == 0 for size in sizes):
            return blocks.view(word)
    raise AssertionError("every size is a multiple of a byte")


def _of_part(records: Tensor, part: Tensor, offset: int) -> Tensor:
    """What of records uint8 [n, record_bytes] belongs to a part, as [num_layers, n, words]; the same memory."""
    num_layers, _, num_words = part.shape
    own = records[:, offset : offset + num_layers * num_words * part.element_size()].view(part.dtype)
    return own.view(len(records), num_layers, num_words).transpose(0, 1)


def _config(num_words: int, *, from_ids: bool, to_ids: bool) -> Config:
    block = 1 << (num_words - 1).bit_length()
    constants = {"HAS_SOURCE_IDS": from_ids, "HAS_TARGET_IDS": to_ids, "BLOCK": min(max(block, 128), 1024)}
    return Config(constants, num_warps=4, num_stages=1)


def variants(capability: int) -> Iterator[Variant]:
    """What is launched for blocks of 16 tokens of Qwen2.5-0.5B and 7B, and for the scales of quantised ones."""
    words = {"0.5B": 16 * 2 * 64 * 2 // 8, "7B": 16 * 4 * 128 * 2 // 8, "scales": 16 * 2 * 4 // 8}
    kind = element(torch.int64)
    strides = ("source_block_stride", "source_layer_stride", "target_block_stride", "target_layer_stride")
    for name, num_words in words.items():
        for what, from_ids, to_ids in (("gather", True, False), ("scatter", False, True), ("copy", True, True)):
            yield Variant(
                f"{what}_blocks {name}",
                jit.move_blocks,
                {
                    "source": f"*{kind}",
                    "target": f"*{kind}",
                    "source_ids": "*i32",
                    "target_ids": "*i32",
                    "num_words": "i32",
                    **dict.fromkeys(strides, "i32"),
                },
                _config(num_words, from_ids=from_ids, to_ids=to_ids),
                aligned=frozenset({"num_words", *strides}),
            )
