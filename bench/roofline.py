"""What this CPU can do at best: the ceilings that benchmarks are put beside.

A decode step of few sequences reads every weight once, so memory bandwidth bounds it; a prefill computes on
each weight hundreds of times, so the rate of matrix products bounds it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from novainfer.kernels.cpu import native
from novainfer.kernels.cpu.linear import NativeLinear, PackedLinear
from novainfer.kernels.errors import KernelUnavailableError

__all__ = ["Roofline", "measure_roofline", "read_packed_weights", "reader"]

READ_BYTES = 256 << 20  # several times the last-level cache
GEMM_SHAPE = (512, 1024, 8192)  # M, K, N: rows of a prefill chunk
SECONDS_PER_MEASUREMENT = 1.0
REPEATS_MIN = 5


@dataclass(frozen=True, slots=True)
class Roofline:
    """Ceilings of this machine with `num_threads` threads: the best of many repetitions of each measurement."""

    num_threads: int
    read_gb_s: float  # 1e9 bytes per second, read from memory
    bfloat16_gflop_s: float  # 1e9 floating-point operations per second in products of matrices
    float32_gflop_s: float


def measure_roofline(num_threads: int | None = None) -> Roofline:
    """Measure for about five seconds; `num_threads` defaults to torch's.

    The faster of the native kernels and torch counts, so that the ceiling is never below what runs under it.
    """
    before = torch.get_num_threads()
    threads = num_threads or before
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            return Roofline(threads, _read_rate(), _gemm_rate(torch.bfloat16), _gemm_rate(torch.float32))
    finally:
        torch.set_num_threads(before)


def read_packed_weights() -> tuple[int, float] | None:
    """Read all packed weights of this process once, as its threads are set: bytes and seconds.

    They are found where they lie, on the pages that a step reads them from. None where there are none: the model is in
    another process, or torch computes.
    """
    library = _library()
    # By type: to ask some modules' objects for their class calls code of theirs.
    weights = [found.weight for found in gc.get_objects() if issubclass(type(found), PackedLinear)]
    if library is None or not weights:
        return None
    threads = torch.get_num_threads()
    started = time.perf_counter()
    for weight in weights:
        library.nova_read(weight.data_ptr(), weight.nbytes, threads)
    return sum(weight.nbytes for weight in weights), time.perf_counter() - started


def _best_seconds(*variants: Callable[[], object]) -> float:
    best = float("inf")
    for variant in variants:
        variant()
    start = time.perf_counter()
    repeats = 0
    while repeats < REPEATS_MIN or time.perf_counter() - start < SECONDS_PER_MEASUREMENT:
        for variant in variants:
            begin = time.perf_counter()
            variant()
            best = min(best, time.perf_counter() - begin)
        repeats += 1
    return best


def reader(data: torch.Tensor) -> Callable[[], object]:
    """What reads all of `data` once: the native kernels' way, or where there are none torch's."""
    library, threads = _library(), torch.get_num_threads()
    if library is None:
        return data.sum
    return lambda: library.nova_read(data.data_ptr(), data.nbytes, threads)


def _read_rate() -> float:
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return READ_BYTES / _best_seconds(data.sum, reader(data)) / 1e9


def _gemm_rate(dtype: torch.dtype) -> float:
    m, k, n = GEMM_SHAPE
    x, weight = torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype)
    variants: list[Callable[[], object]] = [lambda: x @ weight.T]
    if _library() is not None:
        packed = NativeLinear.pack(weight, None)
        variants.append(lambda: packed(x))
    return 2 * m * k * n / _best_seconds(*variants) / 1e9


def _library() -> ctypes.CDLL | None:
    try:
        return native.library()
    except KernelUnavailableError:
        return None


def main() -> None:
    """Print what was measured; with --json as one object."""
    parser = argparse.ArgumentParser(description="Measure memory read rate and matrix-product rates of this CPU.")
    parser.add_argument("--num-threads", type=int, default=None, help="default: torch's")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = asdict(measure_roofline(args.num_threads))
    print(json.dumps(found) if args.json else "\n".join(f"{key:18} {value:.6g}" for key, value in found.items()))


if __name__ == "__main__":
    main()
