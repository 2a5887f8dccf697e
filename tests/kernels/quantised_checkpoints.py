"""Checkpoints as the tools that quantise models write them, and what their codes stand for by the formats' own words.

Each writer takes a checkpoint of `checkpoints.save_checkpoint` and gives a folder. `plain_copy` writes what a format's
reference dequantisation makes of it as an unquantised checkpoint: both must compute the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = [
    "awq_reference",
    "compressed_reference",
    "edit",
    "gptq_reference",
    "plain_copy",
    "save_awq",
    "save_compressed",
    "save_gptq",
]

Tensors = dict[str, Tensor]
AWQ_PACKING = (0, 2, 4, 6, 1, 3, 5, 7)  # which column the i-th four bits of a word hold (AutoAWQ's order_map)


def products(tensors: Tensors) -> list[str]:
    """The modules of the layers that are products."""
    return [name.removesuffix(".weight") for name in tensors if ".layers." in name and name.endswith("proj.weight")]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Along the last axis, the first code in the lowest bits of a word."""
    per_word = 32 // bits
    padded = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word) * per_word), np.uint32)
    padded[..., : codes.shape[-1]] = codes
    words = padded.reshape(*codes.shape[:-1], -1, per_word)
    return sum(words[..., i] << np.uint32(bits * i) for i in range(per_word)).astype(np.uint32).view(np.int32)


def bits_of(words: np.ndarray, at: int, bits: int) -> np.ndarray:
    """The `at`-th code of each word."""
    return (words.view(np.uint32) >> np.uint32(bits * at) & np.uint32((1 << bits) - 1)).astype(np.int64)


def rounded(weight: np.ndarray, bits: int, size: int, *, symmetric: bool) -> tuple[np.ndarray, ...]:
    """Unsigned codes [N, K], and scales and zero points [N, K / size] of their groups."""
    groups, most = weight.reshape(len(weight), -1, size), (1 << bits) - 1
    if symmetric:
        scale = np.abs(groups).max(2) / (1 << bits - 1)
        zero = np.full(scale.shape, 1 << bits - 1)
    else:
        least, largest = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
        scale = (largest - least) / most
        zero = np.rint(-least / scale).clip(1, most)
    scale = scale.astype(np.float16)
    codes = np.rint(groups / scale[..., None].astype(np.float32)) + zero[..., None]
    return codes.clip(0, most).astype(np.int64).reshape(weight.shape), scale, zero.astype(np.int64)


