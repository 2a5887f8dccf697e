"""A whole step in one call gives the bits of its parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

import novainfer.kernels.cpu.forward as native_forward
from novainfer.kernels.cpu.attention import NativeAttention
from novainfer.kernels.cpu.forward import NativeForward
from novainfer.kernels.cpu.linear import NativeLinear, PackedLinear
from novainfer.kernels.cpu.ops import NativeRowOps
from novainfer.kernels.cpu.quantised import NativeGroupedLinear, NativeInt8Linear
from novainfer.kernels.ops.forward import PRODUCTS, DecoderKind, DecoderParts, Layer, LayerKind, OpByOpForward
from novainfer.kernels.ops.grouped import GroupedWeight, rounded_to_int4
from novainfer.kernels.ops.linear import TorchLinear
from novainfer.kernels.ops.registry import AttentionShape, Registry
from novainfer.kernels.ops.selection import Selection, build_registry
from novainfer.kernels.ops.selftest.forward import check_forward
from novainfer.kernels.ops.selftest.linears import grouped_weight
from novainfer.kernels.step import StepTensors

CPU = torch.device("cpu")
SIZE = 16  # tokens per block
EPS = 1e-6
# (layers, hidden, intermediate, heads, kv heads, head_dim): the demo model's proportions; an intermediate size whose
# halves share a panel; no groups.
DIMS = ((3, 192, 512, 6, 2, 32), (2, 24, 40, 3, 1, 8), (1, 64, 96, 4, 4, 16))
# (context, new tokens) of each sequence and the rows sampled (None: the last of each).
STEPS: tuple[tuple[tuple[tuple[int, int], ...], tuple[int, ...] | None], ...] = (
    (((5, 5),), None),
    (((33, 3), (20, 20), (7, 1)), None),
    (((40, 1), (41, 1)), None),
    (((60, 30),), ()),
    (((100, 100), (3, 1)), (3, 50, 100)),
    (((40, 12), (90, 20), (3, 1), (70, 30)), (40, 62, 5, 5)),  # in no order, one twice, and none of two sequences
    (((600, 1), (5, 1)), None),  # a context that threads divide between them, in each layer anew
)

Pack = Callable[[Tensor, Tensor | None], PackedLinear]

DENSE = ("qkv", "o", "gate_up", "down")  # the products of a layer without experts

pytestmark = pytest.mark.usefixtures("level", "on_all_threads")


@pytest.fixture
def on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small as they are, steps are shared out as a model's are."""
    monkeypatch.setattr(native_forward, "SERIAL_FLOPS_MAX", 0)


