"""Devices for processes: each is made in the child by its name, "tests.actors.devices:name", from plain arguments.

A test learns that a job is under way from a file that the device makes, since nothing else can look into a process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from novainfer.actors.device.device import ModelSettings
from novainfer.actors.device.fake import FakeDevice, successor
from novainfer.actors.device.location import ModelLocation
from novainfer.actors.device.spec import FactorySpec, ModelSpec
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import NO_TOKEN, StepDone, StepPlan
from tests.actors.gpu import ILLEGAL, FakeGpu


def spec(name: str = "fake", **arguments: Any) -> FactorySpec:
    """The device that the function `name` here makes."""
    return FactorySpec(f"{__name__}:{name}", arguments)


def model(name: str, native: Literal["0", "1"] = "0", quantization: str | None = None) -> ModelSpec:
    """A model of that name, on torch's kernels unless told otherwise."""
    return ModelSpec(
        ModelSettings(
            location=ModelLocation(name),
            device="cpu",
            dtype="auto",
            max_model_len=None,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            block_size=16,
            kv_cache_capacity_mode="auto",
            kv_cache_memory_utilization=0.5,
            num_kv_blocks=None,
            num_threads=None,
            native=native,
            quantization=quantization,
            batch_invariant=False,
        )
    )


class Scripted(FakeDevice):
    """Does `act(job)` before each job whose name is in `at`."""

    def __init__(self, at: list[str], act: Callable[[str], None]) -> None:
        super().__init__(num_blocks=64)
        self._at = at
        self._act = act

    def load(self, precision: str | None = None) -> dict[str, Any]:
        self._maybe("load")
        return {**super().load(precision), "kv_is_lazy": True}

    def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
        self._maybe("fit")
        return super().fit(num_blocks, is_new=is_new)

    def warm(self, *, measures: bool = True) -> None:
        self._maybe("warm")

    def run(self, plan: StepPlan) -> StepDone:
        self._maybe("run")
        return super().run(plan)

    def close(self) -> None:
        self._maybe("close")

    def _maybe(self, job: str) -> None:
        if job in self._at:
            self._act(job)


def fake(**arguments: Any) -> FakeDevice:
    """It answers at once."""
    return FakeDevice(**arguments)


def raising(at: list[str], kind: str = "RuntimeError", text: str = "a fault of its own") -> Scripted:
    """It raises."""

    def act(job: str) -> None:
        raise {"RuntimeError": RuntimeError, "MemoryError": MemoryError, "SystemExit": SystemExit}[kind](text)

    return Scripted(at, act)


def beyond(number: int = 70) -> FakeDevice:
    """After one token its answer is a number that no message can carry."""
    return FakeDevice(next_token=lambda token: 2**number if token == ord("!") else successor(token))


def exiting(at: list[str], code: int = 3) -> Scripted:
    """Its process ends without a word."""
    return Scripted(at, lambda job: os._exit(code))


def hanging(at: list[str], mark: str) -> Scripted:
    """It makes the file `mark`, and never returns."""

    def act(job: str) -> None:
        Path(mark).touch()
        threading.Event().wait()

    return Scripted(at, act)


def gated(at: list[str], mark: str, gate: str) -> Scripted:
    """It makes the file `mark`, and waits until there is a file `gate`."""

    def act(job: str) -> None:
        Path(mark).touch()
        while not Path(gate).exists():
            threading.Event().wait(0.005)

    return Scripted(at, act)


def stepping(folder: str, fails: Sequence[int] = (), nothing: int = -2, kind: str = "RuntimeError") -> FakeDevice:
    """Each step makes a file of its id in `folder`, and waits while there is a file "hold-" and that id.

    Steps in `fails` raise then; after the token `nothing` there is no token.
    """

    def step(plan: StepPlan) -> None:
        (Path(folder) / str(plan.step_id)).touch()
        while (Path(folder) / f"hold-{plan.step_id}").exists():
            threading.Event().wait(0.002)
        if plan.step_id in fails:
            raise {"RuntimeError": RuntimeError, "MemoryError": MemoryError}[kind]("a fault of its own")

    return FakeDevice(on_step=step, next_token=lambda token: NO_TOKEN if token == nothing else successor(token))


def unusable() -> FakeDevice:
    """Its first step poisons it for ever."""

    class Unusable(FakeDevice):
        def run(self, plan: StepPlan) -> StepDone:
            raise RuntimeError("an illegal memory access was encountered")

        def is_usable(self) -> bool:
            return False

    return Unusable()


def captured(graphs: bool = True) -> FakeDevice:
    """A switch captures graphs, which leaves it of no more use; without `graphs` it captures none."""

    class Captured(FakeDevice):
        def __init__(self) -> None:
            super().__init__()
            self._is_usable = True

        def load(self, precision: str | None = None) -> dict[str, Any]:
            return {**super().load(precision), "graphs": graphs}

        def switch(self, mode: Mode) -> None:
            self._is_usable = not graphs
            if graphs:
                raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

        def is_usable(self) -> bool:
            return self._is_usable

    return Captured()


def gpu(**arguments: Any) -> FakeGpu:
    """It computes beside its host."""
    return FakeGpu(**arguments)


def gpu_beyond(number: int = 70, **arguments: Any) -> FakeGpu:
    """It computes beside its host, and after one token its answer is a number that no message can carry."""
    return FakeGpu(next_token=lambda token: 2**number if token == ord("!") else successor(token), **arguments)


def gpu_offended(bad: int = -2, poison: int = -2) -> FakeGpu:
    """A GPU that fails late where a step holds the token `bad`, and is poisoned by the token `poison`."""
    device = FakeGpu()

    def fails_with(plan: StepPlan) -> BaseException | None:
        if poison in plan.input_ids:
            device.poison = ILLEGAL
            return RuntimeError(ILLEGAL)
        return ValueError("bad luck") if bad in plan.input_ids else None

    device._fails_with = fails_with
    return device


def telling(line: str) -> FakeDevice:
    """It tells the log something, and what it finds in its process."""

    class Telling(FakeDevice):
        def load(self, precision: str | None = None) -> dict[str, Any]:
            logging.getLogger("novainfer.kernels.test").info("%s", line)
            logging.getLogger("novainfer.kernels.test").debug("nobody asked for this")
            environment = os.environ.get("OMP_WAIT_POLICY")
            return {**super().load(precision), "omp": environment, "path": sys.path, "argv": sys.argv[1:]}

    return Telling()


def loading_once(mark: str) -> Scripted:
    """The first one of them makes the file `mark`; all others fail to load."""

    def act(job: str) -> None:
        if Path(mark).exists():
            raise RuntimeError("the second time")
        Path(mark).touch()

    return Scripted(["load"], act)
