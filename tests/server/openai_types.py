"""What the server sends, read by the types of OpenAI's own client, strictly: no field too few, too many or too lax."""

from __future__ import annotations

from typing import Any, TypeVar

from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

# Of a response: the API has them, its client's types in the version here have not.
NAMELESS = {"access_programs", "frequency_penalty", "presence_penalty", "store"}
Kind = TypeVar("Kind", bound=BaseModel)
_event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def checked(kind: type[Kind], data: bytes | str) -> Kind:
    """`data` as `kind`; fails where it is anything else."""
    value = TypeAdapter(kind).validate_json(data, strict=True)
    assert not (found := unknown(value)), found
    return value


def checked_event(data: bytes | str) -> Any:
    """`data` as an event of a response that is streamed."""
    value = _event.validate_json(data, strict=True)
    assert not (found := unknown(value)), found
    return value


def unknown(value: Any, path: str = "") -> list[str]:
    """The fields that OpenAI's types have no name for."""
    if isinstance(value, BaseModel):
        fields = {**value.__dict__}
        here = [f"{path}.{name}" for name in value.model_extra or () if name not in NAMELESS]
        return here + [one for name, field in fields.items() for one in unknown(field, f"{path}.{name}")]
    if isinstance(value, list):
        return [one for at, item in enumerate(value) for one in unknown(item, f"{path}[{at}]")]
    return []
