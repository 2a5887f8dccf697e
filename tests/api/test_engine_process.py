"""An engine whose device has a process: what befalls that process costs time, never a stream or a token."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from novainfer import Engine, EngineConfig, EngineDead, InvalidParameter, ModelLoadError, SamplingParams
from novainfer.actors.device.fake import ByteTokenizer, FakeDevice
from novainfer.actors.device.spec import FactorySpec
from tests.actors.devices import spec
from tests.actors.helpers import WAIT_S, eventually, expected
from tests.actors.links import is_gone
from tests.api.helpers import ask, blocks_back, greedy
from tests.leftovers import open_files


@asynccontextmanager
async def engine_of(device: FactorySpec | None = None, **config: Any) -> AsyncIterator[Engine]:
    """A started engine over a fake device in a process, closed at the end with nothing left."""
    settings: dict[str, Any] = {"worker": "process", "max_num_seqs": 16, **config}
    engine = Engine(EngineConfig(**settings), device=device or spec(), tokenizer=ByteTokenizer())
    async with asyncio.timeout(WAIT_S):
        await engine.start()
    try:
        yield engine
    finally:
        pid = pid_of(engine)
        async with asyncio.timeout(WAIT_S):
            await engine.aclose()
        assert pid == 0 or is_gone(pid)


def pid_of(engine: Engine) -> int:
    return engine._runtime._link.pid


async def read(engine: Engine, prompt: str, num_tokens: int, seen: list[int] | None = None) -> list[int]:
    found: list[int] = []
    async for delta in engine.generate(prompt, greedy(num_tokens)):
        found += delta.token_ids
        if seen is not None:
            seen += delta.token_ids
    return found


@pytest.mark.slow
async def test_killed_again_and_again_under_its_streams_every_token_is_right() -> None:
    async with engine_of() as engine:
        seen: list[int] = []
        prompts = [f"stream {at}" for at in range(8)]
        streams = asyncio.gather(*(read(engine, prompt, 1500, seen) for prompt in prompts))
        for at in range(3):
            await eventually(lambda at=at: len(seen) > (at + 1) * 2000)
            os.kill(pid_of(engine), signal.SIGKILL)
            await eventually(lambda: pid_of(engine) == 0)
            await eventually(lambda: pid_of(engine) != 0)
        assert await streams == [expected(prompt, 1500) for prompt in prompts]
        assert len(seen) == 8 * 1500, "none was sent twice"
        assert engine.statistics().worker_losses == 3
        assert [error.kind for error in engine.errors()] == ["lost"] * 3
        await blocks_back(engine)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "freeze"])
async def test_one_that_no_longer_moves_is_killed_and_replaced(fault: str) -> None:
    # On a busy machine its successor may be as silent for a moment: then it is replaced as well, and that is told too.
    async with engine_of(step_timeout_s=1.0, heartbeat_timeout_s=1.0, max_restarts=20) as engine:
        seen: list[int] = []
        stream = asyncio.create_task(read(engine, "moves", 1800, seen))
        await eventually(lambda: len(seen) > 100)
        pid = pid_of(engine)
        engine._runtime.inject(fault)
        assert await stream == expected("moves", 1800)
        await eventually(lambda: is_gone(pid))
        losses = engine.statistics().worker_losses
        assert losses >= 1
        assert [error.kind for error in engine.errors()] == ["timeout"] * losses


@pytest.mark.parametrize("fault", ["oom", "exception", "eat_memory"])
async def test_a_step_that_fails_there_is_taken_back_here(fault: str) -> None:
    async with engine_of() as engine:
        pid = pid_of(engine)
        engine._runtime.inject(fault)
        assert await asyncio.gather(*(read(engine, str(at), 20) for at in range(4))) == [
            expected(str(at), 20) for at in range(4)
        ]
        assert pid_of(engine) == pid
        assert engine.statistics().step_failures > 0


async def test_a_spare_takes_over() -> None:
    async with engine_of(warm_spare=True) as engine:
        link = engine._runtime._link
        await eventually(lambda: link.roster.spare is not None and "Load" in link.roster.spare.ahead)
        spare = link.roster.spare.pid
        seen: list[int] = []
        stream = asyncio.create_task(read(engine, "spare", 1500, seen))
        await eventually(lambda: len(seen) > 100)
        os.kill(pid_of(engine), signal.SIGKILL)
        assert await stream == expected("spare", 1500)
        assert pid_of(engine) == spare


async def test_one_that_dies_at_every_step_ends_the_engine_with_one_error_for_each_stream() -> None:
    async with engine_of(spec("exiting", at=["run"]), max_restarts=2) as engine:
        found = await asyncio.gather(*(read(engine, str(at), 5) for at in range(4)), return_exceptions=True)
        assert all(isinstance(error, EngineDead) for error in found), found
        assert "lost 3 times in a row" in str(found[0])
        assert "exit code 3" in str(found[0])
        assert not engine.is_ready


@pytest.mark.parametrize("stage", ["load", "fit", "warm"])
async def test_one_that_dies_while_it_comes_up_is_one_sentence(stage: str) -> None:
    files = open_files()
    engine = Engine(EngineConfig(worker="process"), device=spec("exiting", at=[stage]), tokenizer=ByteTokenizer())
    with pytest.raises(ModelLoadError, match="ended with exit code 3"):
        await engine.start()
    assert open_files() <= files


async def test_closed_while_it_comes_up_nothing_is_left(tmp_path: Any) -> None:
    device = spec("hanging", at=["load"], mark=str(tmp_path / "loads"))
    engine = Engine(EngineConfig(worker="process"), device=device, tokenizer=ByteTokenizer())
    start = asyncio.create_task(engine.start())
    await eventually((tmp_path / "loads").exists)
    pid = pid_of(engine)
    os.kill(pid, 0)
    closing = asyncio.create_task(engine.aclose())
    async with asyncio.timeout(WAIT_S):
        await closing
        with pytest.raises(Exception, match="closed while it was starting"):
            await start
    assert is_gone(pid)


def test_a_device_from_here_cannot_be_had_there() -> None:
    with pytest.raises(InvalidParameter, match="makes its device there"):
        Engine(EngineConfig(worker="process"), device=FakeDevice())


async def test_a_spec_may_also_be_made_in_a_thread() -> None:
    engine = Engine(EngineConfig(), device=spec(), tokenizer=ByteTokenizer())
    async with engine:
        assert (await ask(engine, "hello", greedy(4))).token_ids() == expected("hello", 4)
        assert pid_of(engine) == os.getpid()


@pytest.mark.slow
def test_the_process_of_the_loop_never_imports_torch() -> None:
    code = """
