"""Proves products: with and without bias, of weights as they are, rounded here, and in groups of any form."""

from __future__ import annotations

from typing import Any

import torch

from novainfer.kernels.ops.grouped import GroupedWeight
from novainfer.kernels.ops.grouped_linear import ReferenceGroupedActivationsLinear, ReferenceGroupedLinear
from novainfer.kernels.ops.quantised import (
    PART_ROWS,
    ReferenceFp8ActivationsLinear,
    ReferenceFp8Linear,
    ReferenceInt8ActivationsLinear,
    ReferenceInt8Linear,
)
from novainfer.kernels.ops.reference import ReferenceLinear
from novainfer.kernels.ops.selftest.numbers import ROWS, differs, normal

__all__ = ["check_grouped_linear", "check_linear", "check_quantised_linear", "grouped_weight"]

LINEAR_SHAPES = ((64, 96), (160, 64), (33, 48))  # (N, K); those that the kernel refuses are left out
ORACLES: dict[tuple[str, bool], Any] = {
    (oracle.precision, oracle.rounds_activations): oracle
    for oracle in (
        ReferenceInt8Linear,
        ReferenceInt8ActivationsLinear,
        ReferenceFp8Linear,
        ReferenceFp8ActivationsLinear,
        ReferenceGroupedLinear,
        ReferenceGroupedActivationsLinear,
    )
}
# (bits, group size, shifts): what files hold (GGUF: 32 and 16, GPTQ and AWQ: 32 to 128), and a group of a whole row.
GROUPED_FORMS = ((4, 32, True), (4, 96, True), (4, 128, False), (8, 32, False), (8, 16, True), (8, 192, False))
GROUPED_SHAPES = ((64, 192), (33, 384))  # (N, K); of each form the first that its groups divide


def check_linear(linear: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Products with and without bias, rows that lie apart, gathered rows, and rows alone against rows together."""
    return _check_linear(linear, ReferenceLinear, dtype, device)


def check_quantised_linear(linear: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """The same against the reference's own weights of this precision; and a weight put in parts."""
    n, k = LINEAR_SHAPES[1]
    weight = normal((n, k), 9, dtype, device)
    in_parts = linear.empty(n, k, None, dtype, device)
    for first in range(0, n, PART_ROWS):
        in_parts.put(first, weight[first : first + PART_ROWS])
    x = normal((3, k), 10, dtype, device)
    if not torch.equal(in_parts(x), linear.pack(weight, None)(x)):
        return "a weight put in parts is not the weight put at once"
    return _check_linear(linear, ORACLES[linear.precision, linear.rounds_activations], dtype, device)


def check_grouped_linear(linear: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """The same as for rows that are rounded here, and weights as files hold them, in all forms it takes."""
    wrong = check_quantised_linear(linear, dtype, device)
    oracle = ORACLES[linear.precision, linear.rounds_activations]
    for bits, group_size, has_shift in GROUPED_FORMS:
        n, k = next((n, k) for n, k in GROUPED_SHAPES if k % group_size == 0)
        weight = grouped_weight(n, k, bits, group_size, has_shift=has_shift)
        if wrong is not None or linear.refuses_form(k, weight.form) is not None:
            continue
        bias = normal((n,), 1, dtype, device)
        packed, reference = (kind.pack_grouped(weight, bias, dtype, device) for kind in (linear, oracle))
        x = normal((max(ROWS), k), 3, dtype, device)
        together, ids = packed(x), torch.tensor([n - 1, 0, n // 2, 0], device=device)
        what = f"a weight of {bits} bits in groups of {group_size}"
        wrong = differs(what, together, reference(x))
        if wrong is None and linear.row_invariant and not torch.equal(packed(x[2:5]), together[2:5]):
            wrong = f"rows of {what} differ from the same rows in a larger batch"
        if wrong is None and not torch.equal(packed.rows(ids), reference.rows(ids)):
            wrong = f"gathered rows of {what} are not those packed"
    return wrong


def grouped_weight(n: int, k: int, bits: int, group_size: int, *, has_shift: bool) -> GroupedWeight:
    """Codes of all values with scales of several sizes, and shifts if wanted: [n, k]."""
    generator = torch.Generator().manual_seed(n + k + bits)
    least, most = (0, 15) if bits == 4 else (-128, 127)
    codes = torch.randint(least, most + 1, (n, k), generator=generator, dtype=torch.int8)
    scale = torch.rand(n, k // group_size, generator=generator) + 0.01
    zero = torch.randint(least, most + 1, scale.shape, generator=generator)
    return GroupedWeight(bits, group_size, codes, scale, -zero * scale if has_shift else None)


def _check_linear(linear: Any, oracle: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    for n, k in LINEAR_SHAPES:
        if linear.refuses(n, k, dtype, device) is not None:
            continue
        for bias in (None, normal((n,), 1, dtype, device)):
            weight = normal((n, k), 2, dtype, device)
            packed = linear.pack(weight.clone(), bias)
            reference = oracle.pack(weight, bias)
            x = normal((max(ROWS), k + 16), 3, dtype, device)[:, :k]
            together = packed(x)
            for rows in ROWS:
                got = packed(x[:rows])
                wrong = differs(f"[{rows}, {k}] @ [{k}, {n}]", got, reference(x[:rows]))
                if wrong is not None:
                    return wrong
                if linear.row_invariant and not torch.equal(got, together[:rows]):
                    return f"{rows} rows of [{k}, {n}] differ from the same rows in a larger batch"
            ids = torch.tensor([n - 1, 0, n // 2, 0], device=device)
            if not torch.equal(packed.rows(ids), reference.rows(ids)):
                return f"gathered rows of a [{n}, {k}] weight are not those packed"
    return None
