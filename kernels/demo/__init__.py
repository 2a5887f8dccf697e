"""The demo model and its draft: two small Qwen2 checkpoints of our own; the scripts that made them are in tools/demo.

`model/` beside this file holds the checkpoint that `novainfer serve` loads when it is given no model, and `draft/` a
smaller one that guesses what it will say.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["draft_path", "model_path"]


def model_path() -> Path:
    """The folder of the shipped checkpoint: config, weights, tokenizer and generation defaults."""
    return Path(__file__).resolve().parent / "model"  # resolved: an editable install links to here


def draft_path() -> Path:
    """The folder of the draft model that was distilled from the shipped checkpoint, with the same tokenizer."""
    return Path(__file__).resolve().parent / "draft"
