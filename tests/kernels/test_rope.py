"""Rotary positions are transformers' bit for bit, however they are scaled; what cannot be computed is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from novainfer.kernels.errors import LoadError
from novainfer.kernels.models.angles import rope_table
from novainfer.kernels.models.config import INTEGER_MAX, ModelConfig
from novainfer.kernels.models.family import parse_config
from novainfer.kernels.models.registry import FAMILIES

GEOMETRY = {
    "vocab_size": 100,
    "hidden_size": 1536,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "max_position_embeddings": 32_768,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}  # of Qwen2.5's long contexts


def read(**values: Any) -> ModelConfig:
    return parse_config(FAMILIES["Qwen2ForCausalLM"], GEOMETRY | values, Path("config.json"))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": YARN},
        {"rope_theta": 1e6, "rope_scaling": YARN, "head_dim": 64},
        {"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2.0}},
        {"rope_scaling": YARN | {"truncate": False, "rope_theta": 5e5}},
        {"rope_scaling": YARN | {"attention_factor": 1.25}},
        {"rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 1.0}},
        {"rope_scaling": YARN | {"factor": 1.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 40, "rope_theta": 1e4}, "max_position_embeddings": 4096},
        {"rope_scaling": YARN, "original_max_position_embeddings": 8192},
        {"rope_scaling": YARN | {"original_max_position_embeddings": 20}, "head_dim": 8},  # the ramp begins below 0
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 400}},
    ],
    ids=str,
)
def test_angles_are_those_of_transformers_to_the_bit(values: dict[str, Any]) -> None:
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    config = read(**values)
    theirs = Qwen2RotaryEmbedding(Qwen2Config(**copy.deepcopy(GEOMETRY | values)))
    num_positions = 50_000
    cos, sin = theirs(torch.zeros(1, dtype=torch.float32), torch.arange(num_positions)[None])
    half = config.head_dim // 2
    ours = rope_table(config.rope, config.head_dim, num_positions, torch.device("cpu"))
    assert torch.equal(ours, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 32_768),
        ({"rope_scaling": YARN}, 131_072),
        ({"rope_scaling": YARN, "max_position_embeddings": 40_960}, 131_072),  # as Qwen3's configs are to be edited
        ({"rope_scaling": YARN, "max_position_embeddings": 131_072}, 131_072),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, 65_536),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 81_920),
        ({"rope_scaling": LLAMA3, "max_position_embeddings": 131_072}, 131_072),
        ({"rope_scaling": {"type": "default"}}, 32_768),
    ],
    ids=str,
)
def test_a_context_is_as_long_as_its_positions_reach(values: dict[str, Any], expected: int) -> None:
    assert read(**values).max_position_embeddings == expected


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ("yarn", "rope_scaling must be an object, not 'yarn'"),
        (
            {"type": "dynamic", "factor": 2.0},
            "rope_scaling.rope_type 'dynamic' is not supported, only 'default', 'linear'",
        ),
        ({"rope_type": ["yarn"]}, "rope_scaling.rope_type ['yarn'] is not supported"),
        ({"type": "yarn"}, "rope_scaling.factor is missing"),
        (YARN | {"factor": "4"}, "rope_scaling.factor must be a number above 0, not '4'"),
        (YARN | {"factor": 0.5}, "rope_scaling.factor must be at least 1, not 0.5"),
        (YARN | {"factor": 1e300}, f"gives more than {INTEGER_MAX} tokens"),
        (
            YARN | {"original_max_position_embeddings": 0},
            "rope_scaling.original_max_position_embeddings must be a whole",
        ),
        (YARN | {"attention_factor": -1.0}, "rope_scaling.attention_factor must be a number above 0"),
        (YARN | {"truncate": 1}, "rope_scaling.truncate must be true or false"),
        (
            YARN | {"attn_factor": 2.0},
            "rope_scaling.attn_factor is not supported with rope_type 'yarn', only attention_",
        ),
        (YARN | {"partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor 0.5 is not supported, only 1.0"),
        (YARN | {"rope_theta": 1}, "rope_theta must be above 1"),
        ({"type": "default", "rope_theta": 1e-300}, "rope_scaling.rope_theta must be at least 1, not 1e-300"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor is missing"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "rope_scaling.high_freq_factor (4.0) must be above low_freq_factor (4.0)"),
        ({"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_scaling.rope_type 'mrope' is not supported"),
        ({"mrope_section": [16, 24, 24], "type": "default"}, "rope_scaling.mrope_section is not supported"),
    ],
    ids=str,
)
def test_scaling_that_cannot_be_computed_is_named(scaling: Any, expected: str) -> None:
    with pytest.raises(LoadError) as caught:
        read(rope_scaling=scaling)
    assert str(caught.value).startswith("config.json: ")
    assert expected in str(caught.value)
