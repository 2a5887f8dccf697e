"""The native library in every instruction set this CPU has; the lesser ones are built for the tests alone."""

from __future__ import annotations

import pytest
from forced import EMULATED, use_level

from novainfer.kernels.cpu.levels import LEVELS, levels

BEST = [level.name for level in levels()[:1]]
OTHERS = [level.name for level in LEVELS if level.name not in BEST]
UNIT = [] if "amx" in BEST else [EMULATED.name]  # where there is no matrix unit, what stands for it


@pytest.fixture(params=[*BEST, *(pytest.param(name, marks=pytest.mark.slow) for name in (*UNIT, *OTHERS))])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels compiled for one instruction set, in the place of this machine's best."""
    use_level(request.param, monkeypatch)
    name: str = request.param
    return name