def int4(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    return NativeGroupedLinear.pack_grouped(rounded_to_int4(weight), bias, weight.dtype, CPU)


PACKS: dict[str, Pack] = {"none": NativeLinear.pack, "int8": NativeInt8Linear.pack, "int4": int4}


def make_parts(
    dims: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    kv_dtype: str = "auto",
    pack: Pack = NativeLinear.pack,
) -> DecoderParts:
    num_layers, hidden, intermediate, heads, kv_heads, dim = dims
    generator = torch.Generator().manual_seed(0)

    def linear(n: int, k: int, bias: bool = False) -> PackedLinear:
        weight = torch.randn(n, k, generator=generator) / k**0.5
        return pack(weight.to(dtype), torch.randn(n, generator=generator).to(dtype) if bias else None)

    def norm() -> Tensor:
        return (1 + torch.randn(hidden, generator=generator) / 8).to(dtype)

    layers = [
        Layer(
            norm(),
            linear((heads + 2 * kv_heads) * dim, hidden, bias=True),
            linear(hidden, heads * dim),
            norm(),
            linear(2 * intermediate, hidden),
            linear(hidden, intermediate),
        )
        for _ in range(num_layers)
    ]
    final_norm = norm()
    angles = torch.arange(640.0)[:, None] / 10_000 ** (torch.arange(0, dim, 2) / dim)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    cache = NativeAttention.allocate(AttentionShape(num_layers, heads, kv_heads, dim, SIZE, kv_dtype), 40, dtype, CPU)
    return DecoderParts(layers, final_norm, table, NativeRowOps, cache, EPS)


def make_step(sequences: tuple[tuple[int, int], ...], sampled: tuple[int, ...] | None) -> StepTensors:
    free = list(range(40))
    random.Random(0).shuffle(free)
    tables = torch.zeros(len(sequences), 40, dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    for seq, (context, new) in enumerate(sequences):
        blocks = [free.pop() for _ in range(-(-context // SIZE))]
        tables[seq, : len(blocks)] = torch.tensor(blocks)
        positions += range(context - new, context)
        slots += [blocks[token // SIZE] * SIZE + token % SIZE for token in range(context - new, context)]
    starts = torch.tensor([0, *(new for _, new in sequences)]).cumsum(0).int()
    ends: Tensor | None = (starts[1:] - 1).long()
    if sampled is not None:
        ends = torch.tensor(sampled, dtype=torch.int64)
    elif len(positions) == len(sequences):
        ends = None
    return StepTensors(
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        block_tables=tables,
        query_start=starts,
        context_lens=torch.tensor([context for context, _ in sequences], dtype=torch.int32),
        logit_rows=ends,
        num_samples=len(sequences) if ends is None else len(ends),
        max_context_len=max(context for context, _ in sequences),
        min_query_len=min(new for _, new in sequences),
        max_query_len=max(new for _, new in sequences),
    )


def assert_bits_of_parts(
    parts: DecoderParts, sequences: tuple[tuple[int, int], ...], hidden: int, sampled: tuple[int, ...] | None = None
) -> None:
    step = make_step(sequences, sampled)
    embedded = torch.randn(len(step.positions), hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    got, expected = NativeForward.over(parts)(embedded.clone(), step), OpByOpForward.over(parts)(embedded.clone(), step)
    assert got is not None
    assert expected is not None
    assert torch.equal(got, expected)


@pytest.mark.parametrize("rows", [300, 600])
@pytest.mark.parametrize(("pack", "hidden"), [("none", 1152), ("int8", 2176), ("int4", 2176)])
def test_a_block_of_wide_rows_has_the_bits_of_its_parts(pack: str, hidden: int, rows: int) -> None:
    """Rows that the second cache does not hold pass by several panels of a gated product together, or by slices."""
    parts = make_parts((2, hidden, 320, 4, 2, 32), torch.bfloat16, pack=PACKS[pack])  # the last one's MLP has one row
    assert_bits_of_parts(parts, ((rows, rows),), hidden)


@pytest.mark.parametrize(("pack", "hidden"), [("none", 1152), ("int8", 2176)])
def test_rows_pass_by_as_many_panels_together_as_there_is_room_for(
    pack: str, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several threads would share out so few panels in smaller groups; one takes eight, of a gated product four."""
    monkeypatch.setattr(native_forward, "num_threads", lambda: 1)
    parts = make_parts((1, hidden, 1280, 4, 2, 32), torch.bfloat16, pack=PACKS[pack])
    assert_bits_of_parts(parts, ((512, 512),), hidden, tuple(range(512)))


@pytest.mark.parametrize("windows", [(None, None, 300), (300, None, None), (40, 300, None)], ids=str)
def test_the_rows_of_each_layer_see_its_own_window(windows: tuple[int | None, ...]) -> None:
    """In the last one also, where only sampled rows attend."""
    parts = make_parts(DIMS[0], torch.bfloat16)
    for layer, window in zip(parts.layers, windows, strict=True):
        layer.sliding_window = window
    assert_bits_of_parts(parts, ((600, 30), (20, 20)), DIMS[0][1])


@pytest.mark.parametrize("rows", [33, 600])
@pytest.mark.parametrize(("first", "second"), list(product(PACKS, repeat=2)))
def test_what_one_product_writes_is_as_one_of_another_format_reads_it(first: str, second: str, rows: int) -> None:
    """A matrix unit reads rows in tiles, and writes them so for a weight that is multiplied alike, for no other."""
    packs = cycle([PACKS[first if by_first else second] for by_first in (1, 0, 0, 1, 0, 1, 1, 0)])  # of two layers
    parts = make_parts((2, 192, 512, 6, 2, 32), torch.bfloat16, pack=lambda weight, bias: next(packs)(weight, bias))
    assert_bits_of_parts(parts, ((rows, rows),), 192)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_step_in_one_call_has_the_bits_of_its_parts(
    dims: tuple[int, int, int, int, int, int], kv_dtype: str, dtype: torch.dtype
) -> None:
    parts = make_parts(dims, dtype, kv_dtype)
    assert NativeForward.refuses(parts.kind) is None
    fused, by_parts = NativeForward.over(parts), OpByOpForward.over(parts)
    (cache,) = parts.attention.parts
    for sequences, sampled in STEPS:
        step = make_step(sequences, sampled)
        embedded = torch.randn(len(step.positions), dims[1], generator=torch.Generator().manual_seed(1)).to(dtype)
        cache[:] = 0
        expected = by_parts(embedded.clone(), step)
        written = cache.clone()
        cache[:] = 0
        got = fused(embedded.clone(), step)
        assert torch.equal(cache, written)
        if expected is None:
            assert got is None
        else:
            assert got is not None
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dims", DIMS[:2], ids=str)
def test_rows_that_pass_through_an_mlp_in_blocks_have_the_same_bits(
    dims: tuple[int, int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread takes 512 rows at once, and what lies between its products takes the place of attention's rows."""
    monkeypatch.setattr("novainfer.kernels.cpu.forward.num_threads", lambda: 1)
    parts = make_parts(dims, torch.bfloat16)
    step = make_step(((120, 120),) * 5, None)
    embedded = torch.randn(600, dims[1], generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    expected = OpByOpForward.over(parts)(embedded.clone(), step)
    assert expected is not None
    got = NativeForward.over(parts)(embedded.clone(), step)
    assert got is not None
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_forward_is_proved_on_a_decoder_like_the_one_it_is_for(dtype: torch.dtype) -> None:
    """Its own kernels, one layer of each kind."""
    for linears in ((NativeLinear,), (NativeInt8Linear,), (NativeGroupedLinear,), (NativeLinear, NativeInt8Linear)):
        for biased, norms, is_sliding in (
            ((), (), False),
            (("qkv",), (), True),
            (("qkv", "o"), ("q_norm", "k_norm"), True),
        ):
            norms_of = frozenset(("input_norm", "post_norm", *norms))
            kinds = frozenset(
                LayerKind(tuple((part, linear) for part in DENSE), frozenset(biased), norms_of, is_sliding)
                for linear in linears
            )
            for shape in (AttentionShape(24, 14, 2, 64, 16), AttentionShape(2, 3, 3, 8, 4)):
                kind = DecoderKind(kinds, NativeRowOps, NativeAttention, shape)
                assert check_forward(NativeForward, kind, dtype, CPU) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("linear", [NativeLinear, NativeInt8Linear, NativeGroupedLinear])
def test_it_is_proved_on_experts_beside_an_mlp(linear: type[PackedLinear], dtype: torch.dtype) -> None:
    norms, shared = frozenset(("input_norm", "post_norm")), ("shared_gate_up", "shared_down", "shared_gate")
    of = ("qkv", "o", "router", "experts_gate_up", "experts_down")
    exact = ("router", "shared_gate")

    def kind(parts: tuple[str, ...], **others: Any) -> LayerKind:
        products = tuple((part, NativeLinear if part in exact else linear) for part in PRODUCTS if part in parts)
        return LayerKind(products, norms=norms, **others)

    dense = kind(("qkv", "o", "gate_up", "down"))
    for sparse in (
        kind(of, num_active_experts=2, normalises_experts=True),
        kind((*of, *shared), num_active_experts=3),
    ):
        decoder = DecoderKind(
            frozenset((dense, sparse)), NativeRowOps, NativeAttention, AttentionShape(2, 4, 2, 16, 16)
        )
        assert NativeForward.refuses(decoder) is None
        assert check_forward(NativeForward, decoder, dtype, CPU) is None
        mixed = replace(sparse, products=(*sparse.products, ("experts_down", NativeInt8Linear), ("o", NativeLinear)))
        reason = NativeForward.refuses(replace(decoder, layers=frozenset((mixed,))))
        assert reason == "a layer's experts are not all of one kind"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("forms", "is_shared"),
    [
        (((4, 32, True), (4, 32, True)), True),
        (((4, 32, True), (4, 32, False)), False),  # codes stand for 0 at another place
        (((4, 32, False), (4, 16, False)), False),
        (((4, 32, False), (4, 32, False)), True),
        (((8, 16, False), (8, 16, False)), True),
        (((8, 16, True), (8, 16, True)), True),
        (((8, 128, False), (8, 128, False)), True),  # a row is one group, as a matrix unit wants it
        (((8, 16, True), (8, 64, True)), False),
        (((4, 32, True), (8, 32, True)), False),
    ],
)
def test_rows_are_rounded_once_for_experts_that_read_them_alike_and_for_each_that_does_not(
    forms: tuple[tuple[int, int, bool], ...], is_shared: bool, dtype: torch.dtype
) -> None:
    parts = make_parts(DIMS[2], dtype)
    (layer,), hidden, inner, num_experts = parts.layers, DIMS[2][1], 128, 5

    def expert(number: int, n: int, k: int) -> NativeGroupedLinear:
        bits, group_size, has_shift = forms[number % len(forms)]
        group_size = min(group_size, k)
        weight = grouped_weight(n + number, k, bits, group_size, has_shift=has_shift)  # others by other seeds
        rows = (weight.codes[:n], weight.scale[:n] / 100, None if weight.shift is None else weight.shift[:n] / 100)
        if bits == 4 and not has_shift:
            rows = (*rows[:2], -8 * rows[1])
        return NativeGroupedLinear.pack_grouped(GroupedWeight(bits, group_size, *rows), None, dtype, CPU)

    layer.router = NativeLinear.pack(
        torch.randn(num_experts, hidden, generator=torch.Generator().manual_seed(3)).to(dtype), None
    )
    layer.experts_gate_up = [expert(number, 2 * inner, hidden) for number in range(num_experts)]
    layer.experts_down = [expert(number, hidden, inner) for number in range(num_experts)]
    layer.gate_up = layer.down = None
    layer.num_active_experts = 3
    assert len({(e.desc.format, e.desc.group_size, e.shift is None) for e in layer.experts_down}) == (
        1 if is_shared else 2
    )
    forwards = [forward.over(parts) for forward in (NativeForward, OpByOpForward)]
    for sequences, sampled in (*STEPS[:2], (((90, 90),), tuple(range(90)))):  # the last: experts of more than a tile
        step = make_step(sequences, sampled)
        embedded = torch.randn(len(step.positions), hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
        got, expected = (forward(embedded.clone(), step) for forward in forwards)
        assert got is not None
        assert expected is not None
        assert torch.equal(got, expected)
        assert expected.isfinite().all()


class OffByOneBit(NativeForward):
    def __call__(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
        out = super().__call__(hidden, step)
        return None if out is None else out * (1 + 2**-20)


class WithoutBatches(NativeForward):
    """Samples the last row where others are asked for."""

    def __call__(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
        last = None if step.logit_rows is None else torch.full_like(step.logit_rows, len(hidden) - 1)
        return super().__call__(hidden, replace(step, logit_rows=last))


class WithoutCache(NativeForward):
    """Keeps nothing of a step that is not sampled from."""

    def __call__(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
        return super().__call__(hidden, step) if step.num_samples else None


@pytest.mark.parametrize("broken", [OffByOneBit, WithoutBatches, WithoutCache])
def test_a_forward_that_gives_anything_else_is_skipped(broken: type[NativeForward]) -> None:
    kind = make_parts(DIMS[0], torch.float32).kind
    registry = Registry()
    for forward in (broken, OpByOpForward):
        registry.register("forward", forward)
    assert Selection(registry, torch.float32, CPU).forward(kind) is OpByOpForward


def test_one_part_that_is_not_native_is_enough_to_go_by_parts() -> None:
    parts = make_parts(DIMS[2], torch.float32)
    registry = build_registry(CPU)
    assert Selection(registry, torch.float32, CPU).forward(parts.kind) is NativeForward
    parts.layers[0].o = TorchLinear.pack(torch.zeros(64, 64), None)
    assert NativeForward.refuses(parts.kind) == "a layer's o is torch"
    assert Selection(registry, torch.float32, CPU).forward(parts.kind) is OpByOpForward
