"""Proves the operations that each row has to itself: norms, rotations, embeddings, the choice of experts."""

from __future__ import annotations

from typing import Any

import torch

from novainfer.kernels.ops.reference import ReferenceRowOps
from novainfer.kernels.ops.selftest.numbers import EPS, ROWS, differs, normal

__all__ = ["check_row_ops"]


def check_row_ops(ops: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Each operation on rows of two widths."""
    for width in (32, 72):
        for rows in ROWS:
            x = normal((rows, width), 4, dtype, device)
            weight = 1 + normal((width,), 5, dtype, device) / 4
            residual = normal((rows, width), 6, dtype, device)
            expected_residual = residual.clone()
            expected = ReferenceRowOps.add_rms_norm(x, expected_residual, weight, EPS)
            wrong = (
                differs("rms_norm", ops.rms_norm(x, weight, EPS), ReferenceRowOps.rms_norm(x, weight, EPS))
                or differs("add_rms_norm", ops.add_rms_norm(x, residual, weight, EPS), expected)
                or differs("the sum of add_rms_norm", residual, expected_residual)
                or differs("silu_mul", ops.silu_mul(x), ReferenceRowOps.silu_mul(x))
                or _check_embed(ops, rows, width, dtype, device)
                or _check_qk_norm(ops, rows, width, dtype, device)
                or _check_rope(ops, rows, width, dtype, device)
                or _check_experts(ops, rows, width, dtype, device)
            )
            if wrong is not None:
                return wrong
            if ops.row_invariant and not torch.equal(
                ops.rms_norm(x[-1:].clone(), weight, EPS)[0], ops.rms_norm(x, weight, EPS)[-1]
            ):
                return "a row's rms_norm differs from the same row in a larger batch"
    return None


def _check_embed(ops: Any, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Tokens as they are, and tokens that slots were given last, one of which was given none."""
    weight = normal((9, width), 12, dtype, device)
    pool = torch.tensor([8, -1, 3], device=device)
    for ids, token_pool in ((torch.arange(rows) % 9, None), (torch.arange(rows) * 5 % 12 - 3, pool)):
        if not torch.equal(
            ops.embed(weight, ids.to(device), token_pool), ReferenceRowOps.embed(weight, ids.to(device), token_pool)
        ):
            return "embed gives other rows than were asked for"
    return None


def _check_qk_norm(ops: Any, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Four query heads and one key head of six, so that the values behind them must stay."""
    q_norm, k_norm = (1 + normal((head_dim,), seed, dtype, device) / 4 for seed in (9, 10))
    qkv = normal((rows, 6 * head_dim), 11, dtype, device)
    expected = qkv.clone()
    ReferenceRowOps.qk_norm(expected, q_norm, k_norm, 4, 1, EPS)
    ops.qk_norm(qkv, q_norm, k_norm, 4, 1, EPS)
    if not torch.equal(qkv[:, 5 * head_dim :], expected[:, 5 * head_dim :]):
        return "qk_norm changed what it must not norm"
    return differs("qk_norm", qkv, expected)


def _check_rope(ops: Any, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Five rotated heads of seven, so that the values behind them must stay."""
    cos_sin = normal((64, head_dim), 7, torch.float32, device)
    positions = torch.arange(rows, device=device) * 5 % 64
    qkv = normal((rows, 7 * head_dim), 8, dtype, device)
    expected = qkv.clone()
    ReferenceRowOps.rope(expected, cos_sin, positions, 5, head_dim)
    ops.rope(qkv, cos_sin, positions, 5, head_dim)
    if not torch.equal(qkv[:, 5 * head_dim :], expected[:, 5 * head_dim :]):
        return "rope changed what it must not rotate"
    return differs("rope", qkv, expected)


def _check_experts(ops: Any, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Of `width` experts three a row, with likely ones that are equal; all of five; and a row of NaN."""
    for num_experts, num_active, normalises in ((width, 3, True), (5, 5, False)):
        logits = normal((rows, num_experts), 13, dtype, device)
        logits[:, 1] = logits[:, 4]
        logits[0, 0] = logits[0, 1] = logits[0, 4] = 5
        chosen, weights = ops.choose_experts(logits, num_active, normalises=normalises)
        expected, right = ReferenceRowOps.choose_experts(logits, num_active, normalises=normalises)
        if not torch.equal(chosen, expected):
            return "choose_experts gives others than the likeliest"
        outputs = normal((rows * num_active, width), 14, dtype, device)
        places = torch.randperm(len(outputs), generator=torch.Generator().manual_seed(15)).view(rows, -1).to(device)
        shared, gate = (normal((rows, size), 16, dtype, device) for size in (width, 1))
        wrong = differs("the weight of an expert", weights, right)
        for beside in ((None, None), (shared, gate)):
            mixed = ops.mix_experts(outputs, places, right, *beside)
            wrong = wrong or differs("mix_experts", mixed, ReferenceRowOps.mix_experts(outputs, places, right, *beside))
            alone = ops.mix_experts(outputs, places[-1:], right[-1:], *(x if x is None else x[-1:] for x in beside))
            if wrong is None and ops.row_invariant and not torch.equal(alone[0], mixed[-1]):
                wrong = "a row's mix_experts differs from the same row in a larger batch"
        if wrong is not None:
            return wrong
    chosen, weights = ops.choose_experts(torch.full((2, 4), torch.nan, dtype=dtype, device=device), 2, normalises=True)
    if not (weights.isnan().all() and chosen.min() >= 0 and chosen.max() < 4):
        return "choose_experts gives a row of NaN an expert that is not there, or a weight"
    return None
