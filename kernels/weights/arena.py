"""One copy of the packed weights for several processes: a file in memory (memfd) that the first one fills.

The process that starts the others makes the file (`os.memfd_create("novainfer-weights", os.MFD_ALLOW_SEALING)`) and has
them inherit it. The first to load packs its weights into it; the others map it read-only and pack nothing. A process
never waits for another one: where the file is being filled, or was filled from other files, with another dtype or by
other kernels, it loads a copy of its own. One that dies half way leaves a file that the next may fill anew.

The file: magic, the length of the table (0 until everything is in place), the table as JSON, and from 16 MiB on the
tensors; what lies between is never written, and takes no memory. Both the file's offsets and the address where it is
mapped are multiples of the huge page, so that a stream over the weights is as fast as over private memory
(Qwen2.5-0.5B in bf16, decoding one row, interleaved with a runner that has its own copy: 0.95 to 0.99 of its time;
mapping took 0.2 to 0.7 s where packing took 1.5 to 7 s).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import mmap
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from novainfer.kernels.memory import HUGE_PAGE_BYTES, copy_alone, use_huge_pages

if sys.platform != "win32":
    import fcntl

__all__ = ["Arena", "fingerprint_of"]

MAGIC = b"NOVAWGT1"
DATA_BEGIN = 8 * HUGE_PAGE_BYTES  # what is before holds the table: 60 bytes a tensor, of experts some ten thousands
ALIGNMENT = 4096
BACKGROUND_BYTES_MIN = 64 << 20  # 0.1 to 0.3 s
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # Linux on x86-64 and arm64; Python's mmap has no address to give
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 1033, 2, 4, 16  # Linux; the last one since 5.1


def fingerprint_of(facts: Any) -> str:
    """A hash of everything that decides what the bytes of the weights are (plain data)."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one tensor lies."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class Arena:
    """The weights in shared memory: filled already (`is_filled`), or to be filled by `put` and `finish`.

    Tensors that it gives keep the memory mapped. They must not be written to.
    """

    is_mapped = True

    def __init__(self, fd: int, size: int, fingerprint: str, places: dict[str, _Place] | None) -> None:
        self.is_filled = places is not None
        self._fd = fd
        self._fingerprint = fingerprint
        self._places: dict[str, _Place] = places or {}
        self._end = DATA_BEGIN
        self._map = _Map(fd, size, is_writable=not self.is_filled)

    @classmethod
    def open(cls, fd: int, fingerprint: str, num_bytes_max: int) -> Arena | None:
        """The arena behind `fd`, or None where there is none for weights of this fingerprint.

        It holds `num_bytes_max` at most, when this process is the one to fill it.
        """
        if sys.platform != "linux":
            return None
        try:
            if os.fstat(fd).st_size and os.pread(fd, len(MAGIC), 0) != MAGIC:
                return None  # something else: it shall not be overwritten
            table = _read_table(fd)
            if table is None and _lock(fd):
                table = _read_table(fd)  # it may have been finished since
                if table is None:
                    return cls._to_be_filled(fd, fingerprint, num_bytes_max)
                _unlock(fd)
            if table is None or table["fingerprint"] != fingerprint:
                return None
            places = {name: _Place(offset, dtype, tuple(shape)) for name, offset, dtype, shape in table["places"]}
            return cls(fd, os.fstat(fd).st_size, fingerprint, places)
        except (OSError, ValueError, KeyError, TypeError):  # no such file, or not one of ours
            return None

    @classmethod
    def _to_be_filled(cls, fd: int, fingerprint: str, num_bytes_max: int) -> Arena:
        try:
            os.ftruncate(fd, 0)  # of a process that died over it
            os.pwrite(fd, MAGIC + bytes(8), 0)
            os.ftruncate(fd, DATA_BEGIN + _whole_pages(num_bytes_max))
            return cls(fd, os.fstat(fd).st_size, fingerprint, None)
        except BaseException:
            _unlock(fd)
            raise

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of the tensor in shared memory; raises MemoryError when the arena is full."""
        assert not self.is_filled
        assert name not in self._places
        place = _Place(self._end, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        end = self._end + tensor.nbytes
        if end > self._map.size:
            raise MemoryError(f"the shared memory for weights ({self._map.size} bytes) is too small")
        shared = self._at(place)
        copy_alone(tensor, shared)
        self._places[name] = place
        self._end = -(-end // ALIGNMENT) * ALIGNMENT
        return shared

    def clear(self) -> None:
        """Begin anew; nothing that was put here is used any more."""
        assert not self.is_filled
        self._places.clear()
        self._end = DATA_BEGIN

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, if there is one."""
        place = self._places.get(name)
        return None if place is None else self._at(place)

    def finish(self) -> None:
        """Everything is in place: from now on other processes may map it, and none can write to it."""
        table = json.dumps(
            {
                "fingerprint": self._fingerprint,
                "places": [[name, p.offset, p.dtype, p.shape] for name, p in self._places.items()],
            }
        ).encode()
        if len(table) > DATA_BEGIN - 16:
            raise MemoryError("the table of the shared weights is too long")
        self._map.protect()
        os.pwrite(self._fd, table, 16)
        os.pwrite(self._fd, len(table).to_bytes(8, "little"), 8)
        self.is_filled = True
        with contextlib.suppress(OSError):  # a file that cannot be sealed, or an older system
            os.ftruncate(self._fd, DATA_BEGIN + _whole_pages(self._end - DATA_BEGIN))
            fcntl.fcntl(self._fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE)
        _unlock(self._fd)
        self._use_huge_pages()

    def _use_huge_pages(self) -> None:
        """As for private memory; but most systems give huge pages to shared memory only when they are asked to move
        it, which takes them seconds a GiB: until then the weights are read from small ones.
        """
        pages = (self._map.address + DATA_BEGIN, self._end - DATA_BEGIN)
        if pages[1] < BACKGROUND_BYTES_MIN:
            use_huge_pages(*pages)
        else:
            threading.Thread(target=use_huge_pages, args=pages, name="novainfer-huge-pages", daemon=True).start()

    def abandon(self) -> None:
        """It will not be finished: the next process may fill it."""
        if not self.is_filled:
            _unlock(self._fd)

    def _at(self, place: _Place) -> Tensor:
        dtype: torch.dtype = getattr(torch, place.dtype)
        count = math.prod(place.shape)
        if place.offset < DATA_BEGIN or place.offset + count * dtype.itemsize > self._map.size:
            raise ValueError("a tensor of the shared weights lies outside of them")
        return torch.frombuffer(self._map.bytes, dtype=dtype, count=count, offset=place.offset).view(place.shape)


