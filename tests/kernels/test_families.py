"""A family is one table: the checkpoint, the layers and the cuts of tensor parallelism follow from it."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FEW_EXPERTS, Shape, save_checkpoint
from safetensors.torch import load_file
from transformers import LlamaConfig, MistralConfig

from novainfer.bench.make_checkpoint import SHAPES
from novainfer.kernels.cpu.native import LayerDesc
from novainfer.kernels.models.config import Rope
from novainfer.kernels.models.family import ModelFamily
from novainfer.kernels.models.registry import FAMILIES, read_config
from novainfer.kernels.ops import forward
from novainfer.kernels.ops.forward import PRODUCTS, Layer
from novainfer.kernels.weights.header import tensor_shapes


def any_shape(family: ModelFamily, others: tuple[tuple[str, Any], ...] = (), **options: Any) -> Shape:
    """Of a family; some layers have an MLP and others experts where it has experts."""
    if any(tensor.is_per_expert for tensor in family.tensors):
        others = (*FEW_EXPERTS, ("mlp_only_layers", [0]), *others)
    name = family.architecture.removesuffix("ForCausalLM")
    return Shape("any", 4, 2, 24, 64, 160, family=name, others=others, **options)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
@pytest.mark.parametrize(
    "options", [{}, {"tied": False}, {"others": (("attention_bias", True), ("mlp_bias", True))}], ids=str
)
def test_the_table_names_the_tensors_of_transformers(family: ModelFamily, options: dict, tmp_path: Path) -> None:
    folder = save_checkpoint(any_shape(family, **options), tmp_path)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert tensor_shapes(read_config(folder)) == stored


def test_the_parts_of_a_table_are_those_of_a_layer_and_of_its_native_descriptor() -> None:
    names = {field.name for field in fields(Layer)}
    for family in FAMILIES.values():
        parts = {tensor.part for tensor in family.tensors if tensor.is_per_layer}
        assert parts <= names
    assert set(PRODUCTS) <= {tensor.part for family in FAMILIES.values() for tensor in family.tensors}
    assert [name for name, _ in LayerDesc._fields_] == [field.name for field in fields(Layer)]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_a_layer_says_of_each_part_the_shape_that_the_table_gives_it(family: ModelFamily, tmp_path: Path) -> None:
    """The self-test makes layers by it."""
    config = read_config(save_checkpoint(any_shape(family), tmp_path))
    own = ("hidden_size", "head_dim", "q_size", "num_experts")
    sizes = {"1": 1, "qkv_size": config.q_size + 2 * config.kv_size} | {size: getattr(config, size) for size in own}
    for size, fused in (
        ("intermediate_size", "gate_up_size"),
        ("moe_intermediate_size", "moe_gate_up_size"),
        ("shared_expert_intermediate_size", "shared_gate_up_size"),
    ):
        sizes |= {size: getattr(config, size), fused: 2 * getattr(config, size)}
    parts: dict[str, list[tuple[int, ...]]] = {}
    for tensor in config.tensors:
        if tensor.is_per_layer and not tensor.name.endswith(".bias"):
            parts.setdefault(tensor.part, []).append(config.shape(tensor))
    for part, shapes in parts.items():
        assert tuple(sizes[size] for size in forward.SHAPES[part]) == (
            sum(shape[0] for shape in shapes),
            *shapes[0][1:],
        )


def test_deepseek_r1_distill_qwen_is_a_qwen2(tmp_path: Path) -> None:
    """The fields of its public config.json and generation_config.json (1.5B)."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "initializer_range": 0.02,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    generation = {"bos_token_id": 151646, "eos_token_id": 151643, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    found = read_config(tmp_path)
    assert (found.eos_token_ids, found.max_position_embeddings, found.rope) == ((151643,), 131072, Rope(10_000.0))
    assert set(found.sliding_windows) == {None}  # 4096 is there, and not used
    shapes = tensor_shapes(found)
    assert shapes["lm_head.weight"] == (151936, 1536)
    assert sum(math.prod(shape) for shape in shapes.values()) == 1_777_088_000
    made = SHAPES["deepseek-r1-distill-qwen-1.5b"]
    assert {key: config[key] for key in made} == made


