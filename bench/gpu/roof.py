"""The ceilings of a GPU: how fast memory is read and copied, and how fast matrices are multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from novainfer.bench.gpu.clock import Clock

__all__ = ["GpuRoof", "measure_roof"]

READ_BYTES = 2 << 30  # several times any second-level cache
GEMM_SIZE = 8192


@dataclass(frozen=True, slots=True)
class GpuRoof:
    """Of one GPU; the numbers are random, since zeros are multiplied faster."""

    read_bytes_per_s: float
    copy_bytes_per_s: float  # read and written, both counted
    bfloat16_flop_per_s: float


def measure_roof(clock: Clock, *, scale: int = 1) -> GpuRoof:
    """Takes some seconds and 5 GiB; `scale` divides the sizes, for a rehearsal."""
    return GpuRoof(*_streams(clock, READ_BYTES // scale), _products(clock, GEMM_SIZE // scale))


def _streams(clock: Clock, num_bytes: int) -> tuple[float, float]:
    """Bytes a second, read and copied."""
    sets = [torch.randint(0, 2**30, (num_bytes // 4,), dtype=torch.int32, device=clock.device) for _ in range(2)]
    # Reductions are the simplest streams of reads that torch has; the faster one counts.
    reads = (
        clock.measure([lambda x=x: x.view(1024, -1).amax(1) for x in sets]),  # type: ignore[misc]
        clock.measure([lambda x=x: x.view(torch.float32).sum() for x in sets]),  # type: ignore[misc]
    )
    copied = clock.measure([lambda: sets[1].copy_(sets[0])])
    return num_bytes / min(read.median_s for read in reads), 2 * num_bytes / copied.median_s


def _products(clock: Clock, size: int) -> float:
    """Floating-point operations a second, in bf16."""
    sets = [torch.randn(2, size, size, device=clock.device, dtype=torch.bfloat16) for _ in range(2)]
    product = clock.measure([lambda x=x: x[0] @ x[1].T for x in sets])  # type: ignore[misc]
    return 2.0 * size**3 / product.median_s
