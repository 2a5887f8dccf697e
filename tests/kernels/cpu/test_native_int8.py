"""Products over int8 weights against fp64, rows that know nothing of their batch, and parts that make one whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from novainfer.kernels.cpu.int8 import NativeInt8Linear
from novainfer.kernels.ops.quantised import PART_ROWS, ReferenceInt8Linear, put_in_parts, quantised

DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 2e-6}  # of the largest value
# (N, K): whole panels; N and K that fill neither panel, vector nor unit; a model of 24.
SHAPES = ((1152, 896), (915, 192), (77, 24), (33, 191), (7, 3), (1, 1))

pytestmark = pytest.mark.usefixtures("level")


def weights(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of very different sizes, one of them all zero."""
    generator = torch.Generator().manual_seed(n + k)
    sizes = torch.logspace(-3, 2, n)[:, None]
    weight = torch.randn(n, k, generator=generator) * sizes
    weight[n // 2] = 0
    return weight.to(dtype), torch.randn(n, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_those_of_the_quantised_weights_in_double_precision(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, bias = weights(*shape, dtype)
    q, scale = quantised(weight)
    assert q.abs().max() <= 127
    exact = q.double() * scale.double()[:, None]
    assert ((exact - weight.double()).abs() <= scale[:, None] * 0.5001).all()
    x = torch.randn(37, shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    for vector in (None, bias):
        linear = NativeInt8Linear.pack(weight.clone(), vector)
        expected = x.double() @ exact.T + (0 if vector is None else vector.double())
        error = (linear(x).double() - expected).abs().max() / expected.abs().max().clamp_min(1e-9)
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    linear = NativeInt8Linear.pack(*weights(*shape, dtype))
    x = torch.randn(530, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    together = linear(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for first, last in ((0, 1), (529, 530), (3, 5), (10, 17), (1, 12), (20, 33), (100, 164), (0, 513)):
                assert torch.equal(linear(x[first:last]), together[first:last]), (first, last)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = weights(*shape, dtype)
    linear, reference = NativeInt8Linear.pack(weight, bias), ReferenceInt8Linear.pack(weight, bias)
    ids = torch.arange(shape[0]).flip(0)
    assert torch.equal(linear.rows(ids), reference.rows(ids))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_put_in_parts_is_the_weight_put_at_once(dtype: torch.dtype) -> None:
    weight, bias = weights(915, 192, dtype)
    whole = NativeInt8Linear.empty(915, 192, bias, dtype, torch.device("cpu"))
    whole.put(0, weight)
    parts = NativeInt8Linear.empty(915, 192, bias, dtype, torch.device("cpu"))
    for first in range(0, 915, 3 * PART_ROWS):
        parts.put(first, weight[first : first + 3 * PART_ROWS])
    made = NativeInt8Linear.empty(915, 192, bias, dtype, torch.device("cpu"))
    put_in_parts(made, lambda first, last: weight[first:last])
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    for other in (parts, made):
        assert torch.equal(whole.weight, other.weight)
        assert torch.equal(whole(x), other(x))
