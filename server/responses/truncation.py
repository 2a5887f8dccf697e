"""`truncation: "auto"`: a conversation that is too long for the context loses its oldest turns, not its answer."""

from __future__ import annotations

import msgspec

from novainfer import CallerError, SamplingParams
from novainfer.server.http.exchange import Exchange
from novainfer.server.openai.protocol import ChatCompletionRequest, Message
from novainfer.server.openai.tokens import tokens_of
from novainfer.server.service import Service

INSTRUCTIONS = ("system", "developer")


async def fitted(
    service: Service, exchange: Exchange, chat: ChatCompletionRequest, params: SamplingParams
) -> ChatCompletionRequest:
    """`chat` without as many of its oldest turns as must go, so that `max_tokens` fit behind it, or one token.

    What the conversation begins with of instructions stays, and so does its latest turn: where these are too long, the
    request is refused as any other. A turn begins with what a user says, so no call loses its answer.
    """
    room = exchange.model.engine.model_info.max_model_len - (params.max_tokens or 1)

    async def fits(messages: list[Message]) -> bool:
        prompt = msgspec.structs.replace(chat, messages=messages).prompt(has_tools=exchange.model.formats.has_tools)
        try:
            [tokens] = await tokens_of(service, exchange, exchange.model.engine, [prompt], params=params)
        except CallerError:  # far too long; or wrong otherwise, which is said when it is asked
            return False
        return len(tokens) <= room

    cuts = _cuts(chat.messages)
    few, many = 0, len(cuts) - 1  # turns that go: as few as will do
    while few < many:
        middle = (few + many) // 2
        if await fits(cuts[middle]):
            many = middle
        else:
            few = middle + 1
    return msgspec.structs.replace(chat, messages=cuts[few])


def _cuts(messages: list[Message]) -> list[list[Message]]:
    """The conversation as it is, and without its first turn, its first two, … up to its last."""
    num_kept = next((at for at, one in enumerate(messages) if one.role not in INSTRUCTIONS), len(messages))
    turns = [at for at, one in enumerate(messages) if at > num_kept and one.role == "user"]
    return [messages, *(messages[:num_kept] + messages[at:] for at in turns)]
