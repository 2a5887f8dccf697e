"""Seeds: each draws a world, a workload and a mix of faults, runs it, heals it, and demands that everything ends."""

from __future__ import annotations

import random
from collections import Counter
from hashlib import blake2b

import msgspec

from novainfer.fsm.events import Cause, Fault, Run
from novainfer.fsm.params import SamplingParams
from novainfer.fsm.simulation.world import Shape, Violation, World

MOVES_MAX = 60_000  # a world that has not ended by then never will
FAULTS = ("oom", "exception", "unlaunched", "cancel", "duplicate", "stall", "timeout")


class Report(msgspec.Struct, kw_only=True):
    """What happened under some seeds."""

    seeds: int = 0
    requests: int = 0
    tokens: int = 0
    moves: int = 0
    faults: dict[str, int] = {}
    rows: dict[str, int] = {}
    violations: list[str] = []
    trace_hash: str = ""


def run_seed(seed: int) -> tuple[World, str]:
    """Run one seed to its end; returns the world and the hash of its trace. Raises `Violation`."""
    rng = random.Random(seed)
    shape = Shape(
        num_blocks=rng.choice([6, 8, 12, 24]),
        block_size=rng.choice([1, 2, 4]),
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        max_num_batched_tokens=rng.choice([8, 16, 32]),
        prefill_chunk_tokens=rng.choice([3, 8, 16]),
        max_model_len=rng.choice([16, 24, 48]),
        max_num_queued_reqs=rng.choice([2, 8, 64]),
        enable_prefix_caching=rng.random() < 0.8,
    )
    world = World(shape)
    # The mix of faults is drawn too, log-uniform and often zero: a little of everything finds less than much of one.
    rates = {name: 10 ** rng.uniform(-3, -0.3) if rng.random() < 0.5 else 0.0 for name in FAULTS}
    trace = blake2b(digest_size=16)
    num_clients = rng.randint(1, 16)
    prefixes = [[rng.randrange(1, 255) for _ in range(rng.randint(1, 12))] for _ in range(2)]
    healed = False
    for turn in range(MOVES_MAX):
        if len(world.clients) < num_clients and world.scheduler.state != "STARTING" and rng.random() < 0.08:
            _arrive(world, rng, prefixes, rates["timeout"] > 0)
        if not healed and turn > 400 and len(world.clients) == num_clients:
            healed = True
            rates = dict.fromkeys(rates, 0.0)
        if not _move(world, rng, rates, trace) and len(world.clients) == num_clients:
            break
        world.check()
    else:
        raise Violation(f"{MOVES_MAX} moves did not end it: the engine is {world.engine.state}")
    world.check_end()
    return world, trace.hexdigest()


def _arrive(world: World, rng: random.Random, prefixes: list[list[int]], timeouts: bool) -> None:
    prompt = [*rng.choice([[], *prefixes]), *(rng.randrange(1, 255) for _ in range(rng.randint(0, 8)))]
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=rng.choice([1, 2, 8, 8, 16]),
        temperature=0.0,
        timeout_s=1.0 if timeouts and rng.random() < 0.3 else None,
    )
    as_text = rng.random() < 0.5
    world.arrive("".join(map(chr, prompt)) if as_text else prompt, params)


def _move(world: World, rng: random.Random, rates: dict[str, float], trace: blake2b) -> bool:
    """Make one move; False if there is none."""
    moves = world.moves()
    news = [s for s, stream in world.streams.items() if world.clients[s].end is None and stream.has_news]
    kinds = len(moves) + bool(news)
    if not kinds and not world.timers:
        return False
    if world.timers and rng.random() < (rates["timeout"] if kinds else 1.0):
        world.fire_timer(rng.randrange(len(world.timers)))
        trace.update(b"timer")
        return True
    open_streams = [s for s, c in world.clients.items() if c.end is None]
    if open_streams and rng.random() < rates["cancel"] / 8:
        stream_id = rng.choice(open_streams)
        world.cancel(stream_id, rng.choice([Cause.CLIENT, Cause.DISCONNECT]))
        trace.update(b"cancel %d" % stream_id)
        return True
    if (links := world.duplicable()) and rng.random() < rates["duplicate"]:
        world.duplicate(rng.choice(links))
    at = rng.randrange(kinds)
    if at == len(moves):
        if rng.random() < rates["stall"] and moves:
            return True  # the readers are slow
        stream_id = rng.choice(news)
        world.read(stream_id)
        trace.update(b"read %d" % stream_id)
        return True
    move = moves[at]
    if move.kind == "job" and isinstance(world.jobs[0], Run):
        launched = rng.random() >= (0.5 if rates["unlaunched"] else 0.0)
        for fault in (Fault.OOM, Fault.EXCEPTION):
            if rng.random() < rates[fault]:
                world.fail_job(fault, launched=launched)
                trace.update(fault.encode())
                return True
    trace.update(b"%d/%d" % (at, kinds))
    move.go()
    return True


def run_seeds(seeds: range, *, stop_at_first: bool = False) -> Report:
    """Run `seeds`; a violation is reported with the seed that reproduces it."""
    report = Report()
    faults: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    trace = blake2b(digest_size=16)
    for seed in seeds:
        report.seeds += 1
        try:
            world, digest = run_seed(seed)
        except AssertionError as error:
            report.violations.append(f"seed {seed}: {error}")
            if stop_at_first:
                break
            continue
        trace.update(digest.encode())
        report.requests += sum(client.arrive.params.n for client in world.clients.values())
        report.tokens += sum(len(t) for client in world.clients.values() for t in client.tokens)
        report.moves += sum(world.taken.values())
        faults.update({k: v for k, v in world.counts.items() if k != "steps"})
        rows.update({f"{m} {s} {e}": n for (m, s, e), n in world.taken.items()})
    report.faults = dict(sorted(faults.items()))
    report.rows = dict(sorted(rows.items()))
    report.trace_hash = trace.hexdigest()
    return report
