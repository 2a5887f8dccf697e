"""`novainfer simulate`: the engine's state machines under seeds full of faults, or in every order of events."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, TypeVar

import click
from tqdm import tqdm

from novainfer.fsm.simulation.bugs.mutants import Hunt, hunt
from novainfer.fsm.simulation.bugs.planted import MUTANTS, SURVIVORS
from novainfer.fsm.simulation.explore.coverage import ARGUED, Coverage, coverage
from novainfer.fsm.simulation.explore.explore import STATES_MAX, Exploration, explore
from novainfer.fsm.simulation.explore.small import SMALL_WORLDS
from novainfer.fsm.simulation.swarm.report import Report, median, merge, run_seeds
from novainfer.fsm.simulation.world.paths import condense, explain, path_of, shorten, to_line
from novainfer.server.cli.simulate_models import explore_models, hunt_models, run_model_seeds

SEEDS_PER_CHUNK = 100  # a second: short for a progress bar, long for handing it to a process
SECONDS_PER_DAY = 86_400

Job = TypeVar("Job")
Result = TypeVar("Result")


@click.command()
@click.option("--seeds", default=1000, show_default=True, type=click.IntRange(1), help="How many seeds to run.")
@click.option("--seed", type=int, help="Run this one seed only: a failure that was reported.")
@click.option("--first", default=0, show_default=True, type=int, help="The first of the seeds.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Processes to share the work.")
@click.option("--exhaustive", is_flag=True, help="Explore the small worlds completely instead.")
@click.option("--states", type=click.IntRange(1), help="Leave a small world after so many states.  [default: all]")
@click.option("--mutants", is_flag=True, help="Plant bugs instead, one after the other, and see that each is found.")
@click.option("--models", "of_models", is_flag=True, help="The router of several models instead of an engine.")
@click.option("--rows", "lists_rows", is_flag=True, help="List the rows of the tables that were not taken.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def simulate(
    seeds: int,
    seed: int | None,
    first: int,
    jobs: int,
    exhaustive: bool,
    states: int | None,
    mutants: bool,
    of_models: bool,
    lists_rows: bool,
    as_json: bool,
) -> None:
    """Run the scheduler, engine, worker and streams with a simulated device, clients, time and faults.

    Every seed is a world of its own, and gives the same trace each time. Checked after every event: the owner of each
    block, that every token and text is the right one, that every stream ends exactly once, that no wake-up is lost.
    """
    if exhaustive and mutants:
        raise click.UsageError("--exhaustive and --mutants are two things: choose one")
    if states is not None and (of_models or not exhaustive):
        raise click.UsageError("--states is for --exhaustive without --models")
    if of_models:
        result = _simulate_models(
            range(seed, seed + 1) if seed is not None else range(first, first + seeds), exhaustive, mutants
        )
    elif exhaustive:
        result = _explore_all(states, jobs)
    elif mutants:
        result = _hunt_all(jobs)
    else:
        result = _run_seeds([range(seed, seed + 1)] if seed is not None else _chunks(first, seeds), jobs)
        if seed is not None and not result["is_well"]:
            _explain(seed)
    if lists_rows:
        for row in result.get("rows_missing", []):
            why = ARGUED.get(tuple(row.split("/")))
            click.echo(f"    {row.replace('/', ' x ')}" + (f" ({why})" if why else ""))
    is_well = result.pop("is_well")
    if as_json:
        click.echo(json.dumps(result))
    if not is_well:
        raise click.exceptions.Exit(1)


def _simulate_models(seeds: range, exhaustive: bool, mutants: bool) -> dict[str, Any]:
    if exhaustive:
        return explore_models()
    if mutants:
        return hunt_models()
    result, rows = run_model_seeds(seeds)
    _say_rows(rows, "taken")
    return result | _rows(rows)


# ---- seeds ----------------------------------------------------------------------------------------------------------


def _chunks(first: int, seeds: int) -> list[range]:
    end = first + seeds
    return [range(at, min(at + SEEDS_PER_CHUNK, end)) for at in range(first, end, SEEDS_PER_CHUNK)]


def _run_seeds(chunks: list[range], jobs: int) -> dict[str, Any]:
    reports: list[Report] = []
    cpu_s = 0.0
    with tqdm(total=sum(map(len, chunks)), unit="seed", disable=None) as bar:
        for report, seconds in _share(run_seeds, chunks, jobs):
            reports.append(report)
            cpu_s += seconds
            bar.update(report.seeds)
    report = merge(reports)
    counts = sorted(report.faults.items())
    faults = {kind: count for kind, count in counts if not _is_outcome(kind)}
    outcomes = {kind: count for kind, count in counts if _is_outcome(kind)}
    length, at_once, days = median(report.lengths), median(report.at_once), report.simulated_s / SECONDS_PER_DAY
    click.echo(
        f"{report.seeds} seeds: {report.requests} requests of {length} tokens (median), {at_once} at once (median), "
        f"{days:.1f} simulated days, {report.moves} events in {cpu_s:.1f} CPU seconds; "
        f"{len(report.violations)} violations; trace {report.trace_hash}"
    )
    click.echo(
        f"per CPU minute: {report.requests * 60 / cpu_s:,.0f} requests, {days * 60 / cpu_s:.1f} simulated days; "
        "injected: " + ", ".join(f"{count} {kind}" for kind, count in faults.items())
    )
    click.echo("what came of it: " + ", ".join(f"{count} {kind}" for kind, count in outcomes.items()))
    rows = coverage(report.rows)
    _say_rows(rows, "taken")
    for violation, failing in zip(report.violations, report.failing_seeds, strict=True):
        click.echo(f"{violation}\n    reproduce it with: novainfer simulate --seed {failing}")
    return {
        "is_well": not report.violations,
        "seeds": report.seeds,
        "requests": report.requests,
        "simulated_s": round(report.simulated_s, 3),
        "faults": faults,
        "outcomes": outcomes,
        "violations": report.violations,
        "trace_hash": report.trace_hash,
        "tokens": report.tokens,
        "median_tokens": length,
        "median_at_once": at_once,
        "moves": report.moves,
        **_rows(rows),
        "cpu_s": round(cpu_s, 2),
    }


def _is_outcome(kind: str) -> bool:
    """Whether a world's count is of what came of faults, not of a fault."""
    return kind in ("steps", "rollbacks checked") or kind.startswith(("incident: ", "rejected: "))


