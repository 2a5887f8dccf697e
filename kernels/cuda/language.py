"""Triton, where it is there: which version, and whether its functions are compiled or interpreted.

With `TRITON_INTERPRET=1` in the environment Triton's functions run on the CPU, one program after the other, in numpy:
so they are tested where there is no GPU. Triton reads it when a function is defined, so it must be set before anything
of `kernels/cuda/jit` is imported.
"""

from __future__ import annotations

import os

import torch

from novainfer.kernels.errors import KernelUnavailableError

__all__ = ["INTERPRETED", "TRITON_MIN", "can_compute_on", "check_version", "element"]

TRITON_MIN = (3, 6)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")

_ELEMENTS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}


def check_version() -> None:
    """Raise `KernelUnavailableError` where there is no Triton, or one that is too old."""
    try:
        import triton
    except ImportError as error:
        raise KernelUnavailableError(f"Triton cannot be imported: {error}") from None
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < TRITON_MIN:
        wanted = ".".join(map(str, TRITON_MIN))
        raise KernelUnavailableError(f"Triton {triton.__version__} is too old; {wanted} or newer is needed")


def can_compute_on(device: torch.device) -> str | None:
    """None where Triton's functions can compute on tensors of this device; else the reason."""
    if device.type == "cuda" or (INTERPRETED and device.type == "cpu"):
        return None
    return f"Triton computes on CUDA devices, not on {device.type}"


def element(dtype: torch.dtype) -> str:
    """What Triton's signatures call a dtype: `*bf16` is a pointer to bfloat16."""
    return _ELEMENTS[dtype]
