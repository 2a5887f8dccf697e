"""What a prompt is thought to hold before it is tokenised."""

from __future__ import annotations

import pytest

from novainfer.actors.admission import estimate_tokens
from novainfer.fsm.messages.events import Chat


@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [
        ([1, 2, 3], 3),
        ("abcdef", 3),
        ("", 1),
        ("語" * 6, 7),
        ("\ud800", 2),
        (Chat(messages=[{"content": "abcdef"}]), 7),
        (Chat(messages=[{"content": "abcdef"}], template_kwargs={"switch": "x" * 10_000}), 7),  # read by no model
    ],
)
def test_a_prompt_is_thought_to_hold_a_token_for_three_bytes(prompt: str | list[int] | Chat, num_tokens: int) -> None:
    assert estimate_tokens(prompt) == num_tokens
