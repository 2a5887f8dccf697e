"""`novainfer simulate --models`: the router of several models, in worlds of its own."""

from __future__ import annotations

import time
from typing import Any

import click

from novainfer.fsm.machines import OF_MODELS
from novainfer.fsm.simulation.explore.coverage import Coverage, coverage
from novainfer.fsm.simulation.models.bugs import ROUTER_MUTANTS, hunt_routed
from novainfer.fsm.simulation.models.explore import SMALL_ROUTED, explore_routed
from novainfer.fsm.simulation.models.swarm import run_routers


def run_model_seeds(seeds: range) -> tuple[dict[str, Any], list[Coverage]]:
    """Run these seeds, and say what came of them; what a JSON line tells, and the rows that were taken."""
    began_s = time.process_time()
    report = run_routers(seeds)
    cpu_s = time.process_time() - began_s
    refused = ", ".join(f"{count} {reason}" for reason, count in sorted(report.refusals.items()))
    click.echo(
        f"{report.seeds} seeds: {report.requests} requests for models, {report.granted} of them got theirs, "
        f"{report.moves} events in {cpu_s:.1f} CPU seconds; {len(report.violations)} violations; refused: {refused}"
    )
    for seed, violation in report.violations.items():
        click.echo(f"{violation}\n    reproduce it with: novainfer simulate --models --seed {seed}")
    result = {
        "is_well": not report.violations,
        "seeds": report.seeds,
        "requests": report.requests,
        "granted": report.granted,
        "refusals": dict(report.refusals),
        "violations": list(report.violations.values()),
        "moves": report.moves,
        "cpu_s": round(cpu_s, 2),
    }
    return result, coverage(report.rows, OF_MODELS)


def explore_models() -> dict[str, Any]:
    """Every order of events in the small worlds of models."""
    found = []
    for small in SMALL_ROUTED:
        began_s = time.process_time()
        one = explore_routed(small)
        found.append(one)
        how = "every state" if one.complete else "NOT every state"
        click.echo(f"{one.name}: {one.states} states ({how}), {time.process_time() - began_s:.1f} s")
        if one.violation is not None:
            click.echo("\n".join(f"    {move}" for move in one.path) + f"\n    {one.violation}")
    return {
        "is_well": all(one.complete for one in found),
        "states": sum(one.states for one in found),
        "complete": all(one.complete for one in found),
        "violations": [f"{one.name}: {one.violation}" for one in found if one.violation is not None],
    }


def hunt_models() -> dict[str, Any]:
    """Bugs planted in the router: each must be found."""
    survivors = []
    for mutant in ROUTER_MUTANTS:
        how = hunt_routed(mutant)
        click.echo(f"{'SURVIVED' if how is None else 'found'}: {mutant.name}" + (f" ({how})" if how else ""))
        survivors += [mutant.name] if how is None else []
    click.echo(f"{len(ROUTER_MUTANTS)} bugs planted, {len(ROUTER_MUTANTS) - len(survivors)} found")
    return {"is_well": not survivors, "planted": len(ROUTER_MUTANTS), "survivors": survivors}
