"""Weights in groups: what is rounded to 4 bits here, and the products that torch computes over any form."""

from __future__ import annotations

import pytest
import torch

from novainfer.kernels.ops.grouped import GroupedForm, int4_form, rounded_to_int4
from novainfer.kernels.ops.grouped_linear import ReferenceGroupedLinear, TorchGroupedLinear
from novainfer.kernels.ops.selection import Selection, build_registry
from novainfer.kernels.ops.selftest.linears import grouped_weight

CPU = torch.device("cpu")
FORMS = [(4, 16, True), (4, 32, False), (4, 7, True), (4, 21, False), (8, 7, True), (8, 21, False), (8, 3, False)]


def rows(n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randn(n, k, generator=generator) * torch.logspace(-3, 2, n)[:, None]
    weight[n // 2] = 0
    return weight


@pytest.mark.parametrize("k", [192, 96, 48, 37])
def test_rounded_elements_lie_within_a_step_and_the_largest_of_a_group_is_kept(k: int) -> None:
    weight = rows(9, k)
    rounded = rounded_to_int4(weight)
    assert rounded.form == int4_form(k)
    assert rounded.form.zero == 8
    assert (rounded.codes.min(), rounded.codes.max()) == (0, 15)
    groups = weight.view(9, -1, rounded.group_size)
    wide = rounded.widened().view(groups.shape)
    assert ((wide - groups).abs() <= rounded.scale.abs()[..., None] * 1.0001).all()
    largest = groups.abs().argmax(2, keepdim=True)
    torch.testing.assert_close(wide.gather(2, largest), groups.gather(2, largest), rtol=1e-6, atol=0)


def test_group_sizes_are_the_largest_that_divide_a_row() -> None:
    assert [int4_form(k).group_size for k in (896, 4864, 96, 48, 24, 37)] == [64, 64, 32, 16, 24, 37]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_any_form_is_multiplied_and_given_back(form: tuple[int, int, bool], dtype: torch.dtype) -> None:
    bits, group_size, has_shift = form
    k = {16: 48, 32: 96}.get(group_size, 21)
    weight = grouped_weight(13, k, bits, group_size, has_shift=has_shift)
    bias = torch.randn(13, generator=torch.Generator().manual_seed(2)).to(dtype)
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = weight.codes.double() * weight.scale.double().repeat_interleave(group_size, 1)
    if weight.shift is not None:
        wide += weight.shift.double().repeat_interleave(group_size, 1)
    for kind, factor in ((TorchGroupedLinear, 3), (ReferenceGroupedLinear, 1)):
        linear = kind.pack_grouped(weight, bias, dtype, CPU)
        expected = x.double() @ wide.T + bias.double()
        error = (linear(x).double() - expected).abs().max() / expected.abs().max()
        assert error < factor * (1e-6 if dtype == torch.float32 else 4e-3)
        assert torch.equal(linear.rows(torch.tensor([12, 0])), weight.widened(dtype)[[12, 0]])
        again = kind.over(13, k, dtype, linear.tensors)
        assert torch.equal(again(x), linear(x))


def test_a_weight_that_comes_in_groups_has_a_kernel_beside_those_of_the_checkpoints_precision() -> None:
    selection = Selection(build_registry(CPU), torch.float32, CPU)
    kernel = selection.grouped(64, 192, GroupedForm(4, 64, None))
    assert kernel.precision == "int4"
    weight = grouped_weight(64, 192, 4, 64, has_shift=True)
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(1))
    packed = kernel.pack_grouped(weight, None, torch.float32, CPU)
    expected = x @ weight.widened().T
    assert (packed(x) - expected).norm() < 0.02 * expected.norm()
