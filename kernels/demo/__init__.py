"""The demo model: a small Qwen2 checkpoint of our own, and the scripts that made it.

`model/` beside this file holds the checkpoint that `novainfer serve` loads when it is given no model.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """The folder of the shipped checkpoint: config, weights, tokenizer and generation defaults."""
    return Path(__file__).resolve().parent / "model"  # resolved: an editable install links to here
