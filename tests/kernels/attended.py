"""What tests of the CPU's native attention share: what is computed in what, and steps that only attention reads."""

from __future__ import annotations

import torch
from torch import Tensor

from novainfer.kernels.step import StepTensors

__all__ = ["CPU", "DTYPES", "KEPT", "step_of"]

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)
KEPT = tuple((dtype, kv_dtype) for kv_dtype in ("auto", "int8") for dtype in DTYPES)  # computed in, kept in


def step_of(tables: Tensor, starts: Tensor, lens: Tensor) -> StepTensors:
    """What attention reads of a step."""
    nothing = torch.empty(0, dtype=torch.int64)
    rows = starts.diff()
    return StepTensors(
        nothing, nothing, nothing, tables, starts, lens, None, 0, int(lens.max()), int(rows.min()), int(rows.max())
    )
