"""Paged attention against fp64 over scattered blocks: rows that decode, chunks, windows, and what must not be read."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from novainfer.fsm.messages.mode import KV_CACHE_DTYPES
from novainfer.kernels.cuda import attention
from novainfer.kernels.cuda.attention import TritonAttention, TritonInvariantAttention
from novainfer.kernels.ops.attention import TorchAttention
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.ops.selftest.attention import check_attention
from novainfer.kernels.step import StepTensors

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest value
# Heads, key heads, head_dim, block_size: Qwen2.5-0.5B; no groups; one wide key head; dims and blocks that are no powers
# of two.
GEOMETRIES = ((14, 2, 64, 16), (2, 2, 16, 32), (6, 1, 128, 128), (5, 1, 24, 5))
# Context and query rows of each sequence, around the edges of blocks and tiles.
DECODES = ((150, 1), (1, 1), (129, 1), (16, 1), (17, 1))
MIXED = ((150, 1), (7, 1), (140, 20), (1, 1), (66, 2), (65, 64))
VERIFIES = ((150, 4), (33, 1), (4, 4))
STEPS = pytest.mark.parametrize("sequences", [DECODES, MIXED, VERIFIES], ids=["decodes", "mixed", "verifies"])


@dataclass
class World:
    """Sequences in a cache whose every other cell is NaN."""

    cache: Any
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
        step = step_of(self.tables[seqs], lengths, self.lens[seqs] - cut, self.cache.parts[0].device)
        rows = torch.zeros(len(query), 3, *query.shape[1:], dtype=query.dtype)  # they lie apart
        rows[:, 1] = query
        out: Tensor = self.cache.attend(1, rows.to(step.query_start.device)[:, 1], step, self.scale, self.window)
        return out.cpu()

    def everything(self) -> list[tuple[int, int, int]]:
        return [(seq, 0, len(rows)) for seq, rows in enumerate(self.queries)]

    def expected(self) -> Tensor:
        found = (
            in_double(*of, self.scale, self.window) for of in zip(self.queries, self.keys, self.values, strict=True)
        )
        return torch.cat(list(found))


def step_of(tables: Tensor, query_lens: list[int], contexts: Tensor, device: torch.device) -> StepTensors:
    """What attention reads of a step."""
    nothing = torch.empty(0, dtype=torch.int64)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    return StepTensors(
        nothing, nothing, nothing, tables.to(device), starts, contexts.int().to(device), None, 0,
        int(contexts.max()), min(query_lens), max(query_lens),
    )  # fmt: skip


def make_world(
    backend: Any,
    geometry: tuple[int, int, int, int],
    dtype: torch.dtype,
    sequences: tuple[tuple[int, int], ...],
    device: torch.device,
    kv_dtype: str = "auto",
) -> World:
    heads, kv_heads, dim, size = geometry
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_blocks = sum(-(-context // size) for context, _ in sequences) + 3
    cache = backend.allocate(AttentionShape(2, heads, kv_heads, dim, size, kv_dtype), num_blocks, dtype, device)
    for part in cache.parts:  # what an earlier owner left
        part.fill_(float("nan") if part.is_floating_point() else 127)
    free = list(range(num_blocks))
    random.Random(0).shuffle(free)
    longest = max(-(-context // size) for context, _ in sequences)
    tables = torch.full((len(sequences), longest), 10**9, dtype=torch.int32)  # far behind the cache
    queries, keys, values, slots = [], [], [], []
    for seq, (context, rows) in enumerate(sequences):
        blocks = [free.pop() for _ in range(-(-context // size))]
        tables[seq, : len(blocks)] = torch.tensor(blocks)
        slots += [blocks[token // size] * size + token % size for token in range(context)]
        queries.append(normal(rows, heads, dim))
        keys.append(normal(context, kv_heads, dim))
        values.append(normal(context, kv_heads, dim))
    cache.write(1, torch.cat(keys).to(device), torch.cat(values).to(device), torch.tensor(slots).to(device))
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


def error(got: Tensor, expected: Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@STEPS
def test_a_step_equals_double_precision(
    geometry: tuple[int, int, int, int], sequences: tuple[tuple[int, int], ...], device: torch.device
) -> None:
    world = make_world(TritonAttention, geometry, torch.float32, sequences, device)
    assert error(world.attend(world.everything()), world.expected()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [1, 13, 100])  # within a block, across blocks, across tiles
@STEPS
def test_a_window_hides_what_is_before_it(
    sequences: tuple[tuple[int, int], ...], window: int, device: torch.device
) -> None:
    world = make_world(TritonAttention, (3, 1, 32, 16), torch.float16, sequences, device)
    world.window = window
    assert error(world.attend(world.everything()), world.expected()) <= TOLERANCE[torch.float16]


def test_a_tile_that_the_first_row_of_a_chunk_sees_in_full_and_the_last_in_part_is_masked(device: torch.device) -> None:
    """Of tokens 64 to 127 row 0 sees all through its window, row 41 none before 92."""
    world = make_world(TritonAttention, (3, 1, 32, 16), torch.float16, ((172, 42),), device)
    world.window = 80
    assert error(world.attend(world.everything()), world.expected()) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("window", [None, 13])
@STEPS
def test_contexts_that_no_programs_share_need_no_merge(
    sequences: tuple[tuple[int, int], ...], window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there are many sequences."""
    monkeypatch.delattr(attention.jit, "merge")
    world = make_world(TritonAttention, (3, 1, 32, 16), torch.float16, sequences, device)
    world.cache._num_processors = 1
    world.window = window
    assert error(world.attend(world.everything()), world.expected()) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@STEPS
