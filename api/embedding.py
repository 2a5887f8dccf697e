"""Vectors of prompts: how they are asked for, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from novainfer.fsm.messages.errors import InvalidParameter, UnsupportedParameter
from novainfer.fsm.messages.params import SamplingParams, check_types
from novainfer.fsm.messages.pooling import Pooling, PoolingKind, floats_of

if TYPE_CHECKING:
    from novainfer.engine import Engine
    from novainfer.model import ModelInfo
    from novainfer.prompt import PromptLike


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a prompt becomes a vector; raises `InvalidParameter`, naming the field, when a value cannot be used.

    `pooling` takes the hidden state of the "last" token, or the "mean" of those of all; `normalize` divides the vector
    by its length; None: as the model's folder says (`ModelInfo.pooling`). The first `dimensions` numbers are kept
    (None: all), which is of use where a model was trained so. Without `add_special_tokens` a text has none put before
    or behind it. `truncate_prompt_tokens`, `timeout_s`, `max_queue_s`, `priority` and `cache_salt` are as in
    `SamplingParams`.
    """

    pooling: PoolingKind | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    timeout_s: float | None = None
    max_queue_s: float | None = None
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        self._as_sampling(Pooling(dimensions=self.dimensions))

    def sampling_params(self, info: ModelInfo) -> SamplingParams:
        """What the engine is asked for; raises `InvalidParameter`, and `UnsupportedParameter` as `Engine.embed`."""
        own = info.pooling
        if self.pooling is None and own.refusal:
            what = "pooling must be last or mean here"
            raise UnsupportedParameter(f"{what}, in the request or by --pooling: {own.refusal}", param="pooling")
        if self.dimensions is not None and self.dimensions > info.hidden_size:
            message = f"dimensions must be between 1 and {info.hidden_size}, not {self.dimensions}"
            raise InvalidParameter(message, param="dimensions")
        kind = own.kind if self.pooling is None else self.pooling
        normalize = own.normalize if self.normalize is None else self.normalize
        return self._as_sampling(Pooling(kind=kind, dimensions=self.dimensions, normalize=normalize))

    def _as_sampling(self, pooling: Pooling) -> SamplingParams:
        return SamplingParams(
            pooling=pooling,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            timeout_s=self.timeout_s,
            max_queue_s=self.max_queue_s,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """The vector of one prompt: `data` has its numbers as float32, little-endian; `embedding` as a list.

    `num_cached_tokens` of the prompt came from the prefix cache. A prompt of a list that has none has its `error` here.
    """

    request_id: str = ""
    data: bytes = b""
    prompt_token_ids: list[int] = []
    num_cached_tokens: int = 0
    is_degraded: bool = False
    error: Exception | None = None

    @property
    def embedding(self) -> list[float]:
        """The numbers."""
        return floats_of(self.data)


async def embed(engine: Engine, prompt: PromptLike, params: PoolingParams, **more: Any) -> EmbeddingOutput:
    """The vector of `prompt`; `more` is as in `Engine.add_request`."""
    asked = params.sampling_params(engine.model_info)
    if not params.add_special_tokens:
        prompt = await engine.tokenize(prompt, add_special_tokens=False)
    output = EmbeddingOutput()
    stream = engine.generate(prompt, asked, **more)
    try:
        async for delta in stream:
            assert delta.embedding is not None, "a request with pooling gives a vector"
            output = EmbeddingOutput(
                request_id=delta.request_id,
                data=delta.embedding,
                prompt_token_ids=delta.prompt_token_ids or [],
                num_cached_tokens=delta.num_cached_tokens,
                is_degraded=delta.is_degraded,
            )
    finally:
        await stream.aclose()
    return output
