"""Engines over a fake device, and readers of their streams."""

from __future__ import annotations

import asyncio
from typing import Any

from novainfer import Delta, Engine, EngineConfig, SamplingParams
from novainfer.actors.device.fake import ByteTokenizer, FakeDevice
from tests.actors.helpers import WAIT_S, Valve, eventually, expected

CHAT = [{"role": "user", "content": "What is 2 + 3?"}]


def fake_engine(device: FakeDevice | None = None, **config: Any) -> Engine:
    """An engine without weights: each token is the successor of the last one."""
    settings: dict[str, Any] = {"max_num_seqs": 64, **config}
    return Engine(EngineConfig(**settings), device=device or FakeDevice(), tokenizer=ByteTokenizer())


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


class Answer:
    """All deltas of one request."""

    def __init__(self, deltas: list[Delta]) -> None:
        self.deltas = deltas

    def text(self, choice: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == choice)

    def token_ids(self, choice: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == choice for token in delta.token_ids]

    @property
    def seed(self) -> int | None:
        return self.deltas[0].seed

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def prompt_token_ids(self) -> list[int]:
        return next(delta.prompt_token_ids for delta in self.deltas if delta.prompt_token_ids)


async def ask(engine: Engine, prompt: Any, params: SamplingParams | None = None) -> Answer:
    """The whole answer."""
    async with asyncio.timeout(60):
        return Answer([delta async for delta in engine.generate(prompt, params)])


async def blocks_back(engine: Engine) -> None:
    """Wait until no request owns a block, and check that none is lost."""
    await eventually(lambda: engine.statistics().kv_blocks_owned == 0 and engine.statistics().state == "IDLE")
    found = engine.statistics()
    assert found.kv_blocks_free + found.kv_blocks_cached == found.kv_blocks_total


__all__ = ["WAIT_S", "Valve", "ask", "blocks_back", "eventually", "expected", "fake_engine", "greedy"]
