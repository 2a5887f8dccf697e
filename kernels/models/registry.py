"""Which architectures can be served, by the name in a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from novainfer.kernels.config import ConfigReader, ModelConfig
from novainfer.kernels.errors import LoadError
from novainfer.kernels.folder import read_json
from novainfer.kernels.models import qwen2

__all__ = ["FAMILIES", "ModelFamily", "read_config"]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture: how its config.json becomes a `ModelConfig`.

    The families so far share one forward pass (kernels/forward.py) and differ in what their config says; one
    that needs a forward of its own adds it here as a field.
    """

    architecture: str
    parse: Callable[[ConfigReader], ModelConfig]


FAMILIES: dict[str, ModelFamily] = {
    family.architecture: family for family in (ModelFamily(qwen2.ARCHITECTURE, qwen2.parse_config),)
}


def read_config(model_dir: Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face folder; raises `LoadError` naming file and field."""
    path = model_dir / "config.json"
    values = read_json(path)
    architectures = values.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name].parse(ConfigReader(values, path))
    found = ", ".join(names) if names else f"none (model_type {values.get('model_type')!r})"
    raise LoadError(f"{path}: architecture {found} is not supported; supported: {', '.join(FAMILIES)}")
