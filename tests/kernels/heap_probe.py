"""What the C library's heap does with a large block."""

from __future__ import annotations

import ctypes


class HeapInfo(ctypes.Structure):
    """What mallinfo2 (man 3) tells."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def is_mapped_apart(mib: int = 24) -> int:
    """1 if the heap maps such a block apart, though one of 28 MiB was freed, by which the threshold would grow."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.mallinfo2.restype = [ctypes.c_void_p], HeapInfo
    libc.free(libc.malloc(28 << 20))
    libc.malloc_trim(0)  # what the heap has at its end would do
    before = libc.mallinfo2().hblks
    block = libc.malloc(mib << 20)
    after = libc.mallinfo2().hblks
    libc.free(block)
    return int(after - before)
