"""Packed linears against fp64, and the same row in every company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from novainfer.kernels.cpu.linear import NativeLinear

DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 2e-6}  # of the largest value
# (N, K): whole panels; N and K that fill neither panel, vector nor unit; a model of 24; a K so long that the rows of a
# block pass by several panels together, slice by slice.
SHAPES = ((1152, 896), (915, 192), (1056, 2080), (77, 24), (33, 191), (7, 3), (1, 1))
ROWS = 530  # more than a block of rows

pytestmark = pytest.mark.usefixtures("level")


def random_linear(n: int, k: int, dtype: torch.dtype, bias: bool = True) -> tuple[NativeLinear, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    vector = torch.randn(n, generator=generator).to(dtype) if bias else None
    return NativeLinear.pack(weight.clone(), vector), weight, vector


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_those_in_double_precision(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for bias in (True, False):
        linear, weight, vector = random_linear(*shape, dtype, bias)
        x = torch.randn(37, shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = x.double() @ weight.double().T + (0 if vector is None else vector.double())
        error = (linear(x).double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear, _, _ = random_linear(*shape, dtype)
    x = torch.randn(ROWS, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    together = linear(x)
    for first, last in (
        (0, 1),
        (529, 530),
        (3, 5),
        (10, 17),
        (1, 12),
        (20, 33),
        (7, 39),
        (7, 40),
        (100, 164),
        (5, 261),
        (0, 513),
    ):
        assert torch.equal(linear(x[first:last]), together[first:last]), (first, last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    linear, _, _ = random_linear(1152, 896, dtype)
    x = torch.randn(40, 896, generator=torch.Generator().manual_seed(2)).to(dtype)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append((linear(x), linear(x[:1])))
    finally:
        torch.set_num_threads(threads)
    for many, one in results[1:]:
        assert torch.equal(many, results[0][0])
        assert torch.equal(one, results[0][1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_gives_the_weight_back_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    linear, weight, _ = random_linear(*shape, dtype, bias=False)
    ids = torch.randint(shape[0], (50,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(linear.rows(ids), weight[ids])
    assert torch.equal(linear.rows(torch.arange(shape[0])), weight)


def test_rows_of_x_may_lie_apart() -> None:
    linear, _, _ = random_linear(64, 96, torch.bfloat16)
    x = torch.randn(9, 200).to(torch.bfloat16)
    assert torch.equal(linear(x[:, :96]), linear(x[:, :96].contiguous()))


def test_a_nan_stays_in_its_row() -> None:
    linear, _, _ = random_linear(64, 96, torch.bfloat16)
    x = torch.randn(20, 96).to(torch.bfloat16)
    clean = linear(x)
    x[7, 3] = float("nan")
    spoiled = linear(x)
    assert spoiled[7].isnan().all()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(spoiled[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_those_of_the_weight_padded_to_panels(dtype: torch.dtype) -> None:
    linear, weight, _ = random_linear(96, 64, dtype, bias=False)
    assert linear.weight_bytes == weight.nbytes
    assert random_linear(97, 64, dtype, bias=False)[0].weight_bytes > weight.nbytes


def test_it_says_what_it_cannot_do() -> None:
    cpu = torch.device("cpu")
    assert NativeLinear.refuses(8, 8, torch.bfloat16, cpu) is None
    assert "float16" in str(NativeLinear.refuses(8, 8, torch.float16, cpu))
    assert "cuda" in str(NativeLinear.refuses(8, 8, torch.bfloat16, torch.device("cuda")))
    assert "empty" in str(NativeLinear.refuses(0, 8, torch.bfloat16, cpu))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_too_small_to_be_normal_count_as_zero_inside_on_every_thread(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("novainfer.kernels.cpu.linear.num_threads", lambda: 3)
    tiny = torch.full((2048, 512), 1e-39).to(dtype)
    linear = NativeLinear.pack(tiny.clone(), None)
    for _ in range(20):
        assert not linear(torch.ones(8, 512, dtype=dtype)).any()
    assert torch.equal(linear.rows(torch.arange(2048)), tiny)
    assert (tiny[0].float() * 2 == tiny[0].float() + tiny[0].float()).all()
    assert (tiny[0].float() * 2).all()  # outside they are what they were


def test_rows_that_are_not_there_are_refused() -> None:
    linear, _, _ = random_linear(33, 16, torch.float32)
    for wrong in (-1, 33, 10**6, -(2**40)):
        with pytest.raises(IndexError, match="out of range"):
            linear.rows(torch.tensor([0, wrong]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_of_no_rows_has_none(dtype: torch.dtype) -> None:
    packed = NativeLinear.pack(torch.ones(64, 64, dtype=dtype), None)
    assert packed(torch.ones(0, 64, dtype=dtype)).shape == (0, 64)
