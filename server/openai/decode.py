"""A request's bytes to a Struct; every fault becomes one sentence with the field's dotted path in `param`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Protocol, TypeVar

import msgspec

from novainfer import InvalidParameter
from novainfer.allowed import rule_of
from novainfer.server.http.errors import MalformedBody
from novainfer.server.openai.unsupported import ignored_fields, shown_name


class OfFields(Protocol):
    """A Struct that msgspec decodes."""

    __struct_fields__: ClassVar[tuple[str, ...]]


class OfModel(OfFields, Protocol):
    """A body that says which model it is for."""

    model: str | None


AnyBody = TypeVar("AnyBody", bound=OfFields)

FIELDS_MAX = 256  # all that are known are a fourth of it
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_FIELD = re.compile(r"field `(?P<field>[^`]+)`")
WHAT_CHARS_MAX = 200  # of what msgspec says, which holds a value whole


def decode(kind: type[AnyBody], body: bytes, *, is_strict: bool = False) -> tuple[AnyBody, list[str]]:
    """The Struct, and the names of fields that have no effect; raises `MalformedBody` or `InvalidParameter`.

    Where the server `is_strict` there may be no such fields.
    """
    with _explained(kind, body):
        fields = _FIELDS.decode(body)
        if len(fields) > FIELDS_MAX:
            raise MalformedBody(f"The body must have at most {FIELDS_MAX} fields, not {len(fields)}")
        known, elsewhere = frozenset(kind.__struct_fields__), getattr(kind, "ELSEWHERE", {})
        ignored = ignored_fields(fields, known, is_strict=is_strict, elsewhere=elsewhere)
        request = _decoder(kind).decode(body)
    return request, ignored


def decode_own(kind: type[AnyBody], body: bytes) -> AnyBody:
    """The Struct of an endpoint that is no other server's; raises as `decode` does."""
    with _explained(kind, body):
        return msgspec.json.decode(body, type=kind)


def _no_json(body: bytes, error: Exception) -> InvalidParameter | MalformedBody:
    """That `body` is no JSON; where it is but for half of a character, the field that has it."""
    wrong = MalformedBody(f"The body is not valid JSON: {error}")
    if _SURROGATE.search(body) is None:
        return wrong
    try:
        fields = json.loads(body)  # Python's takes them
    except ValueError:
        return wrong
    for name, value in fields.items() if isinstance(fields, dict) else ():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            field = shown_name(name)
            what = "has half of a character: an escape such as \\ud83d needs the other half behind it"
            return InvalidParameter(f"{field} {what}", param=field)
    return wrong


@functools.cache
def _decoder(kind: type[AnyBody]) -> msgspec.json.Decoder[AnyBody]:
    return msgspec.json.Decoder(kind)


@contextmanager
def _explained(kind: type[OfFields], body: bytes) -> Iterator[None]:
    """What msgspec raises of `body`, which should be a `kind`, becomes an error for the client."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise explain(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            wrong = _no_json(body, error)
        except RecursionError:
            raise MalformedBody("The body is nested too deeply") from None
        raise wrong from None
    except RecursionError:
        raise MalformedBody("The body is nested too deeply") from None


def explain(error: msgspec.ValidationError, kind: type[OfFields]) -> MalformedBody | InvalidParameter:
    """msgspec's message of what should be a `kind`, as an error whose `param` is a path such as `messages[0].role`."""
    match = _PATH.match(str(error))
    assert match is not None
    what, path = match["what"], match["path"] or ""
    if what.startswith("Object contains unknown field") and (unknown := _FIELD.search(what)) is not None:
        path = f"{path}.{unknown['field']}" if path else unknown["field"]
        return InvalidParameter(f"{path} is not a field of this body", param=path)
    if (missing := _FIELD.search(what)) is not None:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return InvalidParameter(f"{path} is required", param=path)
    if not path:
        return MalformedBody(f"The body must be a JSON object: {_lower_first(what)}")
    if rule := rule_of(kind, path, what):
        return InvalidParameter(f"{path} {rule}", param=path)
    if what.startswith(path):  # a record of its own has said it, by its whole name
        return InvalidParameter(what, param=what.partition(" ")[0])
    if len(what) > WHAT_CHARS_MAX:
        what = f"{what[:WHAT_CHARS_MAX]}…"
    return InvalidParameter(f"{path}: {_lower_first(what)}", param=path)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
