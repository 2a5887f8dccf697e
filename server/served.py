"""A model that takes requests, as handlers see it: the engine to ask, and what is known of the model's answers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from novainfer.fsm.parsing.formats import Formats
from novainfer.fsm.text import Vocabulary
from novainfer.models import Lease
from novainfer.server.engine import OfTokens, ServedEngine
from novainfer.server.metrics import ModelMetrics


class OfAnswers(Protocol):
    """What an answer is made again of its tokens with, whether its model is loaded or not; see `ServedModel`."""

    @property
    def of(self) -> OfTokens: ...
    @property
    def formats(self) -> Formats: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...


class ServedTokens(NamedTuple):
    """What makes the tokens of one model, loaded or not, and texts of them; as of `ServedModel`."""

    of: OfTokens
    formats: Formats
    vocabulary: Vocabulary
    max_model_len: int

    def hold(self) -> None:
        """Nothing: it takes no place, and is used at once."""

    def release(self) -> None:
        """Nothing, as well."""


class ServedModel:
    """One model for one HTTP request, from when its body has named it until all that was asked for has ended.

    `formats` say how it calls tools and reasons, and `metrics` count what becomes of its requests. While it is held its
    engine stays: each `hold` has its `release`.
    """

    def __init__(
        self, engine: ServedEngine, formats: Formats, metrics: ModelMetrics, lease: Lease[ServedEngine] | None
    ) -> None:
        """`lease` is None for the only model of a server, which is always there."""
        self.name = engine.model_info.name
        self.engine = engine
        self.formats = formats
        self.metrics = metrics
        self._lease = lease

    @property
    def of(self) -> OfTokens:
        """What makes tokens of texts, and back."""
        return self.engine

    @property
    def vocabulary(self) -> Vocabulary:
        """The texts of its tokens."""
        return self.engine.vocabulary

    def hold(self) -> None:
        """One more needs the engine."""
        if self._lease is not None:
            self._lease.hold()

    def release(self) -> None:
        """One less needs it."""
        if self._lease is not None:
            self._lease.release()