import asyncio, sys
from novainfer import Engine, EngineConfig, SamplingParams

async def main():
    async with Engine(EngineConfig(worker="process")) as engine:
        text = "".join([d.text async for d in engine.generate("Once upon a time", SamplingParams(max_tokens=8))])
        print(bool(text), sorted({"torch", "triton"} & set(sys.modules)))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "True []\n", done.stderr
    assert done.stderr == ""


@pytest.mark.slow
async def test_the_demo_model_gives_the_same_text_whatever_befalls_its_process() -> None:
    prompts = [f"Once upon a time there was a {animal}" for animal in ("fox", "bear", "hen", "cat", "dog", "owl")]
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)

    async def texts(engine: Engine, seen: list[str]) -> list[str]:
        async def one(prompt: str) -> str:
            text = ""
            async for delta in engine.generate(prompt, params):
                text += delta.text
                seen.append(delta.text)
            return text

        return await asyncio.gather(*map(one, prompts))

    config = EngineConfig(worker="process", dtype="float32", max_num_seqs=8)
    async with Engine(config) as engine:
        wanted = await texts(engine, [])
        for at in range(2):
            seen: list[str] = []
            answers = asyncio.create_task(texts(engine, seen))
            await eventually(lambda at=at, seen=seen: len(seen) > 60 + 250 * at)
            os.kill(pid_of(engine), signal.SIGKILL)
            assert await answers == wanted
        assert engine.statistics().worker_losses == 2
