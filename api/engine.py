"""The engine as an asyncio library: it lives on the caller's loop, and leaves nothing behind.

    async with Engine() as engine:
        async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(delta.text, end="")

No signal handlers and no loop policy. Model and tokenizer work in two threads of their own; with worker "process" the
model has a process instead, which is replaced when it is lost.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import AsyncGenerator, Collection
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from novainfer.actors.admission import AdmissionStatistics
from novainfer.actors.device import Device, ModelSettings
from novainfer.actors.feed import FEED_EVENTS_MAX, Subscription
from novainfer.actors.incidents import IncidentRecord
from novainfer.actors.link import MakeLink, ThreadLink
from novainfer.actors.location import ModelLocation
from novainfer.actors.process import ProcessLink
from novainfer.actors.recorder import Recorder
from novainfer.actors.records import ActorRecord, HealthRecord, KvRecord, RequestRecord
from novainfer.actors.spec import DeviceSpec, ModelSpec, Progress
from novainfer.actors.steps import PhaseTotals, StepRecord
from novainfer.actors.streams import StreamHandle
from novainfer.actors.system import System
from novainfer.actors.tokenizer import Tokenizer, load_tokenizer
from novainfer.config import EngineConfig
from novainfer.fsm.errors import (
    ContextLengthExceeded,
    EngineClosed,
    EngineDead,
    EngineDraining,
    EngineOverloaded,
    InvalidParameter,
    NovaInferError,
    ReaderStalled,
    RequestCancelled,
    RequestNotFound,
    RequestTimeout,
    StepFailedError,
)
from novainfer.fsm.events import Cause, Chat, End, Finished, Prompt
from novainfer.fsm.outputs import Delta
from novainfer.fsm.params import SamplingParams
from novainfer.fsm.planner import Limits
from novainfer.fsm.stream import StreamState
from novainfer.fsm.worker import RestartPolicy

SEED_MASK = 2**64 - 1
PromptLike = str | list[int] | Chat | dict[str, Any] | list[dict[str, Any]]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served; `created` is when it was loaded, in seconds since 1970.

    `kernels` names, for each operation, the implementations that compute it.
    """

    name: str
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    num_kv_blocks: int
    created: int
    weight_bytes: int = 0
    kv_bytes_per_block: int = 0
    kernels: dict[str, str] = {}


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at one moment; counts are in requests, tokens, blocks and steps, and totals only grow.

    `request_states` counts live choices by state, `incidents` what went wrong by kind; `rung` is that of the ladder.
    """

    state: str
    num_running: int = 0
    num_waiting: int = 0
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
    incidents: dict[str, int] = {}
    worker_losses: int = 0
    rung: str = "FULL"
    phases: PhaseTotals = PhaseTotals()


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
        self.config = config = config or EngineConfig()
        is_process = config.worker == "process"
        location = ModelLocation(config.model)
        is_asked_for = config.tokenizer is not None
        tokenizer_location = ModelLocation(config.tokenizer) if config.tokenizer is not None else location
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_chunk_tokens=min(config.prefill_chunk_tokens, config.max_num_batched_tokens),
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._system = System(
            make_link=_link(config, device or ModelSpec(_settings(config, location)), on_progress),
            load_tokenizer=lambda: tokenizer or load_tokenizer(tokenizer_location.path(), is_asked_for=is_asked_for),
            limits=limits,
            max_queue=(config.max_num_queued_reqs, config.max_num_queued_tokens, config.max_num_overflow_reqs),
            stall_timeout_s=config.stall_timeout_s,
            recorder=_recorder(config),
            step_timeout_s=config.step_timeout_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            restarts=RestartPolicy(config.max_restarts, config.restart_window_s) if is_process else RestartPolicy(),
        )
        self._random = random.Random(config.seed) if config.seed is not None else random.SystemRandom()
        self._handles: dict[str, StreamHandle] = {}
        self._info: ModelInfo | None = None
        self._is_started = False

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load and warm the model; raises `ModelLoadError` with one sentence that says what is wrong."""
        if self._is_started:
            raise EngineClosed("an engine starts once; make a new one")
        self._is_started = True
        ready = await self._system.start()
        self._info = ModelInfo(
            name=self.config.served_model_name or str(self.config.model),
            max_model_len=min(ready.max_model_len, ready.num_blocks * self.config.block_size),
            vocab_size=ready.vocab_size,
            dtype=str(ready.facts.get("dtype", "unknown")),
            device=self.config.device,
            num_kv_blocks=ready.num_blocks,
            created=int(time.time()),
            weight_bytes=int(ready.facts.get("weight_bytes", 0)),
            kv_bytes_per_block=int(ready.facts.get("kv_bytes_per_block", 0)),
            kernels=dict(ready.facts.get("kernels", {})),
        )

    async def aclose(self) -> None:
        """End everything now; requests still open end with `EngineDraining`. From any task, any number of times."""
        await self._system.aclose()

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests; those here may finish for `timeout_s` seconds, then the rest end with an error."""
        await self._system.drain(timeout_s)

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
    ) -> AsyncGenerator[Delta, None]:
        """Stream the answer to `prompt`; leaving early (break, aclose, a cancelled task) cancels the request.

        `owner` says whose request it is, for `requests(owner)` and its like; the server passes a digest of the key.

        Raises `EngineOverloaded` (with `retry_after_s`), `EngineDraining`, `InvalidParameter`,
        `ContextLengthExceeded`, `RequestCancelled`, `RequestTimeout`, `StepFailedError` or `EngineDead`.
        """
        name = self.add_request(prompt, params, request_id=request_id, owner=owner)
        try:
            while (delta := await self.wait_result(name)) is not None:
                yield delta
        finally:
            self._leave(name)

    def add_request(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        owner: str = "",
    ) -> str:
        """Begin a request without waiting; returns its id, which is `request_id` if that is given and not in use.

        Without `params` it samples with the defaults, for as many tokens as the context holds.
        """
        if self._info is None:
            raise EngineClosed("the engine was not started")
        params = params if params is not None else SamplingParams(max_tokens=None)
        params.check_vocabulary(self._info.vocab_size)
        if params.n > self.config.max_num_queued_reqs:
            limit = self.config.max_num_queued_reqs
            raise InvalidParameter(f"n must be at most {limit}, not {params.n}", param="n")
        wanted = _prompt(prompt, self._info.vocab_size)
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        name = request_id or secrets.token_hex(8)
        if name in self._handles:
            name = f"{name}-{secrets.token_hex(4)}"
        self._handles[name] = self._system.add(name, wanted, params, seed & SEED_MASK, owner)
        return name

    async def wait_result(self, request_id: str) -> Delta | None:
        """Wait for what is new, one choice at a time; None when all choices have finished."""
        handle = self._handle(request_id)
        return self._take(request_id, await handle.read())

    def poll_result(self, request_id: str) -> Delta | None:
        """What is new, if anything; all deltas with a finish reason come before the id is forgotten."""
        handle = self._handle(request_id)
        delta = self._take(request_id, handle.read_nowait())
        if delta is not None and handle.state is StreamState.CLOSED and not handle.has_deltas and handle.ended_well:
            self._handles.pop(request_id, None)
            handle.read_nowait()
        return delta

    def cancel(self, request_id: str) -> bool:
        """End a request; False if there is none of this id (any more). Twice is as good as once."""
        handle = self._handles.get(request_id)
        if handle is None:
            return False
        self._system.cancel(handle.stream_id, Cause.CLIENT)
        return True

    def is_overflowed(self, request_id: str) -> bool:
        """True while the request waits for room in the queue, because it set `max_queue_s` and the queue was full."""
        handle = self._handles.get(request_id)
        return handle is not None and self._system.is_overflowed(handle.stream_id)

    # ---- looking in ----------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True while requests are taken."""
        return self._info is not None and self._system.is_ready

    @property
    def model_info(self) -> ModelInfo:
        """The served model; raises `EngineClosed` before `start`."""
        if self._info is None:
            raise EngineClosed("the engine was not started")
        return self._info

    def statistics(self) -> EngineStatistics:
        """An immutable record of the moment, at any time."""
        state = str(self._system.engine_state)
        found = self._system.scheduler_statistics()
        if found is None:
            return EngineStatistics(state=state, incidents=dict(self._system.incidents.counts))
        return EngineStatistics(
            state=state,
            num_running=found.num_running,
            num_waiting=max(found.num_waiting, self._system.num_queued),
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
            admission=self._system.admission_statistics(),
            request_states=dict(self._system.inspector.counts()),
            incidents=dict(self._system.incidents.counts),
            worker_losses=found.worker_losses_total,
            rung=str(found.rung),
            phases=self._system.steps.totals(),
        )

    # `owner` is as in `generate`: only what concerns its requests is told; None: everything.

    def requests(self, owner: str | None = None, ids: Collection[str] | None = None) -> list[RequestRecord]:
        """Those that live, by arrival, then the newest 1024 that ended: where each is, since when, and why it waits."""
        return self._system.inspector.requests(owner, ids)

    def actors(self) -> list[ActorRecord]:
        """What each actor does and since when, how many messages wait for it, and the process it lives in."""
        return self._system.overview.actors()

    def kv(self) -> KvRecord | None:
        """KV blocks by the state of whoever owns them; None before the KV cache is there."""
        return self._system.inspector.kv()

    def steps(self, last: int = 100) -> list[StepRecord]:
        """The newest steps, at most 1024, the newest last: what was in each, and how long its phases took."""
        return self._system.last_steps(last)

    def errors(self, owner: str | None = None) -> list[IncidentRecord]:
        """What went wrong lately and what was done about it, the newest last; at most 1000."""
        return self._system.incidents.records(owner)

    def events(self, owner: str | None = None, *, limit: int = FEED_EVENTS_MAX) -> Subscription:
        """Transitions and incidents from now on, in batches; who is more than `limit` events behind loses the oldest.

        Use it in `with`: as long as somebody listens, each transition costs a few microseconds.
        """
        return self._system.inspector.subscribe(owner, limit=limit)

    def health(self) -> HealthRecord:
        """Whether everything moves, and whether a request sent now would be taken."""
        return self._system.health()

    def inject(self, kind: str, **how: Any) -> None:
        """Let something fail, for a drill: the device ("oom", "exception", "stall", …) or an actor ("freeze_actor").

        Raises `InvalidParameter`, naming the field, when that cannot be done.
        """
        self._system.inject(kind, **how)

    async def dump_recorder(self, path: str | Path | None = None) -> Path:
        """Write the flight recorder's last minutes to `path`, or to a new file in `recorder_dir`; returns where it is.

        `novainfer replay` runs the file again. It holds prompts and answers. Raises `RecorderUnavailable`.
        """
        return await self._system.recorder.dump(Path(path) if path is not None else None)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _handle(self, request_id: str) -> StreamHandle:
        handle = self._handles.get(request_id)
        if handle is None:
            raise RequestNotFound(f"there is no request {request_id}", param="request_id")
        return handle

    def _take(self, request_id: str, found: Delta | Finished | End | None) -> Delta | None:
        if found is None or isinstance(found, Delta):
            return found
        self._handles.pop(request_id, None)
        if isinstance(found, End):
            raise error_of(found, self._system.retry_after_s())
        return None

    def _leave(self, request_id: str) -> None:
        """The reader goes: nobody will ask for the rest."""
        handle = self._handles.pop(request_id, None)
        if handle is not None and not handle.is_over:
            self._system.abandon(handle.stream_id)


