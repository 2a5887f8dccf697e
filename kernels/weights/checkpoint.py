"""Reading a checkpoint: headers first (`header`), then tensors, or codes and their scales, from the mapped files.

Pages that were read are given back at once, so that loading never holds the weights twice.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from novainfer.kernels.errors import LoadError
from novainfer.kernels.memory import copy_alone
from novainfer.kernels.models.folder import weight_files
from novainfer.kernels.ops.grouped import GroupedForm, GroupedWeight
from novainfer.kernels.ops.quantised import part_rows
from novainfer.kernels.weights.entries import GroupedEntry, TensorEntry, common_form
from novainfer.kernels.weights.header import read_entries
from novainfer.kernels.weights.unpack import as_form, rows_of, unpacked

__all__ = ["DTYPES", "Checkpoint"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WHOLE_DTYPES = {"int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64}


class Checkpoint:
    """The tensors of a model folder by name; opening it reads headers only.

    Raises `LoadError` when files are missing, truncated or no safetensors files.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._maps: dict[Path, mmap.mmap] = {}
        # Of each file: bytes, and nanoseconds of its last change.
        self.identities: dict[Path, tuple[int, int]] = {file: _identity(file) for file in weight_files(model_dir)}
        self.entries, scheme = read_entries(model_dir)
        types = sorted({entry.dtype for entry in self.entries.values() if isinstance(entry, GroupedEntry)})
        self.scheme = f"{'+'.join(types)} ({scheme})" if types else None  # what it is quantised by; None: it is not

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(part.end - part.begin for name in self.entries for part in self._parts(name))

    def check_unchanged(self) -> None:
        """Raise `LoadError` unless the files are those that were opened, by size and time of change."""
        for file, identity in self.identities.items():
            if _identity(file) != identity:
                raise LoadError(f"{file} has changed since the model was loaded")

    def form(self, names: Sequence[str]) -> GroupedForm | None:
        """The form in which weights of these names are one product; None where not all of them are in codes.

        Parts may differ: the form is one that holds them all exactly.
        """
        forms = [entry.form for name in names if isinstance(entry := self.entries[name], GroupedEntry)]
        return GroupedForm(*common_form(forms)) if len(forms) == len(names) else None

    def grouped(self, names: Sequence[str], form: GroupedForm, first: int, last: int) -> GroupedWeight:
        """Rows `first` to `last - 1` of these weights, one behind the other, in a form that `form` gave for them."""
        parts, begin = [], 0
        for name in names:
            entry = self.entries[name]
            assert isinstance(entry, GroupedEntry)
            rows = entry.shape[0]
            part = max(first - begin, 0), min(last - begin, rows)
            if part[0] < part[1]:
                parts.append(as_form(unpacked(entry, self._view, *part), form))
            begin += rows
        if len(parts) == 1:
            return parts[0]
        shifts = [part.shift for part in parts if part.shift is not None]
        return GroupedWeight(
            form.bits,
            form.group_size,
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat(shifts) if shifts else None,
        )

    def read_into(self, name: str, out: Tensor) -> None:
        """Copy a tensor into `out` (same shape; converted to its dtype, from codes too), and let its pages go."""
        entry = self.entries[name]
        if isinstance(entry, GroupedEntry):
            count = part_rows(entry.shape[1])
            for first in range(0, len(out), count):
                part = out[first : first + count]
                part.copy_(unpacked(entry, self._view, first, first + len(part)).widened())
        else:
            source = self._view(entry)
            copy_alone(source[rows_of(entry, 0, len(out))] if entry.interleaved_heads else source, out)
        self.release(name)

    def release(self, name: str) -> None:
        """Let the pages of a tensor go that has been read."""
        for part in self._parts(name):
            mapped = self._map(part.file)
            if hasattr(mapped, "madvise") and part.end > part.begin:
                begin = part.begin // mmap.PAGESIZE * mmap.PAGESIZE
                mapped.madvise(mmap.MADV_DONTNEED, begin, part.end - begin)

    def close(self) -> None:
        """Unmap the files."""
        while self._maps:
            self._maps.popitem()[1].close()

    def _parts(self, name: str) -> list[TensorEntry]:
        entry = self.entries[name]
        return list(entry.parts.values()) if isinstance(entry, GroupedEntry) else [entry]

    def _view(self, entry: TensorEntry) -> Tensor:
        """The tensor where it lies; of blocks, which no dtype of torch describes, the bytes of each row."""
        dtype = (DTYPES | WHOLE_DTYPES).get(entry.dtype, torch.uint8)
        count = (entry.end - entry.begin) // dtype.itemsize
        shape = entry.shape if math.prod(entry.shape) == count else (entry.shape[0], -1)
        if not count:
            return torch.empty(shape, dtype=dtype)
        mapped = self._map(entry.file)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.begin).view(shape)

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
