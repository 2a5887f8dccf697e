"""Qwen2 and Qwen2.5: biases on q, k and v; grouped-query attention; SwiGLU.

Source: "Qwen2 Technical Report" (arXiv 2407.10671); field names and defaults as in transformers' Qwen2Config.
"""

from __future__ import annotations

from novainfer.kernels.models.family import ATTENTION_BIAS, DECODER, ModelFamily

__all__ = ["QWEN2"]

QWEN2 = ModelFamily("Qwen2ForCausalLM", "qwen2", (*DECODER, *ATTENTION_BIAS))
