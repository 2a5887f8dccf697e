"""Other people's clients, each in an environment of its own, against the demo model and a model that calls tools.

`make clients` makes the environments. Each script of `scripts/` is run by the interpreter of its environment, with the
addresses of both servers; what it finds wrong, it raises.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from novainfer import Chat, Delta, SamplingParams
from tests.clients.environments import ENVIRONMENTS, is_made, node_of, python_of
from tests.server.conftest import running
from tests.server.fakes import FakeEngine, FakeModelInfo
from tests.server.test_demo_model import DemoServer
from tests.server.test_tools import FORMATS, PARIS

RUN_S_MAX = 480.0  # schemathesis sends 5,000 requests
pytestmark = [pytest.mark.long, pytest.mark.timeout(RUN_S_MAX + 60)]

SCRIPTS = Path(__file__).parent / "scripts"
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


def needs(name: str) -> pytest.MarkDecorator:
    """Skips what has no environment."""
    return pytest.mark.skipif(not is_made(name), reason=f"there is no environment of {name}: `make clients` makes it")


def command_of(name: str) -> list[str]:
    """How a client's script is run."""
    if ENVIRONMENTS[name].npm:
        return [str(node_of(name)), str(SCRIPTS / f"{name}.mjs")]
    return [str(python_of(name)), str(SCRIPTS / f"{name.replace('-', '_')}_.py")]


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in ENVIRONMENTS])
async def test_a_client_gets_what_it_expects(name: str, urls: list[str], tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env = {**os.environ, **offline, "NO_PROXY": "127.0.0.1"}
    if ENVIRONMENTS[name].npm:  # modules are looked for beside the script
        env["CLIENT_HOME"] = str(python_of(name).parents[1])
    process = await asyncio.create_subprocess_exec(
        *command_of(name), *urls, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(RUN_S_MAX):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = said.decode("utf-8", "replace")
    assert process.returncode == 0, text[-6000:]
    assert text.rstrip().endswith("ok"), "a script says that it came to its end"
