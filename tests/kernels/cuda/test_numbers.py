"""Numbers in the interpreter are those of the GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from novainfer.kernels.cuda.jit.numbers import dot, rounded


@triton.jit
def round_all(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, rounded(tl.load(x + at), y.dtype.element_ty))


@triton.jit
def multiply(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, dot(tl.load(a + at), tl.load(b + at), tl.zeros((N, N), tl.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_to_the_nearest_and_of_two_to_the_even_one(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)).to(device) * 100
    x[:8] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    x[8:10] = torch.tensor([3.4e38, -3.4e38])
    y = torch.empty(4096, dtype=dtype, device=device)
    round_all[(1,)](x, y, N=4096)
    assert torch.equal(y.nan_to_num(7.0), x.to(dtype).nan_to_num(7.0))
    assert y[7].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_are_of_the_numbers_and_fp32_is_not_cut_to_tf32(dtype: torch.dtype, device: torch.device) -> None:
    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(i)).to(dtype).to(device) for i in (1, 2))
    out = torch.empty(32, 32, device=device)
    multiply[(1,)](a, b, out, N=32)
    expected = a.double() @ b.double()
    assert (out.double() - expected).abs().max() <= 2e-6 * expected.abs().max()
