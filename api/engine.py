"""The engine as an asyncio library: it lives on the caller's loop, and leaves nothing behind.

    async with Engine() as engine:
        async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(delta.text, end="")

No signal handlers and no loop policy. Model and tokenizer work in two threads of their own; with worker "process" the
model has a process instead, which is replaced when it is lost.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

import novainfer
from novainfer.actors.admission import AdmissionStatistics
from novainfer.actors.core.streams import StreamHandle
from novainfer.actors.device.device import Device
from novainfer.actors.device.spec import DeviceSpec, Progress
from novainfer.actors.inspection.feed import FEED_EVENTS_MAX, Subscription
from novainfer.actors.inspection.frames import Taken
from novainfer.actors.inspection.incidents import IncidentRecord
from novainfer.actors.inspection.records import ActorRecord, HealthRecord, KvRecord, RequestRecord, SessionRecord
from novainfer.actors.inspection.steps import PhaseTotals, StepRecord
from novainfer.actors.inspection.times import STEP_TOKENS, HistogramRecord, RequestTimes
from novainfer.actors.inspection.watch import Watcher
from novainfer.actors.routers.config import KvEventsConfig
from novainfer.actors.tokenizer.tokenizer import Tokenizer
from novainfer.arguments import must_be, must_be_seconds, must_have
from novainfer.assembly import callers_tokenizer, check_before_start, check_model, make_runtime
from novainfer.config import EngineConfig
from novainfer.embedding import EmbeddingOutput, PoolingParams, embed
from novainfer.ends import error_of
from novainfer.fingerprint import fingerprint
from novainfer.fsm.client.stream import StreamState
from novainfer.fsm.messages.errors import (
    EngineClosed,
    InvalidParameter,
    ModelLoadError,
    ReconfigureFailed,
    RequestNotFound,
)
from novainfer.fsm.messages.events import Cause, Chat, Committed, End, Finished, Reconfigured
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.outputs import Delta
from novainfer.fsm.messages.params import SamplingParams, is_unicode
from novainfer.fsm.messages.tenant import ANYONE, Tenant
from novainfer.fsm.schedule.speculation import SpeculationStatistics
from novainfer.fsm.text import TokenizerInfo, Vocabulary
from novainfer.home import Home
from novainfer.model import ModelInfo, checked_reconfiguration, model_info
from novainfer.prompt import PromptLike, check_committed, to_prompt, with_room
from novainfer.room import check_room
from novainfer.thinking import with_thoughts
from novainfer.tokens import bytes_of, token_ids_of

SEED_MASK = 2**64 - 1
# Seeds that are drawn: JavaScript's numbers hold integers below 2**53 exactly, and the last choice adds 127.
SEED_DRAWN_BITS = 52
NAME_CHARS_MAX = 512  # of a request's id


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at one moment; counts are in requests, tokens, blocks and steps, and totals only grow.

    Of those that wait, `num_deferred` wait for something else than room: to be tokenised, or for their grammar's masks.
    `request_states` counts live choices by state, `transitions` how often an actor, or a request, came from one state
    into another, `rollbacks` steps that were taken back, by cause, `incidents` what went wrong by kind; `rung` is that
    of the ladder, one of `rungs`, and `mode` what steps are computed with there. `times` are of requests that have
    ended, `step_tokens` of all steps.
    """

    state: str
    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    num_paused: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_owned: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_failures: int = 0
    requests_finished: dict[str, int] = {}
    admission: AdmissionStatistics = AdmissionStatistics()
    request_states: dict[str, int] = {}
    transitions: dict[tuple[str, str, str], int] = {}
    rollbacks: dict[str, int] = {}
    incidents: dict[str, int] = {}
    worker_losses: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    copied_blocks: int = 0
    rung: str = "FULL"
    rungs: tuple[str, ...] = ()
    mode: Mode = Mode()
    phases: PhaseTotals = PhaseTotals()
    speculation: SpeculationStatistics | None = None
    times: RequestTimes = RequestTimes()
    step_tokens: HistogramRecord = HistogramRecord(STEP_TOKENS, (0,) * (len(STEP_TOKENS) + 1))


