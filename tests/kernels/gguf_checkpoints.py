"""GGUF files written by the gguf package, from checkpoints of `save_checkpoint`, as llama.cpp converts them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.torch import load_file

__all__ = ["Type", "blocks", "save_gguf", "write_tokenizer"]

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
}  # fmt: skip
ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}  # where config.json has another name
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")
KEPT = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")  # llama-quantize leaves them in F32
# Of each block: where fp16 numbers stand, which random bytes must not make infinite or large.
HALVES = {
    Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q5_0: (0,), Type.Q5_1: (0, 2), Type.Q8_0: (0,),
    Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,),
}  # fmt: skip
# What scales must be divided by, for weights of about the size of the source's.
SIZES = {Type.Q4_K: 600.0, Type.Q5_K: 1200.0, Type.Q6_K: 2000.0, Type.Q8_0: 100.0}


def blocks(shape: tuple[int, ...], kind: Type, seed: int) -> np.ndarray:
    """Random blocks: uint8 [rows, bytes of a row]. Every bit of every code and scale is used by some."""
    generator = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    found = generator.integers(0, 256, (shape[0] * shape[1] // size, num_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = (generator.random(len(found)) + 0.1) * 0.2 / SIZES.get(kind, 16.0)
        found[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return found.reshape(shape[0], -1)


def save_gguf(
    source: Path,
    out: Path,
    type_of: Callable[[str], Type],
    *,
    kept: tuple[str, ...] = KEPT,
    fuses_experts: bool = False,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> dict[str, torch.Tensor]:
    """Write the file; the gguf package's own dequantisation of its tensors, by the names of the source.

    With `fuses_experts` the gate and up of experts as `--fuse-gate-up-exps` writes them.
    """
    config = json.loads((source / "config.json").read_text())
    architecture, heads, kv_heads = (
        ARCHITECTURES.get(config["model_type"], config["model_type"]),
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    num_experts = config.get("num_local_experts", config.get("num_experts"))
    if num_experts is not None:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    change(writer)
    read: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    halves: dict[str, dict[str, np.ndarray]] = {}
    for number, (name, tensor) in enumerate(load_file(source / "model.safetensors").items()):
        values = tensor.float().numpy()
        kind = type_of(name) if values.ndim == 2 and not name.endswith(kept) else Type.F32
        interleaves = architecture == "llama" and ("q_proj." in name or "k_proj." in name)
        num_heads = (heads if "q_proj" in name else kv_heads) if interleaves else 0
        if kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
            data = blocks(values.shape, kind, number)
        else:
            data = quants.quantize(interleaved(values, num_heads), kind)
        read[name] = torch.from_numpy(deinterleaved(quants.dequantize(data, kind), num_heads).copy())
        if (of_expert := EXPERT.fullmatch(name)) is None:
            # A tensor of one row is written as a vector, as the converter squeezes what it writes.
            writer.add_tensor(gguf_name(name), data[0] if len(data) == 1 else data, raw_dtype=kind)
            continue
        stack = stacks.setdefault(of_expert[1] + of_expert[3], {})
        stack[int(of_expert[2])] = data
        if len(stack) == num_experts:
            whole = np.stack([stack[expert] for expert in range(num_experts)])
            part = of_expert[3]
            if fuses_experts and part != "down_proj.weight":
                both = halves.setdefault(of_expert[1], {})
                both[part] = whole
                if len(both) < 2:
                    continue
                part = "gate_up_proj.weight"
                whole = np.concatenate([both["gate_proj.weight"], both["up_proj.weight"]], axis=1)
            writer.add_tensor(gguf_name(of_expert[1] + part), whole, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """The rows or biases of each head, the halves side by side: what convert_hf_to_gguf.py does to q and k of llama."""
    if not num_heads:
        return values
    return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def deinterleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """The other way."""
    if not num_heads:
        return values
    return values.reshape(num_heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def gguf_name(name: str) -> str:
    """A tensor's name in the file."""
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str = "qwen2") -> None:
    """The vocabulary of a folder's tokenizer.json, and its chat template, as llama.cpp's converter writes them."""
    given = json.loads((folder / "tokenizer.json").read_text())
    settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary, added = given["model"]["vocab"], {token["content"]: token for token in given["added_tokens"]}
    ids = {**vocabulary, **{content: token["id"] for content, token in added.items()}}
    tokens = [f"[PAD{i}]" for i in range(max(ids.values()) + 1)]
    types = [5] * len(tokens)
    for token, token_id in ids.items():
        tokens[token_id] = token
        types[token_id] = 1 if token not in added else 3 if added[token]["special"] else 4
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in given["model"]["merges"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_add_bos_token(False)
    if settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])
