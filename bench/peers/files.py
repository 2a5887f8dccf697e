"""A checkpoint in the forms that peers read: GGUF for llama.cpp and OpenVINO, compressed-tensors for vLLM.

Made once and kept beside the checkpoints of the benchmarks. Speed is what they are for: weights are rounded to the
nearest, without the calibration that quality would ask for. Of GGUF, the kinds in groups of 256 (Q4_K_M) need
llama.cpp's own `llama-quantize`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from novainfer.kernels.models.config import ModelConfig
from novainfer.kernels.models.registry import read_config
from novainfer.kernels.ops.grouped import INT4_GROUP_SIZES, rounded_to_int4
from novainfer.kernels.ops.quantised import quantised

__all__ = ["GGUF_KINDS", "FileError", "make_gguf", "make_w4a16", "make_w8a8"]

GGUF_KINDS = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M")
ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
# llama.cpp's names of the tensors of Qwen2 and Qwen3, by Hugging Face's
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class FileError(Exception):
    """A form that cannot be made here, and why."""


def make_gguf(model_dir: Path, path: Path, kind: str, quantize: Path | None = None) -> Path:
    """`model_dir` as a GGUF file of `kind` at `path`, unless it is there; `quantize` is llama.cpp's program.

    Raises `FileError` where the package `gguf`, or that program, is needed and not there.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "Q4_K_M":
        if quantize is None:
            raise FileError("Q4_K_M needs llama-quantize, which lies beside llama-server where llama.cpp was built")
        whole = make_gguf(model_dir, path.with_name("BF16.gguf"), "BF16")
        _made(path, lambda to: _run(quantize, "--allow-requantize", whole, to, kind))
        return path
    try:
        import gguf
    except ImportError:
        raise FileError("writing GGUF needs the package gguf (pip install gguf)") from None
    _made(path, lambda to: _write_gguf(gguf, model_dir, to, kind))
    return path


def _write_gguf(gguf: Any, model_dir: Path, path: Path, kind: str) -> None:
    config = read_config(model_dir)
    if config.architecture not in ARCHITECTURES:
        raise FileError(f"{config.architecture} is not written as GGUF, only {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[config.architecture])
    quant = gguf.GGMLQuantizationType[kind]
    _write_facts(gguf, writer, config, quant)
    _write_vocabulary(gguf, writer, model_dir, config)
    for name, tensor in _tensors(model_dir):
        if tensor.ndim == 1:
            writer.add_tensor(_gguf_name(name), tensor.float().numpy())
            continue
        data = gguf.quants.quantize(tensor.float().numpy(), quant)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_facts(gguf: Any, writer: Any, config: ModelConfig, quant: Any) -> None:
    writer.add_name("benchmark")
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{quant.name}"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _write_vocabulary(gguf: Any, writer: Any, model_dir: Path, config: ModelConfig) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    by_id = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens", ())}
    tokens = [special.get(i, by_id.get(i, f"[unused{i}]")) for i in range(config.vocab_size)]
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(config.vocab_size)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"].get("merges", ())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges or [_a_merge(tokens)])  # llama.cpp reads no file without one
    ends = config.eos_token_ids or tuple(special)[-1:]
    writer.add_eos_token_id(ends[0])
    writer.add_add_bos_token(False)


def _a_merge(tokens: list[str]) -> str:
    """Of two tokens that are one together."""
    known = set(tokens)
    for token in tokens:
        if len(token) == 2 and {*token} <= known:
            return " ".join(token)
    raise FileError("the tokenizer has no merges, and no two of its tokens make a third")


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        number, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def make_w8a8(model_dir: Path, out_dir: Path) -> Path:
    """`model_dir` as compressed-tensors has it: int8 weights by row, activations by token as they come; head whole."""

    def parts(name: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scale = quantised(weight)
        return {name: codes, f"{name}_scale": scale[:, None].to(torch.float32)}

    whole = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "weights": whole | {"strategy": "channel", "dynamic": False},
        "input_activations": whole | {"strategy": "token", "dynamic": True},
    }
    return _make_compressed(model_dir, out_dir, "int-quantized", group, parts)


def make_w4a16(model_dir: Path, out_dir: Path) -> Path:
    """Likewise with weights in symmetric codes of 4 bits, in the largest groups that divide all, and activations whole.

    They are those of `--quantization int4`, where those divide all products. Raises `FileError` where none do.
    """
    widths = {tensor.shape[1] for name, tensor in _tensors(model_dir) if _is_product(name, tensor)}
    size = next((size for size in INT4_GROUP_SIZES if not any(width % size for width in widths)), None)
    if size is None:
        raise FileError(f"no group of {INT4_GROUP_SIZES} features divides all of {sorted(widths)}")

    def parts(name: str, weight: Tensor) -> dict[str, Tensor]:
        stem, rows = name.removesuffix(".weight"), len(weight)
        rounded = rounded_to_int4(weight.reshape(-1, size))
        return {
            f"{stem}.weight_packed": packed_words(rounded.codes.view(rows, -1)),
            f"{stem}.weight_scale": rounded.scale.view(rows, -1).to(torch.bfloat16),
            f"{stem}.weight_shape": torch.tensor(weight.shape),
        }

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    group = {"weights": weights | {"dynamic": False}, "input_activations": None}
    return _make_compressed(model_dir, out_dir, "pack-quantized", group, parts)


def packed_words(codes: Tensor) -> Tensor:
    """int8 [N, K] of 0 to 15 -> int32 [N, K / 8]: eight to a word, the first in the lowest bits."""
    words = (codes.view(len(codes), -1, 8).long() << torch.arange(0, 32, 4)).sum(2)
    return torch.where(words < 2**31, words, words - 2**32).int()


def _make_compressed(
    model_dir: Path,
    out_dir: Path,
    layout: str,
    group: dict[str, Any],
    parts: Callable[[str, Tensor], dict[str, Tensor]],
) -> Path:
    """A checkpoint whose layers' products are what `parts` makes of them, unless it is there."""
    if (out_dir / "config.json").exists():
        return out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in _tensors(model_dir):
        tensors |= parts(name, tensor) if _is_product(name, tensor) else {name: tensor}
    _made(out_dir / "model.safetensors", lambda path: save_file(tensors, path, {"format": "pt"}))
    for file in model_dir.iterdir():
        if file.suffix == ".json" and file.name not in ("config.json", "model.safetensors.index.json"):
            (out_dir / file.name).write_bytes(file.read_bytes())
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
    }
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")  # the last file that is written
    return out_dir


def _is_product(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and name.startswith("model.layers.")


def _tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no dict)
                yield name, tensors.get_tensor(name)


def _made(path: Path, write: Callable[[Path], None]) -> None:
    """Under another name first, so that what is there is whole."""
    part = path.with_name(path.name + ".part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise FileError(f"{command[0]} failed: {words[-1] if words else f'exit code {done.returncode}'}")
