"""How fast the machine is just now: reading memory, and multiplying matrices in the precisions that models are run in.

A process of its own keeps what it reads and multiplies, so that a look takes a third of a second. What limits a run is
the better of the looks before and after it: a shared machine is never faster than its best.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import msgspec

from novainfer.bench.peers.launch import die_with_parent

if TYPE_CHECKING:
    import torch

__all__ = ["Look", "Probe"]

REPEATS = 3
READ_BYTES = 256 << 20
SHAPE = (512, 1024, 8192)  # M, K, N: rows of a chunk of prompts


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second that are read, and operations a second (a multiply-add is two) in each precision.

    What is in bf16 can be multiplied in fp32, which is faster on a CPU without instructions for bf16, and what is in
    int8 in either.
    """

    bytes_per_s: float
    bf16_per_s: float
    int8_per_s: float

    def at_least(self, other: Look) -> Look:
        """The better of both in each."""
        pairs = {name: max(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__}
        return Look(**pairs)


class Probe:
    """The parent's end."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "novainfer.bench.peers.probe"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def look(self) -> Look:
        """Measure now."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"look\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=Look)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _best_s(*variants: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        for variant in variants:
            began_s = time.perf_counter()
            variant()
            best = min(best, time.perf_counter() - began_s)
    return best


def measurement() -> Callable[[], Look]:
    """What measures now, on data of its own."""
    import torch

    from novainfer.bench.roofline import reader

    m, k, n = SHAPE
    data = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    read = reader(data)
    products = _products(torch.bfloat16) + _products(torch.float32)
    int8_products = _int8_products()

    @torch.inference_mode()
    def look() -> Look:
        bytes_per_s = READ_BYTES / _best_s(read)
        product_s = _best_s(*products)
        int8_s = min(product_s, _best_s(*int8_products))
        return Look(bytes_per_s=bytes_per_s, bf16_per_s=2 * m * k * n / product_s, int8_per_s=2 * m * k * n / int8_s)

    return look


def _products(dtype: torch.dtype) -> list[Callable[[], Any]]:
    """Torch's product of matrices in `dtype`, and ours where there is one."""
    import torch

    from novainfer.kernels.cpu.linear import NativeLinear
    from novainfer.kernels.errors import KernelUnavailableError

    m, k, n = SHAPE
    x, weight = torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype)
    try:
        packed = NativeLinear.pack(weight, None)
    except KernelUnavailableError:
        return [lambda: x @ weight.T]
    return [lambda: x @ weight.T, lambda: packed(x)]


def _int8_products() -> list[Callable[[], Any]]:
    """The same of whole numbers. Torch's without VNNI is a plain loop, which takes ten seconds and is no measure."""
    import torch

    from novainfer.kernels.cpu.quantised import NativeInt8Linear
    from novainfer.kernels.errors import KernelUnavailableError

    m, k, n = SHAPE
    found: list[Callable[[], Any]] = []
    if torch.cpu._is_vnni_supported():
        codes_x, codes_weight = torch.ones(m, k, dtype=torch.int8), torch.ones(k, n, dtype=torch.int8)
        found.append(lambda: torch._int_mm(codes_x, codes_weight))
    try:
        packed = NativeInt8Linear.pack(torch.ones(n, k), None)
    except KernelUnavailableError:
        return found
    x = torch.ones(m, k)
    return [*found, lambda: packed(x)]


def main() -> None:
    """One look a line of stdin."""
    die_with_parent()
    look = measurement()
    for _ in sys.stdin:
        print(msgspec.json.encode(look()).decode(), flush=True)


if __name__ == "__main__":
    main()
