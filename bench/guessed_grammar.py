"""What guesses bring to answers held to a JSON schema: an engine that makes some, in turns with one that does not.

Both must give the same tokens. Steps of the plain one follow each other one at a time, too, as they do where guesses
are made: what planning ahead brings has a measurement of its own.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from typing import Any

from novainfer import Engine, EngineConfig
from novainfer.bench.grammar import all_of, held_to_schema
from novainfer.bench.machine import describe
from novainfer.bench.report import table
from novainfer.bench.statistic import ratios, spread
from novainfer.server.loop import loop_factory


def run(
    model: str,
    speculative_config: str,
    *,
    batch: int = 32,
    repeat: int = 5,
    max_tokens: int = 160,
    options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], str]:
    """The report and its table; `options` are fields of `EngineConfig`."""
    config: dict[str, Any] = {"model": model, "worker": "process", "max_num_seqs": batch}
    config |= {"enable_prefix_caching": False, "async_scheduling": False, **(options or {})}

    async def turns() -> tuple[list[dict[str, float]], list[dict[str, float]], dict[str, int], bool]:
        guessing = EngineConfig(**config, speculative_config=speculative_config)
        async with Engine(EngineConfig(**config)) as first, Engine(guessing) as second:
            plain, guessed, is_equal = list[dict[str, float]](), list[dict[str, float]](), True
            for turn in range(-1, repeat):
                asked = held_to_schema(turn, batch, max_tokens)
                found = {engine: await all_of(engine, asked) for engine in (first, second)[:: 1 if turn % 2 else -1]}
                is_equal &= found[first][0] == found[second][0]
                if turn >= 0:  # before it all is warm
                    plain.append(found[first][1])
                    guessed.append(found[second][1])
                    progress(f"{1e3 * plain[-1]['wall_s']:.0f} and {1e3 * guessed[-1]['wall_s']:.0f} ms")
            said = second.statistics().speculation
            assert said is not None, "it was asked to guess"
            counts = {"drafted": said.num_draft_tokens_total, "accepted": said.num_accepted_tokens_total}
            return plain, guessed, counts, is_equal

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        plain, guessed, counts, is_equal = runner.run(turns())
    wall = ratios([turn["wall_s"] for turn in plain], [turn["wall_s"] for turn in guessed])
    cpu = ratios([turn["cpu_s"] for turn in guessed], [turn["cpu_s"] for turn in plain])
    steps = [statistics.median(turn["steps"] for turn in way) for way in (plain, guessed)]
    report = {
        "benchmark": "guessed grammar",
        "machine": describe(),
        "model": model,
        "options": options or {},
        "speculative_config": speculative_config,
        "batch": batch,
        "repeat": repeat,
        "throughput_ratio": statistics.median(wall),
        "throughput_ratio_spread": spread(wall),
        "cpu_ratio": statistics.median(cpu),
        "is_equal": is_equal,
        **counts,
        "runs": [{"plain": a, "guessed": b} for a, b in zip(plain, guessed, strict=True)],
    }
    row = (
        f"{steps[0]:.0f}",
        f"{steps[1]:.0f}",
        f"{statistics.median(wall):.3f} ({spread(wall)[0]:.3f}-{spread(wall)[1]:.3f})",
        f"{statistics.median(cpu):.3f}",
        f"{counts['drafted']}",
        f"{counts['accepted']}",
        "yes" if is_equal else "NO",
    )
    header = ("steps, plain", "steps, guessed", "throughput", "CPU time", "drafts", "accepted", "same tokens")
    title = f"{batch} answers held to a JSON schema, {model}, {repeat} times with guesses and without (ratios, medians)"
    return report, table(title, header, [row])
