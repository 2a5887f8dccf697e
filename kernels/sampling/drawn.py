"""What a step has drawn: tokens on the device, and later the same on the host.

A device that runs beside the host has only been told to draw when a draw is handed out. What follows on the device may
use its tokens at once; the host may read them when the step has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from novainfer.kernels.sampling.verify import Sampled

__all__ = ["Draw", "DrawnAtOnce", "DrawnInParts", "joined"]


class Draw(Protocol):
    """One token for each position that was drawn from."""

    @property
    def token_ids(self) -> Tensor:
        """int64 [n] on the device: the tokens, `NO_TOKEN` where none can be drawn."""

    def read(self) -> Sampled:
        """The same on the host, with log probabilities; the step must have ended, and nothing is waited for."""


@dataclass(frozen=True, slots=True)
class DrawnAtOnce:
    """Tokens that the host had before they were asked for."""

    sampled: Sampled
    device: torch.device

    @property
    def token_ids(self) -> Tensor:
        """As in `Draw`."""
        return torch.tensor(self.sampled.token_ids, dtype=torch.int64, device=self.device)

    def read(self) -> Sampled:
        """As in `Draw`."""
        return self.sampled


@dataclass(frozen=True, slots=True)
class DrawnInParts:
    """The draws of a step whose logits did not all exist at once, one after the other."""

    parts: Sequence[Draw]

    @property
    def token_ids(self) -> Tensor:
        """As in `Draw`."""
        return torch.cat([part.token_ids for part in self.parts])

    def read(self) -> Sampled:
        """As in `Draw`."""
        found = [part.read() for part in self.parts]
        sampled = Sampled([token_id for part in found for token_id in part.token_ids], [])
        if any(part.logprobs for part in found):
            for part in found:
                sampled.logprobs.extend(part.logprobs or [None] * len(part.token_ids))
        return sampled


def joined(parts: Sequence[Draw]) -> Draw:
    """All of them as one."""
    return parts[0] if len(parts) == 1 else DrawnInParts(parts)
