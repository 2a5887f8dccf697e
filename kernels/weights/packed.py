"""Packed weights that need not be packed again: found in shared memory, or in a file that an earlier start has kept.

A file is safetensors, one for each model, precision, dtype and library of kernels: `<fingerprint>.safetensors`. It is
written beside its name and moved there when it is whole, so that two starts at once do each other no harm. It holds
what those kernels read, and is of use to nobody else; it may be deleted at any time. Its header has checksums of the
tensors and one of itself: nothing that a disk has lost or mixed up is computed with.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from novainfer.kernels.errors import LoadError
from novainfer.kernels.memory import lazy_zeros
from novainfer.kernels.models.config import ModelConfig
from novainfer.kernels.ops.registry import Linear, SharedLinear
from novainfer.kernels.ops.selection import Selection
from novainfer.kernels.weights.arena import fingerprint_of
from novainfer.kernels.weights.checkpoint import Checkpoint
from novainfer.kernels.weights.entries import GroupedEntry
from novainfer.kernels.weights.header import tensor_shapes
from novainfer.kernels.weights.loader import LinearSpec, WeightSource, linear_kernel, linear_specs

__all__ = [
    "TENSORS_MAX",
    "DamagedFileError",
    "KeptWeights",
    "PackedFile",
    "PackedWeights",
    "Store",
    "checksum",
    "fingerprint",
    "key_of",
]

logger = logging.getLogger(__name__)

TENSORS_MAX = 4  # of a product: weight, scale, shift, bias
ALIGNMENT = 4096  # of what is large enough for pages of its own
HEADER_BYTES_MAX = 100 << 20  # as the format has it
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MIB = 1 << 20
CHECKS_MAX = 2  # tensors that are read and not checked yet: beside shared memory these take memory of their own
HASHED_BYTES_MAX = 2047  # hashlib lets go of the interpreter for more, and waits for it beside a tokenizer that loads
COLUMNS = 251  # of words of 8 bytes, whose sums are hashed: a prime, so that what lies pages away is in another one


class DamagedFileError(LoadError):
    """A file of packed weights is not what was written, or not what is needed."""


def fingerprint(config: ModelConfig, checkpoint: Checkpoint, kernels: Selection) -> str | None:
    """Of everything that decides what the packed bytes are; None where some kernel's layout is opaque."""
    if kernels.device.type != "cpu":
        return None
    layouts = []
    for spec in linear_specs(config):
        kernel = linear_kernel(spec, checkpoint, kernels)
        if not hasattr(kernel, "shared_layout"):
            return None
        layouts.append([spec.layer, spec.part, spec.expert, *spec.names, kernel.shared_layout()])
    facts: dict[str, Any] = {
        "files": [[str(file), *identity] for file, identity in checkpoint.identities.items()],
        "shapes": tensor_shapes(config),
        "dtype": str(kernels.dtype),
        "layouts": layouts,
        "codes": [[e.name, e.layout, *e.form] for e in checkpoint.entries.values() if isinstance(e, GroupedEntry)],
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    return fingerprint_of(facts)


def key_of(spec: LinearSpec, number: int) -> str:
    """The name of a product's `number`th tensor."""
    stem = f"{spec.layer}.{spec.part}" if spec.expert is None else f"{spec.layer}.{spec.part}.{spec.expert}"
    return f"{stem}.{number}"


class Store(Protocol):
    """Packed tensors by name."""

    is_mapped: bool  # what it gives takes no memory of this process's own

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, if there is one."""


class PackedWeights:
    """A source that packs nothing: all is in a store already."""

    def __init__(self, checkpoint: Checkpoint, kernels: Selection, store: Store) -> None:
        self.checkpoint = checkpoint
        self.kernels = kernels
        self.store = store
        self.is_mapped = store.is_mapped
        self.num_bytes = 0
        self.num_read = 0

    def tensor(self, name: str) -> Tensor:
        """A tensor that is kept as it is."""
        tensor = self.store.get(name)
        if tensor is None:
            raise DamagedFileError(f"the packed weights hold no {name}")
        self.num_bytes += tensor.nbytes
        self.num_read += 1
        return tensor

    def linear(self, spec: LinearSpec) -> Linear:
        """A product on the store's tensors."""
        kernel = linear_kernel(spec, self.checkpoint, self.kernels)
        found = [self.store.get(key_of(spec, number)) for number in range(TENSORS_MAX)]
        tensors = [tensor for tensor in found if tensor is not None]
        if not tensors:
            raise DamagedFileError(f"the packed weights hold no {key_of(spec, 0)}")
        linear: Linear = kernel.over(spec.out_features, spec.in_features, self.kernels.dtype, tensors)
        self.num_bytes += linear.weight_bytes
        self.num_read += len(spec.names)
        return linear


class KeptWeights:
    """What another source gives, and `tensors`: all of it by name, for a file."""

    def __init__(self, source: WeightSource) -> None:
        self.checkpoint = source.checkpoint
        self.kernels = source.kernels
        self.is_mapped = source.is_mapped
        self.tensors: dict[str, Tensor] = {}
        self._source = source

    @property
    def num_bytes(self) -> int:
        """Of the other one."""
        return self._source.num_bytes

    @property
    def num_read(self) -> int:
        """Of the other one."""
        return self._source.num_read

    def tensor(self, name: str) -> Tensor:
        """A tensor that is kept as it is."""
        tensor = self.tensors[name] = self._source.tensor(name)
        return tensor

    def linear(self, spec: LinearSpec) -> Linear:
        """The fused and packed product of a spec's projections."""
        packed = self._source.linear(spec)
        assert isinstance(packed, SharedLinear)
        self.tensors |= {key_of(spec, number): tensor for number, tensor in enumerate(packed.tensors)}
        return packed


class _Place(NamedTuple):
    """Where a tensor lies in a file, from its first byte to the one behind its last, and its checksum."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: str


class PackedFile:
    """One such file, open to be read; each tensor is read into memory of its own.

    What was read is compared with its checksum in a thread of its own, while the next tensor is read: nothing may be
    computed with before `check` has said that all of it is what was written.
    """

    is_mapped = False

    def __init__(self, path: Path, places: Mapping[str, _Place]) -> None:
        self.path = path
        self._places = places
        self._file = path.open("rb", buffering=0)
        self._checker = ThreadPoolExecutor(1, "novainfer-checksum")
        self._checks: deque[tuple[str, Future[str], str]] = deque()  # that are not done, and what they are to find

    @staticmethod
    def path_in(folder: Path, fingerprint: str) -> Path:
        """Where the file of this fingerprint lies, if it is there."""
        return folder / f"{fingerprint[:40]}.safetensors"

    @classmethod
    def open(cls, folder: Path, fingerprint: str) -> PackedFile | None:
        """The file of this fingerprint; None where there is none, or, with a warning, where it is damaged."""
        path = cls.path_in(folder, fingerprint)
        try:
            with path.open("rb") as file:
                places = _read_places(file.read(8), file, os.fstat(file.fileno()).st_size, fingerprint)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            cls.warn(path, error)
            return None
        return cls(path, places)

    @staticmethod
    def warn(path: Path, error: Exception) -> None:
        """Say that this file is of no use."""
        why = str(error)  # a record that somebody keeps would hold what was read, by way of the traceback
        logger.warning("%s is not read: %s; the weights are packed anew", path, why)

    def get(self, name: str) -> Tensor | None:
        """The tensor of this name, if there is one; it is not checked yet.

        Raises `DamagedFileError` when it cannot be read, or one before it is not what was written.
        """
        place = self._places.get(name)
        if place is None:
            return None
        dtype, shape, begin, end, expected = place
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        if len(self._checks) == CHECKS_MAX:
            self._await_check()
        tensor = lazy_zeros(shape, dtype, torch.device("cpu"))
        room = tensor.flatten().view(torch.uint8).numpy().data
        done = 0
        while done < end - begin:
            try:
                count = os.preadv(self._file.fileno(), [room[done:]], begin + done)
            except OSError as error:
                raise DamagedFileError(f"{name}: {error.strerror}") from None
            if count == 0:
                raise DamagedFileError("it has become shorter while it was read")
            done += count
        self._checks.append((name, self._checker.submit(checksum, tensor), expected))
        return tensor

    def check(self) -> None:
        """Wait for all comparisons; raises `DamagedFileError` when something that was read is not what was written."""
        while self._checks:
            self._await_check()

    def close(self) -> None:
        """Nothing is read any more."""
        self._checker.shutdown(cancel_futures=True)
        self._file.close()

    def _await_check(self) -> None:
        name, found, expected = self._checks.popleft()
        if found.result() != expected:
            raise DamagedFileError(f"{name} is not what was written")

    @classmethod
    def write(cls, folder: Path, fingerprint: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep these tensors for the next start; where that is not possible a warning says why, and nothing is kept."""
        path, began_s = cls.path_in(folder, fingerprint), time.monotonic()
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                header, places = _header(fingerprint, tensors)
                file.write(header)
                for name, begin in places.items():
                    file.seek(len(header) + begin)
                    if tensors[name].numel():
                        file.write(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
                size = file.tell()
                file.flush()
                os.fsync(file.fileno())  # else a machine that stops just now leaves zeros under the final name
            part.replace(path)
        except OSError as error:
            logger.warning("the packed weights are not kept in %s: %s", path, error)
            part.unlink(missing_ok=True)
            return
        logger.info("packed weights are kept in %s: %d MiB, %.1f s", path, size // MIB, time.monotonic() - began_s)


def checksum(tensor: Tensor) -> str:
    """Of a tensor's bytes, at the speed of memory: it tells those that are zero, stale or elsewhere, not a forger's."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy()
    hashed = hashlib.sha256()
    if len(data) > HASHED_BYTES_MAX:
        whole = len(data) // (8 * COLUMNS) * (8 * COLUMNS)
        hashed.update(data[:whole].view(np.int64).reshape(-1, COLUMNS).sum(0).data)
        data = data[whole:]
    hashed.update(data.data)
    return hashed.hexdigest()


def _header(fingerprint: str, tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where behind it each tensor lies."""
    checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
    metadata = {"format": "novainfer-packed", "fingerprint": fingerprint, "checksums": json.dumps(checksums)}
    fields: dict[str, Any] = {}
    places: dict[str, int] = {}
    end = 0
    for name, tensor in tensors.items():
        begin = -(-end // ALIGNMENT) * ALIGNMENT if tensor.nbytes >= ALIGNMENT else end
        begin = -(-begin // tensor.itemsize) * tensor.itemsize
        if begin > end:
            fields[f"gap.{end}"] = {"dtype": "U8", "shape": [begin - end], "data_offsets": [end, begin]}
        end = begin + tensor.nbytes
        places[name] = begin
        fields[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    fields["__metadata__"] = {**metadata, "header": _of_header(fields, metadata)}
    encoded = json.dumps(fields).encode()
    encoded += b" " * (-(len(encoded) + 8) % ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded, places


def _of_header(fields: dict[str, Any], metadata: dict[str, str]) -> str:
    """The checksum of a header, but for itself."""
    return fingerprint_of([fields, metadata])


def _read_places(head: bytes, file: Any, size: int, fingerprint: str) -> dict[str, _Place]:
    """Where each tensor lies; raises what a damaged file raises."""
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 0 < length <= min(HEADER_BYTES_MAX, size - 8):
        raise ValueError("its header is cut short")
    fields = json.loads(file.read(length))
    metadata = fields.pop("__metadata__")
    expected = metadata.pop("header", None)
    if metadata["fingerprint"] != fingerprint:
        raise ValueError("it is of other weights")
    if expected is None:
        raise ValueError("it is of an earlier version, without checksums")
    if expected != _of_header(fields, metadata):
        raise ValueError("its header is not what was written")
    checksums = json.loads(metadata["checksums"])
    places = {}
    for name, expected in checksums.items():
        field = fields[name]
        begin, end = (8 + length + offset for offset in field["data_offsets"])
        if end > size:
            raise ValueError(f"{name} does not lie in it")
        places[name] = _Place(DTYPES[field["dtype"]], tuple(field["shape"]), begin, end, expected)
    return places
