"""`novainfer simulate`: the engine's state machines under seeds full of faults, or in every order of events."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click
from tqdm import tqdm

from novainfer.fsm.simulation.coverage import coverage
from novainfer.fsm.simulation.explore import explore
from novainfer.fsm.simulation.small import SMALL_WORLDS
from novainfer.fsm.simulation.swarm import Report, merge, run_seeds

SEEDS_PER_CHUNK = 100  # a third of a second: short for a progress bar, long for handing it to a process


@click.command()
@click.option("--seeds", default=1000, show_default=True, type=click.IntRange(1), help="How many seeds to run.")
@click.option("--seed", type=int, help="Run this one seed only: a failure that was reported.")
@click.option("--first", default=0, show_default=True, type=int, help="The first of the seeds.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Processes to run seeds in.")
@click.option("--exhaustive", is_flag=True, help="Explore the small worlds completely instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def simulate(seeds: int, seed: int | None, first: int, jobs: int, exhaustive: bool, as_json: bool) -> None:
    """Run the scheduler, engine, worker and streams with a simulated device, clients and faults.

    Every seed is a world of its own, and gives the same trace each time. Checked after every event: who owns which
    block, that every token and text is the right one, that every stream ends exactly once, that no wake-up is lost.
    """
    began_s = time.process_time()
    if exhaustive:
        result = _explore_all()
    else:
        chunks = [range(seed, seed + 1)] if seed is not None else _chunks(first, seeds)
        report, cpu_s = _run(chunks, jobs)
        result = _summary(report)
        result["cpu_s"] = round(cpu_s, 2)
    result.setdefault("cpu_s", round(time.process_time() - began_s, 2))
    if as_json:
        click.echo(json.dumps(result))
    if result["violations"]:
        raise click.exceptions.Exit(1)


def _chunks(first: int, seeds: int) -> list[range]:
    end = first + seeds
    return [range(at, min(at + SEEDS_PER_CHUNK, end)) for at in range(first, end, SEEDS_PER_CHUNK)]


def _run_chunk(chunk: range) -> tuple[Report, float]:
    began_s = time.process_time()
    report = run_seeds(chunk)
    return report, time.process_time() - began_s


def _run(chunks: list[range], jobs: int) -> tuple[Report, float]:
    """All chunks, in `jobs` processes; the report and the CPU seconds are those of all together."""
    reports: list[Report] = []
    cpu_s = 0.0
    with tqdm(total=sum(map(len, chunks)), unit="seed", disable=None) as bar:
        for report, chunk_cpu_s in _results(chunks, jobs):
            reports.append(report)
            cpu_s += chunk_cpu_s
            bar.update(report.seeds)
    return merge(reports), cpu_s


def _results(chunks: list[range], jobs: int) -> Iterator[tuple[Report, float]]:
    if jobs == 1 or len(chunks) == 1:
        yield from map(_run_chunk, chunks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_run_chunk, chunks)


def _summary(report: Report) -> dict[str, Any]:
    rows = coverage(report.rows)
    click.echo(
        f"{report.seeds} seeds, {report.requests} requests, {report.tokens} tokens read, {report.moves} events, "
        f"{len(report.violations)} violations, trace {report.trace_hash}"
    )
    click.echo("rows taken: " + ", ".join(f"{c.machine} {c.taken}/{c.total}" for c in rows))
    for violation, seed in zip(report.violations, report.failing_seeds, strict=True):
        click.echo(f"{violation}\n    reproduce it with: novainfer simulate --seed {seed}")
    return {
        "seeds": report.seeds,
        "requests": report.requests,
        "tokens": report.tokens,
        "moves": report.moves,
        "faults": report.faults,
        "violations": report.violations,
        "trace_hash": report.trace_hash,
        "rows": {c.machine: [c.taken, c.total] for c in rows},
    }


def _explore_all() -> dict[str, Any]:
    worlds: list[dict[str, Any]] = []
    violations: list[str] = []
    rows: Counter[tuple[str, str, str]] = Counter()
    for small in SMALL_WORLDS:
        found = explore(small)
        rows.update(found.rows)
        how = "every state" if found.complete else "NOT every state"
        click.echo(f"{small.name}: {found.states} states ({how}), {found.edges} moves, up to {found.depth} deep")
        if found.violation is not None:
            violations.append(f"{small.name}: {found.violation}")
            click.echo("\n".join([f"    {step}" for step in found.path]))
        worlds.append({"name": small.name, "states": found.states, "edges": found.edges, "complete": found.complete})
    taken = coverage(rows)
    click.echo("rows reached: " + ", ".join(f"{c.machine} {c.taken}/{c.total}" for c in taken))
    return {
        "worlds": worlds,
        "violations": violations,
        "rows_reached": sum(c.taken for c in taken),
        "rows_total": sum(c.total for c in taken),
    }
