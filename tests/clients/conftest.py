"""What clients ask: the demo model, and one that thinks and calls a tool."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import pytest

from novainfer import Chat, Delta, SamplingParams
from tests.server.conftest import running
from tests.server.fakes import FakeEngine, FakeModelInfo
from tests.server.test_demo_model import DemoServer
from tests.server.test_tools import FORMATS, PARIS
from tests.witness import one_ending, watched

__all__ = ["one_ending", "watched"]

THINKS = ("<think>", "I", " see", ".", "</think>")


class ToolEngine(FakeEngine):
    """Thinks, calls the weather where it may, and says what that was when it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.model_info = FakeModelInfo(formats=FORMATS)

    async def generate(
        self, prompt: Any, params: SamplingParams | None = None, **more: Any
    ) -> AsyncGenerator[Delta, None]:
        assert isinstance(prompt, Chat)
        has_said = prompt.messages[-1]["role"] == "tool"
        calls = prompt.tools and not has_said
        self.answer = (*THINKS, *(PARIS if calls else ("It", " rains", " in Paris", ".")))
        async for delta in super().generate(prompt, params, **more):
            yield delta


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    server = DemoServer(recorder_dir=tmp_path_factory.mktemp("recordings"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def urls(demo: DemoServer) -> AsyncIterator[list[str]]:
    """Of the demo model, and of one that calls tools."""
    async with running(ToolEngine(), shutdown_timeout_s=0.0) as tools:
        yield [demo.server.url, tools.url]
