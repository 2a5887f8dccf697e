"""An engine that is started quantised answers in that precision, calls it exact, and has it again after a loss."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from novainfer import Engine, EngineConfig, InvalidParameter
from novainfer.fsm.messages.mode import INT8, QUANTIZATIONS
from tests.api.helpers import ask, eventually, greedy
from tests.api.test_failures import engine_with

PROMPT = "5 years ago there was a fox that"
KERNELS = {"int8": "-int8", "int4": "-grouped", "fp8": "-fp8"}  # how their products' names end


@pytest.mark.parametrize("unknown", ["int3", "checkpoint", ""])
def test_an_unknown_quantization_is_refused_by_name_with_what_is_possible(unknown: str) -> None:
    with pytest.raises(
        InvalidParameter, match=r"quantization must be one of 'int8', 'int4', 'fp8', or 'none' for weights as"
    ) as info:
        EngineConfig(quantization=unknown)
    assert info.value.param == "quantization"
    with pytest.raises(InvalidParameter, match="quantization"):
        EngineConfig(quantization=8)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
async def test_it_is_served_so_from_the_start_and_is_not_degraded(quantization: str) -> None:
    async with engine_with(quantization=quantization) as (engine, device), engine_with() as (full, _):
        info = engine.model_info
        assert {mode.precision for mode in info.modes} == {quantization}
        assert info.kernels["linear"].endswith(KERNELS[quantization])
        assert info.weight_bytes < 0.4 * full.model_info.weight_bytes
        answer = await ask(engine, PROMPT, greedy(24))
        assert not any(delta.is_degraded for delta in answer.deltas)
        stats = engine.statistics()
        assert (stats.rung, stats.mode) == ("FULL", info.modes[0])
        assert set(stats.rungs) <= {"FULL", "SMALLER_BATCH", "PLAIN_KERNELS"}
        assert {step.mode for step in engine.steps()} == {info.modes[0]}
        assert device.modes_seen == [info.modes[0]]


@pytest.mark.slow
async def test_kernels_that_break_are_left_for_plainer_ones_in_the_same_precision() -> None:
    def fault(plan: Any) -> BaseException | None:
        return RuntimeError("broken") if is_broken and plan.mode.kernels == "fast" else None

    is_broken = False
    async with engine_with(fault, quantization="int8", ladder_quiet_s=60.0) as (engine, _):
        if len(engine.model_info.modes) == 1:
            pytest.skip("there are no native kernels here")
        exact = await ask(engine, PROMPT, greedy(8))
        is_broken = True
        answer = await ask(engine, PROMPT, greedy(8))
        assert engine.statistics().rung == "PLAIN_KERNELS"
        assert engine.statistics().mode == engine.model_info.modes[1]
        assert answer.deltas[-1].is_degraded
        assert not exact.deltas[-1].is_degraded


@pytest.mark.slow
@pytest.mark.parametrize("warm_spare", [False, True])
async def test_a_worker_that_was_killed_comes_back_in_the_same_precision(warm_spare: bool) -> None:
    config = EngineConfig(quantization="int8", worker="process", warm_spare=warm_spare, max_num_seqs=4)
    async with Engine(config) as engine:
        before = (await ask(engine, PROMPT, greedy(16))).text()
        (pid,) = {actor.pid for actor in engine.actors() if actor.name.startswith("worker")}
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: engine.statistics().worker_losses == 1)
        answer = await ask(engine, PROMPT, greedy(16))
        assert answer.text() == before
        assert not any(delta.is_degraded for delta in answer.deltas)
        assert (engine.statistics().rung, engine.statistics().mode.precision) == ("FULL", INT8)
        assert engine.steps()[-1].mode == engine.model_info.modes[0]
