"""Reading a safetensors checkpoint, single or sharded: headers first (`header`), then tensors from the mapped file.

Pages that were read are given back at once, so that loading never holds the weights twice.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.folder import weight_files
from novainfer.kernels.weights.header import TensorEntry, read_header

__all__ = ["DTYPES", "Checkpoint"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Checkpoint:
    """The tensors of a model folder by name; opening it reads headers only.

    Raises `LoadError` when files are missing, truncated or no safetensors files.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.entries: dict[str, TensorEntry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self.identities: dict[Path, tuple[int, int]] = {}  # of each file: bytes, and nanoseconds of its last change
        for file in weight_files(model_dir):
            self.identities[file] = _identity(file)
            self.entries.update(read_header(file))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(entry.end - entry.begin for entry in self.entries.values())

    def check_unchanged(self) -> None:
        """Raise `LoadError` unless the files are those that were opened, by size and time of change."""
        for file, identity in self.identities.items():
            if _identity(file) != identity:
                raise LoadError(f"{file} has changed since the model was loaded")

    def read_into(self, name: str, out: Tensor) -> None:
        """Copy a tensor into `out` (same shape; converted to its dtype), and let its pages go."""
        entry = self.entries[name]
        mapped = self._map(entry.file)
        if entry.end > entry.begin:
            source = torch.frombuffer(
                mapped, dtype=DTYPES[entry.dtype], count=math.prod(entry.shape), offset=entry.begin
            )
            out.copy_(source.view(entry.shape))
            del source
            if hasattr(mapped, "madvise"):
                page = mmap.PAGESIZE
                begin = entry.begin // page * page
                mapped.madvise(mmap.MADV_DONTNEED, begin, entry.end - begin)

    def close(self) -> None:
        """Unmap the files."""
        while self._maps:
            self._maps.popitem()[1].close()

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                # A private map: torch wants writable memory, and nothing is ever written to it.
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def _identity(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise LoadError(f"{file} cannot be read: {error.strerror}") from None
    return status.st_size, status.st_mtime_ns