class _Map:
    """The file's pages at an address that is a multiple of the huge page, until nothing refers to them."""

    def __init__(self, fd: int, size: int, *, is_writable: bool) -> None:
        self.size = size
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        reserved = size + HUGE_PAGE_BYTES
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        begin = _address(libc.mmap(None, reserved, 0, anonymous, -1, 0))
        self.address = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        try:
            _address(libc.mmap(self.address, size, protection, mmap.MAP_SHARED | MAP_FIXED, fd, 0))
        except OSError:
            libc.munmap(begin, reserved)
            raise
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        libc.madvise(self.address, size, getattr(mmap, "MADV_HUGEPAGE", 14))
        self._libc = libc
        # torch refuses what is not writable, which a ctypes array is for it. Tensors hold the array, and it the pages.
        self.bytes: Any = (ctypes.c_char * size).from_address(self.address)
        weakref.finalize(self.bytes, libc.munmap, begin, reserved)

    def protect(self) -> None:
        """From now on a write ends the process, rather than change what others compute with."""
        self._libc.mprotect(self.address, self.size, mmap.PROT_READ)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _address(result: int | None) -> int:
    if result is None or result == 2**64 - 1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _read_table(fd: int) -> Any:
    """The table of a finished arena; None when it is not finished."""
    head = os.pread(fd, 16, 0)
    length = int.from_bytes(head[8:], "little")
    if len(head) < 16 or length == 0:
        return None
    return json.loads(os.pread(fd, length, 16))


_filled_here: set[int] = set()  # inodes: the lock below tells processes apart, not those of one process


def _lock(fd: int) -> bool:
    """Whether the caller is the one that fills it. The lock goes with the process, however that ends."""
    inode = os.fstat(fd).st_ino
    if inode in _filled_here:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    _filled_here.add(inode)
    return True


def _unlock(fd: int) -> None:
    _filled_here.discard(os.fstat(fd).st_ino)
    fcntl.lockf(fd, fcntl.LOCK_UN)
