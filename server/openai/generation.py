"""One HTTP request's work in the engine, whatever its shape: prompts in, deltas out, counted and timed as they pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from novainfer import (
    Committed,
    Delta,
    EngineClosed,
    EngineDead,
    EngineDraining,
    EngineOverloaded,
    NovaInferError,
    ReaderStalled,
    RequestCancelled,
    RequestTimeout,
    SamplingParams,
    Tenant,
)
from novainfer.reading import Reading
from novainfer.server.http.exchange import SCOPE_KEY, Exchange, Viewer
from novainfer.server.http.turns import after
from novainfer.server.keys.quotas import OPEN_ENDED_TOKENS
from novainfer.server.keys.spending import Held, session_of, user_of
from novainfer.server.openai.coming import SILENT_S_MAX, header_timeout_s, model_in_time, silent_s
from novainfer.server.openai.decode import OfModel, decode
from novainfer.server.openai.merge import merge_deltas, turns_to_begin
from novainfer.server.openai.replies import Choice, Tally
from novainfer.server.openai.unsupported import header_value
from novainfer.server.request_log import log_arrival
from novainfer.server.served import ServedModel
from novainfer.server.service import Service
from novainfer.server.work import Work

ADMISSION_TURNS = 2  # of the loop, until the first prompts' tasks have asked for admission
LEFT_OPEN = (EngineClosed, EngineDead, EngineDraining)  # another server may go on with what these end, and counts it
BY_CLIENT = (RequestCancelled, RequestTimeout, ReaderStalled)  # what ends a request by its client's doing


class Asking(OfModel, Protocol):
    """A body that asks for tokens."""

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams: ...


Body = TypeVar("Body", bound=Asking)


class Asker(Protocol):
    """For whom tokens are generated, and by which model: an exchange, or what is left of one."""

    @property
    def model(self) -> ServedModel: ...
    @property
    def viewer(self) -> Viewer: ...
    @property
    def client(self) -> str: ...
    @property
    def user(self) -> str | None: ...
    @property
    def work(self) -> Work: ...


class Origin(msgspec.Struct, kw_only=True):
    """What a generation begins with, where that is written down: when, with which seed for each prompt, and where it
    goes on what the choices of each had got.
    """

    created: int
    seeds: list[int]
    committed: list[list[Committed]] = []


class Generation:
    """A generator of deltas over all prompts, of the model that `exchange` is for; `close` once, whatever happened.

    Its id is `prefix`-`wanted_id`, or `request_id` where that is given.
    """

    def __init__(
        self,
        service: Service,
        exchange: Asker,
        prefix: str,
        wanted_id: str,
        prompts: Sequence[Any],
        params: SamplingParams,
        request_id: str | None = None,
        origin: Origin | None = None,
    ) -> None:
        model, owner, client = exchange.model, exchange.viewer.owner, exchange.client
        engine = model.engine
        key = service.keys.record(owner)
        tenant = Tenant(owner, key.weight if key is not None else 1.0)
        if service.settings.has_priorities and key is not None:
            params = msgspec.structs.replace(params, priority=key.priority_of(params.priority))
        self._service = service
        self._is_journaled = origin is not None
        self.n = params.n
        self._max_tokens = params.max_tokens if params.pooling is None else None
        self.num_choices = len(prompts) * params.n
        self.created = int(time.time()) if origin is None else origin.created
        self.model = model.name
        self.tally = Tally(len(prompts), params.n)
        self._waiting = dict(enumerate(engine.check_room(prompts, params)))  # prompt -> tokens, until its first delta
        num_waiting = sum(self._waiting.values())
        num_wanted = num_waiting + self.num_choices * _tokens_wanted(params, engine.model_info.max_model_len)
        if origin is not None and origin.committed:
            self._hold = service.quotas.admit_again(owner)
            self._spent = service.spending.admit_again(owner, params.session_id, exchange.user)
            service.clients.enter_again(client, self.num_choices, num_waiting)
        else:
            self._hold = service.quotas.admit(owner, self.num_choices, num_wanted)
            self._spent = Held(service.spending)
            try:
                self._spent = service.spending.admit(owner, params.session_id, exchange.user, num_wanted)
                service.clients.enter(client, len(prompts), params.n, num_waiting)
            except NovaInferError:
                self._spent.settle(0)
                self._hold.settle(0, has_begun=False)
                raise
        model.hold()
        self._served = model
        self._client = client
        self._live = service.live.open(prefix, wanted_id, len(prompts), owner, request_id)
        sources = [
            engine.generate(prompt, asked, request_id=engine_id, owner=owner, tenant=tenant, **more)
            for prompt, engine_id, (asked, more) in zip(
                prompts, self._live.engine_ids, _begun_by(origin, params, len(prompts)), strict=True
            )
        ]
        self.deltas = sources[0] if len(sources) == 1 else merge_deltas(sources, params.n)
        self._work: Work = exchange.work
        self._work.begin(prefix, self._live.id, self.model, params)
        if service.settings.enable_log_requests:
            log_arrival(self._work, len(prompts), exchange.viewer.name or (key.name if key is not None else None))
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
        metrics = self._served.metrics
        num_tokens = len(delta.token_ids)
        is_first = not self._last
        if is_first:
            metrics.time_to_first_token.observe(now - self._started)
            self._last = now
        elif num_tokens:
            metrics.inter_token_latency.observe((now - self._last) / num_tokens, num_tokens)
            self._last = now
        self.tally.add(delta)
        if is_first or delta.finish_reason is not None:
            self._work.note(delta, now)
        if self._waiting and (waited := self._waiting.pop(delta.index // self.n, 0)):
            self._service.clients.begin(self._client, waited)

    async def first(self, most_s: float = SILENT_S_MAX) -> asyncio.Task[Delta]:
        """Wait for the first delta, but not for ever; raises what went wrong before it, so that it gets a status.

        Who has to wait for room in the queue hears of it at once, and so does who waits for `most_s` of 0.
        """
        engine = self._served.engine
        task = asyncio.ensure_future(anext(self.deltas))
        try:
            for _ in range(turns_to_begin(len(self._live.engine_ids))):
                await asyncio.sleep(0)
            self.is_overflowed = any(map(engine.is_overflowed, self._live.engine_ids))
            if not self.is_overflowed:
                await asyncio.wait({task}, timeout=silent_s(self._service.settings, most_s))
            if task.done():
                task.result()
        except BaseException as error:
            await self.leave(task, error)
            raise
        return task

    async def forward(self, last: Delta, take: Callable[[Delta], bool]) -> None:
        """Give `take` what comes behind the delta `last`, in the engine's own turn, until it answers False.

        What follows then is in `deltas`. All of it is there where there are several choices: each step has a delta of
        each, and their reader leaves the loop to others between them.
        """
        if self.num_choices == 1:
            await self._served.engine.forward(last.request_id, take)

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
        ends, metrics = self._service.metrics.terminal_events, self._served.metrics
        if error is None:
            ends["finish"] += 1
            metrics.e2e_request_latency.observe(time.perf_counter() - self._started)
            metrics.prompt_tokens.observe(self.tally.prompt_tokens)
            metrics.generation_tokens.observe(self.tally.completion_tokens)
            metrics.params_n.observe(self.n)
            if self._max_tokens is not None:
                metrics.params_max_tokens.observe(self._max_tokens)
        else:
            ends["error" if isinstance(error, Exception) else "disconnect"] += 1
            if isinstance(error, EngineOverloaded):
                metrics.rejections[error.code] += 1
        try:
            await self.deltas.aclose()
        finally:
            num_waiting = sum(self._waiting.values())
            # Of a request that its client ended before its first token the prompts may have been computed.
            is_refused = isinstance(error, Exception) and not isinstance(error, BY_CLIENT)
            num_used = self.tally.prompt_tokens + self.tally.completion_tokens + (0 if is_refused else num_waiting)
            if self._is_journaled and isinstance(error, LEFT_OPEN):
                num_used = 0
            self._spent.settle(num_used)
            self._hold.settle(num_used, has_begun=num_used > 0 or not is_refused)
            self._service.clients.begin(self._client, num_waiting)
            self._service.clients.leave(self._client, self.num_choices)
            self._service.live.close(self._live)
            try:
                self._tell(error)
            finally:
                self._served.release()

    def _tell(self, error: BaseException | None) -> None:
        """Leave in the record of the work what came of it."""
        work, usage = self._work, self.tally.usage()
        work.error = error
        work.prompt_tokens, work.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        work.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if work.is_watched:
            work.records = self._served.engine.requests(ids=set(self._live.engine_ids))
        work.is_over = True
        if work.is_behind:
            self._service.tell_of(work, self._live.owner)


def _begun_by(
    origin: Origin | None, params: SamplingParams, num_prompts: int
) -> Iterator[tuple[SamplingParams, dict[str, Any]]]:
    """How each prompt is asked for."""
    if origin is None:
        yield from [(params, {})] * num_prompts
        return
    for at, seed in enumerate(origin.seeds):
        own = msgspec.structs.replace(params, seed=seed)
        yield own, {"committed": origin.committed[at]} if origin.committed else {}


def _tokens_wanted(params: SamplingParams, max_model_len: int) -> int:
    """What one choice reserves of its key's tokens until it has ended."""
    if params.pooling is not None:
        return 0
    wanted = OPEN_ENDED_TOKENS if params.max_tokens is None else params.max_tokens
    return min(wanted, max_model_len)


