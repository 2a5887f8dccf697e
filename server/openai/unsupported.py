"""Fields that are known and not built: neutral values pass, others are refused, because to ignore them would lie.

A field is refused when it would change the answer (or what a caller relies on). Fields that only hint, and unknown
ones, are let through; the answer names them in its `x-nova-ignored-fields` header.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import msgspec

from novainfer import InvalidParameter, UnsupportedParameter

NOTHING: tuple[Any, ...] = (None, [], {}, "", False)

# field -> values that mean what the server does anyway (NOTHING always does)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("none", "auto"),  # with no tools, which is checked on its own
    "n": (1,),
    "functions": (),
    "function_call": ("none", "auto"),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "stop_regex": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "suffix": (),
    "use_beam_search": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "chat_template": (),
    "documents": (),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "mcp_servers": (),
    "container": (),
    "add_special_tokens": (),  # of a chat: its template writes those that it needs
}

WITHOUT_EFFECT = frozenset({"user", "metadata"})  # never meant to have one, so not worth a header
HEADER_BYTES_MAX = 1024
NAME_CHARS_MAX = 64


def ignored_fields(
    fields: Mapping[str, msgspec.Raw],
    known: frozenset[str],
    *,
    is_strict: bool = False,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """The names in `fields` (a body's top level) that have no effect; raises `UnsupportedParameter` for the others.

    Where the server `is_strict`, there may be none: the first of them raises `InvalidParameter`. Of those that other
    endpoints have, `elsewhere` says what this one has in their place, or nothing.
    """
    ignored = []
    for name, raw in fields.items():
        if name in known:
            continue
        if name in UNSUPPORTED:
            neutral: tuple[Any, ...] = NOTHING + UNSUPPORTED[name]
        elif name in elsewhere:
            neutral = NOTHING
        else:
            if name in WITHOUT_EFFECT:
                continue
            if is_strict:
                raise InvalidParameter(f"{shown_name(name)} {_is_not_known(name, known)}", param=shown_name(name))
            ignored.append(name)
            continue
        value = msgspec.json.decode(raw)
        if not any(value == item and type(value) is type(item) for item in neutral):
            if instead := elsewhere.get(name):
                raise UnsupportedParameter(f"{name} is no field of this endpoint: use {instead}", param=name)
            raise UnsupportedParameter(f"{name} is not supported by this server: leave it out", param=name)
    return ignored


def _is_not_known(name: str, known: frozenset[str]) -> str:
    close = get_close_matches(name, known, 1)
    what = "has no effect on this endpoint, and this server refuses such fields"
    return f"{what}: did you mean {close[0]}?" if close else f"{what}: leave it out"


def shown_name(name: str) -> str:
    """A field's name in an error: whatever a client made of it, on one line, and in quotes where it is empty."""
    if not name.strip():
        return f'"{ascii(name)[1:-1][:NAME_CHARS_MAX]}"'
    return name if len(name) <= NAME_CHARS_MAX and name.isprintable() else ascii(name)[1:-1][:NAME_CHARS_MAX]


def header_value(names: list[str]) -> bytes:
    """The names as a header's value: ASCII names only, cut to a sane length."""
    kept = [name for name in names if len(name) <= NAME_CHARS_MAX and name.replace("_", "").replace("-", "").isalnum()]
    return ", ".join(name for name in kept if name.isascii()).encode()[:HEADER_BYTES_MAX]
