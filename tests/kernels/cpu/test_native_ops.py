"""Row operations against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from novainfer.kernels.cpu.ops import NativeRowOps

DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 1e-6}
EPS = 1e-6
ROWS, WIDTHS = 200, (896, 192, 24, 7, 1)  # 200 rows of 896 go to several threads

pytestmark = pytest.mark.usefixtures("level")


def normal(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, expected: Tensor) -> bool:
    return bool((got.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[got.dtype])


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_equal_double_precision_and_rows_stand_alone(width: int, dtype: torch.dtype) -> None:
    x, weight = normal(0, dtype, ROWS, width), normal(1, dtype, width)
    together = NativeRowOps.rms_norm(x, weight, EPS)
    assert close(together, normed(x, weight))
    assert torch.equal(NativeRowOps.rms_norm(x[40:41], weight, EPS), together[40:41])

    residual = normal(2, dtype, ROWS, width)
    expected = (residual.float() + x.float()).to(dtype)
    got = NativeRowOps.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, expected)
    assert torch.equal(got, NativeRowOps.rms_norm(expected, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_times_up_equals_double_precision(width: int, dtype: torch.dtype) -> None:
    gate_up = normal(3, dtype, ROWS, 2 * width) * 6
    gate, up = gate_up.double().chunk(2, -1)
    assert close(NativeRowOps.silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


def test_silu_of_extremes_is_its_limit() -> None:
    gate_up = torch.tensor([[-1e30, -200.0, 0.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0, 1.0]])
    expected = [[pytest.approx(0, abs=1e-8)] * 3 + [200.0, pytest.approx(1e30)]]
    assert NativeRowOps.silu_mul(gate_up).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 8, 2])
def test_rotation_equals_double_precision_and_leaves_values_alone(head_dim: int, dtype: torch.dtype) -> None:
    rotated, heads = 5, 7
    qkv = normal(4, dtype, ROWS, heads * head_dim)
    angles = torch.rand(ROWS, head_dim // 2, generator=torch.Generator().manual_seed(5)) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.randperm(ROWS, generator=torch.Generator().manual_seed(6))
    before = qkv.clone()
    NativeRowOps.rope(qkv, table, positions, rotated, head_dim)

    wide = before.double().view(ROWS, heads, head_dim)[:, :rotated]
    low, high = wide.chunk(2, -1)
    cos, sin = table[positions].double().unsqueeze(1).chunk(2, -1)
    expected = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).flatten(1)
    assert close(qkv[:, : rotated * head_dim], expected)
    assert torch.equal(qkv[:, rotated * head_dim :], before[:, rotated * head_dim :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [128, 80, 8, 2])
def test_heads_are_normed_one_by_one_as_rows_are_and_values_left_alone(head_dim: int, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads = 4, 2
    qkv = normal(7, dtype, ROWS, (num_heads + 2 * num_kv_heads) * head_dim)
    q_norm, k_norm = normal(8, dtype, head_dim), normal(9, dtype, head_dim)
    before = qkv.view(ROWS, -1, head_dim).clone()
    NativeRowOps.qk_norm(qkv, q_norm, k_norm, num_heads, num_kv_heads, EPS)
    heads = qkv.view(ROWS, -1, head_dim)
    for head in range(num_heads + num_kv_heads):
        weight = q_norm if head < num_heads else k_norm
        assert close(heads[:, head], normed(before[:, head], weight))
        assert torch.equal(heads[:, head], NativeRowOps.rms_norm(before[:, head], weight, EPS))
    assert torch.equal(heads[:, num_heads + num_kv_heads :], before[:, num_heads + num_kv_heads :])
