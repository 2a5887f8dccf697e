"""What is known of a checkpoint's weights before any is read: where they lie, and in what form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd
from pathlib import Path
from typing import NamedTuple

__all__ = ["FLOATS", "Entry", "Form", "GroupedEntry", "TensorEntry", "common_form"]

FLOATS = ("float32", "bfloat16", "float16")


class Form(NamedTuple):
    """What codes look like, known before they are read (`kernels.ops.grouped.GroupedForm`)."""

    bits: int  # 4 or 8
    group_size: int  # input features that share a scale
    zero: int | None  # the code that stands for 0 everywhere; None: each group has a shift


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: absolute byte offsets `begin`..`end` in `file`."""

    file: Path
    dtype: str  # as torch calls it, or a type of GGML's
    shape: tuple[int, ...]
    begin: int
    end: int
    interleaved_heads: int = 0  # so many heads whose halves llama.cpp has interleaved, row by row; 0: none


@dataclass(frozen=True, slots=True)
class GroupedEntry:
    """A weight [N, K] in codes, and the tensors that hold it, by what they are for."""

    name: str

    file: Path
    dtype: str  # in words for people
    shape: tuple[int, ...]
    form: Form
    layout: str  # by which `kernels.weights.unpack` reads it
    parts: Mapping[str, TensorEntry]


Entry = TensorEntry | GroupedEntry


def common_form(forms: Iterable[Form]) -> Form:
    """The one form that weights of all these forms can be brought into exactly: wider codes, smaller groups."""
    found = list(forms)
    bits = max(form.bits for form in found)
    zeros = {0 if bits == 8 and form.zero is not None else form.zero for form in found}
    return Form(bits, reduce(gcd, (form.group_size for form in found)), zeros.pop() if len(zeros) == 1 else None)
