"""The longest turn of the loop, in CPU time of its thread, while thousands of requests come, are planned, or leave.

A turn is one callback of the loop: whatever it holds up waits for so long. The device sleeps in its thread, and the
recorder is on, as it is when requests are served. Python's cyclic garbage collector is off meanwhile: when it runs, and
for how long, depends on all objects of the process, so one collection of everything is measured by itself.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from novainfer import Engine, EngineConfig, SamplingParams
from novainfer.fsm.messages.errors import EngineDraining
from novainfer.fsm.messages.events import Cause, Fault, WorkerLost
from novainfer.testing import ByteTokenizer, FakeDevice

REQUESTS = 4096
SLOTS = 256
BLOCK_SIZE = 16
LONG_PROMPTS, LONG_LEN = 512, 1024
SHORT_LEN = 64
STEP_S = 0.05
TURN_MS_MAX = 5.0
COLLECTION = "one garbage collection among them (not a turn)"


class Longest:
    """The longest callback so far, in milliseconds, and what it was."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.what = ""
        self.is_open = True
        self.collection_ms = 0.0  # of one garbage collection, where it was measured


@contextmanager
def watched() -> Iterator[Longest]:
    """While this lasts, every callback of loops made of `asyncio.Handle` is timed."""
    longest = Longest()
    handle_type: Any = asyncio.Handle
    run = handle_type._run
    was_on = gc.isenabled()

    def timed(handle: Any) -> None:
        what = handle._callback
        began_s = time.thread_time()
        run(handle)
        took_ms = (time.thread_time() - began_s) * 1e3
        if longest.is_open and took_ms > longest.ms:
            longest.ms = took_ms
            owner = getattr(what, "__self__", None)
            longest.what = f"{getattr(what, '__qualname__', what)} {getattr(owner, 'name', '')}"

    handle_type._run = timed
    gc.disable()
    try:
        yield longest
    finally:
        longest.is_open = False  # what the callback that ends this goes on with is not looked at
        if was_on:
            gc.enable()
        handle_type._run = run


def run_all(num_requests: int = REQUESTS, num_long: int = LONG_PROMPTS) -> dict[str, tuple[float, str]]:
    """The longest turn of each scene, in milliseconds, and what it was."""
    scenes: dict[str, Callable[[], Coroutine[Any, Any, Longest]]] = {
        f"{num_requests} requests come": lambda: _come(num_requests),
        f"{num_requests} requests are cancelled": lambda: _leave(num_requests, _cancel_all),
        f"{num_long} prompts of {LONG_LEN} tokens are planned": lambda: _plan(num_long, shared=0),
        f"{num_long} prompts that share {LONG_LEN - BLOCK_SIZE} tokens are planned": lambda: _plan(
            num_long, shared=LONG_LEN - BLOCK_SIZE
        ),
        f"the worker is lost, with {num_requests} requests": lambda: _leave(num_requests, _lose),
    }
    found: dict[str, tuple[float, str]] = {}
    for name, scene in scenes.items():
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            longest = runner.run(scene())
        found[name] = longest.ms, longest.what
        if longest.collection_ms:
            found[COLLECTION] = longest.collection_ms, "gc.collect"
    return found


def _collect() -> float:
    began_s = time.thread_time()
    gc.collect()
    return (time.thread_time() - began_s) * 1e3


def _engine() -> Engine:
    config = EngineConfig(
        max_num_seqs=SLOTS,
        max_num_queued_reqs=REQUESTS + SLOTS,
        max_num_queued_tokens=1 << 30,
        block_size=BLOCK_SIZE,
        worker="thread",
    )
    device = FakeDevice(num_blocks=1 << 16, max_model_len=2 * LONG_LEN, step_s=STEP_S)
    return Engine(config, device=device, tokenizer=ByteTokenizer())


def _ask(engine: Engine, count: int, length: int, shared: int, max_tokens: int) -> list[asyncio.Task[None]]:
    chance = random.Random(1)
    prefix = chance.choices(range(32, 127), k=shared)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    async def read(prompt: list[int]) -> None:
        with suppress(EngineDraining):  # how a scene ends what it has asked for
            async for _ in engine.generate(prompt, params):
                pass

    prompts = [prefix + chance.choices(range(32, 127), k=length - shared) for _ in range(count)]
    return [asyncio.create_task(read(prompt)) for prompt in prompts]


async def _queued(engine: Engine, count: int) -> None:
    """Wait until so many requests are with the scheduler."""
    while len(engine._runtime._scheduler.requests) < count:  # type: ignore[union-attr]  # noqa: ASYNC110
        await asyncio.sleep(STEP_S / 4)


async def _come(count: int) -> Longest:
    async with _engine() as engine:
        with watched() as longest:
            tasks = _ask(engine, count, SHORT_LEN, 0, max_tokens=1000)
            await _queued(engine, count)
        longest.collection_ms = _collect()
        engine._runtime._admission.cancel_all(Cause.DRAIN)
        await asyncio.gather(*tasks)
    return longest


async def _leave(count: int, how: Callable[[Engine], None]) -> Longest:
    async with _engine() as engine:
        tasks = _ask(engine, count, SHORT_LEN, 0, max_tokens=1000)
        await _queued(engine, count)
        with watched() as longest:
            how(engine)
            await asyncio.sleep(4 * STEP_S)
        if how is not _cancel_all:
            engine._runtime._admission.cancel_all(Cause.DRAIN)
        await asyncio.gather(*tasks)
    return longest


def _cancel_all(engine: Engine) -> None:
    engine._runtime._admission.cancel_all(Cause.DRAIN)


def _lose(engine: Engine) -> None:
    runtime = engine._runtime
    runtime._actors["engine"].told(WorkerLost(runtime._worker.epoch, Fault.LOST, "a drill"))


async def _plan(count: int, shared: int) -> Longest:
    async with _engine() as engine:
        running = _ask(engine, 1, LONG_LEN, shared, max_tokens=2)
        await asyncio.gather(*running)  # what is shared is cached
        tasks = _ask(engine, count, LONG_LEN, shared, max_tokens=1)
        await _queued(engine, count)
        with watched() as longest:
            for _ in range(40):
                await asyncio.sleep(STEP_S / 2)
        engine._runtime._admission.cancel_all(Cause.DRAIN)
        await asyncio.gather(*tasks)
    return longest
