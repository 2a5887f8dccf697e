"""What of this process's memory is the KV cache: by its pages, whoever has the blocks on them.

Of a cache on huge pages a page is there as soon as one of its blocks was written, in each layer.
"""

from __future__ import annotations

import ctypes
import gc
import mmap

from torch import Tensor

from novainfer.kernels.models.decoder import Decoder

__all__ = ["cache_bytes", "resident_bytes"]


def cache_bytes() -> int:
    """Of all KV caches of this process that are in use."""
    # By type: to ask some modules' objects for their class calls code of theirs.
    decoders = [found for found in gc.get_objects() if issubclass(type(found), Decoder)]
    parts = [part for decoder in decoders if decoder.attention is not None for part in decoder.attention.parts]
    return sum(resident_bytes(part) for part in parts)


def resident_bytes(tensor: Tensor) -> int:
    """Bytes of the pages of a tensor that are in memory; all, where the system does not tell (man 2 mincore)."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + tensor.nbytes - begin
    is_there = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None or mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), is_there) != 0:
        return tensor.nbytes
    return min(sum(one & 1 for one in is_there) * mmap.PAGESIZE, tensor.nbytes)
