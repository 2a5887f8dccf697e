"""The native library in every instruction set this CPU has; the lesser ones are built for the tests alone."""

from __future__ import annotations

import ctypes
import shutil

import pytest

from novainfer.kernels.cpu import attention, build, forward, int8, linear, native, ops

LEVELS = ("avx512-bf16", "avx512", "avx2")


@pytest.fixture(
    params=[LEVELS[0], pytest.param(LEVELS[1], marks=pytest.mark.slow), pytest.param(LEVELS[2], marks=pytest.mark.slow)]
)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels compiled for one instruction set, in the place of this machine's best."""
    name: str = request.param
    needed, flags = build.ISA_LEVELS[LEVELS.index(name)]
    if not needed <= build.cpu_flags():
        pytest.skip(f"this CPU lacks {name}")
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    library = native.bind(ctypes.CDLL(str(build.build_library(isa=flags))))
    for module in (attention, forward, int8, linear, ops):
        monkeypatch.setattr(module, "library", lambda: library)
    return name
