"""What it costs to hold answers to a JSON schema: the same engine, in turns with the same lengths without a grammar.

The answers that are held to a schema come first, each as long as it becomes; the others are of those very lengths, out
of the same prompts. So both sides compute the same tokens in the same batches, and what is left is the grammar: its
masks, and what a step waits for them.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from novainfer import Engine, EngineConfig, SamplingParams, StructuredOutputsParams
from novainfer.bench.machine import describe
from novainfer.bench.peers.launch import tree_cpu_s
from novainfer.bench.report import Target, table, targets_json, targets_table
from novainfer.bench.statistic import ratios, spread
from novainfer.server.loop import loop_factory

COST_MAX = 0.05  # the target, at a batch of 32
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 24},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "owl", "fox"]}, "minItems": 3, "maxItems": 6},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "minLength": 6, "maxLength": 30},
                "number": {"type": "integer", "minimum": 1, "maximum": 999},
                "city": {"type": "string", "minLength": 4, "maxLength": 20},
            },
            "required": ["street", "number", "city"],
            "additionalProperties": False,
        },
        "notes": {
            "type": "array",
            "items": {"type": "string", "minLength": 12, "maxLength": 40},
            "minItems": 4,
            "maxItems": 4,
        },
    },
    "required": ["name", "age", "pets", "address", "notes"],
    "additionalProperties": False,
}


def run(
    model: str,
    *,
    batch: int = 32,
    repeat: int = 5,
    max_tokens: int = 160,
    options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its table; `options` are fields of `EngineConfig`."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runs = runner.run(_turns(model, batch, repeat, max_tokens, options or {}, progress))
    wall = ratios([free["wall_s"] for free, _ in runs], [held["wall_s"] for _, held in runs])
    cpu = ratios([held["cpu_s"] for _, held in runs], [free["cpu_s"] for free, _ in runs])
    cost, steps = 1 - statistics.median(wall), statistics.median(held["steps"] for _, held in runs)
    step_ms = [
        1e3 * statistics.median(way["wall_s"] / way["steps"] for way in ways) for ways in zip(*runs, strict=True)
    ]
    name = f"cost of a JSON schema, {batch} requests"
    targets = [Target(name=name, wanted=COST_MAX, measured=cost, at_most=True)]
    report = {
        "benchmark": "grammar",
        "machine": describe(),
        "model": model,
        "options": options or {},
        "batch": batch,
        "repeat": repeat,
        "throughput_ratio": statistics.median(wall),
        "throughput_ratio_spread": spread(wall),
        "cpu_ratio": statistics.median(cpu),
        "step_ms": {"free": step_ms[0], "held": step_ms[1]},
        "runs": [{"free": free, "held": held} for free, held in runs],
        "targets": targets_json(targets),
    }
    row = (
        f"{step_ms[0]:.2f}",
        f"{step_ms[1]:.2f}",
        f"{statistics.median(wall):.3f} ({spread(wall)[0]:.3f}-{spread(wall)[1]:.3f})",
        f"{statistics.median(cpu):.3f}",
        f"{steps:.0f}",
    )
    header = ("ms a step, free", "ms a step, held", "throughput", "CPU time", "steps")
    title = f"{batch} answers held to a JSON schema, {model}, {repeat} times in turns with free ones (ratios, medians)"
    return report, table(title, header, [row]) + "\n\n" + targets_table(targets)


async def _turns(
    model: str, batch: int, repeat: int, max_tokens: int, options: dict[str, Any], progress: Callable[[str], None]
) -> list[tuple[dict[str, float], dict[str, float]]]:
    config = {"worker": "process", "max_num_seqs": batch, "enable_prefix_caching": False, **options}
    runs = []
    async with Engine(EngineConfig(model=model, **config)) as engine:
        for turn in range(-1, repeat):
            answers, held_cost = await all_of(engine, held_to_schema(turn, batch, max_tokens))
            free = [
                SamplingParams(temperature=1.0, seed=turn * batch + at, max_tokens=len(answer), ignore_eos=True)
                for at, answer in enumerate(answers)
            ]
            _, free_cost = await all_of(engine, free)
            if turn >= 0:  # before it all is warm
                runs.append((free_cost, held_cost))
                progress(f"{1e3 * free_cost['wall_s']:.0f} and {1e3 * held_cost['wall_s']:.0f} ms")
    return runs


def held_to_schema(turn: int, batch: int, max_tokens: int) -> list[SamplingParams]:
    """What is asked in one turn: answers in the schema, each with a seed of its own."""
    grammar = StructuredOutputsParams(json=SCHEMA)
    return [
        SamplingParams(temperature=1.0, seed=turn * batch + at, max_tokens=max_tokens, structured_outputs=grammar)
        for at in range(batch)
    ]


async def all_of(engine: Engine, asked: Sequence[SamplingParams]) -> tuple[list[list[int]], dict[str, float]]:
    """The tokens of each answer; and what they took together, of the worker's process as well."""

    async def one(params: SamplingParams) -> list[int]:
        deltas = [delta async for delta in engine.generate("Describe a person as JSON. ", params)]
        return [token_id for delta in deltas for token_id in delta.token_ids]

    cpu_s, steps = tree_cpu_s(os.getpid()), engine.statistics().steps
    began_s = time.perf_counter()
    answers = await asyncio.gather(*map(one, asked))
    wall_s = time.perf_counter() - began_s
    took = {"wall_s": wall_s, "cpu_s": tree_cpu_s(os.getpid()) - cpu_s, "steps": engine.statistics().steps - steps}
    return answers, took
