"""Matrix products by Triton: against fp64, and a row's bits whatever is beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from novainfer.fsm.messages.mode import CHECKPOINT, FP8, INT8
from novainfer.kernels.cuda import linear
from novainfer.kernels.cuda.compile import CAPABILITIES
from novainfer.kernels.cuda.linear import TritonFp8Linear, TritonInt8Linear, TritonLinear, quantised_rows
from novainfer.kernels.ops.linear import TorchLinear, sum_in_fp32
from novainfer.kernels.ops.precision import precision_of
from novainfer.kernels.ops.quantised import LARGEST, ReferenceFp8Linear, ReferenceInt8Linear, quantised
from novainfer.kernels.ops.registry import Registry
from novainfer.kernels.ops.selection import Selection, build_registry
from novainfer.kernels.ops.selftest import linears
from novainfer.kernels.ops.selftest.linears import check_linear, check_quantised_linear

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# (N, K): one part and a tail in every dimension; several parts, the last of them shorter.
SHAPES = ((33, 48), (70, 301), (64, 1100))
QUANTISED = ((TritonInt8Linear, ReferenceInt8Linear), (TritonFp8Linear, ReferenceFp8Linear))


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_self_test_passes(dtype: torch.dtype, device: torch.device) -> None:
    assert check_linear(TritonLinear, dtype, device) is None


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (TritonInt8Linear, torch.float32),
        (TritonFp8Linear, torch.float16),
    ],
)
def test_the_self_test_of_eight_bits_passes(
    kernel: Any, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":  # two of the three: the interpreter takes its time with eight bits
        monkeypatch.setattr(linears, "LINEAR_SHAPES", linears.LINEAR_SHAPES[1:])
        monkeypatch.setattr(linears, "ROWS", (1, 7))
    assert kernel.refuses(64, 64, dtype, device) is None
    assert check_quantised_linear(kernel, dtype, device) is None


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_one_row_and_of_many(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    n, k = shape
    weight, bias = normal(n, k, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype)
    x = normal(200, k + 16, seed=3, dtype=dtype)[:, :k]
    packed = TritonLinear.pack(weight.to(device), bias.to(device))
    expected = x.double() @ weight.double().T + bias.double()
    for rows in (0, 1, 17, 200):
        got = packed(x[:rows].to(device)).cpu()
        assert got.shape == (rows, n)
        assert got.dtype == dtype
        assert (got.double() - expected[:rows]).abs().sum() <= rows * n * TOLERANCE[dtype] * expected.abs().max()
        if rows:
            assert (got.double() - expected[:rows]).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *((TritonLinear, dtype) for dtype in TOLERANCE),
        (TritonInt8Linear, torch.float16),
        (TritonFp8Linear, torch.float16),
    ],
)
def test_a_row_has_the_same_bits_whatever_is_beside_it_and_wherever_its_parts_are_computed(
    kernel: Any, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = SHAPES[2]
    weight, bias = normal(n, k, seed=4, dtype=dtype), normal(n, seed=5, dtype=dtype)
    packed = kernel.pack(weight.to(device), bias.to(device))
    num_parts, part_features = linear._parts(n, k, packed.elements.dtype if kernel is not TritonLinear else dtype)
    assert num_parts > 1
    assert 0 < k - (num_parts - 1) * part_features < part_features
    x = normal(70, k, seed=6, dtype=dtype).to(device)
    together = packed(x)
    assert torch.equal(packed(x[:1]), together[:1])
    assert torch.equal(packed(x[64:]), together[64:])
    assert torch.equal(packed(x[3:20]), together[3:20])
    monkeypatch.setattr(linear, "TILES_APART_MAX", 0)
    assert torch.equal(packed(x[:17]), together[:17])
    assert torch.equal(packed(x), together)


@pytest.mark.parametrize(("kernel", "plain"), QUANTISED)
def test_weights_are_those_of_every_device_and_rows_are_rounded_alike(
    kernel: Any, plain: Any, device: torch.device
) -> None:
    weight = normal(130, 200, seed=7, dtype=torch.float16)
    packed, reference = kernel.pack(weight.to(device), None), plain.pack(weight, None)
    assert torch.equal(packed.q.cpu(), reference.q)
    assert torch.equal(packed.scale.cpu(), reference.scale)
    x = normal(6, 5000, seed=8, dtype=torch.float32) * torch.tensor([1, 1e3, 1e-3, 1e-6, 0, 7])[:, None]
    x[5] = torch.arange(5000) % 255 - 127 + 0.5  # halfway between two steps, but for the largest
    x[5, 0] = 127
    for dtype in (torch.float32, torch.bfloat16):
        q, scale = quantised_rows(x.to(dtype).to(device), kernel.element)
        expected, expected_scale = quantised(x.to(dtype), kernel.element)
        assert torch.equal(q.cpu().float(), expected.float())
        assert torch.equal(scale.cpu(), expected_scale)
        assert q.float().abs().max() == LARGEST[kernel.element]


@pytest.mark.parametrize(("kernel", "plain"), QUANTISED)
def test_rounded_activations_cost_about_as_much_as_rounded_weights(
    kernel: Any, plain: Any, device: torch.device
) -> None:
    weight, x = normal(96, 512, seed=9, dtype=torch.float16), normal(9, 512, seed=10, dtype=torch.float16)
    exact = x.double() @ weight.double().T

    def error(got: Tensor) -> float:
        return float((got.cpu().double() - exact).norm() / exact.norm())

    of_weights = error(plain.pack(weight, None)(x))
    of_both = error(kernel.pack(weight.to(device), None)(x.to(device)))
    assert of_weights < of_both < 2 * of_weights


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kernel", [TritonLinear, TritonInt8Linear, TritonFp8Linear])
def test_what_is_not_a_number_stays_so_in_its_row_and_in_no_other(
    kernel: Any, wrong: float, device: torch.device
) -> None:
    x = normal(3, 80, seed=11, dtype=torch.float16)
    packed = kernel.pack(normal(70, 80, seed=12, dtype=torch.float16).to(device), None)
    clean = packed(x.to(device))
    x[1, 77] = wrong
    got = packed(x.to(device))
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    assert not got[1].isfinite().any()


def test_what_cannot_be_computed_is_refused_with_the_reason(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TritonLinear.refuses(8, 8, torch.float64, device) == "no torch.float64"
    assert TritonInt8Linear.refuses(8, 133_144, torch.float16, device) is None
    assert TritonInt8Linear.refuses(8, 133_145, torch.float16, device) == (
        "sums of 133145 products are too large for int32"
    )
    assert TritonFp8Linear.refuses(8, 8, torch.float32, device) == "its sums have fewer bits than float32"
    for capability, reason in (
        ((8, 6), "fp8 needs compute capability 8.9 or more, this GPU has 8.6"),
        ((8, 9), None),
        ((10, 0), None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert TritonFp8Linear.refuses(8, 8, torch.float16, torch.device("cuda")) == reason


def test_cublas_is_taken_unless_rows_must_be_invariant(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(Registry, "_prove", lambda *_: None)  # each is proved above
    for precision, batch_invariant, taken in (
        (CHECKPOINT, False, TorchLinear),
        (CHECKPOINT, True, TritonLinear),
        (INT8, False, TritonInt8Linear),
        (INT8, True, TritonInt8Linear),
        (FP8, True, TritonFp8Linear),
    ):
        registry = build_registry(cuda, native="require", batch_invariant=batch_invariant)
        selection = Selection(registry, torch.float16, device, precision_of(precision))
        assert selection.linear(64, 64, gathers_rows=True) is taken
        assert selection.row_invariant is taken.row_invariant


def test_products_of_the_tensor_cores_are_held_to_them_and_fp8_is_compiled_where_it_can_be() -> None:
    for capability in CAPABILITIES:
        products = [variant for variant in linear.variants(capability) if variant.name.startswith("product ")]
        assert all(variant.needs_mma is ("fp32" not in variant.name) for variant in products)
        assert any("fp8" in variant.name for variant in products) is (capability >= 89)


def test_cublas_adds_in_fp32() -> None:
    sum_in_fp32()
    matmul = torch.backends.cuda.matmul
    assert not matmul.allow_tf32
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
