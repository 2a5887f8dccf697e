"""Matrix products by Triton: row-invariant ones in the checkpoint's precision, and of weights in int8 and fp8.

cuBLAS, through torch, is what products in the checkpoint's precision are computed by otherwise: it is faster, and
chooses by the number of rows in which order it adds. Here tiles and parts of the inner dimension depend on the weight's
shape alone; only whether parts are computed side by side, where there are few tiles, depends on the number of rows, and
that changes no bit (jit/products.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import triton
from torch import Tensor

from novainfer.kernels.cuda.jit import products
from novainfer.kernels.cuda.language import element
from novainfer.kernels.cuda.row_ops import refuses
from novainfer.kernels.cuda.variant import Config, Variant
from novainfer.kernels.ops.linear import TorchLinear
from novainfer.kernels.ops.quantised import LARGEST, TorchFp8Linear, TorchInt8Linear

__all__ = ["TritonFp8Linear", "TritonInt8Linear", "TritonLinear", "quantised_rows", "variants"]

TILES_WANTED = 264  # two for each multiprocessor of an H100: fewer leave memory bandwidth unused
TILES_APART_MAX = TILES_WANTED  # from so many tiles on a program computes all parts of its own
PARTS_MAX = 16
PART_FEATURES_MIN = 256  # below, a part is too short for loads to run ahead of products
FP8_CAPABILITY_MIN = 89
QUANTISE_BLOCK_MAX = 4096


class TritonLinear(TorchLinear):
    """A row's bits are its own, whatever rows are beside it: what `--batch-invariant` asks for."""

    name: ClassVar[str] = "triton"
    row_invariant: ClassVar[bool] = True

    @classmethod
    def refuses(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """bf16, fp16 or fp32, where Triton computes."""
        return refuses(dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        return _product(x, self.weight, None, self.bias, x.dtype)


class TritonInt8Linear(TorchInt8Linear):
    """int8 by int8 on the tensor cores, each row rounded as it comes; sums in int32 are exact, in any order."""

    name: ClassVar[str] = "triton-int8"
    row_invariant: ClassVar[bool] = True
    rounds_activations: ClassVar[bool] = True

    @classmethod
    def refuses(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """bf16, fp16 or fp32, where Triton computes; and not so many features that a sum could leave int32."""
        if in_features * LARGEST[torch.int8] ** 2 > torch.iinfo(torch.int32).max:
            return f"sums of {in_features} products are too large for int32"
        return refuses(dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        q, scale = quantised_rows(x, self.element)
        return _product(q, self.elements, (scale, self.scale), self.bias, x.dtype)


class TritonFp8Linear(TorchFp8Linear):
    """fp8 by fp8 on the tensor cores, each row rounded as it comes; the order of sums is that of `TritonLinear`."""

    name: ClassVar[str] = "triton-fp8"
    row_invariant: ClassVar[bool] = True
    rounds_activations: ClassVar[bool] = True

    @classmethod
    def refuses(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """bf16 or fp16, on GPUs whose tensor cores take fp8: Ada and Hopper were the first."""
        if dtype == torch.float32:
            return "its sums have fewer bits than float32"
        reason = refuses(dtype, device)
        if reason is None and device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if 10 * capability[0] + capability[1] < FP8_CAPABILITY_MIN:
                version = ".".join(map(str, capability))
                reason = f"fp8 needs compute capability 8.9 or more, this GPU has {version}"
        return reason

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N]."""
        q, scale = quantised_rows(x, self.element)
        return _product(q, self.elements, (scale, self.scale), self.bias, x.dtype)


def quantised_rows(x: Tensor, of: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [M, K] as [M, K] of int8 or fp8 and fp32 scales [M]; as `kernels.ops.quantised` of finite numbers."""
    num_rows, width = x.shape
    q = x.new_empty(num_rows, width, dtype=of)
    scale = x.new_empty(num_rows, dtype=torch.float32)
    config = _quantise_config(width, of)
    products.quantise_rows[(num_rows,)](x, q, scale, width, x.stride(0), **config.arguments)
    return q, scale


def _product(
    x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`x @ weight.T`, times the scales of rows of x and of weight, and with its bias -> new [M, N] of `dtype`."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    out = x.new_empty(num_rows, out_features, dtype=dtype)
    tile = _tile(out_features, x.dtype)
    num_parts, part_features = _parts(out_features, in_features, x.dtype)
    tiles = triton.cdiv(num_rows, tile["BLOCK_M"]), triton.cdiv(out_features, tile["BLOCK_N"])
    apart = num_parts > 1 and tiles[0] * tiles[1] < TILES_APART_MAX
    if not apart and x.dtype == torch.int8:  # exact in any order
        num_parts, part_features = 1, in_features
    how = "apart" if apart else "one" if num_parts == 1 else "in order"
    parts = x.new_empty((num_parts, num_rows, out_features) if apart else (1,), dtype=_sum_type(x.dtype))
    x_scale, weight_scale = (out, out) if scales is None else scales
    ends = (x_scale, weight_scale, out if bias is None else bias, out, parts)
    sizes = (num_rows, out_features)
    has_scale, has_bias = scales is not None, bias is not None
    config = _product_config(out_features, in_features, x.dtype, how, has_scale=has_scale, has_bias=has_bias)
    products.product[(*tiles, num_parts if apart else 1)](
        x, weight, *ends, *sizes, in_features, x.stride(0), part_features, num_parts, **config.arguments
    )
    if apart:
        config = _sum_config(has_scale=has_scale, has_bias=has_bias)
        grid = (
            triton.cdiv(num_rows, config.constants["BLOCK_M"]),
            triton.cdiv(out_features, config.constants["BLOCK_N"]),
        )
        products.sum_parts[grid](*ends, *sizes, num_parts, **config.arguments)
    return out


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype == torch.int8 else torch.float32


def _tile(out_features: int, dtype: torch.dtype) -> dict[str, int]:
    """Of x, weight and the inner dimension: 64 rows are what a warp group of Hopper multiplies at once.

    Wide where there are tiles enough without parts: the sums of parts would be as many registers again.
    """
    if dtype == torch.float32:  # not for the tensor cores
        return {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32}
    return {
        "BLOCK_M": 64,
        "BLOCK_N": 128 if 2 * out_features >= 128 * TILES_WANTED else 64,
        "BLOCK_K": 128 // dtype.itemsize,
    }


def _parts(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int]:
    """In how many parts the inner dimension is added up, and the features of one: of a weight, for every batch."""
    tile = _tile(out_features, dtype)
    wanted = TILES_WANTED // triton.cdiv(out_features, tile["BLOCK_N"])
    num_parts = max(1, min(wanted, in_features // PART_FEATURES_MIN, PARTS_MAX))
    part_features = triton.cdiv(triton.cdiv(in_features, num_parts), tile["BLOCK_K"]) * tile["BLOCK_K"]
    return triton.cdiv(in_features, part_features), part_features


def _product_config(
    out_features: int, in_features: int, dtype: torch.dtype, parts: str, *, has_scale: bool, has_bias: bool
) -> Config:
    tile = _tile(out_features, dtype)
    whole = in_features % tile["BLOCK_K"] == 0
    constants = {**tile, "WHOLE_K": whole, "HAS_SCALE": has_scale, "HAS_BIAS": has_bias, "PARTS": parts}
    return Config(constants, num_warps=4, num_stages=2 if dtype == torch.float32 else 4)


def _sum_config(*, has_scale: bool, has_bias: bool) -> Config:
    constants = {"BLOCK_M": 4, "BLOCK_N": 256, "HAS_SCALE": has_scale, "HAS_BIAS": has_bias}
    return Config(constants, num_warps=4, num_stages=2)


def _quantise_config(width: int, of: torch.dtype) -> Config:
    block = min(triton.next_power_of_2(width), QUANTISE_BLOCK_MAX)
    return Config({"LARGEST": LARGEST[of], "BLOCK": block}, min(max(block // 256, 1), 8), num_stages=1)


def variants(capability: int) -> Iterator[Variant]:
    """For weights of Qwen2.5-0.5B, 1.5B and 7B: one of few rows and many features, one of many rows."""
    of = [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float32)]
    of.append((torch.int8, torch.bfloat16))
    if capability >= FP8_CAPABILITY_MIN:
        of.append((torch.float8_e4m3fn, torch.bfloat16))
    for dtype, out_dtype in of:
        yield from _product_variants(dtype, out_dtype)
        if dtype != out_dtype:
            for width in (896, 18944):
                kind, narrow = element(out_dtype), element(dtype)
                yield Variant(
                    f"quantise_rows {kind} {narrow} {width}",
                    products.quantise_rows,
                    {"x": f"*{kind}", "q": f"*{narrow}", "scale": "*fp32", "width": "i32", "x_stride": "i32"},
                    _quantise_config(width, dtype),
                    aligned=frozenset({"width", "x_stride"}),
                )


def _product_variants(dtype: torch.dtype, out_dtype: torch.dtype) -> Iterator[Variant]:
    has_scale = dtype != out_dtype
    kind, out_kind, sums = element(dtype), element(out_dtype), element(_sum_type(dtype))
    scales = "*fp32" if has_scale else f"*{out_kind}"
    bias = {"bias": "*fp32" if has_scale else f"*{out_kind}"}
    ends = {"x_scale": scales, "weight_scale": scales} | bias | {"out": f"*{out_kind}", "parts": f"*{sums}"}
    sizes = {"num_rows": "i32", "out_features": "i32"}
    inner = {"in_features": "i32", "x_stride": "i32", "part_features": "i32", "num_parts": "i32"}
    for out_features, in_features, parts in (
        (1152, 896, "apart"),
        (3584, 18944, "in order"),
        (9728, 896, "one"),
        (37888, 3584, "one"),
    ):
        if dtype == torch.int8 and parts == "in order":
            continue
        yield Variant(
            f"product {kind} {out_features}x{in_features} {parts}",
            products.product,
            {"x": f"*{kind}", "weight": f"*{kind}"} | ends | sizes | inner,
            _product_config(out_features, in_features, dtype, parts, has_scale=has_scale, has_bias=parts == "apart"),
            aligned=frozenset({"out_features", "in_features", "x_stride", "part_features"}),
            needs_mma=dtype != torch.float32,
        )
    yield Variant(
        f"sum_parts {kind}",
        products.sum_parts,
        ends | sizes | {"num_parts": "i32"},
        _sum_config(has_scale=has_scale, has_bias=True),
        aligned=frozenset({"out_features"}),
    )
