"""Paged attention against fp64 over scattered blocks, and the same row in every company."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from attended import CPU, DTYPES, KEPT, step_of
from torch import Tensor

from novainfer.kernels.cpu.attention import AttentionPlan, NativeAttention
from novainfer.kernels.cpu.plain_attention import NativeLayoutAttention
from novainfer.kernels.ops import kv_cache
from novainfer.kernels.ops.registry import AttentionShape

TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 5e-6}  # of the largest value
# (heads, kv heads, head_dim, block_size): Qwen2.5-0.5B; no groups; one kv head, wide; dims and blocks that fill
# neither vector nor unit.
GEOMETRIES = (
    (14, 2, 64, 16),
    (4, 4, 8, 16),
    (6, 2, 80, 32),
    (2, 1, 256, 8),
    (10, 2, 24, 5),
    (3, 1, 15, 48),
    (4, 2, 32, 1),
)
# (context, query rows) of each sequence: decodes, whole prompts, chunks; contexts of several tiles.
WINDOWS = (None, 1, 13, 300)  # within a block, across blocks, across tiles
MIXED = ((700, 1), (7, 1), (300, 20), (530, 530), (1, 1), (257, 2), (65, 64))

pytestmark = pytest.mark.usefixtures("level")


@dataclass
class World:
    """Sequences in a cache whose every other byte is NaN."""

    cache: NativeAttention
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    tables: Tensor
    lens: Tensor
    scale: float
    window: int | None = None

    def attend(self, seq_rows: list[tuple[int, int, int]]) -> Tensor:
        """Rows [first, last) of some sequences' queries, each with the context up to its last row."""
        query = torch.cat([self.queries[seq][first:last] for seq, first, last in seq_rows])
        lengths = [last - first for _, first, last in seq_rows]
        seqs = torch.tensor([seq for seq, _, _ in seq_rows])
        cut = torch.tensor([len(self.queries[seq]) - last for seq, _, last in seq_rows])
        contexts = (self.lens[seqs] - cut).int()
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        return self.cache.attend(1, query, step_of(self.tables[seqs], starts, contexts), self.scale, self.window)

    def read(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Queries of each sequence, and its keys and values as they lie in the cache, in double precision."""
        for query, *written in zip(self.queries, self.keys, self.values, strict=True):
            if self.cache.shape.kv_dtype == "auto":
                yield query, written[0], written[1]
                continue
            (keys, key_scales), (values, value_scales) = (kv_cache.quantise(rows, "int8") for rows in written)
            yield query, keys * key_scales[..., None].double(), values * value_scales[..., None].double()

    def everything(self) -> list[tuple[int, int, int]]:
        return [(seq, 0, len(rows)) for seq, rows in enumerate(self.queries)]


def make_world(
    geometry: tuple[int, int, int, int],
    dtype: torch.dtype,
    kv_dtype: str = "auto",
    sequences: tuple[tuple[int, int], ...] = MIXED,
    seed: int = 0,
) -> World:
    heads, kv_heads, dim, size = geometry
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = sum(-(-context // size) for context, _ in sequences) + 3
    cache = NativeAttention.allocate(AttentionShape(2, heads, kv_heads, dim, size, kv_dtype), num_blocks, dtype, CPU)
    # What an earlier owner left: every slot of every block was written with NaN once.
    nan = torch.full((num_blocks * size, kv_heads, dim), float("nan"), dtype=dtype)
    for layer in (0, 1):
        cache.write(layer, nan, nan, torch.arange(num_blocks * size))
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    tables = torch.full(
        (len(sequences), max(-(-context // size) for context, _ in sequences)), 10**9, dtype=torch.int32
    )
    queries, keys, values, slots = [], [], [], []
    for seq, (context, rows) in enumerate(sequences):
        blocks = [free.pop() for _ in range(-(-context // size))]
        tables[seq, : len(blocks)] = torch.tensor(blocks)
        slots += [blocks[token // size] * size + token % size for token in range(context)]
        queries.append(normal(rows, heads, dim))
        keys.append(normal(context, kv_heads, dim))
        values.append(normal(context, kv_heads, dim))
    cache.write(1, torch.cat(keys), torch.cat(values), torch.tensor(slots))
    lens = torch.tensor([context for context, _ in sequences], dtype=torch.int32)
    return World(cache, queries, keys, values, tables, lens, dim**-0.5)


def in_double(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None) -> Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("nhd,chd->hnc", query.double(), keys) * scale
    rows, context = query.shape[0], keys.shape[0]
    distances = torch.arange(context - rows, context)[:, None] - torch.arange(context)[None, :]
    hidden = (distances < 0) | (distances >= (window or context))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hnc,chd->nhd", weights, values).flatten(1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_mixed_step_equals_double_precision(
    geometry: tuple[int, int, int, int], kept: tuple[torch.dtype, str], window: int | None
) -> None:
    world = make_world(geometry, *kept)
    world.window = window
    got = world.attend(world.everything())
    expected = torch.cat([in_double(*parts, world.scale, window) for parts in world.read()])
    assert (got.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[kept[0]]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_row_has_the_same_bits_in_prefill_chunk_and_decode(
    geometry: tuple[int, int, int, int], kept: tuple[torch.dtype, str], window: int | None
) -> None:
    world = make_world(geometry, *kept)
    world.window = window
    together = world.attend(world.everything())
    start = 0
    threads = torch.get_num_threads()
    try:
        for seq, rows in enumerate(world.queries):
            count = len(rows)
            for first, last in {(0, count), (count // 2, count), (0, (count + 1) // 2), (count // 3, count // 3 + 1)}:
                for number in (1, 2, 7):
                    torch.set_num_threads(number)
                    alone = world.attend([(seq, first, last)])
                    assert torch.equal(alone, together[start + first : start + last]), (seq, first, last, number)
            start += count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("window", [13, 300])
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_token_that_is_not_a_number_reaches_the_rows_whose_window_holds_it_and_no_other(
    geometry: tuple[int, int, int, int], kept: tuple[torch.dtype, str], window: int
) -> None:
    dtype = kept[0]
    world = make_world(geometry, *kept, ((530, 530),))
    world.window = window
    expected = world.attend(world.everything())
    nan = torch.full((1, geometry[1], geometry[2]), float("nan"), dtype=dtype)
    for position in (101, 256):
        block = int(world.tables[0, position // geometry[3]])
        world.cache.write(1, nan, nan, torch.tensor([block * geometry[3] + position % geometry[3]]))
        rows = torch.arange(530)
        touched = (rows >= position) & (rows < position + window)
        got = world.attend(world.everything())
        assert torch.equal(got[~touched], expected[~touched])
        assert got[touched].isnan().all()
        for row in {position - 1, position + window, position + window + 5} & set(range(530)):  # as decodes
            assert torch.equal(world.attend([(0, row, row + 1)]), expected[row : row + 1])
        world.cache.write(
            1, world.keys[0][position : position + 1], world.values[0][position : position + 1],
            torch.tensor([block * geometry[3] + position % geometry[3]]),
        )  # fmt: skip


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_a_query_that_is_not_a_number_is_its_own_rows_trouble(kept: tuple[torch.dtype, str]) -> None:
    world = make_world(GEOMETRIES[0], *kept, ((300, 20),))
    expected = world.attend(world.everything())
    for bad in (float("nan"), float("inf")):
        world.queries[0][7, 3, 5] = bad
        got = world.attend(world.everything()).view(20, 14, 64)
        assert got[7, 3].isnan().all()
        got[7, 3] = expected.view(20, 14, 64)[7, 3]
        assert torch.equal(got.flatten(1), expected)


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_a_value_that_is_infinite_reaches_rows_to_which_its_key_says_nothing(kept: tuple[torch.dtype, str]) -> None:
    """Its probability is less than any number that is not zero."""
    world = make_world(GEOMETRIES[0], *kept, ((300, 20),))
    expected = world.attend(world.everything())
    key = -1000 * world.queries[0][:1, 3:4].expand(1, 2, 64)  # against head 3 of the first row
    value = torch.full((1, 2, 64), float("inf"), dtype=kept[0])
    slot = int(world.tables[0, 5]) * 16 + 7
    world.cache.write(1, key, torch.ones_like(value), torch.tensor([slot]))
    without = world.attend(world.everything()).view(20, 14, 64)[0, 3]
    assert (without - expected.view(20, 14, 64)[0, 3]).abs().max() < 0.2  # a value of 1 is not to be seen
    world.cache.write(1, key, value, torch.tensor([slot]))
    assert not world.attend(world.everything()).view(20, 14, 64)[0, 3].isfinite().any()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_a_query_of_zeros_weighs_all_that_it_sees_alike(kept: tuple[torch.dtype, str], window: int | None) -> None:
    world = make_world(GEOMETRIES[0], *kept, ((530, 530),))
    world.window = window
    world.queries[0][::5] = 0
    got = world.attend(world.everything())
    expected = torch.cat([in_double(*parts, world.scale, window) for parts in world.read()])
    assert (got.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[kept[0]]


def test_order_and_company_of_sequences_do_not_matter() -> None:
    world = make_world(GEOMETRIES[0], torch.bfloat16)
    order = world.everything()
    together = world.attend(order)
    parts = dict(zip(range(len(order)), together.split([last - first for _, first, last in order]), strict=True))
    shuffled = order[::-1]
    assert torch.equal(world.attend(shuffled), torch.cat([parts[seq] for seq, _, _ in shuffled]))


def test_heads_of_a_fused_row_may_lie_apart() -> None:
    heads, kv_heads, dim, size = 4, 2, 32, 16
    fused = torch.randn(20, heads + 2 * kv_heads, dim).to(torch.bfloat16)
    query, key, value = fused.split([heads, kv_heads, kv_heads], dim=1)
    results = []
    for parts in ((query, key, value), tuple(x.contiguous() for x in (query, key, value))):
        cache = NativeAttention.allocate(AttentionShape(1, heads, kv_heads, dim, size), 2, torch.bfloat16, CPU)
        cache.write(0, parts[1], parts[2], torch.arange(20))
        starts, lens = torch.tensor([0, 20], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
        step = step_of(torch.tensor([[0, 1]], dtype=torch.int32), starts, lens)
        results.append(cache.attend(0, parts[0], step, 0.2))
    assert torch.equal(*results)


def test_negative_slots_are_not_written() -> None:
    cache = NativeAttention.allocate(AttentionShape(1, 1, 1, 16, 16), 1, torch.float32, CPU)
    ones = torch.ones(2, 1, 16)
    cache.write(0, ones, ones, torch.tensor([0, -1]))
    assert int((cache.parts[0].view(torch.float32) != 0).sum()) == 2 * 16


def test_large_scores_neither_overflow_nor_vanish() -> None:
    cache = NativeAttention.allocate(AttentionShape(1, 1, 1, 16, 16), 40, torch.float32, CPU)
    keys, values = torch.randn(600, 1, 16) * 100, torch.randn(600, 1, 16)
    cache.write(0, keys, values, torch.arange(600))
    query = torch.randn(1, 1, 16) * 100
    table = torch.arange(40, dtype=torch.int32)[None]
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([600], dtype=torch.int32)
    got = cache.attend(0, query, step_of(table, starts, lens), 0.25)
    assert (got.double() - in_double(query, keys, values, 0.25)).abs().max() < 1e-3


def test_memory_is_counted_as_it_is_taken() -> None:
    shape = AttentionShape(3, 4, 2, 64, 16)
    for dtype in DTYPES:
        per_block = NativeAttention.bytes_per_block(shape, dtype)
        assert per_block == 3 * 2 * 2 * 16 * 64 * dtype.itemsize
        assert NativeAttention.allocate(shape, 5, dtype, CPU).parts[0].nbytes == 5 * per_block
        int8 = replace(shape, kv_dtype="int8")
        assert NativeAttention.bytes_per_block(int8, dtype) == kv_cache.block_bytes(int8, dtype)


def test_it_says_what_it_cannot_do() -> None:
    shape = AttentionShape(1, 4, 2, 64, 16)
    assert NativeAttention.refuses(shape, torch.bfloat16, CPU) is None
    assert "float16" in str(NativeAttention.refuses(shape, torch.float16, CPU))
    assert "not in fp8" in str(NativeAttention.refuses(replace(shape, kv_dtype="fp8"), torch.float32, CPU))
    wide = AttentionShape(1, 1, 1, 514, 16, "int8")
    assert "at most 512 cells, not of 514" in str(NativeAttention.refuses(wide, torch.float32, CPU))
    assert "evenly" in str(NativeAttention.refuses(AttentionShape(1, 5, 2, 64, 16), torch.float32, CPU))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_cells_and_scales_are_torchs_to_the_last_bit(geometry: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    _, kv_heads, dim, size = geometry
    shape = AttentionShape(2, kv_heads, kv_heads, dim, size, "int8")
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(50, kv_heads, dim, generator=generator) * 10 ** torch.linspace(-3, 3, dim) for _ in "kv")
    value[2], value[3, :, -1], key[4, 0, 1], key[5, -1, 0] = 0, float("nan"), float("inf"), float("-inf")
    key[6] = torch.arange(dim) % 127 + 0.5  # ties, which go to the even cell
    key[6, :, 0] = 127
    key, value = key.to(dtype), value.to(dtype)
    slots = torch.randperm(64, generator=generator)[:50]
    native, plain = (
        backend.allocate(shape, -(-64 // size), dtype, CPU) for backend in (NativeAttention, NativeLayoutAttention)
    )
    for cache in (native, plain):
        cache.write(1, key, value, slots)
    assert torch.equal(native.parts[0], plain.parts[0])
    assert not native.parts[0][0].any()
    expected = kv_cache.read(shape, kv_cache.rows_of(shape, key, value), torch.float32)
    got = NativeLayoutAttention.over(shape, native.parts).gather(1, torch.arange(-(-64 // size)), torch.float32)
    for read, wanted in zip(got, expected, strict=True):
        assert torch.equal(read[slots].nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_a_sink_of_small_values_leaves_the_others_their_digits() -> None:
    """The largest probability may belong to the smallest values: digits are of their product."""
    dim = 64
    for dtype in DTYPES:
        cache = NativeAttention.allocate(AttentionShape(1, 1, 1, dim, 16, "int8"), 20, dtype, CPU)
        keys, values = torch.randn(300, 1, dim).to(dtype), torch.randn(300, 1, dim).to(dtype)
        keys[0], values[0] = 0.5, 1e-3 * values[0]
        query = torch.full((1, 1, dim), 3.0).to(dtype)
        cache.write(0, keys, values, torch.arange(300))
        starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([300], dtype=torch.int32)
        got = cache.attend(0, query, step_of(torch.arange(20, dtype=torch.int32)[None], starts, lens), 0.125)
        (keys, key_scales), (values, value_scales) = (kv_cache.quantise(rows, "int8") for rows in (keys, values))
        expected = in_double(
            query, keys * key_scales[..., None].double(), values * value_scales[..., None].double(), 0.125
        )
        assert (got.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("threads", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("shape", [(14, 2, 64), (28, 4, 128), (32, 8, 128)], ids=str)
def test_a_step_is_divided_by_what_its_sequences_cost_and_takes_little_memory(
    shape: tuple[int, int, int], threads: int
) -> None:
    cache = NativeAttention.allocate(AttentionShape(1, *shape, 16), 1, torch.bfloat16, CPU)

    def plan(*sequences: tuple[int, int], is_shared: bool = False) -> AttentionPlan:
        starts = torch.tensor([0, *(rows for _, rows in sequences)]).cumsum(0).int()
        lens = torch.tensor([context for context, _ in sequences], dtype=torch.int32)
        tables = torch.arange(len(sequences) * 8192, dtype=torch.int32).view(-1, 8192)
        return cache.plan(step_of(tables[:1].repeat(len(tables), 1) if is_shared else tables, starts, lens), threads)

    new, decode = (1900, 1900), (102400, 1)
    for piece in ((32768, 148), (102400, 148)):
        together, one, other = plan(piece, new), plan(piece), plan(new)
        assert together.partials_bytes == one.partials_bytes == other.partials_bytes == 0
        assert other.tiles_read < together.tiles_read <= one.tiles_read + other.tiles_read
        groups = one.tiles_read * shape[1] // -(-piece[0] // 256)
        assert 2 * threads <= groups <= 16 * threads + shape[1]
    assert (plan(decode).partials_bytes > 0) == (threads > 1 and 4 * threads > shape[1])  # each thread has a part
    assert plan(*[decode] * 40, is_shared=True).partials_bytes <= 64 << 20
    assert plan(*[(131072, 6)] * 2).partials_bytes <= 64 << 20
