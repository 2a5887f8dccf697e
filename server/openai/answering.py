"""A conversation's answer, whatever the shape that its endpoint gives it: held to grammars, generated, and read.

Endpoints translate their bodies into a `Chat`, sampling parameters and an offer of tools; what comes back is pieces
(thoughts, content, calls), which they write in their own events or objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec

from novainfer import CallerError, Chat, Delta, InvalidParameter, SamplingParams, StructuredOutputsParams
from novainfer.fsm.parsing.formats import THINK
from novainfer.fsm.parsing.pieces import Content
from novainfer.fsm.parsing.reader import opens_thoughts
from novainfer.server.http.exchange import Exchange
from novainfer.server.openai.generation import FIRST_DELTA_WAIT_S_MAX, Generation
from novainfer.server.openai.reading import ReadDelta, Reading, params_for, wanted_of
from novainfer.server.openai.replies import Choice
from novainfer.server.openai.structured import is_whole
from novainfer.server.openai.tools import Offer, grammar_for
from novainfer.server.service import Service

HELD = "structured_outputs"  # how errors name a grammar


class Answer:
    """The answer to one conversation, `params.n` choices of it; end it by its generation.

    `reading` is None where all that the answer can hold is content.
    """

    def __init__(self, generation: Generation, reading: Reading | None, *, is_held_by_tools: bool) -> None:
        self.generation = generation
        self.reading = reading
        self._is_held_by_tools = is_held_by_tools

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it is wanted, though the engine may go on."""
        return self.reading is not None and self.reading.is_over

    def read(self, delta: Delta) -> list[ReadDelta]:
        """What `delta` brings, behind those that had to wait for it."""
        if self.reading is None:
            return [(delta, [Content(delta.text)] if delta.text else [])]
        return self.reading.read(delta)

    async def first(self, most_s: float = FIRST_DELTA_WAIT_S_MAX) -> asyncio.Task[Delta]:
        """`Generation.first`, for an answer that is streamed."""
        with _named(is_of_tools=self._is_held_by_tools):
            return await self.generation.first(most_s)

    async def collect(self) -> list[Choice]:
        """All of it, as choices with their pieces."""
        with _named(is_of_tools=self._is_held_by_tools):
            choices = await self.generation.collect(self.reading)
        if self.reading is None:
            for choice in choices:
                choice.pieces = [Content(choice.text)] if choice.text else []
        return choices


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
) -> Answer:
    """Ask the engine for an answer to `prompt`, with calls of the tools on `offer`.

    Its id is `prefix`-`name`, or `request_id` where that is given.

    Raises `CallerError` for what cannot be asked of this model, naming OpenAI's fields.
    """
    formats = service.formats
    calls_tools = bool(offer.tools) and offer.tool_choice != "none" and formats.has_tools
    is_held = is_whole(params.structured_outputs, calls_tools=calls_tools)
    wanted = None if is_held else wanted_of(offer, formats)
    asked = params_for(params, offer, wanted, formats)
    held = await _with_grammar(service, prompt, asked, offer)
    owner, client = exchange.viewer.owner, exchange.client
    generation = Generation(service, prefix, name, [prompt], held, owner, client, exchange.work, request_id)
    reading = None
    if wanted is not None:
        reading = Reading(wanted, service.ready_engine().vocabulary, held.n, generation.tally)
    return Answer(generation, reading, is_held_by_tools=held is not asked)


async def _with_grammar(service: Service, prompt: Chat, params: SamplingParams, offer: Offer) -> SamplingParams:
    """`params`, held to the grammar of calls where one must come or must fit its schema."""
    formats, tools = service.formats, offer.tools or []
    ask = partial(grammar_for, tools, offer.tool_choice, formats, has_one_call=offer.has_one_call)
    if (grammar := ask(is_thinking=False)) is None:
        return params
    if params.structured_outputs is not None:
        message = "structured_outputs cannot be combined with calls that must come, or with strict tools"
        raise InvalidParameter(message, param="structured_outputs")
    if formats.reasoning == THINK:  # what must come first depends on what the template has opened
        engine = service.ready_engine()
        ids = await engine.tokenize(prompt)
        grammar = ask(is_thinking=opens_thoughts(ids, engine.vocabulary, formats.marker_ids))
    return msgspec.structs.replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))


@contextmanager
def _named(*, is_of_tools: bool) -> Iterator[None]:
    """Where the grammar `is_of_tools`, what is wrong with it is a fault of theirs."""
    try:
        yield
    except CallerError as error:
        if is_of_tools and (error.param or "").startswith(HELD):
            what = error.message.replace(f"{HELD}.grammar", "what is made of their schemas")
            raise type(error)(f"tools cannot be held to: {what}", param="tools") from None
        raise
