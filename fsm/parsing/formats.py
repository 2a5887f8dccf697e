"""Which format a model's answers have, found from its chat template: how it calls tools, and how it reasons."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
MARKERS = (OPEN_THINK, CLOSE_THINK, OPEN_CALL, CLOSE_CALL)

HERMES = "hermes"  # <tool_call> {"name": …, "arguments": {…}} </tool_call>: Qwen2.5, Qwen3
QWEN3_CODER = "qwen3_coder"  # <tool_call> <function=…> <parameter=…> … </tool_call>: Qwen3-Coder, Qwen3.5
THINK = "think"  # <think> … </think>: Qwen3, QwQ, R1 and what was distilled from it
NONE = "none"

# What users of other servers call them.
TOOL_CALL_PARSERS = {
    NONE: NONE,
    HERMES: HERMES,
    "qwen3_json": HERMES,
    QWEN3_CODER: QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
}
REASONING_PARSERS = {NONE: NONE, THINK: THINK, "qwen3": THINK, "deepseek_r1": THINK}


class Formats(msgspec.Struct, frozen=True, kw_only=True):
    """What a model writes: one of `TOOL_CALL_PARSERS` and of `REASONING_PARSERS`, by our own names.

    `marker_ids` are those of `MARKERS` that are tokens of the vocabulary, with their ids: only such a token is the
    marker then, and the same characters, spelled out, are text.
    """

    tool_calls: str = NONE
    reasoning: str = NONE
    marker_ids: dict[str, int] = {}

    @property
    def has_tools(self) -> bool:
        """Whether it calls tools at all."""
        return self.tool_calls != NONE


def formats_of(template: str | None, token_id_of: Callable[[str], int | None]) -> Formats:
    """By what a chat `template` writes into its prompts; `token_id_of` a text, where it is one token of its own."""
    found = {text: token_id for text in MARKERS if (token_id := token_id_of(text)) is not None}
    if template is None:
        return Formats(marker_ids=found)
    tool_calls = NONE
    if OPEN_CALL in template and "tools" in template:
        tool_calls = QWEN3_CODER if "<function=" in template else HERMES
    reasoning = THINK if CLOSE_THINK in template else NONE
    return Formats(tool_calls=tool_calls, reasoning=reasoning, marker_ids=found)
