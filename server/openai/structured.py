"""What an answer is held to, in each of the ways that clients ask for it: one of them a request.

response_format     OpenAI's: text, json_object, json_schema; and vLLM's structural_tag
structured_outputs  vLLM's, as `SamplingParams` has it
guided_json, …      the same, as older clients of vLLM send it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import msgspec

from novainfer import CallerError, InvalidParameter, StructuredOutputsParams
from novainfer.reading import HELD


class JsonSchema(msgspec.Struct, kw_only=True):
    """OpenAI's `json_schema`. Answers are held to it whether it is `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class Held(Protocol):
    """The fields of a body that say what its answer is held to."""

    structured_outputs: StructuredOutputsParams | None
    response_format: ResponseFormat | None
    guided_json: str | dict[str, Any] | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_whitespace_pattern: str | None


GUIDED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}


def grammar_of(body: Held) -> StructuredOutputsParams | None:
    """What `body` asks for; raises `InvalidParameter` when it asks in two ways, or for what is no grammar."""
    ways = _ways(body)
    if len(ways) > 1:
        first, second = ways[0][0].split(".")[0], ways[1][0].split(".")[0]
        raise InvalidParameter(f"{second} and {first} exclude each other: an answer has one grammar", param=second)
    if not ways:
        return None
    ((field, given),) = ways
    if isinstance(given, StructuredOutputsParams):
        return given
    try:
        return StructuredOutputsParams(**given)
    except InvalidParameter as error:
        what = error.message.partition(" ")[2]
        raise InvalidParameter(f"{field} {what}", param=field) from None


@contextmanager
def naming_grammar(body: Held) -> Iterator[None]:
    """Errors of the answer's grammar name the field by which `body` asks for it, as a client may know no other."""
    with naming_grammar_as(next((field for field, _ in _ways(body)), HELD)):
        yield


@contextmanager
def naming_grammar_as(field: str) -> Iterator[None]:
    """Errors of the answer's grammar name this `field`."""
    try:
        yield
    except CallerError as error:
        if error.param != HELD or error.message.startswith(HELD):
            raise
        raise type(error)(f"{field}: {error.message}", param=field) from None


def _ways(body: Held) -> list[tuple[str, dict[str, Any] | StructuredOutputsParams]]:
    """In which ways `body` asks for a grammar: by which field each, and for what."""
    ways: list[tuple[str, dict[str, Any] | StructuredOutputsParams]] = []
    if body.structured_outputs is not None:
        ways.append((f"{HELD}.{body.structured_outputs.kind}", body.structured_outputs))
    if body.response_format is not None and body.response_format.type != "text":
        ways.append(_of_response_format(body.response_format))
    for kind, field in GUIDED.items():
        if (value := getattr(body, field)) is not None:
            ways.append((field, {kind: value, "whitespace_pattern": body.guided_whitespace_pattern}))
    return ways


def _of_response_format(found: ResponseFormat) -> tuple[str, dict[str, Any]]:
    if found.type == "json_object":
        return "response_format", {"json_object": True}
    if found.type == "structural_tag":
        tag = {"structures": found.structures or [], "triggers": found.triggers or []}
        return "response_format", {"structural_tag": tag}
    field = "response_format.json_schema"
    if found.json_schema is None or found.json_schema.schema is None:
        missing = field if found.json_schema is None else f"{field}.schema"
        raise InvalidParameter(f'{missing} is required with response_format.type "json_schema"', param=missing)
    return f"{field}.schema", {"json": found.json_schema.schema}