def test_mistral_v0_1_slides_and_its_successors_do_not(tmp_path: Path) -> None:
    """The fields of their public config.json; those that are not there mean what MistralConfig says."""
    config = {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = read_config(tmp_path)
    assert found.sliding_windows == (4096,) * 32
    assert found.eos_token_ids == (2,)
    assert sum(math.prod(shape) for shape in tensor_shapes(found).values()) == 7_241_732_096
    path.write_text(json.dumps(config | {"sliding_window": None, "rope_theta": 1000000.0}))
    assert read_config(tmp_path).sliding_windows == (None,) * 32
    without = ("sliding_window", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta")
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in without}))
    found = read_config(tmp_path)
    theirs = MistralConfig()
    assert found.sliding_windows == (theirs.sliding_window,) * 32
    assert (found.num_kv_heads, found.rms_norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert (found.max_position_embeddings, found.rope) == (theirs.max_position_embeddings, Rope(10_000.0))


def test_end_tokens_are_the_familys_only_where_no_file_names_any(tmp_path: Path) -> None:
    folder = save_checkpoint(Shape("any", 4, 2, 16, 64, 160, family="Llama"), tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert read_config(folder).eos_token_ids == ()  # null
    for name in (path, folder / "generation_config.json"):
        values = json.loads(name.read_text())
        values.pop("eos_token_id", None)
        name.write_text(json.dumps(values))
    assert read_config(folder).eos_token_ids == (LlamaConfig().eos_token_id,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [128, 9]}))
    assert read_config(folder).eos_token_ids == (9, 128)
    path.write_text(json.dumps(config | {"eos_token_id": 5}))
    assert read_config(folder).eos_token_ids == (5, 9, 128)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama", "Mistral"])
def test_cut_along_their_axes_the_tensors_make_layers_that_add_up(name: str, tmp_path: Path) -> None:
    """Attention and MLP of two halves of a checkpoint, before the residual, sum to those of the whole."""
    folder = save_checkpoint(Shape("whole", 4, 2, 16, 64, 160, tied=False, family=name), tmp_path / "whole")
    config = read_config(folder)
    whole = load_file(folder / "model.safetensors")
    axes = {
        tensor.name.format(layer=layer): tensor.shard_axis for tensor in config.tensors for layer in range(2)
    }  # fmt: skip
    halves = [
        {key: tensor if axes[key] is None else tensor.chunk(2, axes[key])[rank] for key, tensor in whole.items()}
        for rank in range(2)
    ]
    half = replace(config, num_heads=2, num_kv_heads=1, intermediate_size=config.intermediate_size // 2, vocab_size=80)
    for rank in halves:
        shapes = tensor_shapes(half)
        assert {key: tuple(tensor.shape) for key, tensor in rank.items()} == shapes
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    prefix = "model.layers.0."
    logits = torch.cat([x @ rank["lm_head.weight"].T for rank in halves], dim=1)
    assert torch.allclose(logits, x @ whole["lm_head.weight"].T, atol=1e-5)

    def mlp(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        gate, up = (x @ tensors[f"{prefix}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return (torch.nn.functional.silu(gate) * up) @ tensors[prefix + "mlp.down_proj.weight"].T

    def values(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """What attention gives where each row sees itself alone: the values of its key head."""
        v = x @ tensors[prefix + "self_attn.v_proj.weight"].T
        if name == "Qwen2":
            v = v + tensors[prefix + "self_attn.v_proj.bias"]
        heads = v.view(5, -1, 16).repeat_interleave(2, dim=1).flatten(1)
        return heads @ tensors[prefix + "self_attn.o_proj.weight"].T

    for part in (mlp, values):
        assert torch.allclose(sum(part(rank) for rank in halves), part(whole), atol=1e-5)
