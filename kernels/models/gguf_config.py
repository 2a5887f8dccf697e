"""A model's geometry from the keys of a GGUF file, in the words of config.json."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.config import ModelConfig
from novainfer.kernels.models.family import ModelFamily, parse_config
from novainfer.kernels.models.gguf import Gguf, read_gguf

__all__ = ["EMBEDDING", "config_values", "end_tokens", "gguf_config"]

# What config.json calls them as `model_type`; Mistral's files say "llama".
ARCHITECTURES = {
    "qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
}  # fmt: skip
# Whose layers all have experts, and whether the weights of those that are chosen sum to 1: llama.cpp has it by name.
NORMALISES_EXPERTS = {"qwen2moe": False, "qwen3moe": True}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
CONTROL = 3  # the type of a token that is no text
# Tokens that end an answer whatever the keys say, as llama.cpp has it: of some files the keys name one of two.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>")
# Keys that change what is computed, and what they say where they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (1.0, 0.0),
    "expert_gating_func": (1, 0),  # softmax, or not said
    "expert_group_count": (0, 1),
    "expert_weights_scale": (1.0, 0.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (1.0, 0.0),
    "moe_every_n_layers": (0, 1),
    "residual_scale": (1.0, 0.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}
# What llama.cpp writes as factors of frequencies for Llama 3.1 and 3.2, which it has from these fields of their config.
LLAMA3 = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)


def gguf_config(path: Path, families: dict[str, ModelFamily]) -> ModelConfig:
    """The `ModelConfig` of a file; `families` by architecture. Raises `LoadError` naming file and key."""
    gguf = read_gguf(path)
    architecture = gguf.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise LoadError(
            f"{path}: general.architecture {architecture!r} is not supported, only "
            f"{', '.join(map(repr, ARCHITECTURES))}"
        )
    family = next(family for family in families.values() if family.model_type == ARCHITECTURES[architecture])
    config = parse_config(family, config_values(gguf, architecture), path)
    return replace(config, eos_token_ids=end_tokens(gguf, config.vocab_size))


def config_values(gguf: Gguf, architecture: str) -> dict[str, Any]:
    """What config.json would say."""

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    for name, neutral in NEUTRAL.items():
        value = gguf.values.get(key(name), neutral[0])
        if value not in neutral:
            raise LoadError(f"{gguf.path}: {key(name)} {value!r:.100} is not supported, only {neutral[0]!r}")
    embedding = gguf.tensors.get(EMBEDDING)
    if embedding is None:
        raise LoadError(f"{gguf.path} holds no {EMBEDDING}")
    hidden_size, num_heads = gguf.integer(key("embedding_length")), gguf.integer(key("attention.head_count"))
    head_dim = gguf.integer(key("attention.key_length"), max(hidden_size // num_heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if gguf.integer(key(name), head_dim) != head_dim:
            raise LoadError(f"{gguf.path}: {key(name)} must be {head_dim} like the keys, not {gguf.integer(key(name))}")
    context = gguf.integer(key("context_length"))
    rope = {"rope_theta": gguf.number(key("rope.freq_base"), 10_000.0, minimum=1.0)} | _scaling(
        gguf, architecture, context
    )
    if ROPE_FACTORS in gguf.tensors:
        if rope.get("factor", 1.0) != 1.0:
            raise LoadError(f"{gguf.path}: {ROPE_FACTORS} is not supported beside {key('rope.scaling.factor')}")
        rope |= _llama3(gguf, head_dim, rope["rope_theta"])
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": gguf.integer(key("feed_forward_length")),
        "num_hidden_layers": gguf.integer(key("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.integer(key("attention.head_count_kv"), num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": gguf.number(key("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope,
        "tie_word_embeddings": HEAD not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in gguf.tensors,
        "qkv_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "use_sliding_window": False,
    } | _experts(gguf, architecture)


def end_tokens(gguf: Gguf, vocab_size: int) -> tuple[int, ...]:
    """The ids that end an answer, sorted."""
    names = ("eos", "eot", "eom")
    found = {
        gguf.integer(key, minimum=0) for name in names if (key := f"tokenizer.ggml.{name}_token_id") in gguf.values
    }
    tokens = gguf.items("tokenizer.ggml.tokens", str, [])
    types = gguf.items("tokenizer.ggml.token_type", int, [])
    control = {i for i, kind in enumerate(types[: len(tokens)]) if kind == CONTROL}
    found |= {i for i in control if tokens[i] in END_TOKENS}
    return tuple(sorted(token_id for token_id in found if token_id < vocab_size))


def _experts(gguf: Gguf, architecture: str) -> dict[str, Any]:
    """What config.json would say of experts; sizes that the keys lack are what llama.cpp takes them for."""

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    if architecture not in NORMALISES_EXPERTS:
        if count := gguf.integer(key("expert_count"), 0, minimum=0):
            supported = ", ".join(map(repr, NORMALISES_EXPERTS))
            raise LoadError(f"{gguf.path}: {key('expert_count')} {count} is not supported, only with {supported}")
        return {}
    count, num_active = gguf.integer(key("expert_count")), gguf.integer(key("expert_used_count"))
    if num_active > count:
        raise LoadError(
            f"{gguf.path}: {key('expert_used_count')} must be at most {count} ({key('expert_count')}), not {num_active}"
        )
    normalises = NORMALISES_EXPERTS[architecture]
    if gguf.boolean(key("expert_weights_norm"), normalises) != normalises:
        raise LoadError(f"{gguf.path}: {key('expert_weights_norm')} must be {normalises} with {architecture!r}")
    size = gguf.integer(key("feed_forward_length"))
    return {
        "num_experts": count,
        "num_experts_per_tok": num_active,
        "norm_topk_prob": normalises,
        "moe_intermediate_size": gguf.integer(key("expert_feed_forward_length"), max(size // num_active, 1)),
        "shared_expert_intermediate_size": gguf.integer(key("expert_shared_feed_forward_length"), size),
    }


def _scaling(gguf: Gguf, architecture: str, context: int) -> dict[str, Any]:
    """How positions are scaled; a factor without a type is linear, as llama.cpp has it."""
    prefix = f"{architecture}.rope.scaling."
    kind = gguf.text(f"{prefix}type", "linear" if gguf.values.get(f"{prefix}factor", 0) != 0 else "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise LoadError(f"{gguf.path}: {prefix}type {kind!r} is not supported, only 'none', 'linear' and 'yarn'")
    factor = gguf.number(f"{prefix}factor", minimum=1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = gguf.integer(f"{prefix}original_context_length", context)
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _llama3(gguf: Gguf, head_dim: int, theta: float) -> dict[str, Any]:
    """The fields that give the factors which the file holds as a tensor; raises `LoadError` for factors of others."""
    tensor = gguf.tensors[ROPE_FACTORS]
    count = head_dim // 2
    if tensor.type == "F32" and tensor.shape == (count,):
        with tensor.file.open("rb") as file:
            file.seek(tensor.begin)
            data = memoryview(file.read(4 * count)).cast("f").tolist()
        for fields in LLAMA3:
            expected = [_llama3_factor(fields, theta ** (-2 * i / head_dim)) for i in range(count)]
            if all(math.isclose(found, factor, rel_tol=1e-4) for found, factor in zip(data, expected, strict=True)):
                return fields
    raise LoadError(f"{gguf.path}: {ROPE_FACTORS} is not supported, only as Llama 3.1 and 3.2 have it")


def _llama3_factor(fields: dict[str, Any], frequency: float) -> float:
    """By which a frequency is divided ("The Llama 3 Herd of Models", arXiv 2407.21783; as llama.cpp writes it)."""
    turns = fields["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = fields["low_freq_factor"], fields["high_freq_factor"]
    if turns > high:
        return 1.0
    if turns < low:
        return float(fields["factor"])
    smooth = (turns - low) / (high - low)
    return float(1 / ((1 - smooth) / fields["factor"] + smooth))
