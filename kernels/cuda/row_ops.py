"""The row operations on a GPU, each one launch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import ClassVar

import torch
import triton
from torch import Tensor

from novainfer.kernels.cuda.jit import rows
from novainfer.kernels.cuda.language import can_compute_on, element
from novainfer.kernels.cuda.variant import Config, Variant
from novainfer.kernels.ops.row_ops import TorchRowOps

__all__ = ["DTYPES", "TritonRowOps", "head_config", "heads_grid", "refuses", "variants"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EMBED_BLOCK_MAX = 1024
HEADS = 8  # of a row in one program


def refuses(dtype: torch.dtype, device: torch.device) -> str | None:
    """None when Triton's functions compute in this dtype on this device; else the reason."""
    return can_compute_on(device) or (None if dtype in DTYPES else f"no {dtype}")


class TritonRowOps:
    """Row operations in bf16, fp16 and fp32; computed in fp32 and rounded once. A row is summed in one program."""

    name: ClassVar[str] = "triton"
    row_invariant: ClassVar[bool] = True

    @classmethod
    def refuses(cls, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when rows of this dtype can be computed on this device; else the reason."""
        return refuses(dtype, device)

    @staticmethod
    def embed(weight: Tensor, ids: Tensor, token_pool: Tensor | None) -> Tensor:
        """Rows of contiguous weight [V, K] by int64 [T] -> new [T, K]; what is in the pool is looked up beside."""
        num_rows, width = len(ids), weight.shape[1]
        out = weight.new_empty(num_rows, width)
        config = _embed_config(width, has_pool=token_pool is not None)
        grid = (num_rows, triton.cdiv(width, config.constants["BLOCK"]))
        rows.embed[grid](weight, ids, ids if token_pool is None else token_pool, out, width, **config.arguments)
        return out

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[M, K], [K] -> new [M, K]; rows of x may lie apart."""
        num_rows, width = x.shape
        out = x.new_empty(num_rows, width)
        config = _rms_norm_config(width, has_residual=False)
        rows.rms_norm[(num_rows,)](x, x, weight, out, x.stride(0), width, eps, **config.arguments)
        return out

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual += x` in place (contiguous), then `rms_norm(residual)` -> new [M, K]."""
        num_rows, width = x.shape
        out = x.new_empty(num_rows, width)
        config = _rms_norm_config(width, has_residual=True)
        rows.rms_norm[(num_rows,)](x, residual, weight, out, x.stride(0), width, eps, **config.arguments)
        return out

    @staticmethod
    def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
        """Norm each query and key head of each row in place."""
        num_normed, config = num_heads + num_kv_heads, head_config(q_norm.shape[0])
        rows.qk_norm[heads_grid(len(qkv), num_normed)](
            qkv, q_norm, k_norm, qkv.stride(0), num_heads, num_normed, eps, **config.arguments
        )

    @staticmethod
    def rope(qkv: Tensor, cos_sin: Tensor, positions: Tensor, num_rotated: int, head_dim: int) -> None:
        """Rotate the first `num_rotated` heads of each row in place."""
        grid, config = heads_grid(len(qkv), num_rotated), head_config(head_dim)
        rows.rope[grid](qkv, cos_sin, positions, qkv.stride(0), num_rotated, **config.arguments)

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        """Contiguous [M, 2 * I] (gate, then up) -> new [M, I]."""
        num_rows, intermediate_size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, intermediate_size)
        config = _silu_mul_config(intermediate_size)
        grid = (num_rows, triton.cdiv(intermediate_size, config.constants["BLOCK"]))
        rows.silu_mul[grid](gate_up, out, intermediate_size, **config.arguments)
        return out

    @staticmethod
    def choose_experts(logits: Tensor, num_active: int, *, normalises: bool) -> tuple[Tensor, Tensor]:
        """[M, E] -> int64 [M, num_active], [M, num_active], by torch: its sort is stable."""
        return TorchRowOps.choose_experts(logits, num_active, normalises=normalises)

    @staticmethod
    def mix_experts(
        outputs: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """[M * A, K] by int64 [M, A] and [M, A] -> new [M, K], by torch: element by element."""
        return TorchRowOps.mix_experts(outputs, places, weights, shared, gate)


def heads_grid(num_rows: int, num_heads: int) -> tuple[int, int]:
    """Of the functions that `head_config` is for."""
    return num_rows, triton.cdiv(num_heads, HEADS)


@functools.cache
def head_config(head_dim: int) -> Config:
    """Some heads of a row, by their halves."""
    constants = {"HEAD_DIM": head_dim, "BLOCK": triton.next_power_of_2(head_dim // 2), "HEADS": HEADS}
    return Config(constants, num_warps=4, num_stages=1)


@functools.cache
def _rms_norm_config(width: int, *, has_residual: bool) -> Config:
    """A row in one program: 16 bytes a thread up to 1024 elements, then more of both."""
    block = triton.next_power_of_2(width)
    return Config({"HAS_RESIDUAL": has_residual, "BLOCK": block}, min(max(block // 256, 1), 16), num_stages=1)


@functools.cache
def _embed_config(width: int, *, has_pool: bool) -> Config:
    block = min(triton.next_power_of_2(width), EMBED_BLOCK_MAX)
    return Config({"HAS_POOL": has_pool, "BLOCK": block}, num_warps=4, num_stages=1)


@functools.cache
def _silu_mul_config(intermediate_size: int) -> Config:
    return Config({"BLOCK": 1024 if intermediate_size >= 1024 else 256}, num_warps=4, num_stages=1)


def variants(capability: int) -> Iterator[Variant]:
    """What is launched for the sizes of Qwen2.5-0.5B, 1.5B and 7B, for the largest hidden size and other dtypes."""
    yield from _variants(torch.bfloat16, (896, 1536, 3584, 8192), (64, 128), (4864, 8960, 18944))
    yield from _variants(torch.float16, (1536,), (128,), (8960,))
    yield from _variants(torch.float32, (8192,), (128,), (18944,))


def _variants(
    dtype: torch.dtype, widths: tuple[int, ...], head_dims: tuple[int, ...], intermediate_sizes: tuple[int, ...]
) -> Iterator[Variant]:
    kind = element(dtype)
    for width in widths:
        for has_residual in (False, True):
            yield Variant(
                f"{'add_' if has_residual else ''}rms_norm {kind} {width}",
                rows.rms_norm,
                dict.fromkeys(("x", "residual", "weight", "out"), f"*{kind}")
                | {"x_stride": "i32", "width": "i32", "eps": "fp32"},
                _rms_norm_config(width, has_residual=has_residual),
                aligned=frozenset({"x_stride", "width"}),
            )
        yield Variant(
            f"embed {kind} {width}",
            rows.embed,
            {"weight": f"*{kind}", "ids": "*i64", "token_pool": "*i64", "out": f"*{kind}", "width": "i32"},
            _embed_config(width, has_pool=True),
            aligned=frozenset({"width"}),
        )
    for head_dim in head_dims:
        yield Variant(
            f"qk_norm {kind} d{head_dim}",
            rows.qk_norm,
            dict.fromkeys(("qkv", "q_norm", "k_norm"), f"*{kind}")
            | {"stride": "i32", "num_heads": "i32", "num_normed": "i32", "eps": "fp32"},
            head_config(head_dim),
            aligned=frozenset({"stride"}),
        )
        yield Variant(
            f"rope {kind} d{head_dim}",
            rows.rope,
            {"qkv": f"*{kind}", "cos_sin": "*fp32", "positions": "*i64", "stride": "i32", "num_rotated": "i32"},
            head_config(head_dim),
            aligned=frozenset({"stride"}),
        )
    for intermediate_size in intermediate_sizes:
        yield Variant(
            f"silu_mul {kind} {intermediate_size}",
            rows.silu_mul,
            {"gate_up": f"*{kind}", "out": f"*{kind}", "intermediate_size": "i32"},
            _silu_mul_config(intermediate_size),
            aligned=frozenset({"intermediate_size"}),
        )
