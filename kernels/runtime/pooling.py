"""Sums of hidden states: in doubles, so that they do not show in which chunks a prompt was computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Pooled"]


class Pooled:
    """The sums of consecutive rows of `hidden` [sum(lens), hidden_size], `lens[i]` of them each.

    A device that runs beside the host has only been told to sum them when this is made; the host may `read` them when
    the step has ended.
    """

    def __init__(self, hidden: Tensor, lens: Sequence[int]) -> None:
        if max(lens) == 1:
            sums = hidden.double()
        else:
            sums = torch.stack([rows.sum(0, dtype=torch.float64) for rows in torch.split(hidden, list(lens))])
        if sums.device.type == "cuda":
            pinned = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            sums = pinned.copy_(sums, non_blocking=True)
        self._sums = sums  # float64 [num_pools, hidden_size], on the host

    def read(self) -> list[bytes]:
        """The doubles of each, little-endian."""
        return [row.tobytes() for row in self._sums.numpy().astype("<f8", copy=False)]
