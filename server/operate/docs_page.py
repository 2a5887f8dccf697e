"""The OpenAPI document as a page: whole in itself, so that it reads the same without a network and without scripts."""

from __future__ import annotations

from html import escape
from typing import Any

# Nothing is loaded from anywhere, and nothing runs.
HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
REF = "#/components/schemas/"
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
code, .method { font: 13px/1.5 ui-monospace, monospace; }
section { border-top: 1px solid #8886; padding: .2rem 0 .8rem; }
h3 { margin: .8rem 0 .2rem; font-weight: 600; }
.method { display: inline-block; min-width: 3.2rem; font-weight: 700; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; }
td, th { border-bottom: 1px solid #8884; padding: .15rem .8rem .15rem 0; vertical-align: top; }
summary { cursor: pointer; }
"""


def docs_page(document: dict[str, Any]) -> bytes:
    """The page, UTF-8. It says nothing of the server that it comes from: whoever reaches it may read it."""
    root = document["servers"][0]["url"].rstrip("/")
    operations = [
        _operation(method, root + path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>NovaInfer's HTTP API</title><style>{STYLE}</style>",
        "<h1>NovaInfer's HTTP API</h1>",
        "<p>OpenAI's, with vLLM's names where OpenAI has none, and Anthropic's messages. "
        "For programs: <a href=openapi.json>openapi.json</a>.",
        "<h2>Endpoints</h2>",
        *operations,
        "<h2>Records</h2>",
        *schemas,
        "</html>",
    ]
    return "\n".join(parts).encode()


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        _row(one["name"], "string", f"in the {one['in']}", one.get("description", ""))
        for one in operation.get("parameters", ())
    ]
    key = "" if operation.get("security") != [] else " <em>needs no key</em>"
    body = _content(operation["requestBody"]) if "requestBody" in operation else ""
    answers = "".join(
        f"<tr><td><code>{escape(status)}</code><td>{escape(answer['description'])}<td>{_content(answer)}"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<section><h3><span class=method>{escape(method.upper())}</span> <code>{escape(path)}</code></h3>"
        f"{escape(operation['summary'])}{key}"
        + (f"<p>Body: {body}" if body else "")
        + _table(rows)
        + f"<details><summary>Answers</summary><table>{answers}</table></details></section>"
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        _row(field, _type(found), _presence(field, found, required), found.get("description", ""))
        for field, found in schema.get("properties", {}).items()
    ]
    text = escape(schema.get("description", ""))
    return f"<section id='{escape(name)}'><h3><code>{escape(name)}</code></h3>{text}{_table(rows)}</section>"


def _presence(field: str, schema: dict[str, Any], required: set[str]) -> str:
    if field in required:
        return "required"
    return f"default {escape(repr(schema['default']))}" if schema.get("default") is not None else ""


def _content(holder: dict[str, Any]) -> str:
    return " or ".join(
        f"{_type(found['schema'])} as {escape(media_type)}" for media_type, found in holder.get("content", {}).items()
    )


def _table(rows: list[str]) -> str:
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _row(name: str, kind: str, presence: str, text: str) -> str:
    return f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{presence}<td>{escape(text)}"


def _type(schema: dict[str, Any]) -> str:
    """A schema in words, with links to the records it names."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(REF))
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(one))}</code>" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return escape(str(schema.get("type", "anything")))
