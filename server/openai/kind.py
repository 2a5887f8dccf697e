"""What makes an endpoint's answers again of the tokens that the journal holds: as a stream, or as one object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from novainfer.reading import Reading
from novainfer.server.journal.records import Asked
from novainfer.server.openai.chunks import StreamEncoder
from novainfer.server.openai.replies import Choice, Tally
from novainfer.server.served import OfAnswers


class Telling(NamedTuple):
    """What makes events of an answer's pieces, and the count of these."""

    encoder: StreamEncoder
    tally: Tally


MakeReading = Callable[[OfAnswers, Asked, Tally], Reading | None]


class Kind(NamedTuple):
    """One endpoint's: `name` begins the ids of its answers.

    `tell` is given the id of the HTTP request that is answered, which some errors name. `whole` makes JSON of all
    choices. `reading` is what reads them, if anything does.
    """

    name: str
    tell: Callable[[OfAnswers, Asked, str], Awaitable[Telling]]
    whole: Callable[[OfAnswers, Asked, list[Choice], Tally], Awaitable[bytes]]
    reading: MakeReading