class Engine:
    """One model, many requests. `device` and `tokenizer` replace the model's own: tests pass fakes.

    A worker in a process of its own makes its device there, so it takes a `DeviceSpec` only.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        device: Device | DeviceSpec | None = None,
        tokenizer: Tokenizer | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        if config is not None:
            must_be("config", config, EngineConfig, "an EngineConfig")
        if device is not None and not isinstance(device, DeviceSpec):
            must_have("device", device, ("load", "fit", "warm", "run", "close"), "a Device or a DeviceSpec")
        if tokenizer is not None:
            must_have("tokenizer", tokenizer, ("encode_batch", "vocabulary"), "a Tokenizer (a folder goes into config)")
        if on_progress is not None and not callable(on_progress):
            raise InvalidParameter("on_progress must be a function of two integers", param="on_progress")
        self.config = config = config if config is not None else EngineConfig()
        self._home = Home()
        self._tokenizer = tokenizer
        self._loads = {"has_model": device is None, "has_tokenizer": tokenizer is None}
        self._runtime = make_runtime(config, device=device, tokenizer=tokenizer, on_progress=on_progress)
        self._random = random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        self._handles: dict[str, StreamHandle] = {}
        self._info: ModelInfo | None = None
        self._is_started = False

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load and warm the model; raises `ModelLoadError` with one sentence that says what is wrong.

        The engine lives on the running event loop from now on. Raises `WrongLoop` when that is none of asyncio's, and
        `InvalidParameter` when `recorder_dir` cannot be written.
        """
        if self._is_started:
            raise EngineClosed("an engine starts once; make a new one")
        self._home.enter()
        self._is_started = True
        check_before_start(self.config, **self._loads)
        ready = await self._runtime.start()
        runtime = self._runtime
        self._info = model_info(
            self.config, ready, created=int(time.time()), prompt_kind=runtime.prompt_kind, formats=runtime.formats
        )

    async def reconfigure(self, *, num_kv_blocks: int | None = None, precision: str | None = None) -> ModelInfo:
        """Go on with another number of KV blocks, or with weights in another precision ("checkpoint", "int8").

        Requests that run wait meanwhile, and new ones are taken: none is lost, and no token is given twice. Their KV
        goes to the host where there is room for it (`swap_space_gib`), the rest is computed again. The prefix cache
        begins anew. Gives `model_info` as it is then. A caller that is cancelled leaves it going on.

        Raises `InvalidParameter`, `ReconfigureInProgress`, `EngineClosed`, `EngineDraining` or `EngineDead`; and
        `ReconfigureFailed` when it cannot be done: then all is as before.
        """
        self._home.check()
        num_blocks, precision = checked_reconfiguration(self.model_info, num_kv_blocks, precision)
        self._runtime.check_reconfigurable()
        if precision not in (None, self.model_info.modes[0].precision) and self._loads["has_model"]:
            try:  # weights are read anew, and without the files there would be no way back
                await asyncio.to_thread(check_model, self.config)
            except ModelLoadError as error:
                raise ReconfigureFailed(f"the engine goes on as before: {error.message}") from None
        info = self.model_info  # as another reconfiguration has left it, which may have ended meanwhile
        if num_blocks == info.num_kv_blocks:
            num_blocks = None
        if precision == info.modes[0].precision:
            precision = None
        if num_blocks is None and precision is None:
            return info
        answer = self._runtime.reconfigure(num_blocks, precision)
        answer.add_done_callback(self._reconfigured)
        found = await asyncio.shield(answer)
        if found.error is not None:
            raise ReconfigureFailed(f"the engine goes on as before: {found.error}")
        return self.model_info

    async def aclose(self) -> None:
        """End everything now; requests still open end with `EngineDraining`. From any task, any number of times.

        After the loop has ended there is nothing left to close.
        """
        if self._home.has_ended and self._runtime.has_ended:
            return
        self._home.check()
        await self._runtime.aclose()

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests; those here may finish for `timeout_s` seconds, then the rest end with an error."""
        must_be_seconds("timeout_s", timeout_s)
        self._home.check()
        await self._runtime.drain(timeout_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        owner: str = "",
        tenant: Tenant = ANYONE,
        committed: Sequence[Committed] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Stream the answer to `prompt`; leaving early (break, aclose, a cancelled task) cancels the request.

        `owner` says whose request it is, for `requests(owner)` and its like; the server passes a digest of the key.
        `tenant` says whose share of the engine it takes, and whose prefixes it may find in the prefix cache.
        `committed` are the tokens that its choices had got from an engine that is no more, one entry each: they are
        given again at once, and the rest is what it would have been, where model, settings and seed are the same.

        Raises `EngineOverloaded` (with `retry_after_s`), `EngineDraining`, `InvalidParameter`,
        `ContextLengthExceeded`, `GrammarLimit`, `NoTokenAllowed`, `WrongLoop`, `RequestCancelled`, `RequestTimeout`,
        `StepFailedError` or `EngineDead`.
        """
        name = self.add_request(prompt, params, request_id=request_id, owner=owner, tenant=tenant, committed=committed)
        try:
            while (delta := self._take(name, await self._handle(name).read())) is not None:
                yield delta
        finally:
            self._leave(name)

    async def embed(
        self,
        prompt: PromptLike,
        params: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        owner: str = "",
        tenant: Tenant = ANYONE,
    ) -> EmbeddingOutput:
        """The vector of `prompt`, which is computed like any other, beside all that is generated.

        A cancelled task cancels the request. Raises what `generate` raises, and `UnsupportedParameter` where the model
        wants vectors to be made in a way that is not computed here, and `params` says no other.
        """
        if params is not None:
            must_be("params", params, PoolingParams, "PoolingParams")
        return await embed(self, prompt, params or PoolingParams(), request_id=request_id, owner=owner, tenant=tenant)

    def add_request(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        owner: str = "",
        tenant: Tenant = ANYONE,
        committed: Sequence[Committed] = (),
    ) -> str:
        """Begin a request without waiting; returns its id, which is `request_id` if that is given and not in use.

        Without `params` it samples with the model's defaults, for as many tokens as the context holds.
        """
        if self._info is None:
            raise EngineClosed("the engine was not started")
        self._home.check()
        if params is not None:
            must_be("params", params, SamplingParams, "SamplingParams")
        if request_id is not None:
            _check_name("request_id", request_id)
        _check_name("owner", owner)
        must_be("tenant", tenant, Tenant, "a Tenant")
        params = params if params is not None else SamplingParams(max_tokens=None, **self._info.sampling_defaults)
        params.check_vocabulary(self._info.vocab_size)
        if params.priority and self.config.scheduling_policy != "priority":
            message = f'priority must be 0, not {params.priority}: it needs scheduling_policy "priority"'
            raise InvalidParameter(message, param="priority")
        if params.n > self.config.max_num_queued_reqs:
            limit = self.config.max_num_queued_reqs
            raise InvalidParameter(f"n must be at most {limit}, not {params.n}", param="n")
        params = with_room(params, self._info.max_model_len)
        wanted = to_prompt(prompt, self._info.vocab_size)
        params = with_thoughts(params, self._runtime.formats, is_chat=isinstance(wanted, Chat))
        if isinstance(wanted, list):
            wanted = params.truncated(wanted)
        check_committed(committed, params, self._info.vocab_size)
        seed = params.seed if params.seed is not None else self.draw_seed()
        name = request_id or secrets.token_hex(8)
        if name in self._handles:
            name = f"{name}-{secrets.token_hex(4)}"
        handle = self._handles[name] = self._runtime.add(
            name, wanted, params, seed & SEED_MASK, owner, tenant, committed
        )
        if isinstance(wanted, Chat):
            handle.prompt_field = "messages"
        return name

    async def fingerprint(self) -> str:
        """What its answers depend on, as one short text: `committed` tokens go on well where this is the same."""
        return await asyncio.to_thread(
            fingerprint, self.config, self.model_info, novainfer.__version__, has_model=self._loads["has_model"]
        )

    def draw_seed(self) -> int:
        """A seed as a request has it that names none."""
        return self._random.getrandbits(SEED_DRAWN_BITS)

    def check_room(self, prompts: Sequence[PromptLike], params: SamplingParams) -> list[int]:
        """Raise `InvalidParameter`, naming the field, when these prompts together have room in no queue, however empty.

        Sent one after the other they might have: then `EngineOverloaded` would be an invitation to try for ever.
        Returns how many tokens of the queue each of them will take, until it is tokenised.
        """
        return check_room(self.config, prompts, params)

    async def wait_result(self, request_id: str) -> Delta | None:
        """Wait for what is new, one choice at a time; None when all choices have finished."""
        must_be("request_id", request_id, str, "a string")
        return self._take(request_id, await self._handle(request_id).read())

    async def forward(self, request_id: str, take: Callable[[Delta], bool]) -> None:
        """Give what is new to `take` as soon as a step has brought it, without a turn of the loop for each request.

        Returns when `take` has answered False, and when nothing but the request's end is left: `wait_result`, or the
        generator of `generate`, has what follows. `take` must be quick, for all requests wait for it; what it raises
        is raised here.
        """
        must_be("request_id", request_id, str, "a string")
        await self._handle(request_id).forward(take)

    def poll_result(self, request_id: str) -> Delta | None:
        """What is new, if anything; all deltas with a finish reason come before the id is forgotten."""
        must_be("request_id", request_id, str, "a string")
        handle = self._handle(request_id)
        delta = self._take(request_id, handle.read_nowait())
        if delta is not None and handle.state is StreamState.CLOSED and not handle.has_deltas and handle.ended_well:
            self._handles.pop(request_id, None)
            handle.read_nowait()
        return delta

    def cancel(self, request_id: str) -> bool:
        """End a request; False if there is none of this id (any more). Twice is as good as once."""
        must_be("request_id", request_id, str, "a string")
        self._home.check()
        handle = self._handles.get(request_id)
        if handle is None:
            return False
        self._runtime.cancel(handle.stream_id, Cause.CLIENT)
        return True

    def is_overflowed(self, request_id: str) -> bool:
        """True while the request waits for room in the queue, because it set `max_queue_s` and the queue was full."""
        handle = self._handles.get(request_id)
        return handle is not None and self._runtime.is_overflowed(handle.stream_id)

    # ---- conversations -------------------------------------------------------------------------------------------

    def sessions(self, tenant: Tenant | None = None) -> list[SessionRecord]:
        """The conversations (`SamplingParams.session_id`) of which the KV is kept, of one tenant or of all.

        A name is of its tenant's: two tenants may use the same one, for a conversation each.
        """
        if tenant is not None:
            must_be("tenant", tenant, Tenant, "a Tenant")
        self._home.check()
        return self._runtime.sessions(None if tenant is None else tenant.id)

    def end_session(self, session_id: str, tenant: Tenant = ANYONE) -> bool:
        """Keep nothing more of this conversation, and free what it holds; False if there is none of that name.

        Requests of it run on, and nothing is kept of them.
        """
        must_be("session_id", session_id, str, "a string")
        must_be("tenant", tenant, Tenant, "a Tenant")
        self._home.check()
        return self._runtime.end_session(tenant.id, session_id)

    # ---- tokens --------------------------------------------------------------------------------------------------

    async def tokenize(self, prompt: PromptLike, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `prompt`, as `generate` would begin with them; it may be longer than the context.

        Without `add_special_tokens` a text has none put before or behind it. A conversation has those of its template.
        Raises `InvalidParameter`, `ContextLengthExceeded` (a conversation far beyond it), `EngineOverloaded` or
        `EngineClosed`.
        """
        self._home.check()
        return await token_ids_of(
            self._runtime.tokenize,
            prompt,
            self.model_info.vocab_size,
            add_special_tokens=add_special_tokens,
            retry_after_s=self._runtime.retry_after_s,
        )

    async def detokenize(self, token_ids: list[int]) -> list[bytes]:
        """The bytes of each token, special ones included; those of one may be no whole character.

        Raises `InvalidParameter`, also where the model has no tokenizer.
        """
        self._home.check()
        info = self.model_info
        has_texts = info.prompt_kind != "token_ids"
        return await bytes_of(self._runtime.vocabulary, token_ids, info.vocab_size, has_texts=has_texts)

    def tokenizer_info(self) -> TokenizerInfo:
        """What the tokenizer is: its class, its special tokens, and the template of chats."""
        self._home.check()
        if self._info is None:
            raise EngineClosed("the engine was not started")
        return self._runtime.tokenizer_info()

    # ---- looking in ----------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True while requests are taken."""
        return self._info is not None and self._runtime.is_ready

    @property
    def model_info(self) -> ModelInfo:
        """The served model; raises `EngineClosed` before `start`."""
        if self._info is None:
            raise EngineClosed("the engine was not started")
        return self._info

    @property
    def vocabulary(self) -> Vocabulary:
        """The bytes of each token id; raises `EngineClosed` before `start`."""
        if self._info is None:
            raise EngineClosed("the engine was not started")
        return self._runtime.vocabulary

    @property
    def recorder_dir(self) -> Path | None:
        """The folder of the flight recorder's files; None when faults write none."""
        folder = self.config.recorder_dir
        return Path(folder) if folder is not None and self.config.recorder else None

    def statistics(self) -> EngineStatistics:
        """An immutable record of the moment, at any time."""
        state = str(self._runtime.engine_state)
        found = self._runtime.scheduler_statistics()
        if found is None:
            return EngineStatistics(state=state, incidents=dict(self._runtime.incidents.counts))
        admission = self._runtime.admission_statistics()
        num_let_in = max(found.num_waiting, self._runtime.num_queued)
        return EngineStatistics(
            state=state,
            num_running=found.num_running,
            num_waiting=num_let_in + admission.num_overflow,
            num_deferred=num_let_in - found.num_waiting + found.num_deferred,
            num_paused=found.num_paused,
            kv_blocks_total=found.blocks.num_blocks,
            kv_blocks_free=found.blocks.num_free,
            kv_blocks_cached=found.blocks.num_cached,
            kv_blocks_owned=found.blocks.num_owned,
            prompt_tokens_total=found.prompt_tokens_total,
            generation_tokens_total=found.generation_tokens_total,
            prefix_cache_queries=found.prefix_query_tokens_total,
            prefix_cache_hits=found.prefix_hit_tokens_total,
            preemptions=found.preemptions_total,
            steps=found.steps_total,
            step_failures=found.step_failures_total,
            requests_finished={str(state): count for state, count in found.finished_total.items()},
            admission=admission,
            request_states=dict(self._runtime.inspector.counts()),
            transitions=dict(self._runtime.inspector.transitions),
            rollbacks=found.rollbacks_total,
            incidents=dict(self._runtime.incidents.counts),
            worker_losses=found.worker_losses_total,
            swapped_out_blocks=found.swapped_out_blocks_total,
            swapped_in_blocks=found.swapped_in_blocks_total,
            copied_blocks=found.copied_blocks_total,
            rung=found.rung,
            rungs=found.rungs,
            mode=found.mode,
            phases=self._runtime.steps.totals(),
            times=self._runtime.inspector.times.record(),
            step_tokens=self._runtime.steps.tokens.record(),
            speculation=found.speculation,
        )

    # `owner` is as in `generate`: only what concerns its requests is told; None: everything.

    def requests(self, owner: str | None = None, ids: Collection[str] | None = None) -> list[RequestRecord]:
        """Those that live, by arrival, then the newest 1024 that ended: where each is, since when, and why it waits."""
        return self._runtime.inspector.requests(owner, ids)

    def actors(self) -> list[ActorRecord]:
        """What each actor does and since when, how many messages wait for it, and the process it lives in."""
        return self._runtime.overview.actors()

    def kv(self) -> KvRecord | None:
        """KV blocks by the state of their owners; None before the KV cache is there."""
        return self._runtime.inspector.kv()

    def kv_event_sources(self) -> dict[int, KvEventsConfig]:
        """Where routers are told which prefixes can be found (`kv_events_config`), by rank; empty: nowhere."""
        publisher = self._runtime.publisher
        return {publisher.config.rank: publisher.config} if publisher is not None else {}

    def steps(self, last: int = 100) -> list[StepRecord]:
        """The newest steps, at most 1024, the newest last: what was in each, and how long its phases took."""
        return self._runtime.last_steps(last)

    def errors(self, owner: str | None = None) -> list[IncidentRecord]:
        """What went wrong lately and what was done about it, the newest last; at most 1000."""
        return self._runtime.incidents.records(owner)

    def events(self, owner: str | None = None, *, limit: int = FEED_EVENTS_MAX) -> Subscription:
        """Transitions and incidents from now on, in batches; a listener more than `limit` behind loses the oldest.

        Use it in `with`: while there is a listener, each transition costs a few microseconds.
        """
        return self._runtime.inspector.subscribe(owner, limit=limit)

    def watch(self, owner: str | None = None) -> Watcher:
        """Everything as it is, and then what changes, twenty times a second at most: what the page's inspector shows.

        Use it in `with`: while there is one who watches, frames take up to a hundredth of the loop's time.
        """
        return self._runtime.watch.subscribe(owner)

    def taken(self, machine: str, state: str, event: str, to: str, owner: str | None = None) -> list[Taken]:
        """The last hundred times that a row of a machine's table was taken, since somebody began to look.

        Raises `InvalidParameter` where there is no such machine.
        """
        return self._runtime.inspector.taken(machine, state, event, to, owner)

    def health(self) -> HealthRecord:
        """Whether everything moves, and whether a request sent now would be taken."""
        return self._runtime.health()

    def inject(self, kind: str, **how: Any) -> None:
        """Let something fail, for a drill: the device ("oom", "exception", "stall", …) or an actor ("freeze_actor").

        Raises `InvalidParameter`, naming the field, when that cannot be done.
        """
        self._runtime.inject(kind, **how)

    async def dump_recorder(self, path: str | Path | None = None) -> Path:
        """Write the flight recorder's last minutes to `path`, or to a new file in `recorder_dir`; returns where it is.

        `novainfer replay` runs the file again. It holds prompts and answers. Raises `RecorderUnavailable`.
        """
        if path is not None:
            must_be("path", path, str | Path, "a path")
        self._home.check()
        return await self._runtime.recorder.dump(Path(path) if path is not None else None)

    async def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it (another object than the engine's own), or the one given here.

        Raises `ModelLoadError` when the model has none.
        """
        if self._tokenizer is not None:
            return self._tokenizer
        return await asyncio.to_thread(callers_tokenizer, self.config)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _handle(self, request_id: str) -> StreamHandle:
        self._home.check()
        handle = self._handles.get(request_id)
        if handle is None:
            raise RequestNotFound(f"there is no request {request_id}", param="request_id")
        return handle

    def _take(self, request_id: str, found: Delta | Finished | End | None) -> Delta | None:
        if found is None or isinstance(found, Delta):
            return found
        handle = self._handles.pop(request_id, None)
        if isinstance(found, End):
            if found.param == "prompt" and handle is not None:
                found = msgspec.structs.replace(found, param=handle.prompt_field)
            raise error_of(found, self._runtime.retry_after_s())
        return None

    def _reconfigured(self, answer: asyncio.Future[Reconfigured]) -> None:
        """The worker is as it was asked to be, or as it was, whether a caller still waits for that or not."""
        if not answer.exception() and (ready := answer.result().ready) is not None:
            info = self.model_info
            found = model_info(
                self.config, ready, created=info.created, prompt_kind=info.prompt_kind, formats=info.formats
            )
            self._info = msgspec.structs.replace(found, max_model_len=info.max_model_len)  # requests have no more room

    def _leave(self, request_id: str) -> None:
        """The reader goes: the rest will not be read."""
        handle = self._handles.pop(request_id, None)
        if handle is not None and not handle.is_over:
            self._runtime.abandon(handle.stream_id)


def _check_name(name: str, value: Any) -> None:
    must_be(name, value, str, "a string")
    if len(value) > NAME_CHARS_MAX or not is_unicode(value):
        raise InvalidParameter(f"{name} must be valid Unicode of at most {NAME_CHARS_MAX} characters", param=name)
