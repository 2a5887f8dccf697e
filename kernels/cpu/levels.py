"""The instruction sets that the native kernels are compiled for, and which of them this machine has.

`NOVAINFER_ISA` names the best one that may be used: on a better CPU, it computes as on a lesser one.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from novainfer.kernels.errors import LoadError

__all__ = ["ARM_LEVELS", "ISA_VARIABLE", "LEVELS", "X86_LEVELS", "Level", "cpu_flags", "levels"]

ISA_VARIABLE = "NOVAINFER_ISA"
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Level:
    """One instruction set: the features that /proc/cpuinfo must name, and the compiler's flags that use them."""

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]


AVX512 = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"})
AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mavx2")
VNNI_FLAGS = (*AVX512_FLAGS, "-mavx512vnni")
BF16 = AVX512 | {"avx512_vnni", "avx512_bf16"}
BF16_FLAGS = (*VNNI_FLAGS, "-mavx512bf16")
X86_LEVELS = (  # fastest first
    Level("amx", BF16 | {"amx_tile", "amx_bf16", "amx_int8"}, (*BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    Level("avx512-bf16", BF16, BF16_FLAGS),
    Level("avx512-vnni", AVX512 | {"avx512_vnni"}, VNNI_FLAGS),
    Level("avx512", AVX512, AVX512_FLAGS),
    Level("avx2-vnni", frozenset({"avx2", "fma", "avx_vnni"}), ("-mavx2", "-mfma", "-mavxvnni")),
    Level("avx2", frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
)
ARM_LEVELS = (
    # `atomics` as well: the compiler takes what else Armv8.2 has.
    Level("neon-dot", frozenset({"asimd", "asimddp", "atomics"}), ("-march=armv8.2-a+dotprod",)),
    Level("neon", frozenset({"asimd"}), ("-march=armv8-a",)),
)
BY_MACHINE = {"x86_64": X86_LEVELS, "AMD64": X86_LEVELS, "aarch64": ARM_LEVELS}
LEVELS = BY_MACHINE.get(platform.machine(), ())  # of this kind of machine


def cpu_flags() -> frozenset[str]:
    """Features of this machine's CPU as /proc/cpuinfo names them; empty where that cannot be read."""
    if sys.platform != "linux":
        return frozenset()
    try:
        text = CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):  # x86, Arm
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def levels() -> list[Level]:
    """Those that this CPU has and `NOVAINFER_ISA` allows, fastest first; `LoadError` when that names no level."""
    if not LEVELS:
        return []
    best = os.environ.get(ISA_VARIABLE, LEVELS[0].name)
    names = [level.name for level in LEVELS]
    if best not in names:
        raise LoadError(f"{ISA_VARIABLE} must be one of {', '.join(names)}, not {best!r}")
    flags = cpu_flags()
    return [level for level in LEVELS[names.index(best) :] if level.features <= flags]
