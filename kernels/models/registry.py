"""Which architectures can be served: a table each, by the name in a checkpoint's config.json.

Sources: "Qwen2 Technical Report" (arXiv 2407.10671), "Qwen3 Technical Report" (arXiv 2505.09388); field names and
defaults as in transformers' Qwen2Config and Qwen3Config.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.config import ConfigReader, ModelConfig
from novainfer.kernels.models.family import ATTENTION_BIAS, DECODER, OUTPUT_BIAS, QK_NORM, ModelFamily, parse_config
from novainfer.kernels.models.folder import read_json

__all__ = ["FAMILIES", "QWEN2", "QWEN3", "read_config"]

# Qwen2 and Qwen2.5: biases on q, k and v.
QWEN2 = ModelFamily("Qwen2ForCausalLM", "qwen2", (*DECODER, *ATTENTION_BIAS))

# Qwen3, dense: each query and key head is normed before its rotation; no biases, unless config.json has them.
QWEN3 = ModelFamily(
    "Qwen3ForCausalLM",
    "qwen3",
    (*DECODER, *QK_NORM, *(replace(bias, when=("attention_bias", True)) for bias in (*ATTENTION_BIAS, *OUTPUT_BIAS))),
    head_dim=128,
)

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
