"""Matrix products by each linear: what of the memory's and the tensor cores' roof they reach, and beside torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from novainfer.bench.gpu.clock import Clock
from novainfer.kernels.ops.registry import Linear

__all__ = ["PRODUCTS", "Product", "measure_product"]

SETS_BYTES = 256 << 20  # of weights that are read in turn: more than a second-level cache holds


@dataclass(frozen=True, slots=True)
class Product:
    """[rows, in_features] times a weight [out_features, in_features]."""

    name: str
    out_features: int
    in_features: int
    rows: int

    @property
    def flops(self) -> float:
        """A multiplication and an addition each."""
        return 2.0 * self.rows * self.out_features * self.in_features


PRODUCTS = [
    Product(name, out_features, in_features, rows)
    for name, out_features, in_features in (
        ("0.5B gate_up", 9728, 896),
        ("1.5B qkv", 2048, 1536),
        ("1.5B gate_up", 17920, 1536),
        ("1.5B down", 1536, 8960),
        ("7B gate_up", 37888, 3584),
        ("7B head", 152064, 3584),
    )
    for rows in (1, 16, 64, 256, 2048)
    if rows <= 256 or "head" not in name
]


def measure_product(linear: type[Linear], product: Product, clock: Clock, sets_max: int = 64) -> dict[str, Any]:
    """Seconds of one product, as a record for the report; with up to `sets_max` weights in turn."""
    dtype, device = torch.bfloat16, clock.device
    elements = product.out_features * product.in_features
    num_sets = max(1, min(sets_max, SETS_BYTES // (2 * elements) + 1))
    weights = [
        linear.pack(torch.randn(product.out_features, product.in_features, dtype=dtype, device=device), None)
        for _ in range(num_sets)
    ]
    x = torch.randn(product.rows, product.in_features, dtype=dtype, device=device)

    def multiply(weight: Linear) -> Callable[[], Tensor]:
        return lambda: weight(x)

    spread = clock.measure([multiply(weight) for weight in weights])
    num_bytes = weights[0].weight_bytes + 2 * product.rows * (product.in_features + product.out_features)
    return {
        "product": product.name,
        "rows": product.rows,
        "linear": linear.name,
        "us": 1e6 * spread.median_s,
        "us_low": 1e6 * spread.low_s,
        "us_high": 1e6 * spread.high_s,
        "gb_per_s": num_bytes / spread.median_s / 1e9,
        "tflop_per_s": product.flops / spread.median_s / 1e12,
    }
