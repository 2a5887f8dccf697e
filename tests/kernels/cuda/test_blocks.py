"""Blocks that kernels move, to the host and back and inside the cache, are those that torch moves, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from novainfer.kernels.cuda.blocks import IDS_MAX, NUM_ROWS, BlockMover
from novainfer.kernels.cuda.language import INTERPRETED
from novainfer.kernels.runtime import swap
from novainfer.kernels.runtime.copies import copy_blocks
from novainfer.kernels.runtime.swap import HostPool

NUM_LAYERS, NUM_BLOCKS = 3, 9

# Shapes of a block in each part of a cache, and its dtype.
KEYS_AND_VALUES = [((16, 2, 8), torch.bfloat16)] * 2
QUANTISED = [((4, 2, 24), torch.int8)] * 2 + [((4, 2), torch.float32)] * 2
CACHES = {
    "bf16": KEYS_AND_VALUES,
    "fp32, larger than a program": [((16, 2, 136), torch.float32)] * 2,
    "int8 and scales": QUANTISED,
    "fp8 and scales": [((4, 2, 24), torch.float8_e4m3fn)] * 2 + QUANTISED[2:],
    "odd bytes": [((3, 5, 1), torch.uint8), ((3, 1, 1), torch.float16), ((5, 1, 1), torch.float32)],
}


def cache_of(kind: str, device: torch.device, num_blocks: int = NUM_BLOCKS) -> tuple[Tensor, ...]:
    """Every byte is any byte: NaNs among them, and numbers that no arithmetic would leave as they are."""
    chance = torch.Generator().manual_seed(7)
    parts = []
    for shape, dtype in CACHES[kind]:
        num_bytes = NUM_LAYERS * num_blocks * torch.Size(shape).numel() * dtype.itemsize
        filled = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=chance)
        parts.append(filled.to(device).view(dtype).view(NUM_LAYERS, num_blocks, *shape))
    return tuple(parts)


def copied(parts: Sequence[Tensor]) -> list[Tensor]:
    """As bytes [num_layers, num_blocks, bytes of a block], so that a NaN equals itself."""
    return [part.flatten(2).view(torch.uint8).cpu().clone() for part in parts]


@pytest.mark.parametrize("kind", CACHES)
def test_blocks_come_back_from_the_host_bit_for_bit_and_no_other_changes(kind: str, device: torch.device) -> None:
    parts = cache_of(kind, device)
    before = copied(parts)
    pool = HostPool(parts, 7, BlockMover(parts))
    assert all(map(torch.equal, copied(parts), before)), "what compiles the kernels leaves the cache as it is"
    pool.swap_out([8, 0, 3, 5], [1, 6, 0, 2])
    assert all(map(torch.equal, copied(parts), before))
    for part in parts:
        part.view(torch.uint8).fill_(0xAB)
    pool.swap_in([2, 0, 6], [4, 8, 1])
    for got, was in zip(copied(parts), before, strict=True):
        assert torch.equal(got[:, [4, 8, 1]], was[:, [5, 3, 0]])
        assert (got[:, [0, 2, 3, 5, 6, 7]] == 0xAB).all()


@pytest.mark.parametrize("kind", CACHES)
def test_copies_inside_the_cache_are_those_of_torch(kind: str, device: torch.device) -> None:
    parts, expected = cache_of(kind, device), cache_of(kind, torch.device("cpu"))
    copy_blocks([part.view(torch.uint8) for part in expected], [8, 2, 8], [0, 7, 4])
    copy_blocks(parts, [8, 2, 8], [0, 7, 4], BlockMover(parts))
    assert all(map(torch.equal, copied(parts), copied(expected)))
    with pytest.raises(ValueError, match="copied to twice"):
        copy_blocks(parts, [1, 2], [3, 3], BlockMover(parts))


def test_more_blocks_than_the_staging_area_or_a_launch_holds_go_in_pieces(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_blocks = IDS_MAX + 40
    parts = tuple(part[:1] for part in cache_of("odd bytes", device, num_blocks))
    before = copied(parts)
    mover = BlockMover(parts)
    monkeypatch.setattr(swap, "STAGING_BYTES", 50 * mover.record_bytes)
    pool = HostPool(parts, num_blocks, mover)
    assert len(pool._staging) == 50
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    hosts = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).tolist()
    pool.swap_out(blocks, hosts)
    half = num_blocks // 2
    copy_blocks(parts, blocks[:half], blocks[half : 2 * half], mover)
    for got, was in zip(copied(parts), before, strict=True):
        assert torch.equal(got[:, blocks[half : 2 * half]], was[:, blocks[:half]])
    pool.swap_in(hosts, blocks)
    assert all(map(torch.equal, copied(parts), before))


def test_one_block_at_a_time_goes_where_a_record_is_larger_than_the_staging_area(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "STAGING_BYTES", 1)
    parts = cache_of("bf16", device)
    before = copied(parts)
    pool = HostPool(parts, 4, BlockMover(parts))
    pool.swap_out([1, 2], [3, 0])
    pool.swap_in([0, 3], [7, 6])
    for got, was in zip(copied(parts), before, strict=True):
        assert torch.equal(got[:, [7, 6]], was[:, [2, 1]])


def test_host_blocks_that_follow_each_other_are_one_copy_whatever_their_order() -> None:
    def runs(*hosts: int) -> list[tuple[int, int]]:
        return [(host.start, host.stop) for _, host in swap._runs(hosts)]

    assert runs(3, 4, 5, 9, 11, 12) == [(3, 6), (9, 10), (11, 13)]
    assert runs(7) == [(7, 8)]
    assert runs() == []
    parts = cache_of("bf16", torch.device("cpu"))
    pool = HostPool(parts, 6)
    pool._staging = torch.empty(3, 1)
    pieces = [(blocks, hosts) for _, blocks, hosts in pool._pieces([8, 7, 6, 5, 4], [5, 4, 3, 1, 0])]
    assert pieces == [([4, 5, 6], [0, 1, 3]), ([7, 8], [4, 5])]


def test_what_was_swapped_out_of_one_cache_comes_back_into_another(device: torch.device) -> None:
    parts = cache_of("int8 and scales", device)
    before = copied(parts)
    pool = HostPool(parts, 4, BlockMover(parts))
    pool.swap_out([2, 6], [0, 3])
    pool.detach()
    other = tuple(torch.zeros_like(part[:, :5]) for part in parts)
    pool.attach(other, BlockMover(other))
    pool.swap_in([3, 0], [4, 0])
    for got, was in zip(copied(other), before, strict=True):
        assert torch.equal(got[:, [4, 0]], was[:, [6, 2]])
        assert not got[:, 1:4].any()
    with pytest.raises(ValueError, match="swapped blocks of a step must be 0 to 4, not 5"):
        pool.swap_in([0], [5])


def test_a_part_of_a_larger_tensor_is_moved_in_place(device: torch.device) -> None:
    """Layers and blocks may lie apart; only a block's own bytes must lie together."""
    wide = cache_of("bf16", device)[0]
    parts = (wide[:, ::2],)
    before = copied(parts)[0]
    copy_blocks(parts, [4], [1], BlockMover(parts))
    assert torch.equal(copied(parts)[0][:, 1], before[:, 4])
    assert torch.equal(copied(parts)[0][:, [0, 2, 3, 4]], before[:, [0, 2, 3, 4]])


