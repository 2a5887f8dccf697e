"""The control plane alone: engine, scheduler, worker and streams over a device that answers at once.

What is counted is the CPU time of the loop's thread (`time.thread_time`), from the step's plan to the reader that has
its delta; the device has a thread or a process of its own, and HTTP is not there. A step costs a fixed part and a part
per token: batches of several sizes are measured in turns, and a straight line through their medians tells the two
apart.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any, Literal

from novainfer import Engine, EngineConfig, SamplingParams
from novainfer.bench.machine import describe
from novainfer.bench.report import Target, table, targets_json, targets_table
from novainfer.bench.statistic import line_fit
from novainfer.bench.turns import COLLECTION, TURN_MS_MAX, run_all
from novainfer.server.loop import loop_factory
from novainfer.testing import ByteTokenizer, FactorySpec

BATCHES = (16, 64, 128, 256)
STEPS = 400
PROMPT_LEN = 16
BLOCK_SIZE = 16
WARM_STEPS = 10  # after which every request decodes
TOKEN_US_MAX = 8.0  # the targets: at 256 requests and 50 steps/s, a tenth of a core
STEP_US_MAX = 200.0


def run(
    batches: tuple[int, ...] = BATCHES,
    steps: int = STEPS,
    repeat: int = 5,
    device_ms: float = 0.0,
    worker: Literal["thread", "process"] = "thread",
    *,
    turns: bool = True,
) -> tuple[dict[str, Any], str]:
    """The report and its tables. A device that sleeps for `device_ms` shows what waking up with cold caches adds."""
    found: dict[int, list[dict[str, float]]] = {batch: [] for batch in batches}
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        for _ in range(repeat):
            for batch in batches:
                found[batch].append(runner.run(run_once(batch, steps, device_ms / 1e3, worker)))
    rows = {
        batch: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for batch, runs in found.items()
    }
    fixed_us, token_us = line_fit(list(rows), [row["loop_us_per_step"] for row in rows.values()])
    targets = [
        Target(name="loop CPU per token, us", wanted=TOKEN_US_MAX, measured=token_us, at_most=True),
        Target(name="loop CPU per step, us", wanted=STEP_US_MAX, measured=fixed_us, at_most=True),
    ]
    longest = run_all() if turns else {}
    targets += [
        Target(name=f"longest turn, ms: {name}", wanted=TURN_MS_MAX, measured=ms, at_most=True)
        for name, (ms, _) in longest.items()
        if name != COLLECTION
    ]
    report = {
        "benchmark": "control",
        "machine": describe(),
        "repeat": repeat,
        "steps": steps,
        "device_ms": device_ms,
        "worker": worker,
        "us_per_token": token_us,
        "us_per_step": fixed_us,
        "batches": {str(batch): row for batch, row in rows.items()},
        "longest_turn_ms": {name: ms for name, (ms, _) in longest.items()},
        "runs": {str(batch): runs for batch, runs in found.items()},
        "targets": targets_json(targets),
    }
    header = ("running requests", "loop CPU us/step", "us/token", "wall us/step", "steps/s", "tokens/s")
    lines = [
        (
            batch,
            row["loop_us_per_step"],
            row["loop_us_per_step"] / batch,
            row["wall_us_per_step"],
            1e6 / row["wall_us_per_step"],
            batch * 1e6 / row["wall_us_per_step"],
        )
        for batch, row in rows.items()
    ]
    answers = f"answers after {device_ms:g} ms" if device_ms else "answers at once"
    title = f"Control plane, a device in a {worker} that {answers} ({repeat} x {steps} steps, medians)"
    longest_table = table(
        "Longest turns of the loop",
        ("while", "CPU ms", "turn"),
        [(name, ms, what) for name, (ms, what) in longest.items()],
    )
    return report, "\n\n".join((table(title, header, lines), longest_table, targets_table(targets)))


async def run_once(
    batch: int, steps: int, device_s: float, worker: Literal["thread", "process"], *, recorder: bool = True
) -> dict[str, float]:
    """Microseconds a step with `batch` requests decoding, each with a task that reads it."""
    device = FactorySpec("novainfer.testing:FakeDevice", {**sizes(batch, steps), "step_s": device_s})
    (cpu_s, wall_s), (cpu_end_s, wall_end_s) = await decode(device, batch, steps, worker=worker, recorder=recorder)
    return {
        "loop_us_per_step": (cpu_end_s - cpu_s) / steps * 1e6,
        "wall_us_per_step": (wall_end_s - wall_s) / steps * 1e6,
    }


def sizes(batch: int, steps: int) -> dict[str, int]:
    """A cache in which `batch` requests decode in `steps` steps, beside those in which they come and go."""
    length = PROMPT_LEN + steps + 2 * WARM_STEPS
    return {"num_blocks": batch * (-(-length // BLOCK_SIZE) + 1), "max_model_len": length}


async def decode(device: FactorySpec, batch: int, steps: int, **options: Any) -> list[tuple[float, float]]:
    """(CPU seconds of the loop's thread, wall seconds) before and after `steps` steps that hold `batch` requests."""
    max_tokens = steps + 2 * WARM_STEPS
    config = EngineConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, batch),
        max_num_queued_reqs=batch,
        block_size=BLOCK_SIZE,
        **options,
    )
    marks: list[tuple[float, float]] = []
    async with Engine(config, device=device, tokenizer=ByteTokenizer()) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        chance = random.Random(batch)

        async def read(when: tuple[int, ...]) -> None:
            """Read one request to its end, and the clocks when it has as many tokens as `when` says."""
            prompt = chance.choices(range(32, 127), k=PROMPT_LEN)
            async for delta in engine.generate(prompt, params):
                if len(marks) < len(when) and delta.num_generated_tokens >= when[len(marks)]:
                    marks.append((time.thread_time(), time.perf_counter()))

        when = (WARM_STEPS, WARM_STEPS + steps)
        # The last one to come is the last one to be prefilled: from its first token on, every request decodes.
        await asyncio.gather(*(read(when if at == batch - 1 else ()) for at in range(batch)))
    return marks
