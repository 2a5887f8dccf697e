"""How long a workload must take on this machine at least: the roofline.

A step reads all weights once, and the keys and values of its contexts; it multiplies each token with the weights of
all layers, and each sampled row with the head. Whichever of reading (at the measured bandwidth) and multiplying (at
the measured peak) takes longer is the step's ideal time. Decoding is one step per token; prompts are counted by
arithmetic alone, a shared beginning once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from novainfer.server.bench.workload import Workload


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder, as config.json has them; `bytes_per_value` is that of the weights and the cache."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    bytes_per_value: int

    @classmethod
    def read(cls, model_dir: Path, bytes_per_value: int = 2) -> Geometry:
        """From `model_dir`/config.json."""
        values: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        heads = values["num_attention_heads"]
        return cls(
            hidden=values["hidden_size"],
            intermediate=values["intermediate_size"],
            layers=values["num_hidden_layers"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            vocab_size=values["vocab_size"],
            bytes_per_value=bytes_per_value,
        )

    @property
    def is_reference(self) -> bool:
        """True for Qwen2.5-0.5B's sizes: the shape that the targets are written for."""
        return (self.hidden, self.layers, self.vocab_size) == (896, 24, 151_936)

    @property
    def body_parameters(self) -> int:
        """Weights that every token is multiplied with: the linear layers without the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Weights that every sampled row is multiplied with."""
        return self.hidden * self.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    def attention_flops(self, contexts: float) -> float:
        """Scores and weighted sums of queries that see `contexts` tokens in all."""
        return 4.0 * contexts * self.heads * self.head_dim * self.layers


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine can do: bytes/s of reading, operations/s of multiplying (a multiply-add is two)."""

    bytes_per_s: float
    flops_per_s: float


def decode_step_s(geometry: Geometry, roof: Roof, batch: int, context: float) -> float:
    """One token each for `batch` requests of `context` tokens."""
    weights = (geometry.body_parameters + geometry.head_parameters) * geometry.bytes_per_value
    num_bytes = weights + batch * context * geometry.kv_bytes_per_token
    flops = 2.0 * batch * (geometry.body_parameters + geometry.head_parameters)
    flops += geometry.attention_flops(batch * context)
    return max(num_bytes / roof.bytes_per_s, flops / roof.flops_per_s)


def prefill_s(geometry: Geometry, roof: Roof, num_tokens: int, contexts: float, num_sampled: int) -> float:
    """`num_tokens` prompt tokens that see `contexts` tokens in all, and `num_sampled` first tokens."""
    flops = 2.0 * num_tokens * geometry.body_parameters + geometry.attention_flops(contexts)
    flops += 2.0 * num_sampled * geometry.head_parameters
    weights = (geometry.body_parameters + geometry.head_parameters) * geometry.bytes_per_value
    return max(weights / roof.bytes_per_s, flops / roof.flops_per_s)


def ideal_s(workload: Workload, geometry: Geometry, roof: Roof) -> float:
    """The whole workload: a shared beginning once, all prompts, then the decode steps."""
    n, shared, length = workload.num_requests, workload.shared_len, workload.prompt_len
    own = length - shared
    num_tokens = (shared if n else 0) + n * own
    contexts = shared * (shared + 1) / 2 + n * (own * shared + own * (own + 1) / 2)
    total = prefill_s(geometry, roof, num_tokens, contexts, n)
    for made in range(1, workload.max_tokens):
        total += decode_step_s(geometry, roof, n, length + made)
    return total
