"""What a device computes with, on two axes: which kernels, and in which precision weights are kept."""

from __future__ import annotations

import msgspec

__all__ = [
    "ATTENTION_BACKENDS",
    "AUTO",
    "CHECKPOINT",
    "EAGER",
    "FAST",
    "FP8",
    "INT4",
    "INT8",
    "KERNELS",
    "KV_CACHE_DTYPES",
    "PLAIN",
    "PRECISIONS",
    "QUANTIZATIONS",
    "SDPA",
    "UNQUANTIZED",
    "Mode",
]

FAST = "fast"  # kernels made for this device where there are any, and captured as graphs where it can do that
EAGER = "eager"  # the same kernels, launched one after the other: for a device whose fast ones are captured
SDPA = "sdpa"  # the same, but for attention, which is torch's
PLAIN = "plain"  # torch's own for every operation
KERNELS = (FAST, EAGER, SDPA, PLAIN)  # best first
CHECKPOINT = "checkpoint"  # weights in the dtype of the run
INT8 = "int8"  # weights rounded to int8 by row
INT4 = "int4"  # weights rounded to 4 bits in groups of a row's features, the output head to int8
FP8 = "fp8"  # weights rounded to fp8 (e4m3) by row: no smaller than in int8, so no way down from the checkpoint's
PRECISIONS = (CHECKPOINT, INT8)  # what a model as the checkpoint has it can be computed in, best first
QUANTIZATIONS = (INT8, INT4, FP8)  # what the setting `quantization` may ask for
UNQUANTIZED = "none"  # how it is said in words that it asks for nothing
AUTO = "auto"  # of the two below: as the model computes; the fastest that is there
KV_CACHE_DTYPES = (AUTO, "int8", "fp8")
ATTENTION_BACKENDS = (AUTO, "triton", "cudnn", "sdpa")


class Mode(msgspec.Struct, frozen=True):
    """One way to compute a model. A device says which ones it has, best first: it comes up in the first."""

    kernels: str = FAST
    precision: str = CHECKPOINT

    def computes_as(self, other: Mode) -> bool:
        """Whether the arithmetic is that of `other`: a graph launches the kernels that are launched without it."""
        kernels = {self.kernels, other.kernels}
        return self.precision == other.precision and (len(kernels) == 1 or kernels == {FAST, EAGER})

    def __str__(self) -> str:
        return f"{self.kernels} kernels in precision {self.precision}"
