"""What was sent, read by the types that OpenAI and Anthropic publish for TypeScript.

Each body and each event of a stream becomes a constant of its type, and the compiler says what is wrong with it. These
types are made of the descriptions that the APIs are made of; unlike Python's they tell a field that may be left out
from one that may be null. `types/kinds.ts` says which type an answer has, and what this server adds to it.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients.environments import HOME, node
from tests.witness import Answer

KINDS = Path(__file__).parent / "types" / "kinds.ts"
OPTIONS = {
    "noEmit": True,
    "strict": True,
    "skipLibCheck": True,
    "module": "nodenext",
    "moduleResolution": "nodenext",
    "target": "es2022",
    "types": [],
}
# By the path and the method; "{}" stands for one part of it.
WHOLE = {
    ("POST", "/v1/chat/completions"): "chat",
    ("POST", "/v1/completions"): "completion",
    ("POST", "/v1/embeddings"): "embeddings",
    ("GET", "/v1/models"): "models",
    ("GET", "/v1/models/{}"): "model",
    ("POST", "/v1/responses"): "response",
    ("GET", "/v1/responses/{}"): "response",
    ("POST", "/v1/responses/{}/cancel"): "response",
    ("DELETE", "/v1/responses/{}"): "response_deleted",
    ("GET", "/v1/responses/{}/input_items"): "response_items",
    ("POST", "/v1/messages"): "message",
    ("POST", "/v1/messages/count_tokens"): "message_count",
}
# Null until there is any: OpenAI's server sends them so, though its types say that they are left out.
NULL_AT_FIRST = ("usage", "user")
_WRONG = re.compile(r"constants\.ts\((\d+),\d+\): error (.*)")


class Sent(NamedTuple):
    """A body, or an event, and what it should be."""

    kind: str
    text: str


def sent_of(answers: Iterable[Answer]) -> list[Sent]:
    """What answers hold, each once; those of paths that are not OpenAI's or Anthropic's are left out."""
    found: dict[Sent, None] = {}
    for answer in answers:
        for one in _parts_of(answer):
            found[one] = None
    return list(found)


def _parts_of(answer: Answer) -> Iterator[Sent]:
    kind = _kind_of(answer)
    if kind is None or not answer.is_whole:
        return
    if answer.is_stream:
        for event in answer.events():
            if event.data != "[DONE]":
                yield Sent(f"{kind}_event", event.data)
    elif answer.status == 200:
        yield Sent(kind, answer.body.decode())
    else:
        yield Sent("message_error" if kind.startswith("message") else "error", answer.body.decode())


def _kind_of(answer: Answer) -> str | None:
    for (method, path), kind in WHOLE.items():
        if method == answer.method and re.fullmatch(path.replace("{}", "[^/]+"), answer.path):
            return kind
    return None


def wrong_among(sent: list[Sent], folder: Path) -> list[str]:
    """What the compiler says, each with what it says it of; `folder` is one to work in."""
    told = judged(sent, folder)
    return [f"{sent[at].kind}: {said} in {sent[at].text[:2000]}" for at, said in told.items()]


def judged(sent: list[Sent], folder: Path) -> dict[int, str]:
    """What the compiler says of the bodies that are wrong, by their place in `sent`."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "kinds.ts").write_text(KINDS.read_text())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": OPTIONS, "files": ["constants.ts"]}))
    (folder / "node_modules").symlink_to(HOME / "types" / "node_modules")
    lines = [f'export const c{at}: Kinds["{kind}"] = {_constant(text)};' for at, (kind, text) in enumerate(sent)]
    (folder / "constants.ts").write_text("\n".join(['import type { Kinds } from "./kinds.js";', *lines]))
    compiler = folder / "node_modules" / "typescript" / "bin" / "tsc"
    command = [node(), compiler, "--project", folder, "--pretty", "false"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    told: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith(" "):  # why, in the words of one more type
            continue
        found = _WRONG.search(line)
        assert found is not None, f"the types themselves are wrong: {line}"
        told.setdefault(int(found[1]) - 2, found[2])
    assert (done.returncode == 0) == (not told), f"{done.returncode}: {done.stdout}{done.stderr}"
    return told


def _constant(text: str) -> str:
    return json.dumps(_as_clients_have_it(json.loads(text)))


def _as_clients_have_it(value: Any) -> Any:
    """`value` as OpenAI's client gives it: with `output_text`, which its types have and no server sends."""
    if isinstance(value, list):
        return [_as_clients_have_it(one) for one in value]
    if not isinstance(value, dict):
        return value
    made = {name: _as_clients_have_it(one) for name, one in value.items()}
    if value.get("object") == "response" and "output" in value:
        made = {name: one for name, one in made.items() if one is not None or name not in NULL_AT_FIRST}
        made["output_text"] = ""
    return made
