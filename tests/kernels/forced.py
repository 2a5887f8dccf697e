"""Native kernels of a lesser instruction set than this CPU's best, in this process."""

from __future__ import annotations

import functools
import os
import platform

import pytest

from novainfer.kernels.cpu import attention, build, forward, linear, native, ops, quantised, sampling
from novainfer.kernels.cpu.levels import ISA_VARIABLE, LEVELS, cpu_flags, levels
from novainfer.kernels.errors import KernelUnavailableError

__all__ = ["use_level", "why_not"]


@functools.cache
def _library(name: str) -> native.ctypes.CDLL:
    (level,) = (level for level in LEVELS if level.name == name)
    return build.library_of(level, native.bind)


def why_not(name: str) -> str:
    """Why the kernels of this level cannot run here."""
    level = next((level for level in LEVELS if level.name == name), None)
    if level is None:
        return f"they are not for {platform.machine()}"
    missing = ", ".join(sorted(level.features - cpu_flags()))
    return f"this CPU lacks {missing}" if missing else f"{ISA_VARIABLE} is {os.environ[ISA_VARIABLE]}"


def use_level(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the kernels of this level for the rest of the test, which is skipped where they cannot run."""
    if name not in [level.name for level in levels()]:
        pytest.skip(f"native kernels for {name}: {why_not(name)}")
    try:
        library = _library(name)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    for module in (attention, forward, linear, ops, quantised, sampling):
        monkeypatch.setattr(module, "library", lambda: library)
