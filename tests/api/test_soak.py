"""Hundreds of clients of every kind at once, on a device that fails now and then: nobody gets a wrong token."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, suppress

import pytest

from novainfer import Engine, NovaInferError, RequestCancelled, SamplingParams, StepFailedError
from novainfer.actors.device.fake import FakeDevice
from novainfer.fsm.messages.step import StepPlan
from tests.api.helpers import blocks_back, expected, fake_engine

NUM_CLIENTS = 300
BAD = 200  # a token that the device cannot compute


class Weather:
    """A device that runs out of memory at random, and fails on one token always."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, plan: StepPlan) -> None:
        if BAD in plan.input_ids:
            raise ValueError("a bad token")
        if len(plan.slots) > 1 and self._random.random() < 0.05:
            raise MemoryError("not now")


class Client:
    """One client: what it asks for, how it behaves, and what it has to get."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.prompt = [65 + rng.randrange(26) for _ in range(rng.randrange(1, 80))]
        self.is_bad = rng.random() < 0.05
        if self.is_bad:
            self.prompt[0] = BAD
        self.params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 120), n=rng.choice([1, 1, 1, 2, 5]))
        self.behaviour = rng.choice(["reads", "reads", "reads", "leaves", "cancels", "is cancelled", "dawdles"])
        self.patience = rng.randrange(60)
        self.tokens: dict[int, list[int]] = {choice: [] for choice in range(self.params.n)}
        self.ends: list[str] = []

    async def live(self, engine: Engine) -> None:
        name = f"{id(self)}"
        try:
            async with aclosing(engine.generate(self.prompt, self.params, request_id=name)) as stream:
                async for delta in stream:
                    self.tokens[delta.index] += delta.token_ids
                    if delta.finish_reason:
                        self.ends.append("finished")
                    if self.behaviour == "dawdles":
                        for _ in range(50):  # everybody else goes first
                            await asyncio.sleep(0)
                    elif len(self.tokens[0]) > self.patience:
                        if self.behaviour == "leaves":
                            self.ends.append("left")
                            return
                        if self.behaviour == "cancels":
                            engine.cancel(name)
        except RequestCancelled:
            self.ends.append("cancelled")
        except StepFailedError:
            self.ends.append("failed")

    def check(self) -> None:
        n, wanted = self.params.n, expected(self.prompt, self.params.max_tokens or 0)
        for tokens in self.tokens.values():
            assert tokens == wanted[: len(tokens)], "a wrong token, one twice, or one that was lost"
        if self.is_bad and self.behaviour != "is cancelled":
            assert self.ends == ["failed"]
        elif self.behaviour in ("reads", "dawdles"):
            assert self.ends == ["finished"] * n
            assert all(tokens == wanted for tokens in self.tokens.values())
        elif self.behaviour in ("leaves", "cancels"):
            assert len([end for end in self.ends if end != "finished"]) <= 1
            assert self.ends


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_clients_and_device_do_everybody_gets_what_is_right(seed: int) -> None:
    rng = random.Random(seed)
    device = FakeDevice(num_blocks=rng.choice([130, 200, 1000]), on_step=Weather(seed))
    async with fake_engine(device, max_num_seqs=32, max_num_batched_tokens=256) as engine:
        clients = [Client(number, rng) for number in range(NUM_CLIENTS)]
        tasks: list[asyncio.Task[None]] = []
        for client in clients:
            tasks.append(asyncio.create_task(client.live(engine)))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
            if client.behaviour == "is cancelled":
                asyncio.get_running_loop().call_later(rng.random() * 0.2, tasks[-1].cancel)
        async with asyncio.timeout(120):
            await asyncio.wait(tasks)
        for client, task in zip(clients, tasks, strict=True):
            if not task.cancelled():
                task.result()
            client.check()
        await blocks_back(engine)
        assert engine._handles == {}
        assert len(engine._runtime._streams) == 0
        assert engine._runtime.num_queued == 0
        found = engine.statistics()
        assert (found.num_running, found.num_waiting, found.num_paused) == (0, 0, 0)
        print(f"{found.steps} steps, {found.step_failures} failed, {found.preemptions} preemptions")


async def test_closing_in_the_midst_of_it_ends_every_client_once() -> None:
    rng = random.Random(9)
    engine = fake_engine(FakeDevice(on_step=Weather(9)), max_num_seqs=32, max_num_batched_tokens=256)
    await engine.start()
    ends: list[str] = []

    async def live() -> None:
        try:
            async for _ in engine.generate([65 + rng.randrange(26)], SamplingParams(temperature=0, max_tokens=1500)):
                pass
        except NovaInferError as error:
            ends.append(type(error).__name__)

    tasks = [asyncio.create_task(live()) for _ in range(100)]
    while engine.statistics().generation_tokens_total < 2000:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await engine.aclose()
    async with asyncio.timeout(60):
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
    assert ends == ["EngineDraining"] * 100
