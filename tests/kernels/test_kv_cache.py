"""Keys and values in a byte each: how far they are off, and what becomes of what is not a number."""

from __future__ import annotations

import pytest
import torch

from novainfer.kernels.ops import kv_cache
from novainfer.kernels.ops.attention import TorchAttention
from novainfer.kernels.ops.reference import ReferenceAttention
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.ops.selftest.attention import check_attention

CPU = torch.device("cpu")
QUANTISED = pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
STEP = {"int8": 0.5 / 127, "fp8": 2**-4}  # of the largest element of a head; of the element itself (e4m3: 3 bits)


def shape_of(kv_dtype: str) -> AttentionShape:
    return AttentionShape(2, 4, 2, 24, 16, kv_dtype)


@QUANTISED
def test_an_element_is_off_by_half_a_step(kv_dtype: str) -> None:
    key, value = (
        torch.randn(2, 50, 2, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 50)[:, None, None]
    )
    shape = shape_of(kv_dtype)
    for given, read in zip(
        (key, value), kv_cache.read(shape, kv_cache.rows_of(shape, key, value), torch.float32), strict=True
    ):
        largest = given.abs().amax(-1, keepdim=True)
        near = given.abs() if kv_dtype == "fp8" else largest
        bound = STEP[kv_dtype] * near + (2**-9 / 448) * largest
        assert ((read - given).abs() <= 1.001 * bound).all()
        assert (read.abs().amax(-1, keepdim=True) - largest).abs().max() <= 1e-6 * largest.max()


@QUANTISED
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_read_as_a_number(kv_dtype: str) -> None:
    rows = torch.ones(4, 2, 24)
    rows[0] = 0
    rows[1, 0, 3] = float("nan")
    rows[2, 0, 3] = float("-inf")
    shape = shape_of(kv_dtype)
    keys, _ = kv_cache.read(shape, kv_cache.rows_of(shape, rows, rows), torch.float32)
    assert not keys[0].any()
    assert not keys[1:3, 0].isfinite().any()
    assert torch.equal(keys[1:3, 1], rows[1:3, 1])
    assert torch.equal(keys[3], rows[3])


@QUANTISED
def test_a_block_takes_what_is_allocated_for_it(kv_dtype: str) -> None:
    for of in (kv_dtype, "auto"):
        shape = shape_of(of)
        parts = kv_cache.allocate(shape, 3, torch.bfloat16, CPU)
        assert sum(part.nbytes for part in parts) == 3 * kv_cache.block_bytes(shape, torch.bfloat16)
    assert kv_cache.block_bytes(shape_of(kv_dtype), torch.bfloat16) == 2 * 2 * 16 * 2 * (24 + 4)


@QUANTISED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torch_attends_over_it(kv_dtype: str, dtype: torch.dtype) -> None:
    assert check_attention(TorchAttention, shape_of(kv_dtype), dtype, CPU) is None
    assert TorchAttention.layout == ReferenceAttention.layout
