"""`POST /v1/embeddings`: OpenAI's body and answer, with vLLM's names where OpenAI has none."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import CallerError, InvalidParameter, PoolingParams
from novainfer.fsm.messages.params import DURATION_S_MAX
from novainfer.fsm.messages.pooling import PoolingKind, floats_of
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.http.turns import after
from novainfer.server.openai.coming import model_in_time, wanted_id
from novainfer.server.openai.decode import decode
from novainfer.server.openai.generation import Generation, with_deadline
from novainfer.server.openai.protocol import Prompt, prompts_of
from novainfer.server.openai.tokens import without_special_tokens
from novainfer.server.openai.unsupported import header_value
from novainfer.server.service import Service

PREFIX = "embd"  # of ids
FLOATS_PER_TURN = 16_384  # numbers that are written between two turns of the loop: a millisecond


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """`input` is a string, token ids, or a list of either; without `dimensions` a vector has as many as the model."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None

    pooling: PoolingKind | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    request_id: str | None = None
    timeout: float | None = None
    max_queue_ms: float | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def prompts(self) -> list[Prompt]:
        """The inputs as the engine takes prompts."""
        if self.input == "":
            raise InvalidParameter("input must not be empty", param="input")
        return prompts_of(self.input, "input")

    def pooling_params(self) -> PoolingParams:
        """How vectors are to be made; raises `InvalidParameter` naming the field."""
        if self.max_queue_ms is not None and not 0 < self.max_queue_ms <= DURATION_S_MAX * 1000:
            limits = f"more than 0 and at most {DURATION_S_MAX * 1000:.0f} milliseconds"
            raise InvalidParameter(f"max_queue_ms must be {limits}, not {self.max_queue_ms:g}", param="max_queue_ms")
        try:
            return PoolingParams(
                pooling=self.pooling,
                normalize=self.normalize,
                dimensions=self.dimensions,
                add_special_tokens=self.add_special_tokens is not False,
                truncate_prompt_tokens=self.truncate_prompt_tokens,
                timeout_s=self.timeout,
                max_queue_s=None if self.max_queue_ms is None else self.max_queue_ms / 1000,
                priority=self.priority or 0,
                cache_salt=self.cache_salt,
            )
        except InvalidParameter as error:
            if error.param != "timeout_s":
                raise
            raise InvalidParameter(error.message.replace("timeout_s", "timeout", 1), param="timeout") from None


class EmbeddingObject(msgspec.Struct, kw_only=True):
    """One vector: numbers, or their float32 (little-endian) in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The answer: one vector an input, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: EmbeddingUsage


async def create_embedding(service: Service, request: Request) -> Response:
    """One vector for each input."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    waited_s = await service.turns.wait(exchange.client, len(exchange.body))
    body, ignored = decode(EmbeddingRequest, exchange.take_body(), is_strict=service.settings.strict_fields)
    exchange.ignored = header_value(ignored)
    model, more_s = await model_in_time(service, exchange, PREFIX, body, request.headers)
    wanted = body.pooling_params()
    params = wanted.sampling_params(model.engine.model_info)
    params = after(with_deadline(params, request.headers), waited_s + more_s)
    with _naming_input():
        prompts: list[Any] = body.prompts()
        if not wanted.add_special_tokens:
            prompts = await without_special_tokens(service, exchange, prompts)
        name = wanted_id(body.request_id, exchange.request_id)
        generation = Generation(service, exchange, PREFIX, name, prompts, params)
        choices = await generation.collect()
    vectors = [choice.last.embedding or b"" for choice in choices if choice.last is not None]
    num_tokens = generation.tally.prompt_tokens
    reply = {
        "id": generation.id,
        "object": "list",
        "created": generation.created,
        "model": generation.model,
        "data": await _written(vectors, as_base64=body.encoding_format == "base64"),
        "usage": EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    }
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def _written(vectors: list[bytes], *, as_base64: bool) -> list[msgspec.Raw]:
    """Each vector as JSON; others get their turn between many of them."""
    found, num_floats = list[msgspec.Raw](), 0
    for index, data in enumerate(vectors):
        embedding: str | list[float] = b64encode(data).decode() if as_base64 else floats_of(data)
        found.append(msgspec.Raw(msgspec.json.encode(EmbeddingObject(index=index, embedding=embedding))))
        num_floats += len(data) // 4
        if num_floats >= FLOATS_PER_TURN:
            num_floats = 0
            await asyncio.sleep(0)
    return found


@contextmanager
def _naming_input() -> Iterator[None]:
    """What the engine says of a prompt concerns `input`."""
    try:
        yield
    except CallerError as error:
        if error.param == "prompt":
            error.param = "input"
            error.message = error.message.replace("prompt:", "input:", 1)
        raise