def test_narrow_rows_are_rounded_once(
    sequences: tuple[tuple[int, int], ...], dtype: torch.dtype, device: torch.device
) -> None:
    world = make_world(TritonAttention, (7, 1, 64, 16), dtype, sequences, device)
    assert error(world.attend(world.everything()), world.expected()) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("backend", "dtype", "kv_dtype"),
    [
        *((TritonAttention, dtype, "auto") for dtype in TOLERANCE),
        *((TritonInvariantAttention, dtype, "auto") for dtype in TOLERANCE),
        *((TorchAttention, torch.bfloat16, kv_dtype) for kv_dtype in KV_CACHE_DTYPES),
        (TritonAttention, torch.float32, "int8"),
        (TritonAttention, torch.bfloat16, "fp8"),
        (TritonInvariantAttention, torch.float16, "int8"),
        (TritonInvariantAttention, torch.float32, "fp8"),
    ],
)
def test_it_passes_the_proof_that_is_asked_of_it_at_load(
    backend: Any, dtype: torch.dtype, kv_dtype: str, device: torch.device
) -> None:
    assert check_attention(backend, AttentionShape(2, 3, 1, 16, 8, kv_dtype), dtype, device) is None


def test_torch_goes_on_with_its_cache(device: torch.device) -> None:
    world = make_world(TritonAttention, GEOMETRIES[0], torch.float32, MIXED, device)
    got = world.attend(world.everything())
    world.cache = TorchAttention.over(world.cache.shape, world.cache.parts)
    assert error(world.attend(world.everything()), got.double()) <= TOLERANCE[torch.float32]
    assert TorchAttention.bytes_per_block(world.cache.shape, torch.float32) == TritonAttention.bytes_per_block(
        world.cache.shape, torch.float32
    )


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_every_step_and_however_programs_share_its_context(
    dtype: torch.dtype, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(TritonInvariantAttention, (3, 1, 16, 16), dtype, ((530, 1), (520, 25), (256, 2)), device)
    world.window = window
    world.cache._num_processors = 132
    shared = world.attend(world.everything())
    assert error(shared, world.expected()) <= TOLERANCE[dtype]
    assert torch.equal(world.attend([(1, 0, 7)]), shared[1:8])
    assert torch.equal(world.attend([(1, 7, 8)]), shared[8:9])
    world.cache._num_processors = 1
    monkeypatch.delattr(attention.jit, "merge_invariant")
    assert torch.equal(world.attend([(1, 0, 25), (2, 1, 2), (0, 0, 1)]), shared[[*range(1, 26), 27, 0]])


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_torch_and_triton_write_the_same_cells_and_read_each_others(kv_dtype: str, device: torch.device) -> None:
    sequences = ((20, 1), (30, 4), (17, 17))
    ours, theirs = (
        make_world(backend, (3, 1, 24, 16), torch.float32, sequences, device, kv_dtype)
        for backend in (TritonAttention, TorchAttention)
    )
    for part, expected in zip(ours.cache.parts, theirs.cache.parts, strict=True):
        assert torch.equal(part.nan_to_num(7), expected.nan_to_num(7))
    got = ours.attend(ours.everything())
    ours.cache = TorchAttention.over(ours.cache.shape, ours.cache.parts)
    assert error(ours.attend(ours.everything()), got.double()) <= TOLERANCE[torch.float32]
    assert error(got, ours.expected()) <= {"int8": 0.02, "fp8": 0.08}[kv_dtype]


@pytest.mark.parametrize("sequences", [((150, 1), (20, 1)), ((150, 30), (30, 20))], ids=["decodes", "chunks"])
@pytest.mark.parametrize("backend", [TritonAttention, TritonInvariantAttention])
def test_in_fp16_no_weight_is_too_small_beside_the_scale_of_a_small_value(
    backend: Any, sequences: tuple[tuple[int, int], ...], device: torch.device
) -> None:
    """Scales of 1e-7 to 1e-5: fp16's least normal number is 6e-5."""
    world = make_world(backend, (3, 1, 32, 16), torch.float16, sequences, device, "int8")
    scales = world.cache.parts[3]
    apart = 10 ** (-3 - 2 * torch.rand(scales.shape, generator=torch.Generator().manual_seed(1)))
    scales.mul_(apart.to(device))
    small = TorchAttention.over(world.cache.shape, tuple(part.clone() for part in world.cache.parts))
    got = world.attend(world.everything())
    for part, scale in ((0, 2), (1, 3)):  # the same numbers, as they are read
        whole = small.parts[part].float() * small.parts[scale].unsqueeze(-1)
        for seq, of in enumerate((world.keys, world.values)[part]):
            at = torch.arange(len(of))
            of_seq = whole[1][world.tables[seq, at // 16].to(device), at.to(device) % 16]
            (world.keys, world.values)[part][seq] = of_seq.cpu().double()
    expected = world.expected()
    assert 1e-6 < expected.abs().max() < 1e-2
    assert error(got, expected) <= TOLERANCE[torch.float16]


def test_a_context_is_split_while_processors_are_idle_and_longer_where_it_would_end_last() -> None:
    assert attention._num_splits(2, 132, 1024) == attention.SPLITS_MAX
    assert attention._num_splits(20, 132, 1024) == 19, "three programs a processor"
    assert attention._num_splits(99, 132, 1024) == 4
    assert attention._num_splits(120, 132, 4096) == 1, "most are busy, and end together"
    assert attention._num_splits(120, 132, 32768) == 3, "one of them may be at it for long"
    assert attention._num_splits(512, 132, 32768) == 1, "more programs than there is room for at once"
    tables = torch.zeros(2, 100, dtype=torch.int32)
    step = step_of(tables, [1, 1], torch.tensor([30, 40]), torch.device("cpu"))
    captured = replace(step, bucket=2)
    assert (attention._context_max(step, 16, 0), attention._context_max(captured, 16, 0)) == (40, 1600)
    assert attention._context_max(captured, 16, 64) == 64 + attention.VERIFY_QUERIES_MAX


@pytest.mark.parametrize("window", [None, 500])
def test_many_parts_of_many_key_heads_are_merged(window: int | None, device: torch.device) -> None:
    world = make_world(TritonAttention, (4, 2, 128, 16), torch.float32, ((620, 1), (20, 1)), device)
    world.window, world.cache._num_processors = window, 132
    assert error(world.attend(world.everything()), world.expected()) <= TOLERANCE[torch.float32]


def test_a_chunk_behind_more_sequences_than_are_counted_at_once(device: torch.device) -> None:
    sequences = (*(((3, 1),) * 129), (20, 9), (5, 1))
    world = make_world(TritonAttention, (2, 1, 16, 16), torch.float32, sequences, device)
    assert error(world.attend(world.everything()), world.expected()) <= TOLERANCE[torch.float32]


def test_a_long_context_among_many_is_read_by_several_programs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ALONE_TOKENS_MAX", 100)
    launched: list[int] = []
    merge = attention.jit.merge

    class Counting:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.append(grid[1])
            return merge[grid]

    monkeypatch.setattr(attention.jit, "merge", Counting())
    world = make_world(TritonAttention, (3, 1, 32, 16), torch.float16, DECODES, device)
    world.cache._num_processors = 4
    assert error(world.attend(world.everything()), world.expected()) <= TOLERANCE[torch.float16]
    assert launched == [len(DECODES)]


def test_a_block_that_sequences_share_is_read_for_each(device: torch.device) -> None:
    world = make_world(TritonAttention, GEOMETRIES[0], torch.float32, ((40, 1), (50, 1)), device)
    world.tables[1, :2] = world.tables[0, :2]
    for part in (world.keys, world.values):
        part[1][:32] = part[0][:32]
    assert error(world.attend(world.everything()), world.expected()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(("padding", "kv_dtype"), [(1, "auto"), (10, "auto"), (2, "int8")])
def test_the_padding_of_a_captured_step_is_zeros_and_written_nowhere(
    padding: int, kv_dtype: str, device: torch.device
) -> None:
    """Rows with a context of 0 and slots below 0, and tables that hold anything."""
    world = make_world(TritonAttention, GEOMETRIES[0], torch.float32, DECODES, device, kv_dtype)
    expected = world.attend(world.everything())
    before = [part.clone() for part in world.cache.parts]
    rows = torch.full((padding, 2, 64), 7.0, device=device)
    world.cache.write(1, rows, rows, torch.full((padding,), -1, device=device))
    assert all(
        torch.equal(part.nan_to_num(5.0), was.nan_to_num(5.0))
        for part, was in zip(world.cache.parts, before, strict=True)
    )
    tables = torch.cat((world.tables, torch.full((padding, world.tables.shape[1]), -5, dtype=torch.int32)))
    lens = torch.cat((world.lens, torch.zeros(padding, dtype=torch.int32)))
    query = torch.cat((*world.queries, torch.full((padding, 14, 64), float("nan")))).to(device)
    step = step_of(tables, [1] * len(lens), lens, device)
    got = world.cache.attend(1, query, step, world.scale).cpu()
    assert not got[len(world.lens) :].any()
    assert error(got[: len(world.lens)], expected.double()) <= TOLERANCE[torch.float32]


def test_what_it_cannot_do_is_refused_by_its_reason(device: torch.device) -> None:
    def refuses(heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> str:
        return str(TritonAttention.refuses(AttentionShape(1, heads, kv_heads, dim, 16), dtype, device))

    assert refuses(14, 2, 64) == "None"
    assert "evenly" in refuses(5, 2, 64)
    assert "head_dim must be at most 128, not 256" in refuses(4, 2, 256)
    assert "at most 64 heads" in refuses(65, 1, 64)
    assert "not in torch.float64" in refuses(4, 2, 64, torch.float64)
    shape = AttentionShape(1, 4, 2, 64, 16)
    assert "not on meta" in str(TritonAttention.refuses(shape, torch.bfloat16, torch.device("meta")))
