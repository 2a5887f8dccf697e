"""Reading a safetensors checkpoint, single or sharded: headers first, then tensors from the mapped file.

The format (github.com/huggingface/safetensors#format): 8 bytes little-endian header length, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the data. The header is read here rather than by the safetensors
package because it lets every fault be named before a byte of weights is touched, and lets pages that were
read be given back at once, so that loading never holds the weights twice.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from novainfer.kernels.errors import LoadError
from novainfer.kernels.folder import weight_files

__all__ = ["Checkpoint", "TensorEntry"]

HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors package itself
LISTED_MAX = 5  # names spelled out in an error; the rest is counted

DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: absolute byte offsets `begin`..`end` in `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


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
            self.entries.update(_read_header(file))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(entry.end - entry.begin for entry in self.entries.values())

    def check(self, expected: dict[str, tuple[int, ...]], ignored: frozenset[str] = frozenset()) -> None:
        """Raise `LoadError` listing missing, unexpected and mis-shaped tensors, unless there are none.

        Names in `ignored` may be there or not (such as the head of a checkpoint with tied embeddings).
        """
        missing = [name for name in expected if name not in self.entries]
        unexpected = [
            name
            for name in self.entries
            if name not in expected and name not in ignored and not name.endswith("rotary_emb.inv_freq")
        ]
        misshaped = [
            f"{name} {list(self.entries[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in self.entries and self.entries[name].shape != shape
        ]
        faults = [
            f"{len(names)} {kind} ({', '.join(names[:LISTED_MAX])}{', …' if len(names) > LISTED_MAX else ''})"
            for kind, names in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", misshaped))
            if names
        ]
        if faults:
            raise LoadError(f"the weights in {self.model_dir} do not fit config.json: {'; '.join(faults)}")

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
            source = torch.frombuffer(mapped, dtype=entry.dtype, count=math.prod(entry.shape), offset=entry.begin)
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


def _read_header(file: Path) -> dict[str, TensorEntry]:
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
                raise LoadError(f"{file} is no safetensors file, or it was cut off: its header is not complete")
            header = json.loads(handle.read(length))
    except OSError as error:
        raise LoadError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise LoadError(f"{file} is corrupt: its header is not valid JSON") from None
    if not isinstance(header, dict):
        raise LoadError(f"{file} is corrupt: its header is no JSON object")
    header.pop("__metadata__", None)
    return {name: _entry(file, name, value, 8 + length, size) for name, value in header.items()}


def _entry(file: Path, name: str, value: Any, base: int, size: int) -> TensorEntry:
    try:
        dtype_name, shape = value["dtype"], tuple(int(n) for n in value["shape"])
        begin, end = (base + int(offset) for offset in value["data_offsets"])
    except (TypeError, KeyError, ValueError):
        raise LoadError(f"{file} is corrupt: the header entry of {name} is not complete") from None
    dtype = DTYPES.get(str(dtype_name))
    if dtype is None:
        raise LoadError(f"{file}: {name} has dtype {dtype_name}, but only {', '.join(DTYPES)} are supported")
    if end > size:
        raise LoadError(f"{file} was cut off: {name} should end at byte {end}, but the file has {size} bytes")
    if begin < base or min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise LoadError(f"{file} is corrupt: {name} {list(shape)} does not fit its byte range")
    return TensorEntry(file, dtype, shape, begin, end)