async def receive(
    service: Service, request: Request, kind: type[Body], prefix: str | None
) -> tuple[Exchange, Body, SamplingParams]:
    """The body, read when it is its client's turn, and how tokens are to be chosen; raises what is wrong with it.

    Ids of its kind begin with `prefix`; None: the model is not loaded for it, and `ModelUnavailable` says so.
    """
    exchange: Exchange = request.scope[SCOPE_KEY]
    waited_s = await service.turns.wait(exchange.client, len(exchange.body))
    data = exchange.take_body()
    if service.journal is not None:
        exchange.asked = data
    body, ignored = decode(kind, data, is_strict=service.settings.strict_fields)
    exchange.ignored = header_value(ignored)
    if prefix is None:
        model, more_s = service.loaded_model(exchange, body.model), 0.0
    else:
        model, more_s = await model_in_time(service, exchange, prefix, body, request.headers)
    params = body.sampling_params(model.engine.model_info.sampling_defaults)
    session_id = session_of(request, params.session_id)
    if session_id != params.session_id:
        params = msgspec.structs.replace(params, session_id=session_id)
    exchange.user = user = user_of(body)
    owner, key_limits = exchange.viewer.owner, exchange.rate_limits
    exchange.rate_limits = lambda: [*key_limits(), *service.spending.headers(owner, session_id, user)]
    return exchange, body, after(with_deadline(params, request.headers), waited_s + more_s)


def with_deadline(params: SamplingParams, headers: Mapping[str, str]) -> SamplingParams:
    """`params` with the deadline of the header `x-request-timeout-ms`, if it has one that is shorter."""
    timeout_s = header_timeout_s(headers)
    if timeout_s is None or (params.timeout_s is not None and params.timeout_s <= timeout_s):
        return params
    return msgspec.structs.replace(params, timeout_s=timeout_s)
