"""What happened under many seeds, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from novainfer.fsm.simulation.swarm.swarm import Seed


class Report(msgspec.Struct, kw_only=True):
    """Counts of everything under some seeds; `violations` and `failing_seeds` go together."""

    seeds: int = 0
    requests: int = 0
    tokens: int = 0
    moves: int = 0
    simulated_s: float = 0.0
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    rows: Counter[tuple[str, str, str]] = msgspec.field(default_factory=Counter)
    lengths: Counter[int] = msgspec.field(default_factory=Counter)  # requests by the tokens that were read of them
    at_once: Counter[int] = msgspec.field(default_factory=Counter)  # steps by the requests known when they ended
    violations: list[str] = []
    failing_seeds: list[int] = []
    trace_hash: str = ""


def run_seeds(seeds: Iterable[int], *, stop_at_first: bool = False) -> Report:
    """Run `seeds`; a violation is reported with the seed that reproduces it."""
    report = Report()
    trace = blake2b(digest_size=16)
    for seed in seeds:
        drawn = Seed(seed)
        world = drawn.world
        try:
            drawn.run()
        except Exception as error:  # whatever a machine raises is a finding
            report.violations.append(f"seed {seed}: {type(error).__name__}: {error}")
            report.failing_seeds.append(seed)
        trace.update(drawn.trace.digest())
        report.seeds += 1
        for client in world.clients.values():
            if client.was_let_in:
                report.lengths.update(map(len, client.tokens))
        report.moves += sum(n for (machine, _, _), n in world.taken.items() if machine != "Request")
        report.simulated_s += world.now_s
        report.faults.update({str(kind): count for kind, count in world.counts.items()})
        report.rows.update(world.taken)
        report.at_once.update(world.checks.at_once)
        if report.violations and stop_at_first:
            break
    report.requests = report.lengths.total()
    report.tokens = sum(length * count for length, count in report.lengths.items())
    report.trace_hash = trace.hexdigest()
    return report


def merge(reports: Iterable[Report]) -> Report:
    """One report of several, in their order; it does not matter who ran them."""
    whole = Report()
    trace = blake2b(digest_size=16)
    for report in reports:
        whole.seeds += report.seeds
        whole.requests += report.requests
        whole.tokens += report.tokens
        whole.moves += report.moves
        whole.simulated_s += report.simulated_s
        for name in ("faults", "rows", "lengths", "at_once"):
            getattr(whole, name).update(getattr(report, name))
        whole.violations = whole.violations + report.violations
        whole.failing_seeds = whole.failing_seeds + report.failing_seeds
        trace.update(bytes.fromhex(report.trace_hash))
    whole.trace_hash = trace.hexdigest()
    return whole


def median(counts: Counter[int]) -> int:
    """The median of what `counts` counts; 0 of nothing."""
    half = counts.total() / 2
    for value in sorted(counts):
        half -= counts[value]
        if half <= 0:
            return value
    return 0
