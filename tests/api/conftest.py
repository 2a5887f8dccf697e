"""Each test here must leave no thread behind and no error unheard; engines over a fake device, or the demo model."""

from __future__ import annotations

from tests.leftovers import nothing_left

__all__ = ["nothing_left"]
