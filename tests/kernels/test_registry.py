"""Kernels are taken fastest first, and only those that prove themselves on this machine."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from novainfer.fsm.messages.mode import CHECKPOINT, PRECISIONS, QUANTIZATIONS
from novainfer.kernels.cpu.sampling import NativeSampler
from novainfer.kernels.errors import KernelUnavailableError, LoadError
from novainfer.kernels.ops import selection
from novainfer.kernels.ops.attention import TorchAttention
from novainfer.kernels.ops.linear import MkldnnLinear, TorchLinear
from novainfer.kernels.ops.precision import precision_of
from novainfer.kernels.ops.reference import ReferenceAttention, ReferenceLinear, ReferenceRowOps
from novainfer.kernels.ops.registry import AttentionShape, Registry
from novainfer.kernels.ops.row_ops import TorchRowOps
from novainfer.kernels.ops.selection import Selection, build_registry
from novainfer.kernels.ops.selftest.attention import check_attention
from novainfer.kernels.ops.selftest.linears import check_linear
from novainfer.kernels.ops.selftest.row_ops import check_row_ops
from novainfer.kernels.ops.selftest.sampler import check_sampler
from novainfer.kernels.sampling.sampler import RowSampler, TorchSampler
from novainfer.kernels.sampling.verify import Positions
from novainfer.kernels.step import StepTensors

CPU = torch.device("cpu")
SHAPE = AttentionShape(2, 6, 2, 24, 16)


class WrongLinear(TorchLinear):
    """Forgets the bias of its last column."""

    name = "native-wrong"

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        if self.bias is not None:
            y[:, -1] -= self.bias[-1]
        return y


class RaisingLinear(TorchLinear):
    """Cannot even pack."""

    name = "raising"

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> Any:
        raise RuntimeError("no such instruction")


class ForgetfulLinear(TorchLinear):
    """Gives other rows back than it got."""

    name = "forgetful"

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids] + 1e-3


class BatchMindedLinear(TorchLinear):
    """Claims row invariance and rounds by the size of the batch."""

    name = "batch-minded"
    row_invariant = True

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * (1 + len(x) * 1e-7)


class PeekingAttention(TorchAttention):
    """Sees one token of the future."""

    name = "peeking"

    def attend(self, layer: int, query: Tensor, step: StepTensors, *args: Any) -> Tensor:
        step = replace(step, context_lens=torch.clamp(step.context_lens + 1, max=40))
        return super().attend(layer, query, step, *args)


class FarSightedAttention(TorchAttention):
    """Sees one token before its window."""

    name = "far-sighted"

    def attend(self, layer: int, query: Tensor, step: StepTensors, scale: float, window: int | None = None) -> Tensor:
        return super().attend(layer, query, step, scale, None if window is None else window + 1)


class BatchMindedAttention(TorchAttention):
    """Claims row invariance; its decode is another computation than its chunk."""

    name = "batch-minded"
    row_invariant = True

    def attend(self, layer: int, query: Tensor, *args: Any) -> Tensor:
        return super().attend(layer, query, *args) * (1 + len(query) * 1e-7)


class OneNormOps(TorchRowOps):
    """Norms keys as queries."""

    name = "one-norm"

    @staticmethod
    def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
        TorchRowOps.qk_norm(qkv, q_norm, q_norm, num_heads, num_kv_heads, eps)


class HalfTurnOps(TorchRowOps):
    """Rotates the values too."""

    name = "half-turn"

    @staticmethod
    def rope(qkv: Tensor, cos_sin: Tensor, positions: Tensor, num_rotated: int, head_dim: int) -> None:
        TorchRowOps.rope(qkv, cos_sin, positions, qkv.shape[1] // head_dim, head_dim)


class ForgetfulSampler(RowSampler):
    """Counts no token that was drawn."""

    name = "forgetful"

    def _suppose(self, *args: Any) -> None:
        pass


class SecondChanceSampler(RowSampler):
    """Draws other tokens when a step is computed again."""

    name = "second-chance"
    num_drawn = 0

    def draw(self, logits: Tensor, at: Positions) -> Any:
        self.num_drawn += 1
        if self.num_drawn == 4:
            self._rows = [msgspec.structs.replace(row, seed=1) for row in self._rows]
        return super().draw(logits, at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_registered_kernel_passes_its_own_self_test(dtype: torch.dtype) -> None:
    registry = build_registry(CPU)
    for precision in {*PRECISIONS, *QUANTIZATIONS}:
        linears = registry.implementations("linear", precision)
        assert len(linears) >= 2
        for linear in linears:
            assert precision_of(precision).check(linear, dtype, CPU) is None, linear
    for ops in registry.implementations("ops"):
        assert check_row_ops(ops, dtype, CPU) is None, ops
    assert registry.implementations("sampler") == (NativeSampler, RowSampler, TorchSampler)
    for sampler in (NativeSampler, RowSampler):
        assert check_sampler(sampler, dtype, CPU) is None, sampler
    for attention in registry.implementations("attention"):
        smallest = (AttentionShape(2, 4, 2, 16, block_size) for block_size in (1, 2, 3))
        for shape in (SHAPE, AttentionShape(2, 4, 4, 8, 16), AttentionShape(2, 7, 1, 128, 8), *smallest):
            assert check_attention(attention, shape, dtype, CPU) is None, (attention, shape)


def test_long_chunks_are_attended_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for elements in (1, 150, 10_000):
        monkeypatch.setattr("novainfer.kernels.ops.attention.MASK_ELEMENTS_MAX", elements)
        monkeypatch.setattr("novainfer.kernels.ops.attention.GATHERED_ELEMENTS_MAX", elements)
        assert check_attention(TorchAttention, SHAPE, torch.float32, CPU) is None


def test_self_tests_find_what_is_wrong() -> None:
    assert "off by" in (check_linear(WrongLinear, torch.float32, CPU) or "")
    assert "gathered rows" in (check_linear(ForgetfulLinear, torch.float32, CPU) or "")
    assert "larger batch" in (check_linear(BatchMindedLinear, torch.float32, CPU) or "")
    assert "off by" in (check_attention(PeekingAttention, SHAPE, torch.float32, CPU) or "")
    assert "between a chunk and a decode" in (check_attention(BatchMindedAttention, SHAPE, torch.float32, CPU) or "")
    assert "attention with a window" in (check_attention(FarSightedAttention, SHAPE, torch.float32, CPU) or "")
    assert "must not rotate" in (check_row_ops(HalfTurnOps, torch.float32, CPU) or "")
    assert "qk_norm is off by" in (check_row_ops(OneNormOps, torch.float32, CPU) or "")
    assert "drawn, gives token" in (check_sampler(ForgetfulSampler, torch.float32, CPU) or "")
    assert "drawn again, gives token" in (check_sampler(SecondChanceSampler, torch.float32, CPU) or "")


def kernels(*linears: Any, **options: Any) -> Selection:
    registry = Registry(**options)
    for linear in linears:
        registry.register("linear", linear)
    return Selection(registry, torch.float32, CPU)


def test_a_kernel_that_fails_its_self_test_is_skipped_with_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chosen = kernels(WrongLinear, RaisingLinear, ReferenceLinear)
    with caplog.at_level(logging.WARNING):
        assert all(chosen.linear(8, 8) is ReferenceLinear for _ in range(5))
    assert [record.getMessage().split(" skipped")[0] for record in caplog.records] == [
        "kernel native-wrong",
        "kernel raising",
    ]
    assert "no such instruction" in caplog.text
    assert chosen.names == {"linear": "reference"}
    failed = chosen.registry.without("forgetful").failed
    assert list(failed) == ["linear native-wrong", "linear raising"]
    assert failed["linear raising"] == "RuntimeError: no such instruction"


def test_a_required_kernel_that_fails_raises() -> None:
    with pytest.raises(LoadError, match="the required linear kernel native-wrong cannot be used"):
        kernels(WrongLinear, ReferenceLinear, require="native").linear(8, 8)


def test_batch_invariant_takes_only_kernels_that_promise_it() -> None:
    with pytest.raises(LoadError, match="no row-invariant linear kernel can be used here"):
        kernels(TorchLinear, batch_invariant=True).linear(8, 8)
    with pytest.raises(LoadError, match="larger batch"):  # the promise is tested, too
        kernels(BatchMindedLinear, batch_invariant=True).linear(8, 8)


def test_without_native_kernels_torch_is_taken_with_one_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable() -> Any:
        raise KernelUnavailableError("there is no C++ compiler")

    monkeypatch.setattr("novainfer.kernels.cpu.native.implementations", unavailable)
    monkeypatch.delenv(selection.NATIVE_VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING):
        registry = build_registry(CPU)
    assert [r.getMessage() for r in caplog.records] == [
        "native CPU kernels cannot be used (there is no C++ compiler); torch computes instead"
    ]
    assert registry.implementations("attention") == (TorchAttention, ReferenceAttention)
    assert registry.implementations("ops") == (TorchRowOps, ReferenceRowOps)
    with pytest.raises(LoadError, match="native CPU kernels are required, but cannot be used"):
        build_registry(CPU, native="require")
    monkeypatch.setenv(selection.NATIVE_VARIABLE, "require")
    with pytest.raises(LoadError, match="there is no C\\+\\+ compiler"):
        build_registry(CPU)
    assert build_registry(CPU, native="0").implementations("linear")[0] is MkldnnLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 8), (40, 64), (915, 192), (1000, 300), (2049, 33)])
def test_rows_come_back_from_every_packed_weight(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.cat((torch.arange(min(300, size[0])), torch.tensor([size[0] - 1])))
    for linear in build_registry(CPU).implementations("linear", CHECKPOINT):
        if linear.refuses(*size, dtype, CPU) is None:
            assert torch.equal(linear.pack(weight.clone(), None).rows(ids), weight[ids]), linear
