"""Memory for packed weights and KV blocks on huge pages: a stream over them misses the TLB 500 times less."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor

__all__ = ["huge_zeros"]

HUGE_PAGE_BYTES = 2 << 20
SMALL_BYTES_MAX = 64 << 10  # a mapping of its own costs some microseconds, and a page's end


def huge_zeros(num_bytes: int) -> Tensor:
    """Zeroed uint8 [num_bytes], on huge pages as far as whole ones fit; freed with the tensor, to the system.

    The pages become the process's own when they are first touched; asking costs nothing where it is refused. Raises
    MemoryError when there is no room.
    """
    whole = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if num_bytes < SMALL_BYTES_MAX:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    # What is smaller than a huge page lies beside others, and may be part of one with them.
    room = num_bytes + HUGE_PAGE_BYTES if whole else num_bytes
    try:
        buffer = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be mapped: {error}") from None
    start = -ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % HUGE_PAGE_BYTES if whole else 0
    advice: Any = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):
            buffer.madvise(advice, start, whole or room)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes, offset=start)
