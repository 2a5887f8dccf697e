"""What transformers makes of a checkpoint, in fp32: the oracle of the acceptance tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from novainfer import Delta, Engine, SamplingParams
from tests.kernels.checkpoints import greedy, load_transformers


class Reference:
    """One checkpoint; `vocab_size` and `eos_token_id` are its config's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = load_transformers(folder, torch.float32)
        self.vocab_size: int = self._model.config.vocab_size
        self.eos_token_id: int | None = self._model.config.eos_token_id
        self._greedy: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The most likely continuation, end-of-sequence tokens taken like any other."""
        key = (tuple(prompt), num_tokens)
        if key not in self._greedy:
            self._greedy[key] = greedy(self._model, prompt, num_tokens)[0]
        return self._greedy[key]

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The next token's logits [vocab_size], fp32."""
        with torch.no_grad():
            found: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0, -1].float()
        return found

    def prompt(self, length: int, seed: int) -> list[int]:
        """Random token ids."""
        draw = random.Random(seed)
        return [draw.randrange(self.vocab_size) for _ in range(length)]


def exactly(max_tokens: int, **more: Any) -> SamplingParams:
    """Greedy parameters for just so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


async def read(engine: Engine, prompt: Any, params: SamplingParams) -> list[Delta]:
    """All deltas of a request."""
    return [delta async for delta in engine.generate(prompt, params)]


def tokens_of(deltas: list[Delta], choice: int = 0) -> list[int]:
    """The tokens of one choice."""
    return [token for delta in deltas if delta.index == choice for token in delta.token_ids]
