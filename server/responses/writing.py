"""The item of an answer that is being written: what is told of it at its beginning, on the way, and at its end."""

from __future__ import annotations

from typing import Protocol

from novainfer.server.openai.ids import Ids
from novainfer.server.openai.replies import ChatLogprob
from novainfer.server.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
    of_event,
)
from novainfer.server.responses.items import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    new_id,
)


class Writing(Protocol):
    """An item that is being written."""

    def begin(self) -> list[Event]:
        """That it is there."""

    def item(self, status: ItemStatus) -> OutputItem:
        """What there is of it."""

    def end(self, status: ItemStatus) -> list[Event]:
        """That it is done."""


class WritingMessage:
    """What the model says, as the `index`-th item."""

    def __init__(self, index: int, ids: Ids) -> None:
        self._index = index
        self._id = new_id(MessageItem, ids, index)
        self._texts: list[str] = []
        self._logprobs: list[ChatLogprob] = []

    def begin(self) -> list[Event]:
        bare = MessageItem(id=self._id, role="assistant", content=[], status="in_progress")
        return [
            ItemAdded(output_index=self._index, item=bare),
            PartAdded(output_index=self._index, item_id=self._id, part=OutputText("")),
        ]

    def add(self, text: str, logprobs: list[ChatLogprob]) -> Event:
        """It goes on with `text`."""
        self._texts.append(text)
        self._logprobs += logprobs
        return TextDelta(output_index=self._index, item_id=self._id, delta=text, logprobs=of_event(logprobs))

    def item(self, status: ItemStatus) -> MessageItem:
        part = OutputText("".join(self._texts), logprobs=list(self._logprobs))
        return MessageItem(id=self._id, role="assistant", content=[part], status=status)

    def end(self, status: ItemStatus) -> list[Event]:
        item = self.item(status)
        [part] = item.content
        assert isinstance(part, OutputText)
        index, item_id = self._index, self._id
        return [
            TextDone(output_index=index, item_id=item_id, text=part.text, logprobs=of_event(part.logprobs)),
            PartDone(output_index=index, item_id=item_id, part=part),
            ItemDone(output_index=index, item=item),
        ]


class WritingReasoning:
    """What the model thinks, as the `index`-th item."""

    def __init__(self, index: int, ids: Ids) -> None:
        self._index = index
        self._id = new_id(ReasoningItem, ids, index)
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return [
            ItemAdded(output_index=self._index, item=ReasoningItem(id=self._id, status="in_progress")),
            PartAdded(output_index=self._index, item_id=self._id, part=ReasoningText("")),
        ]

    def add(self, text: str) -> Event:
        """It goes on with `text`."""
        self._texts.append(text)
        return ReasoningDelta(output_index=self._index, item_id=self._id, delta=text)

    def item(self, status: ItemStatus) -> ReasoningItem:
        return ReasoningItem(id=self._id, content=[ReasoningText("".join(self._texts))], status=status)

    def end(self, status: ItemStatus) -> list[Event]:
        item = self.item(status)
        [part] = item.content
        index, item_id = self._index, self._id
        return [
            ReasoningDone(output_index=index, item_id=item_id, text=part.text),
            PartDone(output_index=index, item_id=item_id, part=part),
            ItemDone(output_index=index, item=item),
        ]


class WritingCall:
    """A call of the function `name`, as the `index`-th item."""

    def __init__(self, index: int, ids: Ids, name: str) -> None:
        self._index = index
        self._id = new_id(FunctionCallItem, ids, index)
        self._call_id = ids.of_call(0, index)
        self._name = name
        self._arguments: list[str] = []

    def begin(self) -> list[Event]:
        return [ItemAdded(output_index=self._index, item=self.item("in_progress"))]

    def add(self, text: str) -> Event:
        """Its arguments go on with `text`."""
        self._arguments.append(text)
        return ArgumentsDelta(output_index=self._index, item_id=self._id, delta=text)

    def item(self, status: ItemStatus) -> FunctionCallItem:
        arguments = "".join(self._arguments)
        return FunctionCallItem(id=self._id, call_id=self._call_id, name=self._name, arguments=arguments, status=status)

    def end(self, status: ItemStatus) -> list[Event]:
        item = self.item(status)
        return [
            ArgumentsDone(output_index=self._index, item_id=self._id, arguments=item.arguments),
            ItemDone(output_index=self._index, item=item),
        ]
