"""How many threads kernels should use: what the process may run on, not what the machine has."""

from __future__ import annotations

import math
from pathlib import Path

import torch

__all__ = ["granted_cpus", "threads_in_use", "use_threads"]

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "quota period" in microseconds, or "max period"


def granted_cpus() -> int | None:
    """The CPU time a container's quota grants, in whole CPUs (rounded up), or None without a quota."""
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


def use_threads(num_threads: int | None) -> None:
    """Make kernels of this process use `num_threads`; None lowers torch's default to a container's quota.

    torch counts the machine's cores and this process's affinity, but not the quota: with more threads than
    CPU time, all of them are stopped together for most of each period.
    """
    if num_threads is None:
        granted = granted_cpus()
        if granted is None or granted >= torch.get_num_threads():
            return
        num_threads = granted
    torch.set_num_threads(num_threads)


def threads_in_use() -> int:
    """How many threads kernels of this process use on the CPU."""
    return torch.get_num_threads()
