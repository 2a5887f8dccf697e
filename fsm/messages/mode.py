"""What a device computes with, on two axes: which kernels, and in which precision weights are kept."""

from __future__ import annotations

import msgspec

__all__ = ["CHECKPOINT", "FAST", "INT8", "PLAIN", "PRECISIONS", "QUANTIZATIONS", "Mode"]

FAST = "fast"  # kernels made for this device where there are any
PLAIN = "plain"  # torch's own for every operation
CHECKPOINT = "checkpoint"  # weights in the dtype of the run
INT8 = "int8"  # weights rounded to int8 by row, activations in the dtype of the run
PRECISIONS = (CHECKPOINT, INT8)  # best first
QUANTIZATIONS = PRECISIONS[1:]  # what the setting `quantization` may ask for


class Mode(msgspec.Struct, frozen=True):
    """One way to compute a model. A device says which ones it has, best first: it comes up in the first."""

    kernels: str = FAST
    precision: str = CHECKPOINT

    def __str__(self) -> str:
        return f"{self.kernels} kernels in precision {self.precision}"
