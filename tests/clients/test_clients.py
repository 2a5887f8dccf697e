"""Other people's clients, each in an environment of its own, against the demo model and a model that calls tools.

`make clients` makes the environments. Each script of `scripts/` is run by the interpreter of its environment, with the
addresses of both servers; what it finds wrong, it raises. What it was sent is read by the published types besides.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import CLIENTS, HOME, node, python_of
from tests.clients.needs import each, environment
from tests.clients.published import sent_of, wrong_among
from tests.witness import WITNESS

RUN_S_MAX = 480.0  # schemathesis sends 5,000 requests
pytestmark = [pytest.mark.long, pytest.mark.timeout(RUN_S_MAX + 60)]

SCRIPTS = Path(__file__).parent / "scripts"


def command_of(name: str) -> list[str]:
    """How a client's script is run."""
    if CLIENTS[name].npm:
        return [str(node()), str(SCRIPTS / f"{name}.mjs")]
    return [str(python_of(name)), str(SCRIPTS / f"{name.replace('-', '_')}_.py")]


@pytest.mark.parametrize("name", each(CLIENTS))
@environment("types")
async def test_a_client_gets_what_it_expects(name: str, urls: list[str], tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env = {**os.environ, **offline, "NO_PROXY": "127.0.0.1"}
    if CLIENTS[name].npm:  # modules are looked for beside the script
        env["CLIENT_HOME"] = str(HOME / name)
    with WITNESS.answers() as answers:
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
    sent = sent_of(answers)
    assert sent, "it has asked for something that the types know"
    assert wrong_among(sent, tmp_path) == []
