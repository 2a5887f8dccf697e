"""The forms in which a caller may write a prompt, checked before anything is asked of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.events import Chat, Committed, Prompt
from novainfer.fsm.messages.params import SamplingParams, is_unicode, shown

# What apply_chat_template takes itself: as template variables they would change what is rendered, or by what.
RESERVED_KWARGS = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations"),
        *("documents", "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    )
)
KWARGS_BYTES_MAX = 16 << 10  # of template variables, which are switches and names: admission does not count them
DEPTH_MAX = 32  # lists and dicts in each other; a message with tool calls and their schemas has about ten
_encode = msgspec.msgpack.Encoder().encode

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
        if not is_unicode(prompt):
            message = "the prompt is not valid Unicode: it holds half of a surrogate pair"
            raise InvalidParameter(message, param="prompt")
        return prompt
    if isinstance(prompt, Chat):
        return _chat(prompt)
    if not isinstance(prompt, list) or not prompt:
        kinds = "a string, a list of token ids, or messages"
        raise InvalidParameter(f"the prompt must be {kinds}, and not empty", param="prompt")
    if all(isinstance(item, dict) for item in prompt):
        return _chat(Chat(messages=[item for item in prompt if isinstance(item, dict)]))
    return checked_ids(prompt, vocab_size, "prompt token ids", param="prompt")


def checked_ids(items: list[Any], vocab_size: int, what: str, *, param: str) -> list[int]:
    """`items`, when they are token ids; raises `InvalidParameter` that calls them `what`."""
    ids: list[int] = []
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            message = f"{what} must be integers from 0 to {vocab_size - 1}, not {_shown(item)}"
            raise InvalidParameter(message, param=param)
        ids.append(item)
    return ids


def with_room(params: SamplingParams, max_model_len: int) -> SamplingParams:
    """`params`, with the number of tokens where `truncate_prompt_tokens` says: as many as the context holds."""
    if params.truncate_prompt_tokens != -1:
        return params
    room = max(max_model_len - params.num_tokens_needed, 1)
    return msgspec.structs.replace(params, truncate_prompt_tokens=room)


def check_committed(committed: Sequence[Committed], params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidParameter` unless `committed` is what the choices of a request may have got before."""
    if not committed:
        return
    if len(committed) != params.n or not all(isinstance(one, Committed) for one in committed):
        raise InvalidParameter(f"committed must hold a Committed for each of n={params.n} choices", param="committed")
    for one in committed:
        checked_ids(one.token_ids, vocab_size, "committed token ids", param="committed")
        if one.token_ids and (one.logprobs is None) != (params.logprobs is None):
            raise InvalidParameter("committed must hold logprobs where they are asked for", param="committed")
        if one.logprobs is not None and len(one.logprobs) != len(one.token_ids):
            raise InvalidParameter("committed must hold one of logprobs for each token", param="committed")
    if params.pooling is not None:
        raise InvalidParameter("committed cannot be combined with pooling", param="committed")


def _chat(chat: Chat) -> Chat:
    """`chat`, when its messages look like messages; whether they can be rendered is the template's to say."""
    if not isinstance(chat.messages, list) or not chat.messages:
        raise InvalidParameter("messages must hold at least one message", param="messages")
    for at, message in enumerate(chat.messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidParameter(f"messages[{at}] must be a dict with a role and a content", param="messages")
    kwargs = chat.template_kwargs
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidParameter("chat_template_kwargs must be a dict with names as keys", param="chat_template_kwargs")
    if reserved := sorted(RESERVED_KWARGS & set(kwargs)):
        what = f"chat_template_kwargs must not hold {', '.join(reserved)}"
        why = "templates, and how they are used, are the operator's to choose"
        raise InvalidParameter(f"{what}: {why}", param=f"chat_template_kwargs.{reserved[0]}")
    if not isinstance(chat.tools, list) or not all(isinstance(tool, dict) for tool in chat.tools):
        raise InvalidParameter("tools must be a list of dicts", param="tools")
    _check_data("messages", chat.messages)
    _check_data("tools", chat.tools)
    num_bytes = _check_data("chat_template_kwargs", kwargs)
    if num_bytes > KWARGS_BYTES_MAX:
        what = f"chat_template_kwargs must have at most {KWARGS_BYTES_MAX} bytes, not {num_bytes}"
        raise InvalidParameter(f"{what}: what the model is to read belongs into messages", param="chat_template_kwargs")
    return chat


def _check_data(name: str, value: Any) -> int:
    """Its bytes as data; raises `InvalidParameter` unless a template's process and the recorder can hold `value`."""
    _check_depth(name, value, DEPTH_MAX)
    try:
        return len(_encode(value))
    except UnicodeEncodeError:
        message = f"{name} is not valid Unicode: it holds half of a surrogate pair"
        raise InvalidParameter(message, param=name) from None
    except OverflowError:
        raise InvalidParameter(f"{name} holds an integer of more than 64 bits", param=name) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"{name} must hold JSON's kinds of values only: {error}", param=name) from None


def _check_depth(name: str, value: Any, left: int) -> None:
    if isinstance(value, dict | list | tuple):
        if not left:
            raise InvalidParameter(f"{name} is nested more than {DEPTH_MAX} levels deep", param=name)
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(name, item, left - 1)


def _shown(item: Any) -> str:
    return shown(item) if isinstance(item, int) else repr(item)[:100]
