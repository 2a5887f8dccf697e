"""A whole step in one call gives the bits of its parts."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from novainfer.kernels.cpu.attention import NativeAttention
from novainfer.kernels.cpu.forward import NativeForward
from novainfer.kernels.cpu.linear import NativeLinear
from novainfer.kernels.cpu.ops import NativeRowOps
from novainfer.kernels.linear import TorchLinear
from novainfer.kernels.registry import AttentionShape
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
)

pytestmark = pytest.mark.usefixtures("level")


@dataclass
class Layer:
    input_norm: Tensor
    qkv: NativeLinear
    o: NativeLinear
    post_norm: Tensor
    gate_up: NativeLinear
    down: NativeLinear


@dataclass
class Model:
    layers: list[Layer]
    final_norm: Tensor
    table: Tensor
    cache: NativeAttention
    forward: NativeForward
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def by_parts(self, hidden: Tensor, step: StepTensors) -> Tensor | None:
        """The same step, one operation after the other."""
        ops, dim = NativeRowOps, self.head_dim
        rotated = self.num_heads + self.num_kv_heads
        x = ops.rms_norm(hidden, self.layers[0].input_norm, EPS)
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            qkv = layer.qkv(x)
            ops.rope(qkv, self.table, step.positions, rotated, dim)
            heads = qkv.view(len(qkv), -1, dim)
            self.cache.write(index, heads[:, self.num_heads : rotated], heads[:, rotated:], step.slot_mapping)
            if last and step.num_samples == 0:
                return None
            x = self.cache.attend(
                index, heads[:, : self.num_heads], step.block_tables, step.query_start, step.context_lens,
                dim**-0.5, step.max_query_len, step.max_context_len,
            )  # fmt: skip
            if last and step.logit_rows is not None:
                x, hidden = x[step.logit_rows], hidden[step.logit_rows]
            x = ops.add_rms_norm(layer.o(x), hidden, layer.post_norm, EPS)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            x = ops.add_rms_norm(x, hidden, self.final_norm if last else self.layers[index + 1].input_norm, EPS)
        return x


def make_model(dims: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> Model:
    num_layers, hidden, intermediate, heads, kv_heads, dim = dims
    generator = torch.Generator().manual_seed(0)

    def linear(n: int, k: int, bias: bool = False) -> NativeLinear:
        weight = torch.randn(n, k, generator=generator) / k**0.5
        return NativeLinear.pack(weight.to(dtype), torch.randn(n, generator=generator).to(dtype) if bias else None)

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
    angles = torch.arange(128.0)[:, None] / 10_000 ** (torch.arange(0, dim, 2) / dim)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    cache = NativeAttention.allocate(AttentionShape(num_layers, heads, kv_heads, dim, SIZE), 40, dtype, CPU)
    forward = NativeForward.of(layers, final_norm, table, cache, EPS, dim**-0.5)
    assert forward is not None
    return Model(layers, final_norm, table, cache, forward, heads, kv_heads, dim)


def make_step(sequences: tuple[tuple[int, int], ...], sampled: tuple[int, ...] | None) -> StepTensors:
    free = list(range(40))
    random.Random(0).shuffle(free)
    tables = torch.zeros(len(sequences), 8, dtype=torch.int32)
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
        max_query_len=max(new for _, new in sequences),
        max_context_len=max(context for context, _ in sequences),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_step_in_one_call_has_the_bits_of_its_parts(
    dims: tuple[int, int, int, int, int, int], dtype: torch.dtype
) -> None:
    model = make_model(dims, dtype)
    for sequences, sampled in STEPS:
        step = make_step(sequences, sampled)
        embedded = torch.randn(len(step.positions), dims[1], generator=torch.Generator().manual_seed(1)).to(dtype)
        model.cache.parts[0][:] = 0
        expected = model.by_parts(embedded.clone(), step)
        written = model.cache.parts[0].clone()
        model.cache.parts[0][:] = 0
        got = model.forward(embedded.clone(), step)
        assert torch.equal(model.cache.parts[0], written)
        if expected is None:
            assert got is None
        else:
            assert got is not None
            assert torch.equal(got, expected)


def test_one_part_that_is_not_native_is_enough_to_go_by_parts() -> None:
    model = make_model(DIMS[2], torch.float32)
    model.layers[0].o = TorchLinear.pack(torch.zeros(64, 64), None)  # type: ignore[assignment]
    assert NativeForward.of(model.layers, model.final_norm, model.table, model.cache, EPS, 1.0) is None
