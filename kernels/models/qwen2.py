"""Qwen2 and Qwen2.5: biases on q, k and v; grouped-query attention; SwiGLU; no sliding window.

Source: "Qwen2 Technical Report" (arXiv 2407.10671); field names and defaults as in transformers' Qwen2Config.
"""

from __future__ import annotations

from novainfer.kernels.config import NUM_LAYERS_MAX, ConfigReader, ModelConfig
from novainfer.kernels.errors import LoadError

__all__ = ["ARCHITECTURE", "parse_config"]

ARCHITECTURE = "Qwen2ForCausalLM"


def parse_config(config: ConfigReader) -> ModelConfig:
    """Map config.json to a `ModelConfig`; raises `LoadError` for what is missing, wrong or not supported."""
    config.must_be("hidden_act", "silu", "silu")
    layer_types = config.values.get("layer_types")
    slides = config.boolean("use_sliding_window", False)
    if isinstance(layer_types, list):
        slides = any(kind != "full_attention" for kind in layer_types)
    if slides:
        raise LoadError(f"{config.path}: sliding-window attention is not supported, only full attention")
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise LoadError(
            f"{config.path}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    if config.values.get("head_dim") is None and hidden_size % num_heads:
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
    return ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=config.rope_theta(10_000.0),
        max_position_embeddings=config.integer("max_position_embeddings", 32_768),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        qkv_bias=True,
        dtype=config.dtype(),
        eos_token_ids=config.eos_token_ids(vocab_size),
    )
