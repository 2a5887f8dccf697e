"""Native CPU kernels beside torch's own, interleaved: medians, ratios, GB/s and GF/s.

    python tests/bench/kernels.py linear [--dtype bfloat16] [--rows 1,8,64] [--layers qkv,down]

The variants take turns call by call, so that what else runs on the machine hits all alike; the weights rotate
through more copies than the last-level cache holds, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F  # noqa: N812

from novainfer.kernels.cpu.linear import NativeLinear

LAYERS = {  # Qwen2.5-0.5B: rows of the weight, columns
    "qkv": (1152, 896),
    "o": (896, 896),
    "gate_up": (9728, 896),
    "down": (896, 4864),
    "lm_head": (151936, 896),
}
ROTATED_BYTES = 150 << 20
SECONDS_PER_CASE = 0.6


def interleaved(variants: dict[str, list[Callable[[], object]]], seconds: float) -> dict[str, float]:
    """Median microseconds of each variant; copy i of all variants runs before copy i + 1 of any."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    copies = len(next(iter(variants.values())))
    for calls in variants.values():
        calls[0]()
    end = time.perf_counter() + seconds
    i = 0
    while time.perf_counter() < end or i < 3:
        for name, calls in variants.items():
            start = time.perf_counter()
            calls[i % copies]()
            times[name].append(time.perf_counter() - start)
        i += 1
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def bench_linear(dtype: torch.dtype, rows: list[int], layers: list[str]) -> None:
    mkldnn = torch.ops.mkldnn
    print(f"{dtype}, {torch.get_num_threads()} threads; medians in us")
    header = ("layer", "M", "native", "mkldnn", "F.linear", "mkldnn/native", "GB/s", "GF/s")
    print("{:>8} {:>4} {:>9} {:>9} {:>9} {:>13} {:>6} {:>6}".format(*header))
    for layer in layers:
        n, k = LAYERS[layer]
        size = n * k * dtype.itemsize
        copies = max(1, min(64, ROTATED_BYTES // size))
        weights = [torch.randn(n, k).to(dtype) for _ in range(copies)]
        native = [NativeLinear.pack(w, None) for w in weights]
        packed = [mkldnn._reorder_linear_weight(w, 512) for w in weights]
        for m in rows:
            x = torch.randn(m, k).to(dtype)
            variants: dict[str, list[Callable[[], object]]] = {
                "native": [lambda p=p, x=x: p(x) for p in native],
                "mkldnn": [lambda p=p, x=x: mkldnn._linear_pointwise(x, p, None, "none", [], "") for p in packed],
                "F.linear": [lambda w=w, x=x: F.linear(x, w) for w in weights],
            }
            us = interleaved(variants, SECONDS_PER_CASE)
            own = us["native"]
            print(
                f"{layer:>8} {m:>4} {own:9.0f} {us['mkldnn']:9.0f} {us['F.linear']:9.0f} {us['mkldnn'] / own:13.2f}"
                f" {size / own / 1e3:6.1f} {2 * m * n * k / own / 1e3:6.0f}",
                flush=True,
            )
        del weights, native, packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["linear"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="1,8,32,64,256,512")
    parser.add_argument("--layers", default=",".join(LAYERS))
    args = parser.parse_args()
    bench_linear(getattr(torch, args.dtype), [int(m) for m in args.rows.split(",")], args.layers.split(","))


if __name__ == "__main__":
    main()
