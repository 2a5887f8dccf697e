"""Which architectures can be served, by the name in a checkpoint's config.json."""

from __future__ import annotations

from pathlib import Path

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.config import ConfigReader, ModelConfig
from novainfer.kernels.models.family import ModelFamily, parse_config
from novainfer.kernels.models.folder import read_json
from novainfer.kernels.models.qwen2 import QWEN2
from novainfer.kernels.models.qwen3 import QWEN3

__all__ = ["FAMILIES", "read_config"]

FAMILIES: dict[str, ModelFamily] = {family.architecture: family for family in (QWEN2, QWEN3)}


def read_config(model_dir: Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face folder; raises `LoadError` naming file and field."""
    path = model_dir / "config.json"
    values = read_json(path)
    architectures = values.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    for name in names:
        if name in FAMILIES:
            return parse_config(FAMILIES[name], ConfigReader(values, path))
    found = ", ".join(names) if names else f"none (model_type {values.get('model_type')!r})"
    raise LoadError(f"{path}: architecture {found} is not supported; supported: {', '.join(FAMILIES)}")
