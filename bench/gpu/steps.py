"""Whole decode steps of a model, as the worker computes them: the next one is launched before this one has ended.

The roof of a step is the time in which the GPU reads the weights and the contexts' keys and values once. Idle is the
share of the time between the first and the last kernel in which none ran, by CUPTI's record of each (torch.profiler).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from novainfer.bench.gpu.roof import GpuRoof
from novainfer.bench.ideal import Geometry, Roof, decode_step_s
from novainfer.fsm.messages.step import SAMPLED, SeqParams, StepPlan
from novainfer.kernels.ops.selection import GRAPHS, OURS
from novainfer.kernels.runtime.runner import ModelRunner

__all__ = ["STEPS", "Steps", "measure_steps", "other_kernels"]

IN_FLIGHT = 2
WARM_UP = 10


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps of `batch` sequences, whose contexts grow from `context` tokens on."""

    like: str
    batch: int
    context: int
    wanted_ms: float | None = None  # as the project's aim has it


STEPS = [
    Steps("qwen2.5-0.5b", 1, 128, 0.45),
    Steps("qwen2.5-0.5b", 64, 1024),
    Steps("qwen2.5-0.5b", 256, 1024),
    Steps("qwen2.5-1.5b", 1, 128, 1.05),
    Steps("qwen2.5-1.5b", 64, 1024),
    Steps("qwen2.5-1.5b", 256, 1024, 3.7),
]


def plans(steps: Steps, num_steps: int, block_size: int) -> Iterator[StepPlan]:
    """The plans of `num_steps` steps: the first brings tokens, each later one leaves them to the device."""
    batch, length = steps.batch, steps.context + num_steps
    per_sequence = -(-length // block_size)
    slots = list(range(batch))
    order = torch.randperm(batch * per_sequence, generator=torch.Generator().manual_seed(1)).tolist()
    for number in range(num_steps):
        plan = StepPlan(
            slots=slots,
            query_lens=[1] * batch,
            context_lens=[steps.context + 1 + number] * batch,
            input_ids=[SAMPLED] * batch if number else [7] * batch,
            sample_seqs=slots,
            step_id=number + 1,
            after=number,
        )
        if number == 0:
            plan.admissions = [SeqParams(slot=slot) for slot in slots]
            plan.table_slots = [slot for slot in slots for _ in range(per_sequence)]
            plan.table_indexes = [index for _ in slots for index in range(per_sequence)]
            plan.table_blocks = order
        yield plan


def run_steps(runner: ModelRunner, steps: Steps, num_steps: int) -> list[float]:
    """Launch them with two in flight; gives when each was through, in seconds."""
    ended_s: list[float] = []
    flights: deque[Any] = deque()

    def land() -> None:
        flight = flights.popleft()
        flight.wait()
        flight.done()
        ended_s.append(time.perf_counter())

    for plan in plans(steps, num_steps, runner.info.block_size):
        flights.append(runner.launch(plan))
        if len(flights) == IN_FLIGHT:
            land()
    while flights:
        land()
    return ended_s


def measure_steps(
    folder: Path, steps: Steps, roof: GpuRoof, device: torch.device, *, num_steps: int = 100, **options: Any
) -> dict[str, Any]:
    """Milliseconds a step and the share of the roof; `options` are those of `ModelRunner.load`."""
    block_size = options.pop("block_size", 16)
    began_s = time.perf_counter()
    runner = ModelRunner.load(
        folder,
        device=device.type,
        max_num_seqs=max(steps.batch, 1),
        max_num_batched_tokens=max(512, steps.batch),
        max_model_len=steps.context + 4 * num_steps,
        block_size=block_size,
        **options,
    )
    num_blocks = steps.batch * -(-(steps.context + 4 * num_steps) // block_size)
    runner.fit(mode="fixed", num_blocks=num_blocks)
    runner.warm()
    ready_s = time.perf_counter() - began_s
    try:
        run_steps(runner, steps, WARM_UP)
        ended_s = run_steps(runner, steps, num_steps)
        took_s = [after - before for before, after in itertools.pairwise(ended_s)]
        idle = _idle_share(runner, steps, num_steps) if device.type == "cuda" else None
    finally:
        runner.close()
    roof_s = decode_step_s(
        Geometry.read(folder),
        Roof(bytes_per_s=roof.read_bytes_per_s, flops_per_s=roof.bfloat16_flop_per_s),
        steps.batch,
        steps.context + num_steps // 2,
    )
    wall_s = (ended_s[-1] - ended_s[0]) / (len(ended_s) - 1)
    return {
        "like": steps.like,
        "batch": steps.batch,
        "context": steps.context,
        "ms": 1e3 * wall_s,
        "median_ms": 1e3 * statistics.median(took_s),
        "tokens_per_s": steps.batch / wall_s,
        "roof_ms": 1e3 * roof_s,
        "share_of_roof": roof_s / wall_s,
        "wanted_ms": steps.wanted_ms,
        "idle_share": idle,
        "load_to_ready_s": ready_s,
        "kernels": runner.info.kernels,
        "failed_kernels": runner.info.failed_kernels,
    }


def other_kernels(kernels: Mapping[str, str], *, graphs: bool) -> list[str]:
    """Which operations of `ModelInfo.kernels` are not those of a GPU, so that figures would be of something else."""
    wanted = {"forward": GRAPHS if graphs else OURS["cuda"].prefix}
    wanted |= dict.fromkeys(("attention", "ops", "sampler"), OURS["cuda"].prefix)
    found = [f"{name} by {kernels[name]}" for name, prefix in wanted.items() if not kernels[name].startswith(prefix)]
    if not graphs and kernels["forward"].startswith(GRAPHS):
        found.append(f"forward by {kernels['forward']}")
    return found


def _idle_share(runner: ModelRunner, steps: Steps, num_steps: int) -> float | None:
    """Of the time from the first kernel to the last one; None where no kernel was recorded."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_steps(runner, steps, num_steps)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA
    )
    return idle_share(spans)


def idle_share(spans: list[tuple[float, float]]) -> float | None:
    """Which part of the time from the first begin to the last end no span covers; `spans` in the order they begin."""
    if not spans:
        return None
    busy, covered = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return 1 - busy / (covered - spans[0][0])
