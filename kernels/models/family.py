"""A model family as data: the tensors of its checkpoints, and what config.json means where it says nothing.

Everything that must know a layer's weights reads this table: the check of a checkpoint's headers, the loader, the
layers of the decoder and so the native descriptor, the random checkpoints and the roofline of the benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.config import NUM_EXPERTS_MAX, NUM_LAYERS_MAX, ConfigReader, ModelConfig, TensorSpec
from novainfer.kernels.models.rope import max_positions, read_rope

__all__ = [
    "ATTENTION_BIAS",
    "DECODER",
    "EXPERTS",
    "MLP_BIAS",
    "OUTPUT_BIAS",
    "QK_NORM",
    "SHARED_EXPERT",
    "ModelFamily",
    "parse_config",
    "with_experts",
]

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."

# A pre-norm decoder with rotary grouped-query attention and a gated MLP. In the order of a checkpoint; tensors of one
# part are one product. Sharded along axis 0, a product gives its share of the outputs; along axis 1, a summand of all.
DECODER = (
    TensorSpec("model.embed_tokens.weight", "embedding", ("vocab_size", "hidden_size"), shard_axis=0),
    TensorSpec(LAYER + "input_layernorm.weight", "input_norm", ("hidden_size",)),
    TensorSpec(ATTENTION + "q_proj.weight", "qkv", ("q_size", "hidden_size"), shard_axis=0),
    TensorSpec(ATTENTION + "k_proj.weight", "qkv", ("kv_size", "hidden_size"), shard_axis=0),
    TensorSpec(ATTENTION + "v_proj.weight", "qkv", ("kv_size", "hidden_size"), shard_axis=0),
    TensorSpec(ATTENTION + "o_proj.weight", "o", ("hidden_size", "q_size"), shard_axis=1),
    TensorSpec(LAYER + "post_attention_layernorm.weight", "post_norm", ("hidden_size",)),
    TensorSpec(MLP + "gate_proj.weight", "gate_up", ("intermediate_size", "hidden_size"), shard_axis=0),
    TensorSpec(MLP + "up_proj.weight", "gate_up", ("intermediate_size", "hidden_size"), shard_axis=0),
    TensorSpec(MLP + "down_proj.weight", "down", ("hidden_size", "intermediate_size"), shard_axis=1),
    TensorSpec("model.norm.weight", "final_norm", ("hidden_size",)),
    TensorSpec("lm_head.weight", "head", ("vocab_size", "hidden_size"), 0, when=("tie_word_embeddings", False)),
)

# Biases of q, k and v, of what attention gives, and of the MLP; each query and key head normed before its rotation.
ATTENTION_BIAS = (
    TensorSpec(ATTENTION + "q_proj.bias", "qkv", ("q_size",), shard_axis=0),
    TensorSpec(ATTENTION + "k_proj.bias", "qkv", ("kv_size",), shard_axis=0),
    TensorSpec(ATTENTION + "v_proj.bias", "qkv", ("kv_size",), shard_axis=0),
)
OUTPUT_BIAS = (TensorSpec(ATTENTION + "o_proj.bias", "o", ("hidden_size",)),)
MLP_BIAS = (
    TensorSpec(MLP + "gate_proj.bias", "gate_up", ("intermediate_size",), shard_axis=0),
    TensorSpec(MLP + "up_proj.bias", "gate_up", ("intermediate_size",), shard_axis=0),
    TensorSpec(MLP + "down_proj.bias", "down", ("hidden_size",)),
)
QK_NORM = (
    TensorSpec(ATTENTION + "q_norm.weight", "q_norm", ("head_dim",)),
    TensorSpec(ATTENTION + "k_norm.weight", "k_norm", ("head_dim",)),
)

# A mixture of experts in the place of the MLP: the router's product says which of them a row is given to. Of a shared
# expert, which each row is given to, the last tensor says how much of it is added.
EXPERT = MLP + "experts.{expert}."
SHARED = MLP + "shared_expert."
EXPERTS = (
    TensorSpec(MLP + "gate.weight", "router", ("num_experts", "hidden_size"), of_experts=True),
    TensorSpec(EXPERT + "gate_proj.weight", "experts_gate_up", ("moe_intermediate_size", "hidden_size"), 0, None, True),
    TensorSpec(EXPERT + "up_proj.weight", "experts_gate_up", ("moe_intermediate_size", "hidden_size"), 0, None, True),
    TensorSpec(EXPERT + "down_proj.weight", "experts_down", ("hidden_size", "moe_intermediate_size"), 1, None, True),
)
_SHARED_SIZE = "shared_expert_intermediate_size"
SHARED_EXPERT = (
    TensorSpec(SHARED + "gate_proj.weight", "shared_gate_up", (_SHARED_SIZE, "hidden_size"), 0, None, True),
    TensorSpec(SHARED + "up_proj.weight", "shared_gate_up", (_SHARED_SIZE, "hidden_size"), 0, None, True),
    TensorSpec(SHARED + "down_proj.weight", "shared_down", ("hidden_size", _SHARED_SIZE), 1, None, True),
    TensorSpec(MLP + "shared_expert_gate.weight", "shared_gate", ("1", "hidden_size"), of_experts=True),
)


def with_experts(decoder: tuple[TensorSpec, ...], experts: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """A decoder of which some layers have experts, the others its MLP."""
    is_mlp = {"gate_up", "down"}
    return (*(replace(tensor, of_experts=False) if tensor.part in is_mlp else tensor for tensor in decoder), *experts)


# What a field means that is not in config.json, as transformers has it; null in config.json is not the lack of a field.
DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One architecture: its tensors, and what it means where config.json lacks a field, as far as not `DEFAULTS`."""

    architecture: str  # as `architectures` in config.json names it
    model_type: str
    tensors: tuple[TensorSpec, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that it does not read, and what they are for it
    refused: tuple[str, ...] = ()  # fields that must not be true


def parse_config(family: ModelFamily, values: Mapping[str, Any], path: Path) -> ModelConfig:
    """Map config.json to a `ModelConfig`; raises `LoadError` for what is missing, wrong or not supported."""
    config = ConfigReader({**values, **family.fixed}, path, defaults={**DEFAULTS, **family.defaults})
    config.must_be("hidden_act", "silu", "silu")
    if not config.boolean("is_causal", True):
        raise LoadError(f"{path}: is_causal false is not supported: a token sees those before it only")
    for name in family.refused:
        if config.boolean(name, False):
            raise LoadError(f"{path}: {name} is not supported with {family.architecture}")
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise LoadError(
            f"{config.path}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    if config.given("head_dim") is None and hidden_size % num_heads:
        raise LoadError(
            f"{config.path}: hidden_size ({hidden_size}) must be a multiple of num_attention_heads "
            f"({num_heads}) when head_dim is not given"
        )
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise LoadError(f"{config.path}: head_dim must be even for rotary positions, not {head_dim}")
    vocab_size = config.integer("vocab_size")
    num_layers = config.integer("num_hidden_layers")
    if num_layers > NUM_LAYERS_MAX:
        raise LoadError(f"{config.path}: num_hidden_layers must be at most {NUM_LAYERS_MAX}, not {num_layers}")
    max_position_embeddings = config.integer("max_position_embeddings")
    rope = read_rope(config, max_position_embeddings)
    windows = _sliding_windows(config, num_layers)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps"),
        rope=rope,
        max_position_embeddings=max_positions(config, rope, max_position_embeddings),
        sliding_windows=windows,
        tensors=tuple(
            tensor
            for tensor in family.tensors
            if tensor.when is None or config.boolean(tensor.when[0], False) == tensor.when[1]
        ),
        dtype=config.dtype(),
        eos_token_ids=config.eos_token_ids(vocab_size),
        **(_read_experts(config, family, num_layers)),
    )


def _read_experts(config: ConfigReader, family: ModelFamily, num_layers: int) -> dict[str, Any]:
    """The fields of `ModelConfig` that are about experts; none for a family that has no experts."""
    if not any(tensor.is_per_expert for tensor in family.tensors):
        return {}
    # transformers 5 knows it by both names
    name = "num_local_experts" if "num_local_experts" in config.values else "num_experts"
    num_experts, num_active = config.integer(name), config.integer("num_experts_per_tok")
    if num_experts > NUM_EXPERTS_MAX:
        raise LoadError(f"{config.path}: {name} must be at most {NUM_EXPERTS_MAX}, not {num_experts}")
    if num_active > num_experts:
        raise LoadError(f"{config.path}: num_experts_per_tok ({num_active}) must be at most {name} ({num_experts})")
    dense = config.given("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        raise LoadError(f"{config.path}: mlp_only_layers must list layers from 0 to {num_layers - 1}, not {dense!r}")
    step = config.integer("decoder_sparse_step", 1)
    parts = {tensor.part for tensor in family.tensors}
    return {
        "has_experts": tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        "num_experts": num_experts,
        "num_experts_per_tok": num_active,
        "norm_topk_prob": config.boolean("norm_topk_prob", False),
        "moe_intermediate_size": config.integer("moe_intermediate_size"),
        "shared_expert_intermediate_size": config.integer(_SHARED_SIZE) if "shared_down" in parts else 0,
    }


def _sliding_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer: how many tokens a row sees, itself among them; None: its whole context."""
    window: int | None = None
    if config.boolean("use_sliding_window", False) and config.given("sliding_window") is not None:
        window = config.integer("sliding_window")
    kinds = config.values.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise LoadError(f"{config.path}: layer_types must name the attention of each of {num_layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise LoadError(
                f"{config.path}: layer_types {kind!r} is not supported, only 'full_attention' and 'sliding_attention'"
            )
        if kind == "sliding_attention" and window is None:
            raise LoadError(f"{config.path}: layer_types names 'sliding_attention', but there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