def save_gptq(
    source: Path,
    out: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    checkpoint_format: str = "gptq",
    zero_biases: bool = False,
    skip: Callable[[str], bool] = lambda stem: False,
) -> Path:
    """As AutoGPTQ and GPTQModel write it: codes and zero points packed, version 1 with zero points less one."""

    def quantise(stem: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        rows, columns = weight.shape
        size = columns if group_size == -1 else group_size
        codes, scale, zero = rounded(weight, bits, size, symmetric=sym)
        found = {
            "qweight": pack(codes, bits).T,
            "qzeros": pack(zero.T - (checkpoint_format == "gptq"), bits),
            "scales": scale.T,
            "g_idx": (np.arange(columns) // size).astype(np.int32),
        }
        is_extra = zero_biases and not stem.endswith(("q_proj", "k_proj", "v_proj"))
        return found | ({"bias": np.zeros(rows, np.float16)} if is_extra else {})

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym, "desc_act": False}
    return _save(source, out, quantise, settings | {"checkpoint_format": checkpoint_format}, skip)


def gptq_reference(tensors: Tensors, stem: str, settings: dict[str, Any]) -> np.ndarray:
    """scale * (code - zero point) of each element's own group, as AutoGPTQ's torch kernel unpacks them."""
    bits = settings["bits"]
    qweight, qzeros, scales, g_idx = (
        tensors[f"{stem}.{part}"].numpy() for part in ("qweight", "qzeros", "scales", "g_idx")
    )
    columns, rows, per_word = len(g_idx), qweight.shape[1], 32 // bits
    weight = np.empty((rows, columns), np.float32)
    for k in range(columns):
        code = bits_of(qweight[k // per_word], k % per_word, bits)
        zero = np.stack([bits_of(qzeros[g_idx[k], n // per_word], n % per_word, bits) for n in range(rows)])
        if settings["checkpoint_format"] == "gptq":
            zero = (zero + 1) & (1 << bits) - 1
        weight[:, k] = scales[g_idx[k]].astype(np.float32) * (code - zero)
    return weight


def save_awq(source: Path, out: Path, *, group_size: int = 32, zero_point: bool = True) -> Path:
    """As AutoAWQ's "gemm" layout has it: packed along the output features, in its order."""

    def interleaved(codes: np.ndarray) -> np.ndarray:
        return pack(codes.reshape(len(codes), -1, 8)[:, :, AWQ_PACKING].reshape(codes.shape), 4)

    def quantise(stem: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        codes, scale, zero = rounded(weight, 4, group_size, symmetric=not zero_point)
        return {"qweight": interleaved(codes.T), "qzeros": interleaved(zero.T), "scales": scale.T}

    settings = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": zero_point}
    return _save(source, out, quantise, settings | {"version": "gemm", "modules_to_not_convert": None})


def awq_reference(tensors: Tensors, stem: str, settings: dict[str, Any]) -> np.ndarray:
    """(code - zero point) * scale, one output feature after the other."""
    qweight, qzeros, scales = (tensors[f"{stem}.{part}"].numpy() for part in ("qweight", "qzeros", "scales"))
    size = settings["group_size"]
    weight = np.empty((scales.shape[1], len(qweight)), np.float32)
    for n in range(len(weight)):
        at = AWQ_PACKING.index(n % 8)
        code, zero = bits_of(qweight[:, n // 8], at, 4), bits_of(qzeros[:, n // 8], at, 4)
        weight[n] = (code - zero.repeat(size)) * scales[:, n].astype(np.float32).repeat(size)
    return weight


def save_compressed(
    source: Path,
    out: Path,
    *,
    num_bits: int = 8,
    strategy: str = "channel",
    group_size: int | None = None,
    symmetric: bool = True,
    layout: str = "int-quantized",
    activations: bool = True,
) -> Path:
    """As llm-compressor writes W8A8 (int-quantized) and W4A16 or W8A16 (pack-quantized)."""
    middle = 1 << num_bits - 1

    def quantise(stem: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        size = group_size or weight.shape[1]
        codes, scale, zero = rounded(weight, num_bits, size, symmetric=symmetric)
        if layout == "int-quantized":
            found = {"weight": (codes - middle).astype(np.int8), "weight_scale": scale}
            return found | ({} if symmetric else {"weight_zero_point": (zero - middle).astype(np.int8)})
        found = {
            "weight_packed": pack(codes, num_bits),
            "weight_scale": scale,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        return found | ({} if symmetric else {"weight_zero_point": pack(zero.T, num_bits).T})

    weights = {"num_bits": num_bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights | {"group_size": group_size, "actorder": None},
        "input_activations": inputs if activations else None,
        "output_activations": None,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
    return _save(source, out, quantise, settings)


def compressed_reference(tensors: Tensors, stem: str, settings: dict[str, Any]) -> np.ndarray:
    """(code - zero point) * scale in signed codes, as compressed-tensors' decompress and dequantize have it."""
    weights = settings["config_groups"]["group_0"]["weights"]
    bits = weights["num_bits"]
    scale = tensors[f"{stem}.weight_scale"].float().numpy()
    zeros = tensors.get(f"{stem}.weight_zero_point")
    if settings["format"] == "int-quantized":
        codes = tensors[f"{stem}.weight"].numpy().astype(np.int64)
        zero = np.zeros(scale.shape) if zeros is None else zeros.numpy()
    else:
        words, per_word = tensors[f"{stem}.weight_packed"].numpy(), 32 // bits
        rows, columns = tensors[f"{stem}.weight_shape"].tolist()
        codes = np.stack([bits_of(words[:, k // per_word], k % per_word, bits) for k in range(columns)], 1)
        codes -= 1 << bits - 1
        zero = np.zeros(scale.shape)
        if zeros is not None:
            packed = zeros.numpy()
            zero = np.stack([bits_of(packed[n // per_word], n % per_word, bits) for n in range(rows)])
            zero = zero - (1 << bits - 1)
    size = codes.shape[1] // scale.shape[1]
    return ((codes - zero.repeat(size, 1)) * scale.repeat(size, 1)).astype(np.float32)


def plain_copy(
    folder: Path, out: Path, reference: Callable[[Tensors, str, dict[str, Any]], np.ndarray], source: Path
) -> Path:
    """The checkpoint of `folder`, quantised from `source`, with weights as `reference` dequantises them, in fp32."""
    shutil.copytree(source, out)
    stored = load_file(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    for stem in products(tensors):
        if stored.get(f"{stem}.weight", torch.empty(0, dtype=torch.int8)).dtype == torch.int8:
            tensors[f"{stem}.weight"] = torch.from_numpy(reference(stored, stem, settings))
    save_file(tensors, out / "model.safetensors")
    return out


def edit(folder: Path, change: Callable[[Tensors, dict[str, Any]], None]) -> None:
    """Change the tensors, or the quantization_config, of a checkpoint in one file."""
    tensors, path = load_file(folder / "model.safetensors"), folder / "config.json"
    config = json.loads(path.read_text())
    change(tensors, config["quantization_config"])
    path.write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _save(
    source: Path,
    out: Path,
    quantise: Callable[[str, np.ndarray], dict[str, np.ndarray]],
    settings: dict[str, Any],
    skip: Callable[[str], bool] = lambda stem: False,
) -> Path:
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    for stem in products(tensors):
        if skip(stem):
            continue
        for name, part in quantise(stem, tensors.pop(f"{stem}.weight").float().numpy()).items():
            tensors[f"{stem}.{name}"] = torch.from_numpy(np.ascontiguousarray(part))
    save_file(tensors, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text()) | {"quantization_config": settings}
    (out / "config.json").write_text(json.dumps(config))
    return out
