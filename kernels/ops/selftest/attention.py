"""Proves attention over a KV cache in blocks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from novainfer.kernels.ops.reference import ReferenceAttention
from novainfer.kernels.ops.registry import AttentionShape
from novainfer.kernels.ops.selftest.numbers import differs, make_step, normal

__all__ = ["check_attention"]


def check_attention(attention: Any, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """A mixed step over scattered blocks: a prefill, a chunk, decodes, and a block that two sequences share.

    With whole contexts, and with a window that begins within a block.
    """
    small = dataclasses.replace(shape, num_layers=2)
    size = shape.block_size
    more = min(3, size), min(2, size)  # so that two blocks hold them, however small
    contexts = [size + more[0], 2 * size + 1, 3 * size, 1, size + more[1]]
    query_lens = [contexts[0], min(5, contexts[1]), 1, 1, 2]
    tables = torch.full((5, 3), 10**9, dtype=torch.int32)  # what is behind the context must not be read
    tables[0, :2] = torch.tensor([9, 2])
    tables[1] = torch.tensor([4, 7, 0])
    tables[2] = torch.tensor([11, 3, 8])
    tables[3, :1] = torch.tensor([6])
    tables[4, :2] = torch.tensor([9, 5])  # its first block is written by sequence 0 in this very step
    # The same tokens, the last of each sequence computed alone: rows must not know their batch.
    ends = [sum(query_lens[: i + 1]) - 1 for i in range(len(query_lens))]
    for window in (None, size + 2):
        run = functools.partial(
            _run_step, shape=small, contexts=contexts, query_lens=query_lens, dtype=dtype, device=device, window=window
        )
        expected, got = (run(backend, tables=tables) for backend in (ReferenceAttention, attention))
        what = "attention over a mixed step" if window is None else "attention with a window"
        wrong = differs(what, got, expected)
        if wrong is not None:
            return wrong
        if window is None and not torch.equal(run(attention, tables=tables, move=True), got):
            return "a block that was copied elsewhere does not hold what it held"
        if attention.row_invariant and not torch.equal(run(attention, tables=tables, alone=ends), got[ends]):
            return f"a row's {what} differs between a chunk and a decode"
    return None


def _run_step(
    backend: Any,
    shape: AttentionShape,
    contexts: list[int],
    query_lens: list[int],
    tables: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
    alone: list[int] | None = None,
    move: bool = False,
) -> Tensor:
    """Fill the cache with every context and attend over layer 1 -> [T, heads * head_dim].

    With `alone`, each sequence's last query row (those rows of the step) attends as a decode of its own. With
    `move`, block 9 is copied to block 1 and wiped before.
    """
    heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.block_size
    cache = backend.allocate(shape, 12, dtype, device)
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    for seq, context in enumerate(contexts):
        tokens = torch.arange(size if seq == 4 else 0, context)  # sequence 4 finds its first block written
        slots = (tables[seq, tokens // size].long() * size + tokens % size).to(device)
        qkv = normal((len(tokens), heads + 2 * kv_heads, shape.head_dim), 20 + seq, dtype, device)
        for layer in (0, 1):
            key, value = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
            cache.write(layer, key if layer else value, value if layer else key, slots)
    if move:
        for part in cache.parts:
            part[:, 1] = part[:, 9]
            part[:, 9] = 0
        tables = torch.where(tables == 9, 1, tables)
    query = normal((starts[-1], heads + 2 * kv_heads, shape.head_dim), 30, dtype, device)[:, :heads]
    scale = shape.head_dim**-0.5

    def attend(layer: int, rows: Tensor, *args: Any) -> Tensor:
        out: Tensor = cache.attend(layer, rows, *args)
        return out

    if alone is None:
        step = make_step(query_lens, contexts, tables, size, None, device)
        attend(0, query, step, scale, window)
        return attend(1, query, step, scale, window)
    rows = []
    for seq, row in enumerate(alone):
        step = make_step([1], contexts[seq : seq + 1], tables[seq : seq + 1], size, None, device)
        attend(0, query[row : row + 1], step, scale, window)
        rows.append(attend(1, query[row : row + 1], step, scale, window))
    return torch.cat(rows)
