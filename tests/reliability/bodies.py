"""Bodies that no client should send, and many that it may: drawn from the routes' own document, from one seed.

Each begins as one that its route serves. Then places in it are changed: to values that are hostile to any reader of
JSON, to values that the document allows, or to nothing; or it is broken as a text, or as bytes.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

DEPTHS = (40, 130, 2_000, 40_000)  # of nested brackets
LENGTHS = (257, 5_000, 70_000)
NAMES = ("", "a", "\x00", "__proto__", "model", "é\u202e", "x" * 300)

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "How much is 3 and 4?"}], "max_tokens": 2}
TEXT = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 2}
TOOL = {
    "name": "add",
    "description": "a sum",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

# What each route serves: beginnings that reach as much of it as a few tokens can.
SERVED: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": (
        CHAT,
        CHAT | {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2},
        CHAT
        | {"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["\n"], "logit_bias": {"5": -3}},
        CHAT | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto"},
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
        CHAT | {"structured_outputs": {"choice": ["yes", "no"]}, "bad_words": ["maybe"], "min_tokens": 1},
        CHAT | {"prompt_logprobs": 1, "return_token_ids": True, "ignore_eos": True, "repetition_penalty": 1.1},
    ),
    "/v1/completions": (
        TEXT,
        TEXT | {"prompt": ["a", "b"], "echo": True, "logprobs": 2},
        TEXT | {"prompt": [1, 2, 3], "best_of": 2, "n": 1, "stream": False},
        TEXT | {"prompt": [[1], [2, 3]], "stream": True, "truncate_prompt_tokens": 1, "allowed_token_ids": [5, 6]},
    ),
    "/v1/responses": (
        {"model": "demo", "input": "How much is 3 and 4?", "max_output_tokens": 2},
        {"model": "demo", "input": [{"role": "user", "content": "hi"}], "max_output_tokens": 2, "stream": True},
        {"model": "demo", "input": "hi", "max_output_tokens": 2, "store": False, "text": {"format": {"type": "text"}}},
        {
            "model": "demo",
            "input": "hi",
            "max_output_tokens": 2,
            "tools": [{"type": "function", "strict": False} | TOOL],
        },
    ),
    "/v1/messages": (
        {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2,
            "stream": True,
            "system": "Be.",
        },
        {
            "model": "demo",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "max_tokens": 2,
            "tools": [{"name": "add", "description": "a sum", "input_schema": PERSON}],
        },
    ),
    "/v1/messages/count_tokens": ({"model": "demo", "messages": [{"role": "user", "content": "hi"}]},),
    "/v1/embeddings": (
        {"model": "demo", "input": "hi"},
        {"model": "demo", "input": ["hi", "you"], "dimensions": 8, "encoding_format": "base64"},
        {"model": "demo", "input": [[1, 2], [3]]},
    ),
    "/v1/chat/completions/render": (CHAT,),
    "/v1/completions/render": (TEXT,),
    "/tokenize": (
        {"model": "demo", "prompt": "hi"},
        {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    ),
    "/detokenize": ({"model": "demo", "tokens": [1, 2, 3]},),
    "/abort_requests": ({"request_ids": ["nobody", "nobody-else"]},),
    "/abort_request": ({"rid": "nobody", "abort_all": False},),
}


class Raw(str):
    """JSON text that `json` cannot write."""

    __slots__ = ()


class Body(NamedTuple):
    """What is sent where; `kind` says how it was made."""

    kind: str
    path: str
    data: bytes


class Bodies:
    """Any number of bodies: the same ones for one seed and one OpenAPI document."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self._draw = random.Random(seed)
        self._components = document["components"]["schemas"]
        self._schemas = {
            path: document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path in SERVED
        }
        self._kinds: tuple[tuple[str, Callable[[str], bytes]], ...] = (
            ("schema", self._of_schema),
            ("schema", self._of_schema),
            ("hostile", self._hostile),
            ("hostile", self._hostile),
            ("text", self._text),
            ("bytes", self._bytes),
            ("nesting", self._nesting),
        )

    def next(self) -> Body:
        """One more."""
        path = self._draw.choice(tuple(SERVED))
        kind, make = self._draw.choice(self._kinds)
        return Body(kind, path, make(path))

    def _beginning(self, path: str) -> Any:
        return copy.deepcopy(self._draw.choice(SERVED[path]))

    def _of_schema(self, path: str) -> bytes:
        """Fields of the route's own document, most of them of the right type, at the top or further in."""
        body = self._beginning(path)
        fields = self._resolved(self._schemas[path])["properties"]
        for _ in range(self._draw.randint(1, 3)):
            name = self._draw.choice(tuple(fields))
            body[name] = self._value(fields[name], 0)
        return written(body)

    def _hostile(self, path: str) -> bytes:
        """Places anywhere in it hold what nobody expects there, or nothing."""
        body = self._beginning(path)
        for _ in range(self._draw.randint(1, 3)):
            holder, key = self._place(body)
            if self._draw.random() < 0.15:
                del holder[key]
            else:
                holder[key] = self._anything()
            if not body:
                break
        if self._draw.random() < 0.1:
            body[self._draw.choice(NAMES)] = self._anything()
        return written(body)

    def _text(self, path: str) -> bytes:
        """JSON with names twice, other spaces, escapes that are none, comments, and ends that come early."""
        text = written(self._beginning(path)).decode("utf-8", "surrogatepass")
        at = self._draw.randrange(len(text))
        change = self._draw.randrange(6)
        if change == 0:
            text = text[:at]
        elif change == 1:
            text = "{" + f'"model": {self._draw.choice(["1", "null", chr(34) * 2])}, ' + text[1:]
        elif change == 2:
            text += self._draw.choice((" ", "\n{}", "]", "\x00", "// that was it", text))
        elif change == 3:
            text = text.replace('"', "'", self._draw.randint(1, 20))
        elif change == 4:
            text = (
                text[:at] + self._draw.choice(("\\u12", "\\ud800", "\\x", "\t", "\x00", "\ud800", "\ufeff")) + text[at:]
            )
        else:
            text = self._draw.choice(
                ("", " ", "null", "1", '"demo"', "[]", "{}", "true", "NaN", "\ufeff{}", f"[{text}]")
            )
        return text.encode("utf-8", "surrogatepass")

    def _bytes(self, path: str) -> bytes:
        """Bytes are changed, lost, said twice, or none of UTF-8."""
        data = bytearray(written(self._beginning(path)))
        for _ in range(self._draw.choice((1, 1, 2, 8))):
            at = self._draw.randrange(len(data))
            change = self._draw.randrange(4)
            if change == 0:
                data[at] = self._draw.randrange(256)
            elif change == 1:
                del data[at : at + self._draw.randint(1, 9)]
            elif change == 2:
                data[at:at] = data[at : at + self._draw.randint(1, 9)]
            else:
                data[at:at] = self._draw.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\xf5\x80\x80\x80"))
            data = data or bytearray(b"{")
        return bytes(data)

    def _nesting(self, path: str) -> bytes:
        body = self._beginning(path)
        depth = self._draw.choice(DEPTHS)
        opening, closing = self._draw.choice(
            (("[", "]"), ('{"a":', "}"), ('{"type":"object","properties":{"a":', "}}"))
        )
        end = self._draw.choice(("0", "", '"x"'))
        is_closed = self._draw.random() < 0.7
        deep = Raw(opening * depth + end + closing * depth * is_closed)
        holder, key = self._place(body)
        holder[key] = deep
        return written(body)

    def _place(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """Somewhere in it: what holds the value, and its name or place there."""
        places: list[tuple[Any, Any]] = []
        within: list[Any] = [body]
        while within:
            holder = within.pop()
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            for key in keys:
                places.append((holder, key))
                if isinstance(holder[key], dict | list):
                    within.append(holder[key])
        return self._draw.choice(places)

    def _anything(self) -> Any:
        draw = self._draw
        number = draw.choice((0, -1, 1, 3, -0.0, 0.5, 1e308, 5e-324, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1))
        text = draw.choice(("", " ", "a", "\x00", "\ud800", "😀", "{{ 7 * 7 }}", "%s%n", "auto", "function", "object"))
        return draw.choice(
            (
                *(None, True, False, number, number, text, text),
                draw.choice((Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("9" * 400), Raw("-0"))),
                draw.choice(("x", "é", "\x00", "\\", "<tool_call>")) * draw.choice(LENGTHS),
                draw.choice(([], {}, [[]], [None], [{}], [number], [text], {text: number}, {text: text})),
                [draw.choice((number, text, None))] * draw.choice(LENGTHS),
            )
        )

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._components[schema["$ref"].rsplit("/", 1)[1]]
        return schema

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        """One that the schema allows, or, at times, not quite."""
        draw = self._draw
        schema = self._resolved(schema)
        if draw.random() < 0.08 or depth > 5:
            return self._anything()
        if "anyOf" in schema:
            return self._value(draw.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return draw.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        if kind == "object" and "properties" in schema:
            required = schema.get("required", ())
            fields = [name for name in schema["properties"] if name in required or draw.random() < 0.3]
            return {name: self._value(schema["properties"][name], depth + 1) for name in fields}
        if kind == "object":
            inside = schema.get("additionalProperties", {})
            inside = inside if isinstance(inside, dict) else {}
            return {draw.choice(NAMES): self._value(inside, depth + 1) for _ in range(draw.randint(0, 3))}
        if kind == "array":
            return [self._value(schema.get("items", {}), depth + 1) for _ in range(draw.choice((0, 1, 1, 2, 5)))]
        simple: dict[Any, tuple[Any, ...]] = {
            "integer": (0, 1, 2, 5, 100, -1, 2**31 - 1),
            "number": (0, 0.1, 1, 1.5, 2, -2, 1e-9),
            "string": ("demo", "a", "hi there", "user", "text", "auto", "none", "", "5"),
            "boolean": (True, False),
            "null": (None,),
        }
        return draw.choice(simple[kind]) if kind in simple else self._anything()


def written(value: Any) -> bytes:
    """As JSON; what is `Raw` stands there as it is, lone surrogates as escapes or as three bytes that are no UTF-8."""
    raws: list[Raw] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raws.append(value)
            return f"<raw {len(raws) - 1}>"
        if isinstance(value, dict):
            return {key: marked(inside) for key, inside in value.items()}
        if isinstance(value, list):
            return [marked(inside) for inside in value]
        return value

    text = json.dumps(marked(value), ensure_ascii=len(raws) % 2 == 0)
    for at, raw in enumerate(raws):
        text = text.replace(f'"<raw {at}>"', raw)
    return text.encode("utf-8", "surrogatepass")
