"""From the codes that a checkpoint holds to `GroupedWeight`: some rows of a weight at a time, and every value exactly.

Each function reads one layout (`GroupedEntry.layout`). What the tensors say is compared with what the config has
promised: zero points that differ where it says that they are all in the middle, features that are not in order of their
groups, are refused and never computed with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from novainfer.kernels.errors import LoadError
from novainfer.kernels.ops.grouped import GroupedForm, GroupedWeight
from novainfer.kernels.weights.entries import Form, GroupedEntry, TensorEntry
from novainfer.kernels.weights.ggml import BLOCKS

__all__ = ["as_form", "unpacked"]

View = Callable[[TensorEntry], Tensor]
"""The tensor of an entry as it lies in the file, not to be written to."""

# In which four bits of a word, from the lowest on, output feature 0, 1, ... is.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpacked(entry: GroupedEntry, view: View, first: int, last: int) -> GroupedWeight:
    """Rows `first` to `last - 1` of a weight; raises `LoadError` for what its config rules out, or is no number."""
    weight = LAYOUTS.get(entry.layout, _ggml)(entry, view, first, last)
    for numbers in (weight.scale, weight.shift):
        if numbers is not None and not bool(numbers.isfinite().all()):
            raise LoadError(f"{entry.file}: {_module(entry)} is damaged: a scale of its codes is not a finite number")
    return weight


def as_form(weight: GroupedWeight, form: GroupedForm) -> GroupedWeight:
    """The same values in a form of at least as many bits and groups that divide its own (`entries.common_form`)."""
    codes, shift = weight.codes, weight.shift
    own = weight.form
    if form.bits > own.bits and own.zero is not None:
        codes, shift = codes - own.zero, None
    times = own.group_size // form.group_size
    scale = weight.scale.repeat_interleave(times, dim=1)
    if shift is not None:
        shift = shift.repeat_interleave(times, dim=1)
    elif form.zero is None:
        shift = torch.zeros_like(scale)
    return GroupedWeight(form.bits, form.group_size, codes, scale, shift)


def _gptq(entry: GroupedEntry, view: View, first: int, last: int) -> GroupedWeight:
    form, middle = entry.form, 1 << entry.form.bits - 1
    if "g_idx" in entry.parts:
        order = torch.arange(entry.shape[1]) // form.group_size
        if not torch.equal(view(entry.parts["g_idx"]).long(), order):
            raise LoadError(
                f"{entry.file}: features of {_module(entry)} are not in the order of their groups (g_idx, desc_act), "
                "which is not supported: only groups of neighbours are"
            )
    codes = _codes(view(entry.parts["qweight"])[:, first:last].T, form.bits)
    scale = view(entry.parts["scales"])[:, first:last].T.float()
    zeros = _codes(view(entry.parts["qzeros"]), form.bits)[:, first:last].T
    if entry.layout == "gptq":
        zeros = zeros + 1 & (1 << form.bits) - 1
    if form.zero is not None and not bool((zeros == middle).all()):
        raise LoadError(
            f"{entry.file}: {_module(entry)}.qzeros are not all {middle}, though quantization_config.sym says so "
            f"(checkpoint_format {entry.layout!r})"
        )
    if form.bits == 8:
        codes, zeros = codes - 128, zeros.int() - 128
    return _weight(form, codes, scale, zeros)


def _awq(entry: GroupedEntry, view: View, first: int, last: int) -> GroupedWeight:
    def ordered(words: Tensor) -> Tensor:
        """int32 [n, N / 8] -> [last - first, n]."""
        taken = _codes(words[:, first // 8 : -(-last // 8)], 4).view(len(words), -1, 8)
        return taken[:, :, AWQ_ORDER].flatten(1)[:, first % 8 :][:, : last - first].T

    codes = ordered(view(entry.parts["qweight"]))
    scale = view(entry.parts["scales"])[:, first:last].T.float()
    if entry.form.zero is not None:
        return _weight(entry.form, codes, scale, torch.full_like(codes, entry.form.zero)[:, : scale.shape[1]])
    return _weight(entry.form, codes, scale, ordered(view(entry.parts["qzeros"])))


def _compressed(entry: GroupedEntry, view: View, first: int, last: int) -> GroupedWeight:
    form, middle = entry.form, 1 << entry.form.bits - 1
    is_packed = entry.layout == "packed"
    if is_packed:
        shape = view(entry.parts["weight_shape"]).tolist()
        if shape != list(entry.shape):
            raise LoadError(f"{entry.file}: {_module(entry)}.weight_shape says {shape}, not {list(entry.shape)}")
        codes = _codes(view(entry.parts["weight_packed"])[first:last], form.bits).int() - middle
    else:
        codes = view(entry.parts["weight"])[first:last].int()
        if form.bits == 4 and not bool(((codes >= -8) & (codes <= 7)).all()):
            raise LoadError(f"{entry.file}: {_module(entry)}.weight holds codes that have more than 4 bits")
    groups = (last - first, entry.shape[1] // form.group_size)

    def by_row(tensor: Tensor) -> Tensor:
        return tensor.reshape(1, 1).expand(groups) if tensor.numel() == 1 else tensor[first:last]

    scale = by_row(view(entry.parts["weight_scale"])).float()
    zeros = torch.zeros(groups, dtype=torch.int32)
    if "weight_zero_point" in entry.parts:
        points = view(entry.parts["weight_zero_point"])
        if is_packed and points.dtype == torch.int32:
            zeros = _codes(points.T, form.bits)[:, first:last].T.int() - middle
        else:
            zeros = by_row(points).int()
    if form.bits == 4:
        codes, zeros = codes + 8, zeros + 8
    return _weight(form, codes, scale, zeros)


def _ggml(entry: GroupedEntry, view: View, first: int, last: int) -> GroupedWeight:
    stored = entry.parts["weight"]
    rows = view(stored)
    taken = rows[first:last] if not stored.interleaved_heads else rows[rows_of(stored, first, last)]
    codes, scale, shift = BLOCKS[entry.layout](taken)
    if entry.form.zero is not None and entry.form.bits == 4:
        shift = -entry.form.zero * scale
    return GroupedWeight(entry.form.bits, entry.form.group_size, codes, scale, shift)


def rows_of(entry: TensorEntry, first: int, last: int) -> Tensor:
    """Where rows of a weight lie whose heads llama.cpp has interleaved: row 2 i + h of a head is row i of half h."""
    size = entry.shape[0] // entry.interleaved_heads
    rows = torch.arange(first, last)
    within = rows % size
    return rows - within + within % (size // 2) * 2 + within // (size // 2)


LAYOUTS: dict[str, Callable[[GroupedEntry, View, int, int], GroupedWeight]] = {
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "awq": _awq,
    "packed": _compressed,
    "integers": _compressed,
}


def _weight(form: Form, codes: Tensor, scale: Tensor, zeros: Tensor) -> GroupedWeight:
    """Where zero points are not all 0, as shifts: whole numbers times scales of 16 bits are exact in fp32."""
    shift = None if form.zero == 0 else -zeros.float() * scale
    return GroupedWeight(form.bits, form.group_size, codes.to(torch.int8).contiguous(), scale.contiguous(), shift)


def _codes(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits], the lowest bits of a word first."""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), dim=2).flatten(1)


def _module(entry: GroupedEntry) -> str:
    return entry.name.removesuffix(".weight")