def error_of(end: End, retry_after_s: float) -> NovaInferError:
    """The exception for a bad end; who waited too long is told to come back in `retry_after_s`."""
    if end.cause is Cause.QUEUE:
        message = f"the queue stayed full for as long as the request was willing to wait: try again in {retry_after_s:.1f} s"
        return EngineOverloaded(message, retry_after_s=retry_after_s)
    if end.cause is Cause.TIMEOUT:
        return RequestTimeout("the request's deadline passed before it finished", param="timeout_s")
    if end.cause is Cause.DRAIN:
        return EngineDraining("the engine shut down before the request finished")
    if end.cause is not None:
        return RequestCancelled("the request was cancelled")
    message = end.error or "the request failed"
    kinds: dict[str, type[NovaInferError]] = {
        "context_length_exceeded": ContextLengthExceeded,
        "invalid_value": InvalidParameter,
        "draining": EngineDraining,
        "engine_dead": EngineDead,
        "stalled": ReaderStalled,
    }
    return kinds.get(end.code, StepFailedError)(message, param=end.param)


def _prompt(prompt: PromptLike, vocab_size: int) -> Prompt:
    """Any of the forms a caller may write, checked."""
    if isinstance(prompt, dict):
        if "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
            if not isinstance(prompt, list):
                raise InvalidParameter("prompt_token_ids must be a list of integers", param="prompt")
        elif "prompt" in prompt:
            prompt = prompt["prompt"]
        else:
            raise InvalidParameter('a prompt dict needs "prompt" or "prompt_token_ids"', param="prompt")
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidParameter("the prompt must not be empty", param="prompt")
        return prompt
    if isinstance(prompt, Chat):
        return _chat(prompt)
    if not isinstance(prompt, list) or not prompt:
        kinds = "a string, a list of token ids, or messages"
        raise InvalidParameter(f"the prompt must be {kinds}, and not empty", param="prompt")
    if all(isinstance(item, dict) for item in prompt):
        return _chat(Chat(messages=[item for item in prompt if isinstance(item, dict)]))
    ids: list[int] = []
    for item in prompt:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            raise InvalidParameter(
                f"prompt token ids must be integers from 0 to {vocab_size - 1}, not {item!r}", param="prompt"
            )
        ids.append(item)
    return ids


