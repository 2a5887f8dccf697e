"""Attention over a paged cache, beside the memory's roof when decoding and the tensor cores' in a prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from novainfer.bench.gpu.clock import Clock
from novainfer.kernels.ops.registry import AttentionBackend, AttentionShape
from novainfer.kernels.step import StepTensors

__all__ = ["DECODES", "PREFILLS", "Case", "measure_attention"]

CACHE_SETS_BYTES = 256 << 20  # of keys and values that are read in turn: more than a second-level cache holds
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """A step of `batch` sequences of `context` tokens each, of which `query` are computed in this step."""

    model: str  # whose heads these are
    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int
    context: int
    query: int = 1
    block_size: int = BLOCK_SIZE
    kv_dtype: str = "auto"

    @property
    def shape(self) -> AttentionShape:
        """Of one layer."""
        return AttentionShape(1, self.num_heads, self.num_kv_heads, self.head_dim, self.block_size, self.kv_dtype)

    @property
    def num_bytes(self) -> int:
        """Keys and values read, queries read and results written; bf16, each once."""
        per_token = 2 * self.num_kv_heads * self.head_dim
        queries = 2 * self.batch * self.query * self.num_heads * self.head_dim
        element = 2 if self.kv_dtype == "auto" else 1
        scales = 0 if self.kv_dtype == "auto" else 2 * self.num_kv_heads * 4
        return self.batch * self.context * (per_token * element + scales) + 2 * queries

    @property
    def flops(self) -> float:
        """Scores and weighted sums of what each row sees."""
        seen = self.query * (self.context - self.query) + self.query * (self.query + 1) / 2
        return 4.0 * self.batch * seen * self.num_heads * self.head_dim


SHAPES = {"0.5B": (14, 2, 64), "1.5B": (12, 2, 128), "7B": (28, 4, 128), "qwen3-8B": (32, 8, 128)}
DECODES = [
    *(Case(name, *SHAPES[name], batch, 1024) for name in SHAPES for batch in (1, 8, 64, 256)),
    *(Case(name, *SHAPES[name], batch, 8192) for name in ("0.5B", "7B") for batch in (1, 64)),
    Case("7B", *SHAPES["7B"], 64, 1024, block_size=64),
    *(Case("7B", *SHAPES["7B"], 64, 4096, kv_dtype=kind) for kind in ("int8", "fp8")),
]
PREFILLS = [
    *(Case("7B", *SHAPES["7B"], 1, length, length) for length in (1024, 4096, 16384)),
    Case("qwen3-8B", *SHAPES["qwen3-8B"], 1, 4096, 4096),
    Case("0.5B", *SHAPES["0.5B"], 1, 4096, 4096),
    Case("7B", *SHAPES["7B"], 4, 8192, 512),  # chunks behind a prefix
]


def measure_attention(backend: type[AttentionBackend], case: Case, clock: Clock, sets_max: int = 16) -> dict[str, Any]:
    """Seconds of one layer, as a record for the report; over caches of up to `sets_max` layers in turn."""
    dtype = torch.bfloat16
    num_blocks = case.batch * -(-case.context // case.block_size)
    per_layer = max(1, case.batch * case.context * 2 * case.num_kv_heads * case.head_dim * 2)
    num_layers = max(1, min(sets_max, CACHE_SETS_BYTES // per_layer + 1))
    shape = dataclasses.replace(case.shape, num_layers=num_layers)
    cache = backend.allocate(shape, num_blocks, dtype, clock.device)
    for part in cache.parts:
        _fill(part)
    step = _step(case, num_blocks, clock.device)
    query = torch.randn(case.batch * case.query, case.num_heads, case.head_dim, dtype=dtype, device=clock.device)
    scale = case.head_dim**-0.5

    def attend(layer: int) -> Callable[[], Tensor]:
        return lambda: cache.attend(layer, query, step, scale)

    # Torch's attention reads on the host what a step brings: it cannot be captured.
    in_graph = backend.name.startswith("triton")
    spread = clock.measure([attend(layer) for layer in range(num_layers)], in_graph=in_graph)
    return {
        "model": case.model,
        "batch": case.batch,
        "context": case.context,
        "query": case.query,
        "block_size": case.block_size,
        "kv_dtype": case.kv_dtype,
        "us": 1e6 * spread.median_s,
        "us_low": 1e6 * spread.low_s,
        "us_high": 1e6 * spread.high_s,
        "gb_per_s": case.num_bytes / spread.median_s / 1e9,
        "tflop_per_s": case.flops / spread.median_s / 1e12,
    }


def _fill(part: Tensor) -> None:
    """Random numbers, as a cache holds; scales positive, and bits of 8-bit numbers finite."""
    if part.itemsize == 1:
        part.view(torch.int8).random_(-100, 100)
    elif part.dim() == 4:
        part.uniform_(0.01, 0.02)
    else:
        part.normal_()


def _step(case: Case, num_blocks: int, device: torch.device) -> StepTensors:
    """Scattered blocks, as after hours of work."""
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm(num_blocks, generator=generator).int().view(case.batch, -1)
    num_tokens = case.batch * case.query
    starts = torch.arange(0, num_tokens + 1, case.query, dtype=torch.int32)
    first = case.context - case.query
    positions = (torch.arange(num_tokens) % case.query) + first
    rows = torch.arange(num_tokens) // case.query
    slots = tables[rows, positions // case.block_size].long() * case.block_size + positions % case.block_size
    return StepTensors(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        block_tables=tables.to(device),
        query_start=starts.to(device),
        context_lens=torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
        logit_rows=None,
        num_samples=num_tokens,
        max_context_len=case.context,
        min_query_len=case.query,
        max_query_len=case.query,
    )
