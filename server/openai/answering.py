"""A conversation's answer, whatever the shape that its endpoint gives it: held to grammars, generated, and read.

Endpoints translate their bodies into a `Chat`, sampling parameters and an offer of tools; what comes back is pieces
(thoughts, content, calls), which they write in their own events or objects.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

from novainfer import Chat, Delta, SamplingParams
from novainfer.fsm.parsing.pieces import Content
from novainfer.fsm.parsing.reader import Wanted
from novainfer.offer import Offer
from novainfer.reading import ReadDelta, Reading, asked_for, naming_tools
from novainfer.server.http.exchange import Exchange
from novainfer.server.openai.coming import SILENT_S_MAX
from novainfer.server.openai.generation import Generation, Origin
from novainfer.server.openai.replies import Choice, Tally
from novainfer.server.served import OfAnswers
from novainfer.server.service import Service


class Answer:
    """The answer to one conversation, `params.n` choices of it; end it by its generation.

    `reading` is None where all that the answer can hold is content; `params` are those that the engine was given.
    """

    def __init__(
        self, generation: Generation, reading: Reading | None, params: SamplingParams, *, is_held_by_tools: bool
    ) -> None:
        self.generation = generation
        self.params = params
        self.reading = reading
        self._is_held_by_tools = is_held_by_tools

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it is wanted, though the engine may go on."""
        return self.reading is not None and self.reading.is_over

    @property
    def tally(self) -> Tally:
        """What was counted of it."""
        return self.generation.tally

    def read(self, delta: Delta) -> list[ReadDelta]:
        """What `delta` brings, behind those that had to wait for it."""
        return read_by(self.reading, delta)

    def naming(self) -> AbstractContextManager[None]:
        """Errors of a grammar that is made of tools name these."""
        return naming_tools(is_held_by_tools=self._is_held_by_tools)

    async def first(self, most_s: float = SILENT_S_MAX) -> asyncio.Task[Delta]:
        """`Generation.first`, for an answer that is streamed."""
        with self.naming():
            return await self.generation.first(most_s)

    async def collect(self) -> list[Choice]:
        """All of it, as choices with their pieces."""
        with self.naming():
            choices = await self.generation.collect(self.reading)
        if self.reading is None:
            for choice in choices:
                choice.pieces = [Content(choice.text)] if choice.text else []
        return choices


class AnswerAgain:
    """An answer as it is made again of its pieces; `add` counts each before it is read."""

    def __init__(self, reading: Reading | None, tally: Tally) -> None:
        self.tally = tally
        self._reading = reading

    @property
    def is_over(self) -> bool:
        """As of `Answer`."""
        return self._reading is not None and self._reading.is_over

    def read(self, delta: Delta) -> list[ReadDelta]:
        """As of `Answer`."""
        return read_by(self._reading, delta)


def read_by(reading: Reading | None, delta: Delta) -> list[ReadDelta]:
    """What `delta` brings, to `reading`, or as content where there is none."""
    if reading is None:
        return [(delta, [Content(delta.text)] if delta.text else [])]
    return reading.read(delta)


async def begin_answer(
    service: Service,
    exchange: Exchange,
    prompt: Chat,
    params: SamplingParams,
    offer: Offer,
    *,
    prefix: str,
    name: str,
    request_id: str | None = None,
    origin: Origin | None = None,
) -> Answer:
    """Ask the engine for an answer to `prompt`, with calls of the tools on `offer`.

    Its id is `prefix`-`name`, or `request_id` where that is given.

    Raises `CallerError` for what cannot be asked of this model, naming OpenAI's fields.
    """
    model = exchange.model
    asked, wanted, is_held_by_tools = asked_for(params, offer, model.formats)
    generation = Generation(service, exchange, prefix, name, [prompt], asked, request_id, origin)
    reading = reading_of(model, wanted, asked.n, generation.tally)
    return Answer(generation, reading, asked, is_held_by_tools=is_held_by_tools)


def reading_of(model: OfAnswers, wanted: Wanted | None, n: int, tally: Tally) -> Reading | None:
    """What reads them."""
    return None if wanted is None else Reading(wanted, model.vocabulary, n, tally)
