"""An engine that is used wrongly says so at once, and names the argument; it does not hang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from novainfer import Engine, EngineClosed, EngineConfig, InvalidParameter, SamplingParams, WrongLoop
from novainfer.testing import ByteTokenizer, FakeDevice


def make_engine() -> Engine:
    return Engine(EngineConfig(), device=FakeDevice(), tokenizer=ByteTokenizer())


async def read(engine: Engine, *args: Any) -> str:
    return "".join([delta.text async for delta in engine.generate(*args)])


# ---- wrong types -----------------------------------------------------------------------------------------------------

MAKING: list[tuple[str, Callable[[Any], Any]]] = [
    ("config", lambda bad: Engine(bad)),
    ("device", lambda bad: Engine(device=bad)),
    ("tokenizer", lambda bad: Engine(tokenizer=bad)),
    ("on_progress", lambda bad: Engine(on_progress=bad)),
    ("model", lambda bad: EngineConfig(model=bad)),
    ("max_num_seqs", lambda bad: EngineConfig(max_num_seqs=bad)),
    ("dtype", lambda bad: EngineConfig(dtype=bad)),
    ("gpu_memory_utilization", lambda bad: EngineConfig(gpu_memory_utilization=bad)),
    ("temperature", lambda bad: SamplingParams(temperature=bad)),
]


@pytest.mark.parametrize("bad", [{"model": "demo"}, ["x"]], ids=repr)
@pytest.mark.parametrize(("name", "make"), MAKING, ids=[name for name, _ in MAKING])
def test_what_an_engine_is_made_of_is_named(name: str, make: Callable[[Any], Any], bad: Any) -> None:
    with pytest.raises(InvalidParameter, match=name) as caught:
        make(bad)
    assert caught.value.param == name


USING: list[tuple[str, Callable[[Engine, Any], Any]]] = [
    ("prompt", lambda engine, bad: engine.add_request(bad)),
    ("params", lambda engine, bad: engine.add_request("x", bad)),
    ("request_id", lambda engine, bad: engine.add_request("x", request_id=bad)),
    ("owner", lambda engine, bad: engine.add_request("x", owner=bad)),
    ("tenant", lambda engine, bad: engine.add_request("x", tenant=bad)),
    ("request_id", lambda engine, bad: engine.cancel(bad)),
    ("request_id", lambda engine, bad: engine.poll_result(bad)),
    ("request_id", lambda engine, bad: engine.wait_result(bad)),
    ("timeout_s", lambda engine, bad: engine.drain(bad)),
    ("path", lambda engine, bad: engine.dump_recorder(bad)),
]


async def in_task(use: Callable[[], Any]) -> None:
    found = use()
    if asyncio.iscoroutine(found):
        await found


@pytest.mark.parametrize("bad", [5.5, {"a": 1}, [None]], ids=repr)
@pytest.mark.parametrize("number", range(len(USING)), ids=[name for name, _ in USING])
async def test_what_is_asked_of_it_is_named(number: int, bad: Any) -> None:
    name, use = USING[number]
    if name == "timeout_s" and bad == 5.5:
        bad = float("nan")
    async with make_engine() as engine:
        with pytest.raises(InvalidParameter, match=name) as caught:
            await in_task(lambda: use(engine, bad))
        assert caught.value.param == name
        assert await read(engine, "still there", SamplingParams(max_tokens=3))


# ---- loops -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def other() -> Any:
    """An engine that lives on the loop of another thread, and what runs a coroutine there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    engine = make_engine()
    asyncio.run_coroutine_threadsafe(engine.start(), loop).result()
    yield engine, loop
    asyncio.run_coroutine_threadsafe(engine.aclose(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def test_on_another_loop_each_call_says_so_at_once(other: Any) -> None:
    engine, loop = other
    name = asyncio.run_coroutine_threadsafe(_add(engine), loop).result()
    for use in (
        lambda: read(engine, "x"),
        lambda: engine.wait_result(name),
        lambda: engine.drain(1.0),
        lambda: engine.aclose(),
        lambda: engine.dump_recorder("x"),
    ):
        with pytest.raises(WrongLoop, match="lives on another event loop"):
            await use()
    for call in (engine.add_request, engine.poll_result, engine.cancel):
        with pytest.raises(WrongLoop):
            call(name)
    assert engine.statistics().state  # looking is free


async def _add(engine: Engine) -> str:
    return engine.add_request("x", SamplingParams(max_tokens=2))


def test_in_a_thread_without_a_loop_it_says_so_too(other: Any) -> None:
    engine, _ = other
    with pytest.raises(WrongLoop):
        engine.add_request("x")


def test_without_a_loop_of_asyncio_it_says_what_it_needs() -> None:
    start = make_engine().start()
    with pytest.raises(WrongLoop, match=r"asyncio\.run, or LLM"):
        start.send(None)  # as trio would: there is no loop of asyncio
    assert issubclass(WrongLoop, RuntimeError)


def test_after_its_loop_has_ended_closing_is_harmless_and_using_it_says_why() -> None:
    engine = make_engine()

    async def start_only() -> None:
        await engine.start()
        engine.add_request("x", SamplingParams(max_tokens=500))

    asyncio.run(start_only())
    for use in (lambda: read(engine, "x"), lambda: engine.drain(1.0)):
        with pytest.raises(EngineClosed, match="event loop of this engine has ended"):
            asyncio.run(use())
    asyncio.run(engine.aclose())
    asyncio.run(engine.aclose())


def test_between_two_runs_of_its_loop_it_may_be_called() -> None:
    with asyncio.Runner() as runner:
        engine = make_engine()
        runner.run(engine.start())
        name = engine.add_request("x", SamplingParams(max_tokens=2))
        assert engine.cancel(name)
        runner.run(engine.aclose())


def test_a_program_that_forgets_to_close_ends() -> None:
    code = "import asyncio; from novainfer import Engine; asyncio.run(Engine().start())"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---- names of vLLM ---------------------------------------------------------------------------------------------------


def test_each_device_has_its_own_share_of_memory() -> None:
    with pytest.raises(InvalidParameter, match="on cuda gpu_memory_utilization says what share"):
        EngineConfig(device="cuda", kv_cache_memory_utilization=0.5)
    assert EngineConfig(device="cuda", gpu_memory_utilization=0.5).ignored is None
    assert EngineConfig().ignored is None
    ignored = EngineConfig(gpu_memory_utilization=0.5, kv_cache_memory_utilization=0.3).ignored
    assert ignored is not None
    assert ignored.startswith("gpu_memory_utilization 0.5 is ignored on a CPU")
    assert "kv_cache_memory_utilization says" in ignored
    assert "(0.3)" in ignored


def test_settings_may_have_vllms_names() -> None:
    assert EngineConfig(dtype="half") == EngineConfig(dtype="float16")
    assert EngineConfig(dtype="bf16").dtype == "bfloat16"
    assert EngineConfig(gpu_memory_utilization=0.5).gpu_memory_utilization == 0.5
    with pytest.raises(InvalidParameter, match="gpu_memory_utilization must be more than 0 and at most 1, not"):
        EngineConfig(gpu_memory_utilization=1.5)
    with pytest.raises(InvalidParameter, match="dtype must be one of auto, float32, bfloat16, float16, half"):
        EngineConfig(dtype="int3")
