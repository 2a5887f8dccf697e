"""What can go wrong between a model's folder and a loaded model."""

from __future__ import annotations

__all__ = ["KernelUnavailableError", "LoadError"]


class LoadError(Exception):
    """The model cannot be loaded; the message is one sentence naming the file or setting at fault."""


class KernelUnavailableError(Exception):
    """Kernels that cannot run here; the message says what is missing (compiler, CPU feature, library)."""
