"""Qwen3, dense: each query and key head is normed before its rotation; no biases, unless config.json has them.

Source: "Qwen3 Technical Report" (arXiv 2505.09388); field names and defaults as in transformers' Qwen3Config.
"""

from __future__ import annotations

from dataclasses import replace

from novainfer.kernels.models.config import TensorSpec
from novainfer.kernels.models.family import ATTENTION, ATTENTION_BIAS, DECODER, QK_NORM, ModelFamily

__all__ = ["QWEN3"]

BIASES = (*ATTENTION_BIAS, TensorSpec(ATTENTION + "o_proj.bias", "o", ("hidden_size",)))

QWEN3 = ModelFamily(
    "Qwen3ForCausalLM",
    "qwen3",
    (*DECODER, *QK_NORM, *(replace(bias, when=("attention_bias", True)) for bias in BIASES)),
    head_dim=128,
)
