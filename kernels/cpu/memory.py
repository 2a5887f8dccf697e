"""Memory for packed weights and KV blocks on huge pages: a stream over them misses the TLB 500 times less."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor

__all__ = ["huge_zeros"]

HUGE_PAGE_BYTES = 2 << 20


def huge_zeros(num_bytes: int) -> Tensor:
    """Zeroed uint8 [num_bytes] on huge pages where the kernel gives them; freed with the tensor.

    The pages are the process's own from the first touch on, and asking costs nothing where it is refused.
    """
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    buffer = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice: Any = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            buffer.madvise(advice)
        except OSError:
            pass
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    offset = -address % HUGE_PAGE_BYTES
    return torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes, offset=offset)
