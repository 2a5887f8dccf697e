"""Tokens without an answer: tokenize, detokenize, what the tokenizer is, and requests rendered as they would begin.

Bodies and answers are vLLM's, as evaluation harnesses and routers expect them. Prompts are tokenised in the engine's
own threads, between those of requests; while they wait they count as live requests of their client. No model is loaded
for tokens: of one that is not there its tokenizer is asked alone. What is rendered needs its sampling defaults too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from novainfer import Chat, InvalidParameter, SamplingParams
from novainfer.offer import Tool
from novainfer.prompt import with_room
from novainfer.server.engine import OfTokens
from novainfer.server.http.exchange import SCOPE_KEY, Exchange
from novainfer.server.openai.coming import wanted_id
from novainfer.server.openai.decode import OfModel, decode
from novainfer.server.openai.generation import receive
from novainfer.server.openai.protocol import ChatCompletionRequest, CompletionRequest, Message, Prompt
from novainfer.server.openai.replies import token_text
from novainfer.server.openai.unsupported import header_value
from novainfer.server.service import Service


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: of `prompt`, or of `messages` as the model's template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None

    def checked_prompt(self, *, has_tools: bool) -> str | Chat:
        """What is to be tokenised; raises `InvalidParameter` unless it is given once."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidParameter("prompt or messages must be given, and not both", param="prompt")
        if self.prompt is not None:
            return self.prompt
        if self.add_special_tokens:
            message = "add_special_tokens goes with prompt: the template of messages writes those that it needs"
            raise InvalidParameter(message, param="add_special_tokens")
        return ChatCompletionRequest(
            messages=self.messages or [],
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        ).prompt(has_tools=has_tools)


TokensBody = TypeVar("TokensBody", bound=OfModel)


class Tokenized(msgspec.Struct, kw_only=True):
    """The answer of `POST /tokenize`; a token that is no whole character reads as in `bytes:\\xe2` in `token_strs`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


class Detokenized(msgspec.Struct, kw_only=True):
    """The answer of `POST /detokenize`; bytes that are no whole character are U+FFFD."""

    prompt: str


class Rendered(msgspec.Struct, kw_only=True):
    """What a request would begin with: the tokens of its prompt, and how it would sample."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: SamplingParams


async def tokenize(service: Service, request: Request) -> Response:
    """The tokens of a text or of a conversation."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    body = await receive_for_tokens(service, exchange, TokenizeRequest)
    async with service.tokens_for(exchange, body.model) as model:
        prompt = body.checked_prompt(has_tools=model.formats.has_tools)
        if prompt == "":
            tokens = []
        else:
            adds = body.add_special_tokens is not False
            [tokens] = await tokens_of(service, exchange, model.of, [prompt], adds_special_tokens=adds)
        reply = Tokenized(count=len(tokens), max_model_len=model.max_model_len, tokens=tokens)
        if body.return_token_strs:
            reply.token_strs = [token_text(token) for token in await model.of.detokenize(tokens)]
    return _json(reply)


async def detokenize(service: Service, request: Request) -> Response:
    """The text of tokens."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    body = await receive_for_tokens(service, exchange, DetokenizeRequest)
    async with service.tokens_for(exchange, body.model) as model:
        try:
            found = await model.of.detokenize(body.tokens)
        except InvalidParameter as error:
            raise InvalidParameter(error.message.replace("token_ids", "tokens", 1), param="tokens") from None
    return _json(Detokenized(prompt=b"".join(found).decode("utf-8", "replace")))


async def tokenizer_info(service: Service, request: Request) -> Response:
    """What the tokenizer is: its special tokens and the template of chats."""
    async with service.tokens_for(request.scope[SCOPE_KEY], request.query_params.get("model")) as model:
        return _json(model.of.tokenizer_info())


async def render_chat(service: Service, request: Request) -> Response:
    """The tokens that a chat completion would begin with."""
    exchange, body, params = await receive(service, request, ChatCompletionRequest, None)
    prompt = body.prompt(has_tools=exchange.model.formats.has_tools)
    [rendered] = await _rendered(service, exchange, "chatcmpl", body.request_id, [prompt], params)
    return _json(rendered)


async def render_completion(service: Service, request: Request) -> Response:
    """The tokens that each prompt of a completion would begin with."""
    exchange, body, params = await receive(service, request, CompletionRequest, None)
    adds = body.add_special_tokens is not False
    prompts = body.prompts()
    return _json(await _rendered(service, exchange, "cmpl", body.request_id, prompts, params, adds_special_tokens=adds))


async def _rendered(
    service: Service,
    exchange: Exchange,
    prefix: str,
    body_id: str | None,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    adds_special_tokens: bool = True,
) -> list[Rendered]:
    model = exchange.model
    name = f"{prefix}-{wanted_id(body_id, exchange.request_id)}"
    found = await tokens_of(
        service, exchange, model.engine, prompts, params=params, adds_special_tokens=adds_special_tokens
    )
    names = [name] if len(found) == 1 else [f"{name}-{at}" for at in range(len(found))]
    params = with_room(params, model.engine.model_info.max_model_len)
    return [
        Rendered(
            request_id=request_id,
            model=model.name,
            token_ids=params.truncated(token_ids),
            sampling_params=params,
        )
        for request_id, token_ids in zip(names, found, strict=True)
    ]


async def tokens_of(
    service: Service,
    exchange: Exchange,
    of: OfTokens,
    prompts: Sequence[Any],
    *,
    params: SamplingParams | None = None,
    adds_special_tokens: bool = True,
) -> list[list[int]]:
    """The tokens of each prompt, one after the other; meanwhile they are live requests of their client."""
    waiting = of.check_room(prompts, msgspec.structs.replace(params or SamplingParams(), n=1))
    service.clients.enter(exchange.client, len(prompts), 1, sum(waiting))
    try:
        return [await of.tokenize(prompt, add_special_tokens=adds_special_tokens) for prompt in prompts]
    finally:
        service.clients.begin(exchange.client, sum(waiting))
        service.clients.leave(exchange.client, len(prompts))


async def without_special_tokens(service: Service, exchange: Exchange, prompts: Sequence[Prompt]) -> list[Prompt]:
    """`prompts` as token ids, with none put before or behind a text."""
    found = await tokens_of(service, exchange, exchange.model.engine, prompts, adds_special_tokens=False)
    return [{"prompt_token_ids": token_ids} for token_ids in found]


async def receive_for_tokens(service: Service, exchange: Exchange, kind: type[TokensBody]) -> TokensBody:
    """The body, read when it is its client's turn; raises what is wrong with it."""
    await service.turns.wait(exchange.client, len(exchange.body))
    body, ignored = decode(kind, exchange.take_body(), is_strict=service.settings.strict_fields)
    exchange.ignored = header_value(ignored)
    return body


def _json(reply: Any) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")
