"""The native library in every instruction set this CPU has; the lesser ones are built for the tests alone."""

from __future__ import annotations

import pytest
from forced import use_level

from novainfer.kernels.cpu.levels import LEVELS

NAMES = [level.name for level in LEVELS]


@pytest.fixture(params=[NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels compiled for one instruction set, in the place of this machine's best."""
    use_level(request.param, monkeypatch)
    name: str = request.param
    return name
