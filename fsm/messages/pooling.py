"""How the hidden states of a prompt become one vector: the rows that are taken, and what is made of their sum.

A device gives sums of rows (`StepDone.pooled`) in doubles; what is left to do is a thousand operations, on the loop.
"""

from __future__ import annotations

import math
import sys
from array import array
from operator import add
from typing import Literal

import msgspec

PoolingKind = Literal["last", "mean"]
KINDS: tuple[PoolingKind, ...] = ("last", "mean")


class Pooling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The vector of a prompt: the hidden state of its `last` token, or the `mean` of those of all its tokens.

    Hidden states are those behind the last norm. The first `dimensions` numbers are kept (None: all of them), and
    with `normalize` they are divided by their length, so that the vector has length 1.
    """

    kind: PoolingKind = "last"
    dimensions: int | None = None
    normalize: bool = True


class ModelPooling(msgspec.Struct, frozen=True, kw_only=True):
    """How a model wants its vectors to be made, where a request says nothing; `refusal` says why it cannot be done."""

    kind: PoolingKind = "last"
    normalize: bool = True
    refusal: str = ""


def added(total: bytes, more: bytes) -> bytes:
    """The sum of two vectors of doubles; `total` may be empty, which is 0."""
    if not total:
        return more
    return _bytes(array("d", map(add, _numbers("d", total), _numbers("d", more))))


def vector(pooling: Pooling, total: bytes, num_rows: int) -> bytes | None:
    """Float32, little-endian, of a sum of `num_rows` hidden states in doubles; None where it holds no number.

    A vector of zeros has no direction, and stays what it is.
    """
    numbers = _numbers("d", total)[: pooling.dimensions]
    length = math.hypot(*numbers)
    if not math.isfinite(length):
        return None
    divisor = (length or 1.0) if pooling.normalize else float(num_rows)
    return _bytes(array("f", [number / divisor for number in numbers]))


def floats_of(data: bytes) -> list[float]:
    """The numbers of a vector."""
    return _numbers("f", data).tolist()


def _numbers(kind: Literal["d", "f"], data: bytes) -> array[float]:
    numbers = array(kind, data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _bytes(numbers: array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
