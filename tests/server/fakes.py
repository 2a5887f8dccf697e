"""A scripted engine with the interface that the server needs: tokens on demand, failures where a test wants them."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from novainfer import (
    Chat,
    Committed,
    ContextLengthExceeded,
    Delta,
    EngineDraining,
    EngineOverloaded,
    EngineStatistics,
    FinishReason,
    InvalidParameter,
    KvEventsConfig,
    NovaInferError,
    RecorderUnavailable,
    RequestCancelled,
    SamplingParams,
    TokenizerInfo,
    TokenLogprob,
)
from novainfer.actors.admission import AdmissionStatistics
from novainfer.actors.inspection.feed import Feed
from novainfer.fsm.messages.mode import INT8, Mode
from novainfer.fsm.messages.outputs import Mark
from novainfer.fsm.messages.pooling import ModelPooling, Pooling
from novainfer.fsm.messages.tenant import ANYONE, Tenant
from novainfer.fsm.parsing.formats import Formats
from novainfer.fsm.text import Vocabulary
from novainfer.inspection import (
    ActorRecord,
    HealthRecord,
    HistogramRecord,
    IncidentRecord,
    KvRecord,
    RequestRecord,
    RequestTimes,
    SessionRecord,
    StepRecord,
    Subscription,
)

ANSWER = ("Hello", ",", " wor", "ld", "!")


class FakeModelInfo(msgspec.Struct, frozen=True):
    name: str = "fake"
    max_model_len: int = 64
    created: int = 1_700_000_000
    sampling_defaults: dict[str, Any] = {}
    num_kv_blocks: int = 100
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    max_num_seqs: int = 8
    num_threads: int = 2
    modes: tuple[Mode, ...] = (Mode(), Mode(precision=INT8))
    dtype: str = "float32"
    precision: str = "float32"
    device: str = "cpu"
    kernels: dict[str, str] = msgspec.field(
        default_factory=lambda: {"linear": "native", "ops": "native", "attention": "torch"}
    )
    failed_kernels: dict[str, str] = {}
    step_costs: list[tuple[int, float]] = []
    weight_bytes: int = 3 << 30
    kv_bytes_per_block: int = 1 << 20
    memory: dict[str, int] = {}
    prompt_kind: str = "chat"
    formats: Formats = Formats()
    hidden_size: int = 4
    pooling: ModelPooling = ModelPooling()


TO_DECODE = ("request", "PREFILL", "DECODE")


class FakeStatistics(EngineStatistics, frozen=True, kw_only=True):
    state: str = "IDLE"
    kv_blocks_total: int = 100
    kv_blocks_free: int = 90
    kv_blocks_cached: int = 6
    kv_blocks_owned: int = 4
    prefix_cache_queries: int = 10
    prefix_cache_hits: int = 5
    copied_blocks: int = 7
    swapped_out_blocks: int = 3
    swapped_in_blocks: int = 2
    rungs: tuple[str, ...] = ("FULL", "SMALLER_BATCH", "INT8")
    admission: AdmissionStatistics = AdmissionStatistics(rejected_total={"overflow": 2}, cancelled_total={"queue": 3})
    num_waiting: int = 3
    num_deferred: int = 1
    transitions: dict[tuple[str, str, str], int] = msgspec.field(default_factory=lambda: {TO_DECODE: 7})
    rollbacks: dict[str, int] = msgspec.field(default_factory=lambda: {"oom": 2})
    times: RequestTimes = RequestTimes(queue=HistogramRecord((1.0, 2.0), (1, 1, 0), 1.5))
    step_tokens: HistogramRecord = HistogramRecord((32.0,), (1, 1), 40.0)


class Active:
    """A request in progress: how many tokens it may still give, and the error that is to end it."""

    def __init__(self) -> None:
        self.permits = 0
        self.left: deque[tuple[int, int]] = deque()  # position and choice of each delta to come
        self.params = SamplingParams()
        self.num_prompt_tokens = 0
        self.error: NovaInferError | None = None
        self.changed = asyncio.Event()


class FakeEngine:
    """Answers every prompt with `answer`, a token per piece.

    `is_paced`: a token goes out only when `release` allows it. `fail_at` raises `failure` in place of that token.
    `overloaded` refuses everything. `is_ready` may be set by hand.
    """

    def __init__(self, *, answer: tuple[str, ...] = ANSWER, is_paced: bool = False, is_ready: bool = True) -> None:
        self.answer = answer
        self.is_paced = is_paced
        self.is_ready = False
        self._ready_after_start = is_ready
        self.model_info = FakeModelInfo()
        self.prompt_ends_with = ""  # the text of its last token
        self.recorder_dir: Path | None = None
        self.fail_at: int | None = None
        self.failure: Exception = RuntimeError("a secret that must not leave the server")
        self.start_failure: NovaInferError | None = None
        self.overloaded = False
        self.in_overflow = False
        self.is_draining = False
        self.is_closed = False
        self.active: dict[str, Active] = {}
        self.seen: list[tuple[Any, SamplingParams, str]] = []  # prompt, params, id of every request
        self.tenants: list[Tenant] = []  # whose each was
        self.committed: list[list[Committed]] = []  # what each came with
        self.print = "fake"
        self.left_early: list[str] = []  # ids of requests whose reader went away before their end
        self.changed = asyncio.Condition()
        self.start_gate: asyncio.Event | None = None
        self.stuck: str | None = None  # why it stands still, if a test wants it to
        self.feed = Feed(lambda is_listened: None)
        self.injected: list[tuple[str, dict[str, Any]]] = []
        self.kept: list[SessionRecord] = []  # conversations
        self.recording: Path | None = None  # where it is written when somebody asks

    async def start(self) -> None:
        if self.start_gate is not None:
            await self.start_gate.wait()
        if self.start_failure is not None:
            raise self.start_failure
        self.is_ready = self._ready_after_start

    async def aclose(self) -> None:
        self.is_closed = True
        self.is_ready = False

    async def dump_recorder(self, path: str | Path | None = None) -> Path:
        if self.recording is None:
            raise RecorderUnavailable("the flight recorder is off")
        return self.recording

    async def reconfigure(self, *, num_kv_blocks: int | None = None, precision: str | None = None) -> FakeModelInfo:
        if num_kv_blocks is not None:
            self.model_info = msgspec.structs.replace(self.model_info, num_kv_blocks=num_kv_blocks)
        return self.model_info

    def draw_seed(self) -> int:
        return 4711

    async def fingerprint(self) -> str:
        return self.print

    async def drain(self, timeout_s: float) -> None:
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_until(lambda: not self.active)
        except TimeoutError:
            for active in self.active.values():
                active.error = EngineDraining("The server is shutting down")
                active.changed.set()
            await self.wait_until(lambda: not self.active)

    async def tokenize(self, prompt: Any, *, add_special_tokens: bool = True) -> list[int]:
        """A byte is a token, behind one more where special tokens are added to a text."""
        if isinstance(prompt, Chat):
            return [2, *"|".join(message["content"] for message in prompt.messages).encode()]
        if isinstance(prompt, dict):
            return list(prompt["prompt_token_ids"])
        return [1] * add_special_tokens + list(prompt.encode())

    async def detokenize(self, token_ids: list[int]) -> list[bytes]:
        if wrong := [token_id for token_id in token_ids if not 0 <= token_id < 256]:
            raise InvalidParameter(f"token_ids must be integers from 0 to 255, not {wrong[0]}", param="token_ids")
        return [bytes([token_id]) for token_id in token_ids]

    def kv_event_sources(self) -> dict[int, KvEventsConfig]:
        return {}

    def tokenizer_info(self) -> TokenizerInfo:
        return TokenizerInfo(tokenizer_class="Bytes", eos_token="<eos>", chat_template="{{ messages }}")

    def sessions(self, tenant: Tenant | None = None) -> list[SessionRecord]:
        return self.kept

    def end_session(self, session_id: str, tenant: Tenant = ANYONE) -> bool:
        return False

    @property
    def vocabulary(self) -> Vocabulary:
        """Of a prompt's three tokens the last has a text."""
        return Vocabulary.build([b"", b"", b"", self.prompt_ends_with.encode()], frozenset([1]))

    def check_room(self, prompts: Sequence[Any], params: SamplingParams) -> list[int]:
        """There is always room; a character is a token."""
        return [len(str(prompt)) for prompt in prompts]

    def cancel(self, request_id: str) -> bool:
        active = self.active.get(request_id)
        if active is None:
            return False
        active.error = RequestCancelled("The request was cancelled")
        active.changed.set()
        return True

    def is_overflowed(self, request_id: str) -> bool:
        return self.in_overflow and request_id in self.active

    def statistics(self) -> FakeStatistics:
        return FakeStatistics(num_running=len(self.active))

    def release(self, num_tokens: int = 1) -> None:
        for active in self.active.values():
            active.permits += num_tokens
            active.changed.set()

    async def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for something about this engine's requests; they tell when they begin and end."""
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def health(self) -> HealthRecord:
        return HealthRecord(
            is_live=self.stuck is None,
            is_ready=self.is_ready and self.stuck is None,
            state="IDLE",
            reason=self.stuck,
            late=[],
            lag_s=0.0,
        )

    def actors(self) -> list[ActorRecord]:
        actor = ActorRecord(
            name="worker-0", state="READY", dwell_s=1.5, mailbox_depth=2, pid=4711, handled_total=9, wait_s=0.0
        )
        return [actor]

    def kv(self) -> KvRecord:
        blocks = {"free": 90, "cached": 6, "DECODE": 4}
        return KvRecord(block_size=16, total=100, blocks=blocks, host_total=0, host_used=0)

    def requests(self, owner: str | None = None, ids: Collection[str] | None = None) -> list[RequestRecord]:
        return []

    def steps(self, last: int = 100) -> list[StepRecord]:
        return []

    def errors(self, owner: str | None = None) -> list[IncidentRecord]:
        return []

    def events(self, owner: str | None = None) -> Subscription:
        return self.feed.subscribe(lambda event, whose: event if owner in (None, whose) else None)

    def inject(self, kind: str, **how: Any) -> None:
        self.injected.append((kind, how))

    async def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        owner: str = "",
        tenant: Tenant = ANYONE,
        committed: Sequence[Committed] = (),
    ) -> AsyncGenerator[Delta, None]:
        self.committed.append(list(committed))
        params = params or SamplingParams()
        request_id = request_id or f"unnamed-{len(self.seen)}"
        if self.overloaded:
            raise EngineOverloaded("The queue is full", retry_after_s=1.5)
        if self.is_draining:
            raise EngineDraining("The server is shutting down")
        self.seen.append((prompt, params, request_id))
        self.tenants.append(tenant)
        active = self.active[request_id] = Active()
        is_over = False
        await self._tell()
        try:
            num_prompt_tokens = len(prompt) if isinstance(prompt, str) else 7
            if isinstance(prompt, str) and num_prompt_tokens > self.model_info.max_model_len:
                is_over = True
                raise ContextLengthExceeded(
                    f"This model's maximum context length is {self.model_info.max_model_len} tokens", param="prompt"
                )
            if params.pooling is not None:
                await self._turn(active)
                if self.fail_at is not None:
                    raise self.failure
                yield self._embedding(prompt, params.pooling, request_id, num_prompt_tokens)
                is_over = True
                return
            active.params, active.num_prompt_tokens = params, num_prompt_tokens
            active.left.extend((position, index) for position in range(len(self.answer)) for index in range(params.n))
            while active.left:
                await self._turn(active)
                if active.left[0][0] == self.fail_at:
                    is_over = True
                    raise self.failure
                yield self._next(request_id, active)
            is_over = True
        except NovaInferError:
            is_over = True
            raise
        finally:
            del self.active[request_id]
            if not is_over:
                self.left_early.append(request_id)
            await self._tell()

    async def forward(self, request_id: str, take: Callable[[Delta], bool]) -> None:
        """In the place of `generate`, up to what ends it badly."""
        active = self.active[request_id]
        while active.left and active.left[0][0] != self.fail_at:
            try:
                await self._turn(active)
            except NovaInferError:
                return
            if not take(self._next(request_id, active)):
                return

    def _embedding(self, prompt: Any, pooling: Pooling, request_id: str, num_prompt_tokens: int) -> Delta:
        """The prompt's length, and how it was to be pooled, in numbers."""
        numbers = (num_prompt_tokens, float(pooling.kind == "mean"), float(pooling.normalize), 0.1)
        return Delta(
            request_id=request_id,
            finish_reason=FinishReason.STOP,
            num_prompt_tokens=num_prompt_tokens,
            prompt_token_ids=prompt["prompt_token_ids"] if isinstance(prompt, dict) else [1, 2, 3],
            embedding=struct.pack("<4f", *numbers)[: 4 * (pooling.dimensions or 4)],
        )

    def _prompt_logprobs(self, params: SamplingParams) -> list[TokenLogprob] | None:
        """Of a prompt of three tokens, "Say" and " é" in two."""
        if params.prompt_logprobs is None:
            return None
        told = [(1, b"Say", 0.0), (2, b" \xc3", -0.25), (3, b"\xa9", -0.75)]
        top = [(7, b"x", -0.125), (8, b"y", float("-inf"))][: params.prompt_logprobs]
        return [TokenLogprob(i, token, logprob, top if i > 1 else []) for i, token, logprob in told]

    async def _turn(self, active: Active) -> None:
        if not self.is_paced:
            await asyncio.sleep(0)
        while self.is_paced and not active.permits and active.error is None:
            active.changed.clear()
            await active.changed.wait()
        if active.error is not None:
            raise active.error
        active.permits -= 1

    def _next(self, request_id: str, active: Active) -> Delta:
        position, index = active.left.popleft()
        return self._delta(request_id, index, position, active.num_prompt_tokens, active.params)

    def _delta(
        self, request_id: str, index: int, position: int, num_prompt_tokens: int, params: SamplingParams
    ) -> Delta:
        text = self.answer[position]
        limit = len(self.answer) if params.max_tokens is None else min(params.max_tokens, len(self.answer))
        is_last = position == len(self.answer) - 1
        marker_id = self.model_info.formats.marker_ids.get(text)
        begin = sum(map(len, self.answer[:position]))
        is_marked = marker_id is not None and marker_id in params.mark_token_ids
        logprobs = None
        if params.logprobs is not None:
            top = [(position, text.encode(), -0.5), (99, b"\xff", float("-inf"))][: params.logprobs]
            logprobs = [TokenLogprob(position, text.encode(), -0.5, top)]
        return Delta(
            request_id=request_id,
            index=index,
            text=text,
            token_ids=[position],
            marks=[Mark(marker_id or 0, begin, begin + len(text), position + 1)] if is_marked else [],
            logprobs=logprobs,
            finish_reason=(FinishReason.LENGTH if limit < len(self.answer) else FinishReason.STOP) if is_last else None,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=3,
            num_generated_tokens=position + 1,
            prompt_token_ids=[1, 2, 3] if position == 0 else None,
            prompt_logprobs=self._prompt_logprobs(params) if position == 0 else None,
            seed=1234,
        )
