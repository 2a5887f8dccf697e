"""One HTTP request's work in the engine, whatever its shape: prompts in, deltas out, counted and timed as they pass."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from novainfer import (
    Delta,
    EngineOverloaded,
    InvalidParameter,
    NovaInferError,
    ReaderStalled,
    RequestCancelled,
    RequestTimeout,
    SamplingParams,
    Tenant,
)
from novainfer.fsm.messages.params import DURATION_S_MAX
from novainfer.server.http.exchange import SCOPE_KEY, Exchange, is_printable_id
from novainfer.server.http.turns import after
from novainfer.server.keys.quotas import OPEN_ENDED_TOKENS
from novainfer.server.openai.decode import OfModel, decode
from novainfer.server.openai.merge import merge_deltas, turns_to_begin
from novainfer.server.openai.reading import Reading
from novainfer.server.openai.replies import Choice, Tally
from novainfer.server.openai.unsupported import header_value
from novainfer.server.service import Service
from novainfer.server.work import Work

TIMEOUT_HEADER = "x-request-timeout-ms"
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")  # JSON's, and what C prints
ADMISSION_TURNS = 2  # of the loop, until the first prompts' tasks have asked for admission
BY_CLIENT = (RequestCancelled, RequestTimeout, ReaderStalled)  # what ends a request by its client's doing
FIRST_DELTA_WAIT_S_MAX = 15.0  # then the stream begins without it, so that proxies and clients see life


class Asking(OfModel, Protocol):
    """A body that asks for tokens."""

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams: ...


Body = TypeVar("Body", bound=Asking)


class Generation:
    """A generator of deltas over all prompts; `close` once, whatever happened.

    Its id is `prefix`-`wanted_id`, or `request_id` where that is given.
    """

    def __init__(
        self,
        service: Service,
        prefix: str,
        wanted_id: str,
        prompts: Sequence[Any],
        params: SamplingParams,
        owner: str = "",
        client: str = "",
        work: Work | None = None,
        request_id: str | None = None,
    ) -> None:
        engine = service.ready_engine()
        key = service.keys.record(owner)
        tenant = Tenant(owner, key.weight if key is not None else 1.0)
        if service.settings.has_priorities and key is not None:
            params = msgspec.structs.replace(params, priority=key.priority_of(params.priority))
        self._service = service
        self.n = params.n
        self.num_choices = len(prompts) * params.n
        self.created = int(time.time())
        self.model = engine.model_info.name
        self.tally = Tally(len(prompts), params.n)
        self._waiting = dict(enumerate(engine.check_room(prompts, params)))  # prompt -> tokens, until its first delta
        num_waiting = sum(self._waiting.values())
        num_wanted = num_waiting + self.num_choices * _tokens_wanted(params, engine.model_info.max_model_len)
        self._hold = service.quotas.admit(owner, self.num_choices, num_wanted)
        try:
            service.clients.enter(client, len(prompts), params.n, num_waiting)
        except NovaInferError:
            self._hold.settle(0, has_begun=False)
            raise
        self._client = client
        self._live = service.live.open(prefix, wanted_id, len(prompts), owner, request_id)
        sources = [
            engine.generate(prompt, params, request_id=engine_id, owner=owner, tenant=tenant)
            for prompt, engine_id in zip(prompts, self._live.engine_ids, strict=True)
        ]
        self.deltas = sources[0] if len(sources) == 1 else merge_deltas(sources, params.n)
        self._work = work if work is not None else Work()
        self._work.begin(prefix, self._live.id, self.model, params)
        self._started = time.perf_counter()
        self._last = 0.0
        self._is_closed = False
        self.is_overflowed = False  # it waits for room in the queue, as it asked to

    @property
    def id(self) -> str:
        return self._live.id

    def note(self, delta: Delta) -> None:
        """Count and time one delta."""
        now = time.perf_counter()
        metrics = self._service.metrics
        num_tokens = len(delta.token_ids)
        if not self._last:
            metrics.time_to_first_token.observe(now - self._started)
            self._last = now
        elif num_tokens:
            metrics.inter_token_latency.observe((now - self._last) / num_tokens, num_tokens)
            self._last = now
        self.tally.add(delta)
        self._work.note(delta, now)
        if waited := self._waiting.pop(delta.index // self.n, 0):
            self._service.clients.begin(self._client, waited)

    async def first(self, most_s: float = FIRST_DELTA_WAIT_S_MAX) -> asyncio.Task[Delta]:
        """Wait for the first delta, but not for ever; raises what went wrong before it, so that it gets a status.

        Who has to wait for room in the queue hears of it at once, and so does who waits for `most_s` of 0.
        """
        engine = self._service.ready_engine()
        task = asyncio.ensure_future(anext(self.deltas))
        interval_s = self._service.settings.sse_keep_alive_interval_s
        try:
            for _ in range(turns_to_begin(len(self._live.engine_ids))):
                await asyncio.sleep(0)
            self.is_overflowed = any(map(engine.is_overflowed, self._live.engine_ids))
            if not self.is_overflowed:
                wait_s = min(interval_s or most_s, most_s)
                await asyncio.wait({task}, timeout=wait_s)
            if task.done():
                task.result()
        except BaseException as error:
            await self.leave(task, error)
            raise
        return task

    async def leave(self, first: asyncio.Task[Delta], error: BaseException | None) -> None:
        """`close`, when the first delta may still be waited for: a generator that runs cannot be closed."""
        first.cancel()
        try:
            await asyncio.gather(first, return_exceptions=True)
        finally:  # cancelled once more, by an end of the connection behind the client's own
            await self.close(error)

    async def collect(self, reading: Reading | None = None) -> list[Choice]:
        """All deltas, put together by choice; what `reading` makes of them, and no more than it wants."""
        choices = [Choice() for _ in range(self.num_choices)]
        try:
            async for delta in self.deltas:
                self.note(delta)
                if reading is None:
                    choices[delta.index].add(delta)
                    continue
                for read, pieces in reading.read(delta):
                    choices[read.index].add(read, pieces)
                if reading.is_over:
                    break
        except BaseException as error:
            await self.close(error)
            raise
        await self.close(None)
        return choices

    async def close(self, error: BaseException | None) -> None:
        """End the generation: cancels what still runs, and counts the end once; `error` is what ended it early."""
        if self._is_closed:
            return
        self._is_closed = True
        metrics = self._service.metrics
        if error is None:
            metrics.terminal_events["finish"] += 1
            metrics.e2e_request_latency.observe(time.perf_counter() - self._started)
            metrics.prompt_tokens.observe(self.tally.prompt_tokens)
            metrics.generation_tokens.observe(self.tally.completion_tokens)
        else:
            metrics.terminal_events["error" if isinstance(error, Exception) else "disconnect"] += 1
            if isinstance(error, EngineOverloaded):
                metrics.rejections[error.code] += 1
        try:
            await self.deltas.aclose()
        finally:
            num_waiting = sum(self._waiting.values())
            # Of a request that its client ended before its first token the prompts may have been computed.
            is_refused = isinstance(error, Exception) and not isinstance(error, BY_CLIENT)
            num_used = self.tally.prompt_tokens + self.tally.completion_tokens + (0 if is_refused else num_waiting)
            self._hold.settle(num_used, has_begun=num_used > 0 or not is_refused)
            self._service.clients.begin(self._client, num_waiting)
            self._service.clients.leave(self._client, self.num_choices)
            self._service.live.close(self._live)
            self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        """Leave in the record of the work what came of it."""
        work, usage = self._work, self.tally.usage()
        work.error = error
        work.prompt_tokens, work.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        work.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if work.is_watched and (engine := self._service.engine) is not None:
            work.records = engine.requests(ids=set(self._live.engine_ids))


def _tokens_wanted(params: SamplingParams, max_model_len: int) -> int:
    """What one choice reserves of its key's tokens until it has ended."""
    if params.pooling is not None:
        return 0
    wanted = OPEN_ENDED_TOKENS if params.max_tokens is None else params.max_tokens
    return min(wanted, max_model_len)


