"""Each test here must leave no thread behind and no error unheard; engines over a fake device, or the demo model."""

from __future__ import annotations

import pytest

from novainfer.fsm.schedule.speculation import Speculation, Stretches
from tests.leftovers import nothing_left

__all__ = ["eager", "nothing_left"]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever steps take on this machine: drafts are thought to cost nothing, and are in all steps."""
    monkeypatch.setattr(Speculation, "measured", lambda self, costs: None)
    monkeypatch.setattr(Stretches, "next_step", lambda self: None)
    monkeypatch.setattr(Stretches, "rest", lambda self: None)