def _explain(seed: int) -> None:
    """The shortest path to the violation of `seed` that can be found in half a minute, for reading and for keeping."""
    path = path_of(seed)
    if path is None:
        click.echo("its moves alone do not lead there: it takes the seed's clock, or very many moves")
        return
    path = condense(shorten(path))
    click.echo(f"{len(path.moves)} moves that lead there:")
    click.echo("\n".join(f"    {line}" for line in explain(path)))
    click.echo(f"to keep it, append this line to tests/simulation/regressions.jsonl:\n{to_line(path)}")


# ---- small worlds ---------------------------------------------------------------------------------------------------


def _explore_all(states: int | None, jobs: int) -> dict[str, Any]:
    """Each small world, as far as `states` go; without a number one with more than `STATES_MAX` is a fault."""
    found: list[Exploration] = []
    rows: Counter[tuple[str, str, str]] = Counter()
    cpu_s = 0.0
    for one, seconds in _share(partial(explore, states_max=states or STATES_MAX), SMALL_WORLDS, jobs):
        found.append(one)
        rows.update(one.rows)
        cpu_s += seconds
        how = "every state" if one.complete else "NOT every state"
        click.echo(
            f"{one.name}: {one.states} states ({how}), {one.edges} moves, up to {one.depth} deep, {seconds:.1f} s"
        )
        if one.violation is not None:
            click.echo("\n".join([one.violation, *(f"    {step}" for step in one.path)]))
    covered = coverage(rows)
    _say_rows(covered, "reached")
    violations = [f"{one.name}: {one.violation}" for one in found if one.violation is not None]
    complete = all(one.complete for one in found)
    return {
        "is_well": not violations and (complete or states is not None),
        "states": sum(one.states for one in found),
        "edges": sum(one.edges for one in found),
        "complete": complete,
        "rows_total": sum(c.total for c in covered),
        "rows_reached": sum(c.taken for c in covered),
        "violations": violations,
        "worlds": [
            {"name": one.name, "states": one.states, "edges": one.edges, "depth": one.depth, "complete": one.complete}
            for one in found
        ],
        **_rows(covered),
        "cpu_s": round(cpu_s, 2),
    }


# ---- planted bugs ---------------------------------------------------------------------------------------------------


def _hunt_all(jobs: int) -> dict[str, Any]:
    hunts: list[Hunt] = []
    cpu_s = 0.0
    for one, seconds in _share(hunt, MUTANTS, jobs):
        hunts.append(one)
        cpu_s += seconds
        click.echo(f"{'found' if one.found else 'SURVIVED'}: {one.name} ({one.how}, {seconds:.1f} s)")
    survivors = [one.name for one in hunts if not one.found]
    for name in survivors:
        click.echo(f"{name} survives: {SURVIVORS.get(name, 'without an argument')}")
    click.echo(f"{len(hunts)} bugs planted, {len(hunts) - len(survivors)} found")
    return {
        "is_well": set(survivors) <= set(SURVIVORS),
        "planted": len(hunts),
        "found": len(hunts) - len(survivors),
        "survivors": survivors,
        "seconds": {one.name: one.seconds for one in hunts},
        "cpu_s": round(cpu_s, 2),
    }


# ---- both -----------------------------------------------------------------------------------------------------------


def _share(work: Callable[[Job], Result], todo: Iterable[Job], jobs: int) -> Iterator[tuple[Result, float]]:
    """The result of each job with its CPU seconds, in their order, worked out in so many processes."""
    timed = _Timed(work)
    if jobs == 1:
        yield from map(timed, todo)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(timed, todo)


class _Timed:
    """A function that also says how long it took, in CPU seconds; a class, because it goes to other processes."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __call__(self, job: Any) -> tuple[Any, float]:
        began_s = time.process_time()
        result = self._work(job)
        return result, time.process_time() - began_s


def _say_rows(rows: list[Coverage], verb: str) -> None:
    click.echo(f"rows {verb}: " + ", ".join(f"{c.machine} {c.taken}/{c.total}" for c in rows))
    missing = sum(len(c.missing) for c in rows)
    if missing:
        click.echo(f"{missing} rows were not {verb}: --rows lists them")


def _rows(rows: list[Coverage]) -> dict[str, Any]:
    return {
        "rows": {c.machine: [c.taken, c.total] for c in rows},
        "rows_missing": ["/".join(row) for c in rows for row in c.missing],
    }
