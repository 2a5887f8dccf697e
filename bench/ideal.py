"""How long a workload must take on this machine at least: the roofline.

A step reads all weights once (of experts, those of its tokens), and the keys and values of its contexts; it multiplies
each token with the weights of all layers, and each sampled row with the head. Whichever of reading (at the measured
bandwidth) and multiplying (at the measured peak) takes longer is the step's ideal time. Decoding is one step per token,
which reads a shared beginning once; prompts are counted by arithmetic alone, a shared beginning once.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from novainfer.bench.workload import Workload
from novainfer.kernels.models.config import ModelConfig
from novainfer.kernels.models.registry import read_config


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a step of a model reads and multiplies; `bytes_per_value` is that of the weights."""

    config: ModelConfig
    bytes_per_value: float = 2
    kv_bytes_per_value: float = 2

    @classmethod
    def read(cls, model_dir: Path, bytes_per_value: float = 2) -> Geometry:
        """From `model_dir`/config.json."""
        return cls(read_config(model_dir), bytes_per_value)

    @property
    def is_reference(self) -> bool:
        """True for Qwen2.5-0.5B's sizes: the shape that the targets are written for."""
        config = self.config
        return (config.hidden_size, config.num_layers, config.vocab_size) == (896, 24, 151_936)

    @property
    def body_parameters(self) -> int:
        """Weights that a token is multiplied with: the linear layers without the head, and of experts its own."""
        return round(self._body_parameters(self.config.num_experts_per_tok))

    def read_parameters(self, num_tokens: int) -> float:
        """Of these, weights that a step of so many tokens reads: of experts those that some token is given to.

        On average, where each expert is as likely as another.
        """
        num_experts = self.config.num_experts
        if not num_experts:
            return self._body_parameters(0)
        missed = 1 - self.config.num_experts_per_tok / num_experts
        return self._body_parameters(num_experts * (1 - missed**num_tokens))

    def _body_parameters(self, num_experts: float) -> float:
        config = self.config
        return sum(
            math.prod(config.shape(tensor)) * (num_experts if tensor.is_per_expert else 1)
            for layer in range(config.num_layers)
            for tensor in config.layer_tensors(layer)
            if len(tensor.shape) == 2
        )

    @property
    def head_parameters(self) -> int:
        """Weights that every sampled row is multiplied with."""
        return self.config.hidden_size * self.config.vocab_size

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in all layers."""
        return 2 * self.config.num_layers * self.config.kv_size * self.kv_bytes_per_value

    def seen(self, first: int, last: int) -> float:
        """The tokens that rows at positions `first` to `last - 1` see in all, sliding windows counted; of a layer."""
        windows = Counter(self.config.sliding_windows)
        total = 0.0
        for window, num_layers in windows.items():
            grown = last if window is None else min(max(window, first), last)  # up to here each row sees all
            rows = (grown - first) * (first + grown + 1) / 2 + (last - grown) * (window or 0)
            total += num_layers * rows
        return total / self.config.num_layers

    def seen_before(self, end: int, context: int) -> float:
        """Of the tokens before `end`, those that a context's last row sees, sliding windows counted; of a layer."""
        windows = self.config.sliding_windows
        seen = (min(end, context) - (0 if window is None else max(0, context - window)) for window in windows)
        return sum(max(0, tokens) for tokens in seen) / self.config.num_layers

    def attention_flops(self, contexts: float) -> float:
        """Scores and weighted sums of queries that see `contexts` tokens in all."""
        return 4.0 * contexts * self.config.q_size * self.config.num_layers


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine can do: bytes/s of reading, operations/s of multiplying (a multiply-add is two)."""

    bytes_per_s: float
    flops_per_s: float


def decode_step_s(geometry: Geometry, roof: Roof, batch: int, context: int, shared: int = 0) -> float:
    """One token each for `batch` requests of `context` tokens, of which the first `shared` are read once for all."""
    weights = (geometry.read_parameters(batch) + geometry.head_parameters) * geometry.bytes_per_value
    contexts = batch * geometry.seen(context - 1, context)
    read = contexts - (batch - 1) * geometry.seen_before(shared, context) if batch else 0.0
    num_bytes = weights + read * geometry.kv_bytes_per_token
    flops = 2.0 * batch * (geometry.body_parameters + geometry.head_parameters)
    flops += geometry.attention_flops(contexts)
    return max(num_bytes / roof.bytes_per_s, flops / roof.flops_per_s)


def prefill_s(geometry: Geometry, roof: Roof, num_tokens: int, contexts: float, num_sampled: int) -> float:
    """`num_tokens` prompt tokens that see `contexts` tokens in all, and `num_sampled` first tokens."""
    flops = 2.0 * num_tokens * geometry.body_parameters + geometry.attention_flops(contexts)
    flops += 2.0 * num_sampled * geometry.head_parameters
    weights = (geometry.read_parameters(num_tokens) + geometry.head_parameters) * geometry.bytes_per_value
    return max(weights / roof.bytes_per_s, flops / roof.flops_per_s)


def ideal_s(workload: Workload, geometry: Geometry, roof: Roof) -> float:
    """The whole workload: a shared beginning once, all prompts, then the decode steps."""
    n, shared, length = workload.num_requests, workload.shared_len, workload.prompt_len
    own = length - shared
    num_tokens = (shared if n else 0) + n * own
    contexts = geometry.seen(0, shared) + n * geometry.seen(shared, length)
    total = prefill_s(geometry, roof, num_tokens, contexts, n)
    for made in range(1, workload.max_tokens):
        total += decode_step_s(geometry, roof, n, length + made, shared)
    return total


def ideal_served_s(workload: Workload, clients: int, geometry: Geometry, roof: Roof) -> float:
    """The same where `clients` ask, each for one answer at a time: one wave of requests after the other."""
    waves = math.ceil(workload.num_requests / clients)
    wave = msgspec.structs.replace(workload, num_requests=min(clients, workload.num_requests))
    return waves * ideal_s(wave, geometry, roof)
