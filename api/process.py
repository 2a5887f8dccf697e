"""What a process of NovaInfer's own sets for all that runs in it; a library leaves its host's process as it is."""

from __future__ import annotations

import os

__all__ = ["settle"]


def settle() -> None:
    """Before torch is loaded: OpenMP's threads sleep while they wait."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a spinning pool beside a live event loop costs it 100 times