def _chat(chat: Chat) -> Chat:
    """`chat`, when its messages look like messages; whether they can be rendered is the template's to say."""
    if not isinstance(chat.messages, list) or not chat.messages:
        raise InvalidParameter("messages must hold at least one message", param="messages")
    for at, message in enumerate(chat.messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidParameter(f"messages[{at}] must be a dict with a role and a content", param="messages")
    return chat


def _link(config: EngineConfig, device: Device | DeviceSpec, on_progress: Progress | None) -> MakeLink:
    """How the worker's machine reaches its device."""
    if isinstance(device, DeviceSpec):
        if config.worker == "process":
            return partial(ProcessLink, device, warm_spare=config.warm_spare, on_progress=on_progress)
        return partial(ThreadLink, device.make(on_progress))
    if config.worker == "process":
        raise InvalidParameter('worker "process" makes its device there, and cannot take one from here', param="worker")
    return partial(ThreadLink, device)


def _settings(config: EngineConfig, location: ModelLocation) -> ModelSettings:
    return ModelSettings(
        location=location,
        device=config.device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        kv_cache_capacity_mode=config.kv_cache_capacity_mode,
        kv_cache_memory_utilization=config.kv_cache_memory_utilization,
        num_kv_blocks=config.num_kv_blocks,
        num_threads=config.num_threads,
        native=config.native,
        batch_invariant=config.batch_invariant,
        swap_space_gib=config.swap_space_gib,
    )


def _recorder(config: EngineConfig) -> Recorder:
    folder = Path(config.recorder_dir) if config.recorder_dir is not None else None
    return Recorder(folder, is_enabled=config.recorder)