def wanted_id(body_id: str | None, exchange_id: str) -> str:
    """The id the client would like: the body's, else the x-request-id."""
    if body_id is None:
        return exchange_id
    if not is_printable_id(body_id):
        raise InvalidParameter(
            "request_id must be 1 to 128 printable ASCII characters without spaces and quotes", param="request_id"
        )
    return body_id


async def receive(service: Service, request: Request, kind: type[Body]) -> tuple[Exchange, Body, SamplingParams]:
    """The body, read when it is its client's turn, and how tokens are to be chosen; raises what is wrong with it."""
    exchange: Exchange = request.scope[SCOPE_KEY]
    waited_s = await service.turns.wait(exchange.client, len(exchange.body))
    body, ignored = decode(kind, exchange.take_body(), is_strict=service.settings.strict_fields)
    exchange.ignored = header_value(ignored)
    service.check_model(body.model, exchange.viewer)
    params = body.sampling_params(service.ready_engine().model_info.sampling_defaults)
    return exchange, body, after(with_deadline(params, request.headers), waited_s)


def with_deadline(params: SamplingParams, headers: Mapping[str, str]) -> SamplingParams:
    """`params` with the deadline of the header `x-request-timeout-ms`, if it has one that is shorter."""
    value = headers.get(TIMEOUT_HEADER)
    if value is None:
        return params
    timeout_s = float(value) / 1000 if _NUMBER.fullmatch(value.strip()) else math.nan  # `float` takes 1_000 as well
    if not 0 < timeout_s <= DURATION_S_MAX:
        message = f"{TIMEOUT_HEADER} must be a number of milliseconds, above 0 and at most {DURATION_S_MAX * 1000:.0f}"
        raise InvalidParameter(message, param=TIMEOUT_HEADER)
    if params.timeout_s is not None and params.timeout_s <= timeout_s:
        return params
    return msgspec.structs.replace(params, timeout_s=timeout_s)
