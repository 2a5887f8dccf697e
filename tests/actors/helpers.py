"""A system over a fake device, a valve for its steps, and readers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from novainfer.actors.core.streams import StreamHandle
from novainfer.actors.device.device import Device
from novainfer.actors.device.fake import ByteTokenizer, FakeDevice, successor
from novainfer.actors.device.link import MakeLink, ThreadLink
from novainfer.actors.runtime import Runtime
from novainfer.actors.tokenizer.tokenizer import Tokenizer
from novainfer.fsm.messages.events import Cause, End, Finished, Prompt
from novainfer.fsm.messages.outputs import Delta
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepPlan
from novainfer.fsm.schedule.planner import Limits

WAIT_S = 60.0  # a test that waits longer has found a lost wake-up
LIMITS = Limits(
    max_num_seqs=64, max_num_batched_tokens=512, prefill_chunk_tokens=128, block_size=16, enable_prefix_caching=True
)
NO_LIMIT = (1024, 1 << 20)


def make_runtime(
    device: Device | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    load_tokenizer: Callable[[], Tokenizer] | None = None,
    limits: Limits = LIMITS,
    max_queue: tuple[int, int] = NO_LIMIT,
    link: MakeLink | None = None,
    **more: Any,
) -> Runtime:
    """A system that is not started yet."""
    return Runtime(
        make_link=link or partial(ThreadLink, device or FakeDevice()),
        load_tokenizer=load_tokenizer or (lambda: tokenizer or ByteTokenizer()),
        limits=limits,
        max_queue=max_queue,
        **more,
    )


@asynccontextmanager
async def running(device: Device | None = None, **more: Any) -> AsyncIterator[Runtime]:
    """A started system, closed at the end."""
    runtime = make_runtime(device, **more)
    async with asyncio.timeout(WAIT_S):
        await runtime.start()
    try:
        yield runtime
    finally:
        if isinstance(valve := getattr(device, "_on_step", None), Valve):
            valve.open()  # closing waits for the step on the device
        async with asyncio.timeout(WAIT_S):
            await runtime.aclose()


class Valve:
    """A FakeDevice's `on_step`: holds every step, in the device's thread, until it is let through."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.plans: list[StepPlan] = []
        self._permits = threading.Semaphore(0)
        self._is_open = is_open
        self._arrived = threading.Semaphore(0)

    def __call__(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._arrived.release()
        if not self._is_open:
            assert self._permits.acquire(timeout=WAIT_S), "nobody opened the valve"

    async def step_arrived(self) -> None:
        """Wait until one more step is at the device."""
        assert await asyncio.to_thread(self._arrived.acquire, timeout=WAIT_S), "no step came"

    def let(self, count: int = 1) -> None:
        """Let `count` steps through."""
        self._permits.release(count)

    def open(self) -> None:
        """Let everything through from now on."""
        self._is_open = True
        self._permits.release(1)


def params(max_tokens: int = 8, **more: Any) -> SamplingParams:
    """Greedy parameters."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def expected(prompt: Prompt, num_tokens: int) -> list[int]:
    """What FakeDevice answers."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    assert isinstance(ids, list)
    answer: list[int] = []
    last = ids[-1]
    for _ in range(num_tokens):
        last = successor(last)
        answer.append(last)
    return answer


class Read:
    """All that one reader got: tokens by choice, and every end it met."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.ends: list[Finished | End] = []

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice."""
        return self.tokens_of(0)

    def tokens_of(self, choice: int) -> list[int]:
        """Of one choice."""
        return [token for delta in self.deltas if delta.index == choice for token in delta.token_ids]

    @property
    def end(self) -> End:
        """The one bad end."""
        (end,) = self.ends
        assert isinstance(end, End), f"it ended well: {end}"
        return end

    @property
    def is_well(self) -> bool:
        """True when it ended once, and well."""
        (end,) = self.ends
        return isinstance(end, Finished)


async def read_all(handle: StreamHandle) -> Read:
    """Read to the end."""
    found = Read()
    async with asyncio.timeout(WAIT_S):
        while not found.ends:
            item = await handle.read()
            if isinstance(item, Delta):
                found.deltas.append(item)
            else:
                found.ends.append(item)
    return found


def ask(runtime: Runtime, prompt: Prompt, wish: SamplingParams | None = None, seed: int = 0) -> StreamHandle:
    """Add a stream."""
    return runtime.add("request", prompt, wish or params(), seed)


async def answer(runtime: Runtime, prompt: Prompt, wish: SamplingParams | None = None) -> Read:
    """Add a stream and read all of it."""
    return await read_all(ask(runtime, prompt, wish))


async def eventually(condition: Callable[[], object]) -> None:
    """Let the loop turn until `condition` holds: for what has no event to wait for."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def all_blocks_back(runtime: Runtime) -> None:
    """Wait until no request owns a block any more, and check that none was lost."""
    scheduler = runtime._scheduler
    assert scheduler is not None
    await eventually(lambda: scheduler.statistics().blocks.num_owned == 0 and not scheduler.flights)
    blocks = scheduler.statistics().blocks
    assert blocks.num_free + blocks.num_cached == blocks.num_blocks
    scheduler.check()


__all__ = ["Cause", "Valve", "answer", "ask", "expected", "make_runtime", "params", "read_all", "running"]
