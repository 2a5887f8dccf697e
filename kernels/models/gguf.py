"""GGUF files, read without torch: what they say of a model, and where its tensors lie. In tenths of a second.

The format (github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: magic, version, the numbers of tensors
and of keys; keys with typed values; for each tensor name, sizes (the innermost first), type and offset; and the data.
It is read here for the reason that safetensors headers are: each fault is named before a byte of weights is touched.

A large model comes in parts, `NAME-00001-of-00003.gguf` and so on, as llama.cpp's gguf-split makes them: the keys are
in the first one, and each holds some of the tensors.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from novainfer.kernels.errors import LoadError

__all__ = ["GGUF", "Gguf", "GgufTensor", "is_gguf", "read_gguf"]

GGUF = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had other widths, and was written for some weeks of 2023
DIMENSIONS_MAX = 4  # of GGML's tensors
ALIGNMENT = 32  # of the data, where general.alignment says nothing
SPLIT_COUNT, SPLIT_NUMBER, SPLIT_TENSORS = "split.count", "split.no", "split.tensors.count"
SPLIT_NAME = "-{:05}-of-{:05}.gguf"  # which of how many, from 1 on
READ_BYTES = 1 << 22  # of a header at once: one with a tokenizer has some MB

# By number: the name, and of a block the elements and the bytes. Those of one element are no blocks.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
}  # fmt: skip
# Those that are not read, by name: a number tells nothing.
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

STRING, ARRAY = 8, 9
NUMBERS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: in `file`, absolute byte offsets `begin`..`end`; its shape has the innermost size last."""

    type: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """One file, or all parts of one: `path` is the first."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, GgufTensor]
    files: tuple[Path, ...]

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise LoadError(f"{self.path}: {key} must be a whole number of at least {minimum}, not {value!r:.100}")
        return value

    def number(self, key: str, default: float | None = None, minimum: float = 0.0) -> float:
        """A finite number above 0 and not below `minimum`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise LoadError(f"{self.path}: {key} must be a number above 0, not {value!r:.100}")
        if value < minimum:
            raise LoadError(f"{self.path}: {key} must be at least {minimum:g}, not {value!r:.100}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise LoadError(f"{self.path}: {key} must be a string, not {value!r:.100}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise LoadError(f"{self.path}: {key} must be true or false, not {value!r:.100}")
        return value

    def items(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """An array of values of this kind."""
        values = self._get(key, default)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise LoadError(f"{self.path}: {key} must be an array of {kind.__name__}, not {values!r:.100}")
        return values

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise LoadError(f"{self.path}: {key} is missing")
        return value


def is_gguf(path: Path) -> bool:
    """Whether this is a file of that name, and no folder."""
    return path.suffix == GGUF and os.path.isfile(path)  # Path's own raises for a name that no file can have


def read_gguf(path: Path) -> Gguf:
    """What a file says of itself; of a model in parts `path` is the first, and the others lie beside it.

    Raises `LoadError` when one is cut short, damaged, missing, or of a type that is not read.
    """
    first = _read_part(path)
    count = first.integer(SPLIT_COUNT, 1, minimum=0)
    if count <= 1:
        return first
    if (number := first.integer(SPLIT_NUMBER, minimum=0)) != 0:
        raise LoadError(f"{path} is part {number + 1} of {count} ({SPLIT_COUNT}): give the first one")
    ending = SPLIT_NAME.format(1, count)
    if not path.name.endswith(ending):
        raise LoadError(f"{path} is the first of {count} parts ({SPLIT_COUNT}): its name must end with {ending}")
    tensors, files = dict(first.tensors), [path]
    for at in range(1, count):
        file = path.with_name(path.name.removesuffix(ending) + SPLIT_NAME.format(at + 1, count))
        part = _read_part(file)
        found = part.integer(SPLIT_NUMBER, minimum=0), part.integer(SPLIT_COUNT)
        if found != (at, count):
            raise LoadError(f"{file}: {SPLIT_NUMBER} and {SPLIT_COUNT} must be {at} and {count}, not {found}")
        if twice := tensors.keys() & part.tensors.keys():
            raise LoadError(f"{file}: tensor {min(twice)} is in a part before it, too")
        tensors |= part.tensors
        files.append(file)
    if len(tensors) != (expected := first.integer(SPLIT_TENSORS, len(tensors))):
        raise LoadError(f"{path}: {SPLIT_TENSORS} is {expected}, but the parts hold {len(tensors)}")
    return Gguf(path, first.values, tensors, tuple(files))


def _read_part(path: Path) -> Gguf:
    try:
        status = path.stat()
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None
    return _read(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)  # a start asks for config, tokenizer and tensors one after the other, of all parts
def _read(path: Path, num_bytes: int, changed_ns: int) -> Gguf:
    try:
        with path.open("rb") as file:
            return _parse(path, _Header(path, file, num_bytes))
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}") from None


def _parse(path: Path, header: _Header) -> Gguf:
    if header.bytes(4) != MAGIC:
        raise LoadError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
    version = header.number(4)
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        what = "big-endian" if swapped else f"version {version}"
        raise LoadError(f"{path}: {what} is not supported, only little-endian GGUF of version 2 or 3")
    num_tensors, num_keys = header.number(10), header.number(10)
    values: dict[str, Any] = {}
    for _ in range(header.fits(num_keys, 13, "keys")):
        key = header.string("a key")
        values[key] = header.value(header.number(4), key)
    infos = [header.tensor() for _ in range(header.fits(num_tensors, 24, "tensors"))]
    alignment = values.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & alignment - 1:
        raise LoadError(f"{path}: general.alignment must be a power of 2 from 8 on, not {alignment!r:.100}")
    base = -(-header.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, type_name, shape, num_bytes, offset in infos:
        begin, end = base + offset, base + offset + num_bytes
        if name in tensors or offset % alignment:
            raise LoadError(
                f"{path} is corrupt: tensor {name} is there twice, or does not begin at a multiple of {alignment}"
            )
        if end > header.size:
            raise LoadError(
                f"{path} was cut off: {name} should end at byte {end}, but the file has {header.size} bytes"
            )
        tensors[name] = GgufTensor(type_name, shape, path, begin, end)
    return Gguf(path, values, tensors, (path,))


class _Header:
    """Reads on from one field to the next; every length is compared with what is left of the file."""

    def __init__(self, path: Path, file: Any, size: int) -> None:
        self.path = path
        self.size = size
        self.at = 0
        self._file = file
        self._data = b""
        self._begin = 0  # of `_data` in the file

    def bytes(self, count: int) -> bytes:
        """The next so many."""
        if count > self.size - self.at:
            raise LoadError(f"{self.path} was cut off: its header goes on behind byte {self.size}")
        begin = self.at - self._begin
        if begin + count > len(self._data):
            self._data = self._data[begin:] + self._file.read(max(count, READ_BYTES))
            self._begin, begin = self.at, 0
            if len(self._data) < count:
                raise LoadError(f"{self.path} was cut off while it was read")
        self.at += count
        return self._data[begin : begin + count]

    def number(self, number_type: int) -> Any:
        """A number of one of GGUF's types."""
        form = NUMBERS[number_type]
        return form.unpack(self.bytes(form.size))[0]

    def fits(self, count: int, bytes_min: int, what: str) -> int:
        """`count`, if so many of something can be in what is left."""
        if count * bytes_min > self.size - self.at:
            raise LoadError(f"{self.path} is corrupt, or was cut off: it cannot hold {count} {what}")
        return count

    def string(self, what: str) -> str:
        """Bytes behind their number, as UTF-8."""
        data = self.bytes(self.number(10))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise LoadError(f"{self.path} is corrupt: {what} is not UTF-8") from None

    def value(self, value_type: int, key: str) -> Any:
        """A value of a key; arrays hold numbers or strings."""
        if value_type == STRING:
            return self.string(key)
        if value_type in NUMBERS:
            return self.number(value_type)
        if value_type == ARRAY:
            item_type, count = self.number(4), self.number(10)
            if item_type == STRING:
                return [self.string(key) for _ in range(self.fits(count, 8, f"strings of {key}"))]
            if item_type in NUMBERS:
                form = NUMBERS[item_type]
                data = self.bytes(self.fits(count, form.size, f"numbers of {key}") * form.size)
                return [number for (number,) in form.iter_unpack(data)]
            value_type = item_type
        raise LoadError(f"{self.path} is corrupt: {key} has a value of type {value_type}, which GGUF does not know")

    def tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """Name, type, shape, bytes and offset of the next tensor."""
        name = self.string("the name of a tensor")
        if not name.isprintable():  # it is told to people, in one line
            raise LoadError(f"{self.path} is corrupt: {name!r:.100} is no name of a tensor")
        num_dimensions = self.number(4)
        if num_dimensions > DIMENSIONS_MAX:
            raise LoadError(f"{self.path} is corrupt: {name} has {num_dimensions} dimensions")
        shape = tuple(self.number(10) for _ in range(num_dimensions))[::-1]
        number, offset = self.number(4), self.number(10)
        if number not in TYPES:
            found = OTHER_TYPES.get(number, str(number))
            supported = ", ".join(type_name for type_name, _, _ in TYPES.values())
            raise LoadError(f"{self.path}: {name} is of type {found}, which is not supported, only {supported}")
        type_name, block, block_bytes = TYPES[number]
        count = math.prod(shape)
        if not count or not shape or shape[-1] % block:
            raise LoadError(
                f"{self.path} is corrupt: {name} {list(shape)} cannot be of type {type_name}, in blocks of {block}"
            )
        return name, type_name, shape, count // block * block_bytes, offset
