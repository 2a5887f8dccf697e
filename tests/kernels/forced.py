"""Native kernels of another instruction set than this CPU's best, in this process."""

from __future__ import annotations

import functools
import os
import platform

import pytest

from novainfer.kernels.cpu import attention, build, forward, linear, native, ops, quantised, sampling
from novainfer.kernels.cpu.levels import BF16, BF16_FLAGS, ISA_VARIABLE, LEVELS, Level, cpu_flags, levels
from novainfer.kernels.errors import KernelUnavailableError

__all__ = ["EMULATED", "use_level", "why_not"]

# What a matrix unit computes, to the same bits, where there is none.
EMULATED = Level("amx-emulated", BF16, (*BF16_FLAGS, "-DNOVA_EMULATED_TILES"))
ALL = (*LEVELS, EMULATED)


@functools.cache
def _library(name: str) -> native.ctypes.CDLL:
    (level,) = (level for level in ALL if level.name == name)
    return build.library_of(level, native.bind)


def why_not(name: str) -> str:
    """Why the kernels of this level cannot run here."""
    level = next((level for level in ALL if level.name == name), None)
    if level is None or not LEVELS:
        return f"they are not for {platform.machine()}"
    missing = ", ".join(sorted(level.features - cpu_flags()))
    return f"this CPU lacks {missing}" if missing else f"{ISA_VARIABLE} is {os.environ[ISA_VARIABLE]}"


def _stands_for(emulated: Level) -> bool:
    """Whether this CPU and `NOVAINFER_ISA` have what is beside the matrix unit."""
    return any(level.features == emulated.features for level in levels())


def use_level(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the kernels of this level for the rest of the test, which is skipped where they cannot run."""
    emulated = {EMULATED.name} if _stands_for(EMULATED) else set()
    if name not in {level.name for level in levels()} | emulated:
        pytest.skip(f"native kernels for {name}: {why_not(name)}")
    try:
        library = _library(name)
    except KernelUnavailableError as error:
        if "compiler failed" in str(error) and "option" not in str(error):  # it does not take what we wrote
            raise
        pytest.skip(str(error))
    for module in (attention, forward, linear, ops, quantised, sampling):
        monkeypatch.setattr(module, "library", lambda: library)
