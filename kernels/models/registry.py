"""Which architectures can be served: a table each, by the name in a checkpoint's config.json.

Sources: "Qwen2 Technical Report" (arXiv 2407.10671), "Qwen3 Technical Report" (arXiv 2505.09388), "The Llama 3 Herd of
Models" (arXiv 2407.21783), "Mistral 7B" (arXiv 2310.06825); field names and defaults as in transformers' Qwen2Config,
Qwen3Config, LlamaConfig, MistralConfig, Qwen2MoeConfig and Qwen3MoeConfig.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.config import ModelConfig, TensorSpec
from novainfer.kernels.models.family import (
    ATTENTION_BIAS,
    DECODER,
    EXPERTS,
    MLP_BIAS,
    OUTPUT_BIAS,
    QK_NORM,
    SHARED_EXPERT,
    ModelFamily,
    parse_config,
    with_experts,
)
from novainfer.kernels.models.folder import read_json
from novainfer.kernels.models.gguf import is_gguf
from novainfer.kernels.models.gguf_config import gguf_config

__all__ = ["FAMILIES", "LLAMA", "MISTRAL", "QWEN2", "QWEN2_MOE", "QWEN3", "QWEN3_MOE", "read_config"]


def _when(field: str, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Tensors that are there when this field of config.json is true."""
    return tuple(replace(tensor, when=(field, True)) for tensor in tensors)


# Qwen2 and Qwen2.5: biases on q, k and v.
QWEN2 = ModelFamily("Qwen2ForCausalLM", "qwen2", (*DECODER, *ATTENTION_BIAS))

# Qwen3, dense: each query and key head is normed before its rotation; no biases, unless config.json has them.
QWEN3 = ModelFamily(
    "Qwen3ForCausalLM",
    "qwen3",
    (*DECODER, *QK_NORM, *_when("attention_bias", (*ATTENTION_BIAS, *OUTPUT_BIAS))),
    {"head_dim": 128},
)

# Qwen1.5-MoE and Qwen2-MoE: beside the experts that a row is given to one that all rows share.
QWEN2_MOE = ModelFamily(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    (*with_experts(DECODER, (*EXPERTS, *SHARED_EXPERT)), *_when("qkv_bias", ATTENTION_BIAS)),
    {
        "qkv_bias": True,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    refused=("use_sliding_window",),  # transformers and vLLM disagree on which layers slide
)

# Qwen3-MoE: attention as in Qwen3.
QWEN3_MOE = ModelFamily(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    (
        *with_experts(DECODER, EXPERTS),
        *QK_NORM,
        *_when("attention_bias", (*ATTENTION_BIAS, *OUTPUT_BIAS)),
    ),
    {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    refused=("use_sliding_window",),
)

# Llama 2 and 3, and what was made in their likeness.
LLAMA = ModelFamily(
    "LlamaForCausalLM",
    "llama",
    (*DECODER, *_when("attention_bias", (*ATTENTION_BIAS, *OUTPUT_BIAS)), *_when("mlp_bias", MLP_BIAS)),
    {"max_position_embeddings": 2048, "eos_token_id": 2},
    {"use_sliding_window": False},
)

# Mistral: each layer has the window, unless `sliding_window` is null.
MISTRAL = ModelFamily(
    "MistralForCausalLM",
    "mistral",
    DECODER,
    {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "eos_token_id": 2},
    {"use_sliding_window": True, "max_window_layers": 0},
)

FAMILIES: dict[str, ModelFamily] = {
    family.architecture: family for family in (QWEN2, QWEN3, LLAMA, MISTRAL, QWEN2_MOE, QWEN3_MOE)
}


def _with_head(name: str) -> str:
    """What transformers calls the model that has a head on top of this one."""
    return f"{name.removesuffix('Model')}ForCausalLM"


def read_config(model_dir: Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face folder, or of a GGUF file; raises `LoadError` naming file and field."""
    if is_gguf(model_dir):
        return gguf_config(model_dir, FAMILIES)
    path = model_dir / "config.json"
    values = read_json(path)
    architectures = values.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    for name in names:
        if (family := FAMILIES.get(name) or FAMILIES.get(_with_head(name))) is not None:
            return parse_config(family, values, path)
    found = ", ".join(names) if names else f"none (model_type {values.get('model_type')!r})"
    raise LoadError(f"{path}: architecture {found} is not supported; supported: {', '.join(FAMILIES)}")
