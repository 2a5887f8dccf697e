"""Sequences whose block tables begin alike: their tiles are read once, and each row has the bits that it has alone."""

from __future__ import annotations

import pytest
import torch
from attended import CPU, DTYPES, KEPT, step_of
from torch import Tensor

from novainfer.kernels.cpu.attention import NativeAttention
from novainfer.kernels.ops.registry import AttentionShape

pytestmark = pytest.mark.usefixtures("level")

# (heads, kv heads, head_dim, block_size): Qwen2.5-0.5B's; blocks that fill no group, and such as hold two tiles.
GEOMETRIES = ((14, 2, 64, 16), (4, 2, 24, 40), (3, 1, 15, 512))
# A sequence: the blocks that it shares, by (name of a prefix, tokens of it), its context, its query rows.
Prefixes = tuple[tuple[str, int], ...]
SEQUENCES: tuple[tuple[Prefixes, int, int], ...] = (
    ((("a", 520),), 700, 1),
    ((("a", 520), ("b", 800)), 1500, 1),
    ((("a", 520), ("b", 800)), 1330, 2),
    ((("a", 520), ("b", 800)), 1321, 1),
    ((("a", 520),), 525, 4),
    ((("a", 520),), 900, 300),  # a chunk, which does not share
    ((("c", 1024),), 1025, 1),  # all but its last token
    ((("c", 1024),), 1025, 1),
    ((("c", 250),), 300, 1),  # less than a tile
    ((), 600, 1),
    ((("d", 530),), 531, 3),  # its rows begin where a block does
    ((("d", 530),), 540, 1),
    ((("e", 640),), 513, 3),  # its first row does not see the whole of what is shared
    ((("e", 640),), 640, 1),
)


def make(
    geometry: tuple[int, int, int, int], dtype: torch.dtype, kv_dtype: str = "auto"
) -> tuple[NativeAttention, list[Tensor], Tensor, Tensor]:
    """A cache, and the queries, tables and contexts of `SEQUENCES` in it."""
    heads, kv_heads, dim, size = geometry
    generator = torch.Generator().manual_seed(0)
    named: dict[tuple[str, int], int] = {}
    blocks = 0
    tables = torch.full((len(SEQUENCES), -(-1500 // size)), 10**9, dtype=torch.int32)
    for seq, (prefixes, context, _) in enumerate(SEQUENCES):
        for at in range(-(-context // size)):
            name = next((name for name, end in prefixes if (at + 1) * size <= min(end, context)), None)
            if name is None or (name, at) not in named:
                blocks += 1
            block = blocks - 1 if name is None else named.setdefault((name, at), blocks - 1)
            tables[seq, at] = block
    order = torch.randperm(blocks, generator=generator).int()
    known = tables < 10**9
    tables[known] = order[tables[known].long()]
    cache = NativeAttention.allocate(AttentionShape(1, heads, kv_heads, dim, size, kv_dtype), blocks, dtype, CPU)
    key, value = (torch.randn(blocks * size, kv_heads, dim, generator=generator).to(dtype) for _ in "kv")
    cache.write(0, key, value, torch.arange(blocks * size))
    queries = [torch.randn(rows, heads, dim, generator=generator).to(dtype) for _, _, rows in SEQUENCES]
    return cache, queries, tables, torch.tensor([context for _, context, _ in SEQUENCES], dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_row_has_the_bits_that_it_has_alone(
    geometry: tuple[int, int, int, int], kept: tuple[torch.dtype, str], window: int | None
) -> None:
    cache, queries, tables, lens = make(geometry, *kept)
    alone = []
    for seq, query in enumerate(queries):
        starts = torch.tensor([0, len(query)], dtype=torch.int32)
        one = step_of(tables[seq : seq + 1], starts, lens[seq : seq + 1])
        alone.append(cache.attend(0, query, one, 0.2, window))
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 7):
            torch.set_num_threads(number)
            order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(number))
            starts = torch.tensor([0, *(len(queries[seq]) for seq in order)]).cumsum(0).int()
            step = step_of(tables[order], starts, lens[order])
            for _ in range(2):  # a plan is a step's, but what it counts must be as before
                got = cache.attend(0, torch.cat([queries[seq] for seq in order]), step, 0.2, window)
            assert torch.equal(got, torch.cat([alone[seq] for seq in order])), number
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_all_read_is_read_once_for_as_many_rows_as_a_tile_holds(dtype: torch.dtype) -> None:
    """Thirteen rows of seven heads each, three of them with a prefix of their own: six fit into a reading."""
    heads, kv_heads, dim, size, shared = 14, 2, 64, 16, 4096
    cache = NativeAttention.allocate(AttentionShape(1, heads, kv_heads, dim, size), 1, dtype, CPU)
    tables = torch.arange(shared // size + 3, dtype=torch.int32).repeat(13, 1)
    tables[:, shared // size :] = 1000 + torch.arange(39).view(13, 3)
    tables[10:, 200] = 5  # 12 tiles in common with the others
    lens = torch.full((13,), shared + 40, dtype=torch.int32)
    starts = torch.arange(14, dtype=torch.int32)
    step = step_of(tables, starts, lens)
    assert cache.plan(step, 1).tiles_read == 3 * 12 + 2 * 4 + 1 * 4 + 13
    assert cache.plan(step, 1, window=8192).tiles_read == 13 * 17
    assert cache.plan(step_of(tables[:1], starts[:2], lens[:1]), 1).tiles_read == 17
    mixed = step_of(tables[:2], torch.tensor([0, 1, 8], dtype=torch.int32), lens[:2])
    assert cache.plan(mixed, 1).tiles_read == 17 + 2 * 17  # seven rows are a chunk
