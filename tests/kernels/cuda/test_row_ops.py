"""The row operations against fp64."""

from __future__ import annotations

import pytest
import torch

from novainfer.kernels.cuda.row_ops import silu_mul

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 72, 256, 1500])
def test_silu_mul(dtype: torch.dtype, width: int, device: torch.device) -> None:
    gate_up = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(width)).to(dtype)
    gate, up = gate_up.double().chunk(2, 1)
    expected = gate * gate.sigmoid() * up
    got = silu_mul(gate_up.to(device)).cpu().double()
    assert (got - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
