"""Native CPU kernels beside torch's own, interleaved: medians, ratios, GB/s and GF/s.

    python tests/bench/kernels.py linear [--dtype bfloat16] [--rows 1,8,64] [--layers qkv,down]
    python tests/bench/kernels.py quantised [--dtype bfloat16] [--rows 1,8,32] [--layers gate_up]
    python tests/bench/kernels.py attention [--dtype bfloat16]
    python tests/bench/kernels.py kv [--dtype bfloat16]
    python tests/bench/kernels.py long [--dtype bfloat16]
    python tests/bench/kernels.py shared [--dtype bfloat16]
    python tests/bench/kernels.py ops [--dtype bfloat16] [--rows 1,8,64]

With `--clock cpu` it takes the processor time of all threads in place of wall time: on a machine with other work that
is the steadier number (GB/s and GF/s are then those of one core).

The variants take turns call by call, so that what else runs on the machine hits all alike; the weights rotate
through more copies than the last-level cache holds, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F  # noqa: N812

from novainfer.kernels.cpu import native
from novainfer.kernels.cpu.attention import NativeAttention
from novainfer.kernels.cpu.linear import NativeLinear
from novainfer.kernels.cpu.ops import NativeRowOps
from novainfer.kernels.cpu.quantised import NativeGroupedLinear, NativeInt8Linear
from novainfer.kernels.ops.attention import TorchAttention
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.ops.row_ops import TorchRowOps
from novainfer.kernels.step import StepTensors

LAYERS = {  # Qwen2.5-0.5B: rows of the weight, columns
    "qkv": (1152, 896),
    "o": (896, 896),
    "gate_up": (9728, 896),
    "down": (896, 4864),
    "lm_head": (151936, 896),
}
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 14, 2, 64, 16
# (sequences, context, query rows of each): decodes, whole prompts, a chunk.
ATTENTION = (
    (1, 64, 1),
    (1, 1024, 1),
    (8, 1024, 1),
    (32, 1024, 1),
    (8, 4096, 1),
    (1, 1024, 1024),
    (4, 1024, 1024),
    (1, 2048, 512),
)
KV_HEADS_AND_DIMS = ((14, 2, 64), (28, 4, 128))  # heads, key heads, head_dim: Qwen2.5-0.5B and 7B
KV_CASES = (*((seqs, context, 1) for context in (1024, 4096, 16384) for seqs in (1, 8)), (1, 4096, 512))
LONG_CASES = tuple((*shape, context) for shape in KV_HEADS_AND_DIMS for context in (1024, 8192, 16384, 32768))
LONG_ROWS = 512
SHARED_CASES = ((16, 768, 64), (32, 1024, 64), (32, 4096, 64), (8, 4096, 64), (2, 4096, 64))  # sequences, shared, own
ROTATED_BYTES = 150 << 20
SECONDS_PER_CASE = 0.6
Clock = Callable[[], float]


def interleaved(variants: dict[str, list[Callable[[], object]]], seconds: float, clock: Clock) -> dict[str, float]:
    """Median microseconds of each variant; copy i of all variants runs before copy i + 1 of any."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    copies = len(next(iter(variants.values())))
    for calls in variants.values():
        calls[0]()
    end = time.perf_counter() + seconds
    i = 0
    while time.perf_counter() < end or i < 3:
        for name, calls in variants.items():
            start = clock()
            calls[i % copies]()
            times[name].append(clock() - start)
        i += 1
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def bench_linear(dtype: torch.dtype, rows: list[int], layers: list[str], clock: Clock) -> None:
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
        try:
            packed = [mkldnn._reorder_linear_weight(w, 512) for w in weights]
        except RuntimeError:  # bf16 on a CPU without instructions for it
            packed = []
        for m in rows:
            x = torch.randn(m, k).to(dtype)
            variants: dict[str, list[Callable[[], object]]] = {
                "native": [lambda p=p, x=x: p(x) for p in native],
                "mkldnn": [lambda p=p, x=x: mkldnn._linear_pointwise(x, p, None, "none", [], "") for p in packed],
                "F.linear": [lambda w=w, x=x: F.linear(x, w) for w in weights],
            }
            if not packed:
                del variants["mkldnn"]
            us = {"mkldnn": math.nan, **interleaved(variants, SECONDS_PER_CASE, clock)}
            own = us["native"]
            print(
                f"{layer:>8} {m:>4} {own:9.0f} {us['mkldnn']:9.0f} {us['F.linear']:9.0f} {us['mkldnn'] / own:13.2f}"
                f" {size / own / 1e3:6.1f} {2 * m * n * k / own / 1e3:6.0f}",
                flush=True,
            )
        del weights, native, packed


