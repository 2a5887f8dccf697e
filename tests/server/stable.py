"""Fake engines behind the names of several models, and requests that name one."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from novainfer import EngineConfig, ModelLoadError
from novainfer.models import Models
from tests.server.fakes import FakeEngine

ADMIN = {"authorization": "Bearer admin-key"}


class Stable:
    """Makes a fake engine for each load; `made` are all there ever were, by name."""

    def __init__(self) -> None:
        self.made: dict[str, list[FakeEngine]] = {"small": [], "large": [], "broken": []}
        self.is_paced = False
        self.kind: type[FakeEngine] = FakeEngine
        self.words: tuple[str, ...] = ()  # of an answer, behind "I am" and the name
        self.failing = {"broken"}
        self.print = "fake"  # of all of them
        self.unfit: set[str] = set()  # whose files are wrong, which a look at them tells
        self.gate: asyncio.Event | None = None  # engines come up when it is open
        self.configs: list[EngineConfig] = []

    def make(self, config: EngineConfig) -> FakeEngine:
        name = config.served_model_name
        assert name is not None
        self.configs.append(config)
        engine = self.kind(answer=(f"I am {name}", *self.words), is_paced=self.is_paced)
        engine.model_info = msgspec.structs.replace(engine.model_info, name=name)
        engine.start_gate = self.gate
        engine.print = self.print
        if name in self.failing:
            engine.start_failure = ModelLoadError("config.json is missing")
        self.made[name].append(engine)
        return engine

    def check(self, config: EngineConfig) -> None:
        if config.served_model_name in self.unfit:
            raise ModelLoadError(f"{config.model} holds no config.json")

    def models(
        self, *names: str, max_loaded: int | None = None, idle_s: float | None = None, **more: Any
    ) -> Models[FakeEngine]:
        configs = {name: EngineConfig(model=f"/models/{name}") for name in names}
        return Models(configs, self.make, max_loaded=max_loaded, idle_unload_s=idle_s, check=self.check, **more)


def ask(model: str | None, **more: object) -> dict[str, object]:
    body = {"prompt": "Who are you?", "max_tokens": 9, **more}
    return body if model is None else body | {"model": model}
