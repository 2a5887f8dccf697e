"""Tiny random checkpoints made with transformers: biases that are not 0, norm weights that are not 1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["FEW_EXPERTS", "GRID", "Shape", "greedy", "load_transformers", "save_checkpoint"]


@dataclass(frozen=True)
class Shape:
    """What differs between the checkpoints of the grid."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    tied: bool = True
    sharded: bool = False
    rope_theta: float = 10_000.0
    num_layers: int = 2
    intermediate_size: int = 72
    eos_token_id: int | None = None
    family: str = "Qwen2"
    rope: tuple[tuple[str, Any], ...] = ()  # fields of `rope_parameters`
    others: tuple[tuple[str, Any], ...] = ()  # fields of config.json


LLAMA3 = (
    ("rope_type", "llama3"),
    ("factor", 8.0),
    ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 16),
)
YARN = (("rope_type", "yarn"), ("factor", 16.0), ("original_max_position_embeddings", 16))
FEW_EXPERTS = (
    ("num_experts", 7),
    ("num_experts_per_tok", 3),
    ("moe_intermediate_size", 24),
    ("shared_expert_intermediate_size", 40),
)
GRID = (
    Shape("mha", 4, 4, 8, 32, 257),
    Shape("mqa", 4, 1, 32, 64, 301, tied=False),
    Shape("wide-heads", 6, 2, 24, 96, 1000, sharded=True),
    Shape("like-0.5b", 14, 2, 64, 112, 515, rope_theta=1e6, num_layers=3),
    Shape("narrow-hidden", 8, 4, 128, 48, 400, tied=False, sharded=True, rope_theta=500.0),
    Shape("odd", 3, 3, 10, 30, 127, intermediate_size=43),
    Shape("qwen3", 4, 2, 32, 64, 257, family="Qwen3", rope_theta=1e6, num_layers=3),
    Shape(
        "qwen3-biased", 6, 2, 20, 40, 301, tied=False, sharded=True, family="Qwen3", others=(("attention_bias", True),)
    ),
    Shape("yarn", 4, 2, 32, 64, 257, rope=YARN),
    Shape("llama", 4, 2, 24, 64, 257, tied=False, sharded=True, family="Llama", rope_theta=5e5, rope=LLAMA3),
    Shape(
        "llama-biased",
        4,
        4,
        16,
        64,
        130,
        family="Llama",
        intermediate_size=64,  # halves that share no panel
        others=(("attention_bias", True), ("mlp_bias", True)),
    ),
    # Windows of all layers, whatever layer they begin with elsewhere
    Shape("mistral", 6, 2, 32, 48, 257, tied=False, num_layers=3, family="Mistral", others=(("sliding_window", 19),)),
    # Each layer with experts, and an odd number of rows for each; some layers without; halves that share no panel
    Shape(
        "qwen3-moe", 4, 2, 32, 64, 257, tied=False, family="Qwen3Moe", others=(*FEW_EXPERTS, ("norm_topk_prob", True))
    ),
    Shape(
        "qwen2-moe",
        4,
        2,
        16,
        64,
        301,
        sharded=True,
        num_layers=3,
        family="Qwen2Moe",
        others=(*FEW_EXPERTS, ("moe_intermediate_size", 64), ("mlp_only_layers", [1])),
    ),
    # Windows of some layers, shorter than a block, and of all, across blocks
    Shape(
        "sliding",
        4,
        2,
        16,
        64,
        257,
        num_layers=3,
        others=(("use_sliding_window", True), ("sliding_window", 11), ("max_window_layers", 1)),
    ),
    Shape(
        "qwen3-sliding",
        6,
        2,
        20,
        64,
        257,
        family="Qwen3",
        num_layers=3,
        others=(
            ("use_sliding_window", True),
            ("sliding_window", 21),
            ("layer_types", ["sliding_attention", "full_attention", "sliding_attention"]),
        ),
    ),
)


def save_checkpoint(shape: Shape, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Write the checkpoint and give its folder."""
    import transformers

    config = getattr(transformers, f"{shape.family}Config")(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=shape.tied,
        rope_parameters={"rope_theta": shape.rope_theta, "rope_type": "default"} | dict(shape.rope),
        eos_token_id=shape.eos_token_id,
        dtype=dtype,
        **dict(shape.others),
    )
    model = getattr(transformers, f"{shape.family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (0.0, 0.3) if name.endswith("bias") else (1.0, 0.2) if "norm" in name else (0.0, 0.12)
            parameter.copy_(torch.empty_like(parameter).normal_(mean, std, generator=generator))
    model.to(dtype).save_pretrained(folder, max_shard_size="60KB" if shape.sharded else "1GB")
    return folder


def load_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """The same checkpoint in transformers."""
    from transformers import AutoModelForCausalLM

    # Experts one after the other: torch's grouped product wants their sizes to be multiples of 16 bytes.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def greedy(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy continuation, and the fp32 logits [num_tokens, vocab_size] each token came from."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()