class ScriptedEvent:
    """As a CUDA event: done when the copy that it was recorded behind is."""

    log: ClassVar[list[str]] = []

    def __init__(self, name: int) -> None:
        self.name = name

    def record(self) -> None:
        self.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"wait {self.name}")


@pytest.mark.skipif(not INTERPRETED, reason="events are recorded, not waited for")
def test_ids_are_written_again_only_when_their_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = cache_of("odd bytes", torch.device("cpu"))
    mover = BlockMover(parts)
    ids = mover._ids
    ids._copied = [ScriptedEvent(turn) for turn in range(NUM_ROWS)]  # type: ignore[misc]
    ids._device = torch.zeros_like(ids._host)
    ids._turn = 0
    monkeypatch.setattr(ScriptedEvent, "log", [])
    seen = [ids.put([turn, 5], [turn + 1]) for turn in range(NUM_ROWS + 1)]
    turns = [(turn + 1) % NUM_ROWS for turn in range(NUM_ROWS + 1)]
    assert ScriptedEvent.log == [entry for turn in turns for entry in (f"wait {turn}", f"record {turn}")]
    assert [int(sources[0]) for sources, _ in seen] == [NUM_ROWS, *range(1, NUM_ROWS), NUM_ROWS]
    assert [int(targets[0]) for _, targets in seen] == [NUM_ROWS + 1, *range(2, NUM_ROWS + 1), NUM_ROWS + 1]
