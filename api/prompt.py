"""The forms in which a caller may write a prompt, checked before anything is asked of the engine."""

from __future__ import annotations

from typing import Any

from novainfer.fsm.errors import InvalidParameter
from novainfer.fsm.events import Chat, Prompt

PromptLike = str | list[int] | Chat | dict[str, Any] | list[dict[str, Any]]


def to_prompt(prompt: PromptLike, vocab_size: int) -> Prompt:
    """Any of the forms a caller may write, checked."""
    if isinstance(prompt, dict):
        if "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
            if not isinstance(prompt, list):
                raise InvalidParameter("prompt_token_ids must be a list of integers", param="prompt")
        elif "prompt" in prompt:
            prompt = prompt["prompt"]
        else:
            raise InvalidParameter('a prompt dict needs "prompt" or "prompt_token_ids"', param="prompt")
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidParameter("the prompt must not be empty", param="prompt")
        return prompt
    if isinstance(prompt, Chat):
        return _chat(prompt)
    if not isinstance(prompt, list) or not prompt:
        kinds = "a string, a list of token ids, or messages"
        raise InvalidParameter(f"the prompt must be {kinds}, and not empty", param="prompt")
    if all(isinstance(item, dict) for item in prompt):
        return _chat(Chat(messages=[item for item in prompt if isinstance(item, dict)]))
    ids: list[int] = []
    for item in prompt:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            raise InvalidParameter(
                f"prompt token ids must be integers from 0 to {vocab_size - 1}, not {item!r}", param="prompt"
            )
        ids.append(item)
    return ids


def _chat(chat: Chat) -> Chat:
    """`chat`, when its messages look like messages; whether they can be rendered is the template's to say."""
    if not isinstance(chat.messages, list) or not chat.messages:
        raise InvalidParameter("messages must hold at least one message", param="messages")
    for at, message in enumerate(chat.messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidParameter(f"messages[{at}] must be a dict with a role and a content", param="messages")
    return chat
