"""The row operations against fp64, and against the reference's roundings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from novainfer.kernels.cuda.row_ops import TritonRowOps
from novainfer.kernels.ops.reference import ReferenceRowOps
from novainfer.kernels.ops.selftest.row_ops import check_row_ops

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-6
NAN, INF = torch.nan, torch.inf


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert (got.cpu().double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_self_test_passes(dtype: torch.dtype, device: torch.device) -> None:
    assert TritonRowOps.refuses(dtype, device) is None
    assert check_row_ops(TritonRowOps, dtype, device) is None


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 72, 256, 1500])
def test_silu_mul(dtype: torch.dtype, width: int, device: torch.device) -> None:
    gate_up = normal(3, 2 * width, seed=width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, 1)
    assert_close(TritonRowOps.silu_mul(gate_up.to(device)), gate * gate.sigmoid() * up, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 30, 896, 3584, 8192])
def test_rms_norm_of_rows_that_lie_apart_and_of_sums(dtype: torch.dtype, width: int, device: torch.device) -> None:
    x, residual = ((normal(4, width + 16, seed=seed, dtype=dtype) * 30)[:, :width] for seed in (1, 2))
    weight = 1 + normal(width, seed=3, dtype=dtype) / 4

    def norm(rows: Tensor) -> Tensor:
        wide = rows.double()
        return wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()

    assert_close(TritonRowOps.rms_norm(x.to(device), weight.to(device), EPS), norm(x), dtype)
    sums = residual.clone(memory_format=torch.contiguous_format).to(device)
    got = TritonRowOps.add_rms_norm(x.to(device), sums, weight.to(device), EPS)
    assert torch.equal(sums.cpu(), residual + x)  # rounded to the dtype as torch rounds
    assert_close(got, norm(residual + x), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [10, 24, 64, 128])
def test_heads_are_normed_and_rotated_in_place(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    cos_sin = normal(40, head_dim, seed=5, dtype=torch.float32)
    positions = torch.tensor([3, 39, 0])
    q_norm, k_norm = (1 + normal(head_dim, seed=seed, dtype=dtype) / 4 for seed in (6, 7))
    qkv = normal(3, 7 * head_dim, seed=8, dtype=dtype)
    wide = qkv.double()
    ReferenceRowOps.qk_norm(wide, q_norm.double(), k_norm.double(), 3, 2, EPS)
    normed = qkv.clone().to(device)
    TritonRowOps.qk_norm(normed, q_norm.to(device), k_norm.to(device), 3, 2, EPS)
    assert_close(normed, wide, dtype)
    turned = normed.cpu().double()
    ReferenceRowOps.rope(turned, cos_sin.double(), positions, 5, head_dim)
    TritonRowOps.rope(normed, cos_sin.to(device), positions.to(device), 5, head_dim)
    assert_close(normed, turned, dtype)
    assert torch.equal(normed[:, 5 * head_dim :].cpu(), qkv[:, 5 * head_dim :])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_what_is_not_a_number_stays_so_in_its_row_and_in_no_other(
    wrong: float, dtype: torch.dtype, device: torch.device
) -> None:
    x = normal(3, 40, seed=9, dtype=dtype)
    x[1, 7] = wrong
    weight = torch.ones(40, dtype=dtype)
    normed = TritonRowOps.rms_norm(x.to(device), weight.to(device), EPS).cpu()
    assert torch.equal(normed.isfinite(), ReferenceRowOps.rms_norm(x, weight, EPS).isfinite())
    got = TritonRowOps.silu_mul(x.to(device)).cpu()
    assert torch.equal(got.isfinite(), ReferenceRowOps.silu_mul(x).isfinite())
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("width", [3, 64, 1100])
def test_tokens_are_taken_from_the_pool_where_ids_name_a_slot(width: int, device: torch.device) -> None:
    weight = normal(11, width, seed=10, dtype=torch.bfloat16).to(device)
    pool = torch.tensor([4, -1, 10, 7], device=device)  # slot 1 has been given no token
    ids = torch.tensor([5, -1, -2, 0, -3, -4, 10], device=device)
    assert torch.equal(TritonRowOps.embed(weight, ids, pool), weight[[5, 4, 0, 0, 10, 7, 10]])
    assert torch.equal(TritonRowOps.embed(weight, ids[:1], None), weight[[5]])


def test_no_rows_give_none(device: torch.device) -> None:
    x, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    assert TritonRowOps.rms_norm(x, weight, EPS).shape == (0, 8)
    assert TritonRowOps.silu_mul(x).shape == (0, 4)


def test_other_dtypes_and_devices_are_refused(device: torch.device) -> None:
    assert TritonRowOps.refuses(torch.float64, device) == "no torch.float64"
    assert TritonRowOps.refuses(torch.float32, torch.device("meta")) is not None
