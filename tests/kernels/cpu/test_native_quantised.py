"""Products over codes of 8 and 4 bits: the oracle's bits, on every instruction set, in any batch and part by part."""

from __future__ import annotations

import pytest
import torch
from forced import use_level
from torch import Tensor

from novainfer.kernels.cpu.levels import LEVELS, levels
from novainfer.kernels.cpu.quantised import PRODUCT_MAX, SUM_MAX, NativeGroupedLinear, NativeInt8Linear
from novainfer.kernels.ops.grouped import GroupedForm, GroupedWeight, rounded_to_int4
from novainfer.kernels.ops.grouped_linear import ReferenceGroupedActivationsLinear
from novainfer.kernels.ops.quantised import PART_ROWS, ReferenceInt8ActivationsLinear, put_in_parts, quantised
from novainfer.kernels.ops.selftest.linears import grouped_weight

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
ROWS = 69  # so many that each way of computing them is taken, and that tiles differ in size
# (N, K): whole panels; N and K that fill neither panel, vector nor step; a K so long that the rows of a block pass by
# several panels together; a model of 24.
SHAPES = ((1152, 896), (915, 192), (300, 2112), (77, 24), (33, 191), (7, 3), (1, 1))
# (N, K, bits, group size, shifts); a group that is no multiple of a step is all of a row.
GROUPED = (
    (160, 384, 4, 32, True),
    (160, 384, 4, 128, False),
    (77, 192, 4, 16, True),
    (77, 192, 4, 64, False),
    (33, 191, 4, 191, True),
    (33, 192, 8, 32, False),
    (33, 192, 8, 16, True),
    (5, 12, 8, 12, True),
    (96, 128, 8, 128, True),  # a row is one group, as a matrix unit wants it, but for the shifts
)


