"""How much memory a device has left, and memory that costs nothing until it is touched."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import re
import sys
import weakref
from pathlib import Path

import torch
from torch import Tensor

__all__ = [
    "copy_alone",
    "free_bytes",
    "in_words",
    "is_out_of_memory",
    "lazy_zeros",
    "page_locked_zeros",
    "release_library_pages",
    "total_bytes",
    "use_huge_pages",
]

CGROUP = Path("/sys/fs/cgroup")
MIB, GIB = 1024**2, 1024**3
HUGE_PAGE_BYTES = 2 * MIB
# Of RuntimeErrors: torch's CPU allocator; what C++ threw through torch; cuBLAS and cuDNN; an asynchronous CUDA call;
# oneDNN, which takes scratch memory as it computes (bf16 on a CPU without BF16), and then needs nothing else.
OUT_OF_MEMORY_TEXTS = (
    "allocate memory",
    "bad_alloc",
    "STATUS_ALLOC_FAILED",
    "when calling `cublasCreate",  # CUBLAS_STATUS_NOT_INITIALIZED: its own memory found no room
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",  # as a kernel is loaded or launched
    "could not execute a primitive",
)
MADV_COLLAPSE = 25  # Linux 6.1; Python 3.11 has no name for it


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device (on the CPU: without swapping, within the cgroup).

    On CUDA what torch keeps for later, and nothing uses, goes back to the driver first: it would count as taken.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    candidates = [free for free in (_meminfo_available(), _cgroup_available()) if free is not None]
    if candidates:
        return min(candidates)
    # macOS has neither file; half of the physical memory is a cautious guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def total_bytes() -> int:
    """All memory of this machine that processes here may have: what is installed, within the limit of the cgroup."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_limit()
    return found if limit is None else min(found, limit)


def in_words(num_bytes: int) -> str:
    """So many bytes for people: as GiB, or as MiB where there is less than one."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _cgroup_available() -> int | None:
    """What the cgroup (v2) of a container still grants; its reclaimable file cache counts as free."""
    if (limit := _cgroup_limit()) is None:
        return None
    try:
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def _cgroup_limit() -> int | None:
    """What the cgroup (v2) of a container grants in all; None where it says nothing of it."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit)
    except (OSError, ValueError):
        return None


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on the CPU its pages become resident when they are first written, in huge pages.

    Raises MemoryError (CPU) or torch.OutOfMemoryError (CUDA) when there is no room.
    """
    if device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = max(1, math.prod(shape) * dtype.itemsize)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be mapped: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor holds the only reference to the map, which is unmapped with it.
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def copy_alone(source: Tensor, out: Tensor) -> None:
    """Copy `source` into `out` (same shape): by one thread where no number changes.

    torch's threads wait for each other, and a busy neighbour has one of them wait: tensors of 0.8 MB on two cores with
    ten busy threads took 10 ms each by torch, and 1.6 ms so.
    """
    is_copied = source.dtype == out.dtype and source.is_contiguous() and out.is_contiguous()
    if is_copied and source.device.type == out.device.type == "cpu":
        ctypes.memmove(out.data_ptr(), source.data_ptr(), out.nbytes)
    else:
        out.copy_(source)


def page_locked_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in the host's memory, which CUDA copies from and to beside the host; all of it is resident.

    Of exactly this size: torch's allocator of such memory rounds up to a power of two. Raises MemoryError when there is
    no room, or the system locks no more. It must outlive the copies that were asked for.
    """
    tensor = lazy_zeros(shape, dtype, torch.device("cpu"))
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if status != 0:
        raise MemoryError(f"{tensor.nbytes} bytes cannot be page-locked: CUDA error {status}")
    # Before the memory goes; at the end of the process it goes by itself, and CUDA may have gone before.
    weakref.finalize(tensor, cudart.cudaHostUnregister, tensor.data_ptr()).atexit = False
    return tensor


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Move memory that is already written onto huge pages where the system can; nothing happens where it
    cannot.

    A matrix product at batch 1 reads its weight once, and spends a quarter of that on address translation
    with 4 KB pages (bf16 [9728, 896], one thread: 615 against 465 µs).
    """
    begin = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - begin
    if length <= 0 or sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for advice in (getattr(mmap, "MADV_HUGEPAGE", 14), MADV_COLLAPSE):
            madvise(begin, length, advice)  # an older system says EINVAL, a full one EAGAIN: both are well


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator said no: Python's, the system's, CUDA's, or one of torch's (that its text tells)."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS)


def release_library_pages() -> None:
    """Let go of the pages of libraries that this process has touched so far: what is used again comes back by itself.

    They are clean pages of files, mostly of torch's libraries, that imports and self-tests ran or read once: of 107 MB
    of code 84 stay away for good, and those that come back take a millisecond of one step. Pages that somebody has
    written to (a debugger's breakpoints, relocated data) exist nowhere else: a mapping that has any, in memory or
    swapped out, is left alone.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for begin, end in _clean_mappings(Path("/proc/self/smaps").read_text(errors="replace")):
            madvise(begin, end - begin, mmap.MADV_DONTNEED)


def _clean_mappings(smaps: str) -> list[tuple[int, int]]:
    """First address and end of each private mapping of a file that holds code, if it is not and was never written."""
    mapping = r"^([0-9a-f]+)-([0-9a-f]+) (r-[x-]p) \S+ (\S+ (?!0 )\d+) .*\n((?:[A-Z]\w+: .*\n)+)"
    found = re.findall(mapping, smaps, re.MULTILINE)
    with_code = {file for _, _, access, file, _ in found if access == "r-xp"}
    return [
        (int(begin, 16), int(end, 16))
        for begin, end, _, file, facts in found
        if file in with_code  # not weights, which steps read
        and all(re.search(rf"^{kind}: +0 kB$", facts, re.MULTILINE) for kind in ("Anonymous", "Swap"))
    ]
