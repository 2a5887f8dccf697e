"""The heap of the C library: what it keeps of freed memory while a model is loaded, and while it serves.

glibc maps large blocks apart, which a free gives back at once, and lets what counts as large grow with each that is
freed, up to 32 MiB. Loading frees many blocks of a few MiB: from the first large one on they lie in the heap, between
small ones that stay, and half of it is holes that no step fits into. A step's logits in turn are of that size, and
would be mapped, and their pages zeroed, at each step. So blocks count as large from 1 MiB on until the model is warm,
and then from 32 MiB on.

Process-wide, and of glibc alone: other C libraries know no such thresholds. What the environment says about them
(`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`, man 3 mallopt) holds throughout.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

__all__ = ["keep_for_steps", "keep_little", "release_freed_pages"]

MIB = 1024**2
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LOADING_MMAP_BYTES, LOADING_TRIM_BYTES = MIB, MIB // 8  # the second is glibc's own at first
SERVING_MMAP_BYTES = 32 * MIB  # where glibc's own growth ends: DEFAULT_MMAP_THRESHOLD_MAX
SERVING_TRIM_BYTES = 2 * SERVING_MMAP_BYTES  # as it keeps them


def keep_little() -> None:
    """Until `keep_for_steps`: blocks from 1 MiB on are mapped apart, and the end of the heap shrinks as it is freed."""
    _set_thresholds(LOADING_MMAP_BYTES, LOADING_TRIM_BYTES)


def keep_for_steps() -> None:
    """From now on the heap keeps what steps allocate and free again."""
    _set_thresholds(SERVING_MMAP_BYTES, SERVING_TRIM_BYTES)


def release_freed_pages() -> None:
    """Give pages that the C heap has freed back to the system, so that loading leaves nothing resident."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    libc = _glibc()
    if libc is not None and not _is_set_by_user():
        libc.mallopt(M_MMAP_THRESHOLD, mmap_bytes)
        libc.mallopt(M_TRIM_THRESHOLD, trim_bytes)


def _is_set_by_user() -> bool:
    names = ("MMAP_THRESHOLD", "TRIM_THRESHOLD")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(f"MALLOC_{name}_" in os.environ or f"glibc.malloc.{name.lower()}" in tunables for name in names)


def _glibc() -> ctypes.CDLL | None:
    """This process's C library, where it is glibc."""
    with contextlib.suppress(OSError, TypeError):  # Windows has no library of the process itself
        libc = ctypes.CDLL(None)
        if hasattr(libc, "gnu_get_libc_version"):
            return libc
    return None