def weights(n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of very different sizes, one of them all zero."""
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randn(n, k, generator=generator) * torch.logspace(-3, 2, n)[:, None]
    weight[n // 2] = 0
    return weight.to(dtype), torch.randn(n, generator=generator).to(dtype)


def activations(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, one of them all zero, and in each one element far above all others."""
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator) * torch.logspace(-2, 2, m)[:, None]
    x[:, k // 2] *= 50
    x[m // 2] = 0
    return x.to(dtype)


def of_all_kinds(dtype: torch.dtype) -> list[NativeGroupedLinear]:
    """INT8 by row of every shape, and every form of groups, with a bias."""
    found: list[NativeGroupedLinear] = [NativeInt8Linear.pack(*weights(n, k, dtype)) for n, k in SHAPES]
    for n, k, bits, size, has_shift in GROUPED:
        weight = grouped_weight(n, k, bits, size, has_shift=has_shift)
        bias = weights(n, k, dtype)[1]
        found.append(NativeGroupedLinear.pack_grouped(weight, bias, dtype, CPU))
        if bits == 4 and size < k:
            found.append(NativeGroupedLinear.pack_grouped(rounded_to_int4(weights(n, k, dtype)[0]), bias, dtype, CPU))
    return found


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_in_int8_give_the_bits_of_the_oracle(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = weights(*shape, dtype)
    x = activations(ROWS, shape[1], dtype)
    for vector in (None, bias):
        linear, oracle = (
            kind.pack(weight.clone(), vector) for kind in (NativeInt8Linear, ReferenceInt8ActivationsLinear)
        )
        assert torch.equal(linear(x), oracle(x))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("exponent", [-110, -93, 0, 120])  # of the largest; at the first it is a division
def test_every_number_of_bf16_is_rounded_by_every_largest_one_as_a_division_would(exponent: int) -> None:
    mantissas = 1 + torch.arange(128, dtype=torch.float64) / 128
    numbers = torch.cat([mantissas * 2.0**-halvings for halvings in range(9)] + [torch.zeros(1)])  # to below 1 / 254
    numbers = numbers * torch.tensor([1.0, -1.0]).repeat(len(numbers))[: len(numbers)]  # of either sign, in turns
    x = torch.where(numbers.abs() <= mantissas[:, None], numbers, 0.0)
    x[:, -1] = mantissas
    x = (x * 2.0**exponent).to(torch.bfloat16)
    weight = torch.eye(len(numbers), dtype=torch.bfloat16)
    linear, oracle = (kind.pack(weight.clone(), None) for kind in (NativeInt8Linear, ReferenceInt8ActivationsLinear))
    assert torch.equal(linear(x), oracle(x))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("exponent", [-118, -119, -122, -130])  # of the largest: its scale is normal above -120
def test_numbers_too_small_to_be_normal_count_as_zero(exponent: int) -> None:
    """Of activations, of their scale and of the product (abi.h), on every instruction set."""
    mantissas = 1 + torch.arange(128, dtype=torch.float64) / 128
    numbers = torch.cat([mantissas * 2.0**-halvings for halvings in range(9)])
    x = torch.where(numbers <= mantissas[:, None], numbers, 0.0)
    x[:, -1] = mantissas
    x = (x * 2.0**exponent).to(torch.bfloat16)
    weight = torch.eye(len(numbers), dtype=torch.bfloat16)
    linear, oracle = (kind.pack(weight.clone(), None) for kind in (NativeInt8Linear, ReferenceInt8ActivationsLinear))
    least = torch.finfo(torch.float32).tiny
    has_scale = x.float().abs().amax(1, keepdim=True) / 127 >= least
    expected = oracle(torch.where(x.float().abs() < least, 0, x))
    expected = torch.where(has_scale & (expected.float().abs() >= least), expected, 0)
    assert has_scale.any() == (exponent >= -119)
    assert torch.equal(linear(x), expected)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_groups_are_multiplied_as_the_oracle_does(case: tuple[int, int, int, int, bool], dtype: torch.dtype) -> None:
    n, k, bits, size, has_shift = case
    weight = grouped_weight(n, k, bits, size, has_shift=has_shift)
    x = activations(ROWS, k, dtype)
    linear, oracle = (
        kind.pack_grouped(weight, None, dtype, CPU) for kind in (NativeGroupedLinear, ReferenceGroupedActivationsLinear)
    )
    expected = oracle(x).float()
    error = (linear(x).float() - expected).abs().amax(1) / expected.abs().amax(1).clamp_min(1e-9)
    assert error.max() < (4e-3 if dtype == torch.bfloat16 else 1e-5)
    ids = torch.arange(n).flip(0)
    assert torch.equal(linear.rows(ids), weight.widened(dtype)[ids])


def test_every_instruction_set_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test's tolerance would not tell; a request that moves to another machine would."""
    names = [level.name for level in levels()]
    assert names
    first: list[Tensor] | None = None
    for name in {names[0], "avx2"} if len(names) > 1 else names:
        with monkeypatch.context() as patch:
            use_level(name, patch)
            found = [
                linear(activations(ROWS, linear.in_features, dtype))
                for dtype in DTYPES
                for linear in of_all_kinds(dtype)
            ]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True)), name


@pytest.mark.slow
@pytest.mark.parametrize("name", [level.name for level in LEVELS])
def test_each_instruction_set_gives_the_bits_of_the_least(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[Tensor]] = []
    for each in (name, "avx2"):
        with monkeypatch.context() as patch:
            use_level(each, patch)
            found.append(
                [linear(activations(ROWS, linear.in_features, torch.float32)) for linear in of_all_kinds(torch.float32)]
            )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    try:
        for linear in of_all_kinds(dtype):
            torch.set_num_threads(threads)
            x = activations(530, linear.in_features, dtype)
            together = linear(x)
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                for first, last in ((0, 1), (529, 530), (3, 5), (10, 17), (1, 12), (20, 33), (100, 164), (0, 513)):
                    assert torch.equal(linear(x[first:last]), together[first:last]), (linear.desc.k, first, last)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("code", [-128, 127])
def test_the_largest_sums_do_not_leave_int32(code: int) -> None:
    """One row of the longest group that is taken, all codes and activations as large as they can be."""
    k = SUM_MAX // PRODUCT_MAX
    weight = GroupedWeight(8, k, torch.full((1, k), code, dtype=torch.int8), torch.ones(1, 1))
    linear = NativeGroupedLinear.pack_grouped(weight, None, torch.float32, CPU)
    for sign in (1, -1):
        x = torch.full((1, k), 127.0 * sign)
        assert linear(x).item() == torch.tensor(float(sign * 127 * code * k), dtype=torch.float32).item()
    assert "too large for int32" in (NativeInt8Linear.refuses(1, k + 1, torch.float32, CPU) or "")
    assert NativeGroupedLinear.refuses_form(8 * (k + 1), GroupedForm(8, 128, 0)) is None


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("rows", [1, 2, 13, 64])
@pytest.mark.parametrize("group", [8, 40, 128])
def test_the_largest_sums_of_4_bits_do_not_leave_16_where_they_are_kept_there(group: int, rows: int) -> None:
    n, k = 40, 3 * group
    weight = GroupedWeight(4, group, torch.full((n, k), 15, dtype=torch.int8), torch.ones(n, 3))
    linear = NativeGroupedLinear.pack_grouped(weight, None, torch.float32, CPU)
    for sign in (1, -1):
        assert (linear(torch.full((rows, k), 127.0 * sign)) == float(sign * 127 * 15 * k)).all()


def test_groups_that_break_a_step_are_refused() -> None:
    assert "no multiple of 8" in (NativeGroupedLinear.refuses_form(24, GroupedForm(4, 12, None)) or "")
    assert NativeGroupedLinear.refuses_form(12, GroupedForm(4, 12, None)) is None


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_row(bad: float) -> None:
    for linear in of_all_kinds(torch.float32):
        x = activations(ROWS, linear.in_features, torch.float32)
        expected = linear(x)
        x[4, linear.in_features - 1] = bad
        got = linear(x)
        assert not got[4].isfinite().any()
        assert torch.equal(got[5:], expected[5:])
        assert torch.equal(got[:4], expected[:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [NativeInt8Linear, NativeGroupedLinear], ids=lambda kind: kind.name)
def test_a_weight_put_in_parts_is_the_weight_put_at_once(kind: type[NativeGroupedLinear], dtype: torch.dtype) -> None:
    weight, bias = weights(915, 192, dtype)
    whole = kind.empty(915, 192, bias, dtype, CPU)
    whole.put(0, weight)
    parts = kind.empty(915, 192, bias, dtype, CPU)
    for first in range(0, 915, 3 * PART_ROWS):
        parts.put(first, weight[first : first + 3 * PART_ROWS])
    made = kind.empty(915, 192, bias, dtype, CPU)
    put_in_parts(made, lambda first, last: weight[first:last])
    for other in (parts, made, kind.over(915, 192, dtype, whole.tensors)):
        assert all(torch.equal(a, b) for a, b in zip(whole.tensors, other.tensors, strict=True))
    with pytest.raises(IndexError, match="are no part of 915 rows"):
        whole.put(1, weight[:PART_ROWS])


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_rounded_here_are_those_of_the_one_definition(dtype: torch.dtype) -> None:
    weight, _ = weights(77, 191, dtype)
    q, scale = quantised(weight)
    ids = torch.arange(77)
    assert torch.equal(NativeInt8Linear.pack(weight, None).rows(ids), (q.float() * scale[:, None]).to(dtype))
