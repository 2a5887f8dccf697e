"""The events of a response that is streamed, in the order in which they come; each has its number, from 0.

    response.created  [response.queued]  response.in_progress
    for each item   response.output_item.added
      a message       response.content_part.added  .output_text.delta …  .output_text.done  .content_part.done
      thoughts        response.content_part.added  .reasoning_text.delta …  .reasoning_text.done  .content_part.done
      a call          response.function_call_arguments.delta …  .done
                    response.output_item.done
    one of          response.completed  response.incomplete  response.failed

The last one is `response.incomplete` where the answer broke off: its `status` is `incomplete`, or `cancelled`. `error`
ends a stream whose response is gone.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from novainfer.server.openai.replies import ChatLogprob
from novainfer.server.responses.items import OutputItem, OutputText, ReasoningText
from novainfer.server.responses.reply import Response

_json = msgspec.json.Encoder().encode


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    """One event; its number is set where it is sent, and stands first, as OpenAI's: API processes read it there."""

    sequence_number: int = 0


class Created(Event, tag="response.created", kw_only=True):
    response: Response


class Queued(Event, tag="response.queued", kw_only=True):
    response: Response


class InProgress(Event, tag="response.in_progress", kw_only=True):
    response: Response


class Completed(Event, tag="response.completed", kw_only=True):
    response: Response


class Incomplete(Event, tag="response.incomplete", kw_only=True):
    response: Response


class Failed(Event, tag="response.failed", kw_only=True):
    response: Response


class ItemEvent(Event, kw_only=True):
    """Of the item that is the `output_index`-th of the response."""

    output_index: int


class ItemAdded(ItemEvent, tag="response.output_item.added", kw_only=True):
    item: OutputItem


class ItemDone(ItemEvent, tag="response.output_item.done", kw_only=True):
    item: OutputItem


class ContentEvent(ItemEvent, kw_only=True):
    """Of an item's only part."""

    item_id: str
    content_index: int = 0


class PartAdded(ContentEvent, tag="response.content_part.added", kw_only=True):
    part: OutputText | ReasoningText


class PartDone(ContentEvent, tag="response.content_part.done", kw_only=True):
    part: OutputText | ReasoningText


class EventTopLogprob(msgspec.Struct):
    """As events have them: without bytes, which are in the item."""

    token: str
    logprob: float


class EventLogprob(msgspec.Struct):
    """As events have them: without bytes, which are in the item."""

    token: str
    logprob: float
    top_logprobs: list[EventTopLogprob]


class TextDelta(ContentEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[EventLogprob] = []


class TextDone(ContentEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[EventLogprob] = []


class ReasoningDelta(ContentEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(ContentEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    arguments: str


def of_event(logprobs: Iterable[ChatLogprob]) -> list[EventLogprob]:
    """Log probabilities as events have them."""
    return [
        EventLogprob(one.token, one.logprob, [EventTopLogprob(top.token, top.logprob) for top in one.top_logprobs])
        for one in logprobs
    ]


def event_bytes(event: Event) -> bytes:
    """As a server-sent event."""
    return b"event: " + str(event.__struct_config__.tag).encode() + b"\ndata: " + _json(event) + b"\n\n"
