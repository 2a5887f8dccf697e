"""Causal attention for training on a CPU: in blocks of queries, each against the keys up to its end.

With heads of 32 and rows of some hundred tokens PyTorch's own kernel takes more than half of a step, most of that for
its gradients; so it takes half of that.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

__all__ = ["causal", "use_blocks"]

_QUERIES = 128  # of a block
_NAME = "blocks_of_queries"


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float) -> torch.Tensor:
    """Attention of each query to the keys up to its own place; all are `[rows, heads, length, head size]`."""
    num_rows, num_heads, length, _ = query.shape
    queries, keys, values = (each.flatten(0, 1) for each in (query * scaling, key, value))
    found = []
    for start in range(0, length, _QUERIES):
        end = min(length, start + _QUERIES)
        mask = torch.full((end - start, end), float("-inf"), dtype=query.dtype).triu(1 + start)
        scores = torch.baddbmm(mask, queries[:, start:end], keys[:, :end].transpose(1, 2))
        found.append(torch.bmm(scores.softmax(-1), values[:, :end]))
    return torch.cat(found, dim=1).view(num_rows, num_heads, length, -1)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: key heads are shared, the result is `[rows, length, heads, head size]`."""
    if attention_mask is not None:
        raise ValueError("rows are padded on the right and need no mask: give none")
    shared = query.shape[1] // key.shape[1]
    kind = value.dtype  # autocast's: queries and keys come from their rotation in fp32
    key, value = (each.to(kind).repeat_interleave(shared, dim=1) for each in (key, value))
    with torch.autocast("cpu", enabled=False):
        return causal(query.to(kind), key, value, scaling=scaling).transpose(1, 2), None


def use_blocks(model: PreTrainedModel) -> None:
    """Lets the model compute its attention so: for rows that are padded on the right only."""
    AttentionInterface.register(_NAME, _attention)
    model.set_attn_implementation(_NAME)