def bench_quantised(dtype: torch.dtype, rows: list[int], layers: list[str], clock: Clock) -> None:
    """Weights as they are, in INT8 and in INT4, and what a stream over the bytes of each alone takes."""
    kinds = {"full": NativeLinear, "int8": NativeInt8Linear, "int4": NativeGroupedLinear}
    print(f"{dtype}, {torch.get_num_threads()} threads; medians in us, and of ratios call by call")
    header = ("layer", "M", *kinds, "full/int8", "int8/int4", "int8 GOP/s", "read/int8", "read/int4")
    print(("{:>10} " * len(header)).format(*header))
    for layer in layers:
        n, k = LAYERS[layer]
        copies = max(1, min(64, 2 * ROTATED_BYTES // (n * k * dtype.itemsize)))
        weights = [torch.randn(n, k).to(dtype) for _ in range(copies)]
        packed = {name: [kind.pack(weight, None) for weight in weights] for name, kind in kinds.items()}
        del weights
        for m in rows:
            x = torch.randn(m, k).to(dtype)
            times: dict[str, list[float]] = {name: [] for name in ("full", "int8", "int4", "read int8", "read int4")}
            end, i = time.perf_counter() + SECONDS_PER_CASE, 0
            while time.perf_counter() < end or i < 6:
                for name, linears in packed.items():
                    start = clock()
                    linears[i % copies](x)
                    times[name].append(clock() - start)
                    if name != "full":
                        other = linears[(i + copies // 2) % copies]
                        start = clock()
                        for part in other.tensors:
                            read(part)
                        times[f"read {name}"].append(clock() - start)
                i += 1

            def ratio(one: str, other: str, times: dict[str, list[float]] = times) -> float:
                return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))

            us = {name: statistics.median(values) * 1e6 for name, values in times.items()}
            print(
                f"{layer:>10} {m:>10} {us['full']:10.0f} {us['int8']:10.0f} {us['int4']:10.0f}"
                f" {ratio('full', 'int8'):10.2f} {ratio('int8', 'int4'):10.2f} {2 * m * n * k / us['int8'] / 1e3:10.0f}"
                f" {ratio('read int8', 'int8'):10.2f} {ratio('read int4', 'int4'):10.2f}",
                flush=True,
            )
        del packed


def read(tensor: torch.Tensor) -> None:
    """Load every byte once, on all threads."""
    native.library().nova_read(tensor.data_ptr(), tensor.nbytes, torch.get_num_threads())


def bench_attention(dtype: torch.dtype, clock: Clock) -> None:
    print(f"{dtype}, {torch.get_num_threads()} threads, one layer; medians in us")
    header = ("seqs", "context", "rows", "native", "torch", "torch/native", "GB/s", "GF/s")
    print("{:>5} {:>7} {:>5} {:>9} {:>9} {:>12} {:>6} {:>6}".format(*header))
    for seqs, context, rows in ATTENTION:
        blocks = seqs * context // BLOCK_SIZE
        size = 2 * seqs * context * KV_HEADS * HEAD_DIM * dtype.itemsize
        layers = max(1, min(24, ROTATED_BYTES // size))
        shape = AttentionShape(layers, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        tables = torch.randperm(blocks, dtype=torch.int32).view(seqs, -1)
        variants = {
            backend.name: attend_calls(filled(backend, shape, blocks, dtype), tables, context, rows, dtype)
            for backend in (NativeAttention, TorchAttention)
        }
        us = interleaved(variants, SECONDS_PER_CASE, clock)
        own = us["native"]
        flops = 4 * HEADS * HEAD_DIM * seqs * sum(range(context - rows + 1, context + 1))
        print(
            f"{seqs:>5} {context:>7} {rows:>5} {own:9.0f} {us['torch']:9.0f} {us['torch'] / own:12.1f}"
            f" {size / own / 1e3:6.1f} {flops / own / 1e3:6.0f}",
            flush=True,
        )


def bench_kv(dtype: torch.dtype, clock: Clock) -> None:
    """Attention over an INT8 cache beside one as it was computed."""
    print(f"{dtype}, {torch.get_num_threads()} threads, one layer; medians in us")
    header = ("heads", "seqs", "context", "rows", "as computed", "int8", "ratio", "GB/s", "GB/s")
    print("{:>12} {:>5} {:>7} {:>5} {:>11} {:>9} {:>5} {:>6} {:>6}".format(*header))
    for heads, kv_heads, dim in KV_HEADS_AND_DIMS:
        for seqs, context, rows in KV_CASES:
            variants, sizes = {}, []
            tables = torch.randperm(seqs * context // BLOCK_SIZE, dtype=torch.int32).view(seqs, -1)
            for kv_dtype in ("auto", "int8"):
                shape = AttentionShape(1, heads, kv_heads, dim, BLOCK_SIZE, kv_dtype)
                size = NativeAttention.bytes_per_block(shape, dtype) * tables.numel()
                layers = max(1, min(24, ROTATED_BYTES // size))
                cache = filled(NativeAttention, replace(shape, num_layers=layers), tables.numel(), dtype)
                variants[kv_dtype] = attend_calls(cache, tables, context, rows, dtype)
                sizes.append(size)
            copies = min(map(len, variants.values()))
            us = interleaved({name: calls[:copies] for name, calls in variants.items()}, SECONDS_PER_CASE, clock)
            exact, int8 = us["auto"], us["int8"]
            print(
                f"{heads:>5}/{kv_heads} d{dim:<4} {seqs:>5} {context:>7} {rows:>5} {exact:11.0f} {int8:9.0f}"
                f" {exact / int8:5.2f} {sizes[0] / exact / 1e3:6.1f} {sizes[1] / int8 / 1e3:6.1f}",
                flush=True,
            )


def bench_long(dtype: torch.dtype, clock: Clock) -> None:
    """The last chunk of a long prompt, beside a product of as many rows: GF/s of the medians."""
    print(f"{dtype}, {torch.get_num_threads()} threads, a chunk of {LONG_ROWS}; GF/s")
    print(f"{'heads':>12} {'context':>7} {'product':>8} {'as computed':>11} {'int8':>6} {'computed/product':>16}")
    n, k = LAYERS["gate_up"]
    linear, x = NativeLinear.pack(torch.randn(n, k).to(dtype), None), torch.randn(LONG_ROWS, k).to(dtype)
    for heads, kv_heads, dim, context in LONG_CASES:
        variants: dict[str, list[Callable[[], object]]] = {"product": [lambda: linear(x)]}
        tables = torch.randperm(context // BLOCK_SIZE, dtype=torch.int32).view(1, -1)
        for kv_dtype in ("auto", "int8"):
            shape = AttentionShape(1, heads, kv_heads, dim, BLOCK_SIZE, kv_dtype)
            cache = filled(NativeAttention, shape, tables.numel(), dtype)
            variants[kv_dtype] = attend_calls(cache, tables, context, LONG_ROWS, dtype)
        us = interleaved(variants, SECONDS_PER_CASE, clock)
        flops = 4 * heads * dim * sum(range(context - LONG_ROWS + 1, context + 1))
        product = 2 * LONG_ROWS * n * k / us["product"] / 1e3
        exact, int8 = (flops / us[kv_dtype] / 1e3 for kv_dtype in ("auto", "int8"))
        print(
            f"{heads:>5}/{kv_heads} d{dim:<4} {context:>7} {product:8.0f} {exact:11.0f} {int8:6.0f}"
            f" {exact / product:16.2f}",
            flush=True,
        )


def bench_shared(dtype: torch.dtype, clock: Clock) -> None:
    """Decodes whose block tables begin alike, beside as many over contexts of their own."""
    print(f"{dtype}, {torch.get_num_threads()} threads, one layer; medians in us")
    print(f"{'seqs':>5} {'shared':>7} {'own':>5} {'apart':>9} {'shared':>9} {'ratio':>5} {'tiles':>11}")
    for seqs, shared, own in SHARED_CASES:
        context = shared + own
        apart = torch.randperm(seqs * context // BLOCK_SIZE, dtype=torch.int32).view(seqs, -1)
        alike = apart.clone()
        alike[:, : shared // BLOCK_SIZE] = apart[0, : shared // BLOCK_SIZE]
        shape = AttentionShape(1, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        size = NativeAttention.bytes_per_block(shape, dtype) * apart.numel()
        layers = max(2, min(24, ROTATED_BYTES // size))
        cache = filled(NativeAttention, replace(shape, num_layers=layers), apart.numel(), dtype)
        assert isinstance(cache, NativeAttention)
        variants = {
            name: attend_calls(cache, tables, context, 1, dtype)
            for name, tables in (("apart", apart), ("shared", alike))
        }
        threads = torch.get_num_threads()
        tiles = [cache.plan(attend_step(tables, context, 1), threads).tiles_read for tables in (apart, alike)]
        us = interleaved(variants, SECONDS_PER_CASE, clock)
        print(
            f"{seqs:>5} {shared:>7} {own:>5} {us['apart']:9.0f} {us['shared']:9.0f} {us['apart'] / us['shared']:5.2f}"
            f" {tiles[0]:>5}/{tiles[1]:<5}",
            flush=True,
        )


def filled(
    backend: type[NativeAttention] | type[TorchAttention], shape: AttentionShape, num_blocks: int, dtype: torch.dtype
) -> NativeAttention | TorchAttention:
    """A cache that holds something in every slot of every layer."""
    cache = backend.allocate(shape, num_blocks, dtype, torch.device("cpu"))
    tokens = num_blocks * shape.block_size
    for layer in range(shape.num_layers):
        key = torch.randn(tokens, shape.num_kv_heads, shape.head_dim).to(dtype)
        cache.write(layer, key, key, torch.arange(tokens))
    return cache


def attend_calls(
    cache: NativeAttention | TorchAttention, tables: torch.Tensor, context: int, rows: int, dtype: torch.dtype
) -> list[Callable[[], object]]:
    """A call for each layer: the last `rows` tokens of each sequence over its context."""
    shape, seqs = cache.shape, len(tables)
    query = torch.randn(seqs * rows, shape.num_heads, shape.head_dim).to(dtype)
    step = attend_step(tables, context, rows)
    scale = shape.head_dim**-0.5
    return [lambda i=i: cache.attend(i, query, step, scale) for i in range(shape.num_layers)]


def attend_step(tables: torch.Tensor, context: int, rows: int) -> StepTensors:
    seqs = len(tables)
    starts = torch.arange(0, seqs * rows + 1, rows, dtype=torch.int32)
    lens = torch.full((seqs,), context, dtype=torch.int32)
    nothing = torch.empty(0, dtype=torch.int64)
    return StepTensors(nothing, nothing, nothing, tables, starts, lens, None, 0, context, rows, rows)


def bench_ops(dtype: torch.dtype, rows: list[int], clock: Clock) -> None:
    print(f"{dtype}, {torch.get_num_threads()} threads; medians in us")
    print(f"{'M':>4} {'':>12} {'native':>9} {'torch':>9} {'torch/native':>12}")
    for m in rows:
        native, plain = ops_calls(NativeRowOps, dtype, m), ops_calls(TorchRowOps, dtype, m)
        for name in native:
            us = interleaved({"native": [native[name]], "torch": [plain[name]]}, 0.2, clock)
            print(
                f"{m:>4} {name:>12} {us['native']:9.1f} {us['torch']:9.1f} {us['torch'] / us['native']:12.1f}",
                flush=True,
            )


def ops_calls(
    ops: type[NativeRowOps] | type[TorchRowOps], dtype: torch.dtype, m: int
) -> dict[str, Callable[[], object]]:
    hidden, intermediate = LAYERS["o"][0], LAYERS["down"][1]
    x, residual = torch.randn(m, hidden).to(dtype), torch.zeros(m, hidden).to(dtype)
    weight, gate_up = torch.ones(hidden).to(dtype), torch.randn(m, 2 * intermediate).to(dtype)
    qkv, table = torch.randn(m, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype), torch.randn(4096, HEAD_DIM)
    positions = torch.arange(m)
    return {
        "rms_norm": lambda: ops.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda: ops.add_rms_norm(x, residual, weight, 1e-6),
        "rope": lambda: ops.rope(qkv, table, positions, HEADS + KV_HEADS, HEAD_DIM),
        "silu_mul": lambda: ops.silu_mul(gate_up),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["linear", "quantised", "attention", "kv", "long", "shared", "ops"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="1,8,32,64,256,512")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    dtype, rows = getattr(torch, args.dtype), [int(m) for m in args.rows.split(",")]
    with torch.inference_mode():
        if args.what == "linear":
            bench_linear(dtype, rows, args.layers.split(","), clock)
        elif args.what == "quantised":
            bench_quantised(dtype, rows, args.layers.split(","), clock)
        elif args.what == "attention":
            bench_attention(dtype, clock)
        elif args.what == "kv":
            bench_kv(dtype, clock)
        elif args.what == "long":
            bench_long(dtype, clock)
        elif args.what == "shared":
            bench_shared(dtype, clock)
        else:
            bench_ops(dtype, rows, clock)


if __name__ == "__main__":
    main()
