"""What goes into the machine that reads an answer, and what comes out of it."""

from __future__ import annotations

import msgspec

# ---- in: an answer, cut at its markers ------------------------------------------------------------------------------
# `num_tokens` counts the answer's tokens up to the marker, itself included.


class Text(msgspec.Struct, frozen=True):
    """Characters that are no marker."""

    text: str


class Marker(msgspec.Struct, frozen=True):
    """A marker, and its `text` as the answer shows it: none where control tokens are hidden."""

    text: str
    num_tokens: int


class OpenThink(Marker, frozen=True):
    """`<think>`."""


class CloseThink(Marker, frozen=True):
    """`</think>`."""


class OpenCall(Marker, frozen=True):
    """`<tool_call>`."""


class CloseCall(Marker, frozen=True):
    """`</tool_call>`."""


class Finish(msgspec.Struct, frozen=True):
    """The answer has ended, with so many tokens."""

    num_tokens: int


# ---- out: what it says ----------------------------------------------------------------------------------------------


class Reasoning(msgspec.Struct, frozen=True):
    """More of what it thinks."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More of what it says."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """It calls the tool `name`; its calls are counted from 0."""

    index: int
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, which are JSON when all pieces are put together."""

    index: int
    text: str


Piece = Reasoning | Content | CallBegun | CallArguments
