"""Seeds: each draws a world, a workload and a mix of faults, runs it, heals it, and demands that everything ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from novainfer.fsm.events import Cause, Fault, JobDone, Run
from novainfer.fsm.params import SamplingParams
from novainfer.fsm.simulation.device import VOCAB_SIZE
from novainfer.fsm.simulation.world import TO_WORKER, Move, Shape, World

MOVES_MAX = 60_000  # a world that has not ended by then never will
HEAL_AFTER_MOVES = 400
FAULTS = ("oom", "exception", "unlaunched", "cancel", "duplicate", "stall", "timeout", "encode", "reclaim")
STOPS = ["a", "ab", "bca", "c ", "\u00e9", "c\u20ac", "\U0001f600", "<sep>", "\ufffd"]


class Report(msgspec.Struct, kw_only=True):
    """What happened under some seeds."""

    seeds: int = 0
    requests: int = 0
    tokens: int = 0
    moves: int = 0
    faults: dict[str, int] = {}
    rows: dict[tuple[str, str, str], int] = {}
    violations: list[str] = []
    failing_seeds: list[int] = []
    trace_hash: str = ""


class Seed:
    """One seed: everything that it draws, and the world it drives."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        shape = Shape(
            num_blocks=rng.choice([6, 8, 12, 24]),
            block_size=rng.choice([1, 2, 4]),
            max_num_seqs=rng.choice([1, 2, 4, 8]),
            max_num_batched_tokens=rng.choice([8, 16, 32]),
            prefill_chunk_tokens=rng.choice([3, 8, 16]),
            max_model_len=rng.choice([16, 24, 48]),
            max_num_queued_reqs=rng.choice([2, 8, 64]),
            max_num_queued_tokens=rng.choice([20, 1 << 20, 1 << 20]),
            enable_prefix_caching=rng.random() < 0.8,
            stall_high=rng.choice([1, 2, 4, 16]),
            stall_low=rng.choice([0, 1]),
        )
        self.trace = blake2b(digest_size=16)
        self.world = World(shape, self.trace.update)
        # The mix of faults is drawn too, log-uniform, often zero: much of one finds more than a little of everything.
        self.rates = {name: 10 ** rng.uniform(-3, -0.3) if rng.random() < 0.5 else 0.0 for name in FAULTS}
        self.num_clients = rng.randint(1, 16)
        self.prefixes = [[rng.randrange(1, 255) for _ in range(rng.randint(1, 12))] for _ in range(2)]
        self.come_up_fails = rng.random() < 0.03
        self.lateness = 10 ** rng.uniform(-2.5, -0.3)
        self.frozen = {i for i in range(self.num_clients) if rng.random() < 0.3} if rng.random() < 0.25 else set()
        self.agenda: dict[int, list[Move]] = {}  # turn -> what the owner does
        self._plan_agenda()

    def _plan_agenda(self) -> None:
        rng = self.rng
        if rng.random() < 0.1:
            for _ in range(rng.randint(1, 3)):
                self._at(rng.choice([20, 200, 400]), ("cancel_all",))
        if rng.random() < 0.1:
            self._at(rng.choice([15, 400]), ("drain",))
            if rng.random() < 0.3:
                self._at(rng.choice([15, 400]), ("drain",))
        if rng.random() < 0.2:
            for _ in range(rng.choice([1, 1, 2])):
                to = rng.choice([("engine",), ("engine", "gate", "streams", "worker")])
                self._at(rng.choice([15, 100, 400]), ("stop", rng.choice([None, "injected"]), to))

    def _at(self, before: int, move: Move) -> None:
        self.agenda.setdefault(self.rng.randrange(before), []).append(move)

    def run(self) -> None:
        """Run to the end. Raises `AssertionError`, mostly `Violation`, or `IllegalEvent`."""
        world, rng = self.world, self.rng
        clients, num_clients = world.clients, self.num_clients
        healed = False
        for turn in range(MOVES_MAX):
            for move in self.agenda.pop(turn, ()):
                world.make(move)
            if len(clients) < num_clients and rng.random() < 0.08:
                is_early = not clients and world.gate.state == "STARTING"
                if not is_early or rng.random() < 0.1:
                    self._arrive()
            can_move = self._move()
            if len(clients) < num_clients or (can_move and turn < HEAL_AFTER_MOVES) or self.agenda:
                continue
            if not healed:
                healed = True
                self.rates = dict.fromkeys(self.rates, 0.0)
                self.frozen.clear()
            elif not can_move:
                break
        else:
            raise AssertionError(f"{MOVES_MAX} moves did not end it: the engine is {world.engine.state}")
        if world.is_draining and not world.is_stopped:  # the owner waits for the last one, and stops
            world.checks.drained()
            world.stop(None)
            while self._move():
                pass
        world.checks.end()

    def _arrive(self) -> None:
        rng, shape = self.rng, self.world.shape
        length = rng.choice([0, 1, 2, 3, 5, 8]) if rng.random() < 0.97 else shape.context_len
        prompt = [*rng.choice([[], *self.prefixes]), *(rng.randrange(1, 255) for _ in range(length))]
        draw = rng.random
        max_tokens = rng.choice([1, 2, 8, 8, 16, None])
        stops = draw() < 0.4
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3]),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens or 8) if draw() < 0.2 else 0,
            stop=[rng.choice(STOPS) for _ in range(rng.randint(1, 3))] if stops else None,
            stop_token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(6)] if draw() < 0.2 else [],
            include_stop_str_in_output=stops and draw() < 0.4,
            ignore_eos=draw() < 0.2,
            skip_special_tokens=draw() < 0.8,
            logprobs=rng.randrange(3) if draw() < 0.15 else None,
            temperature=0.0,
            timeout_s=1.0 if self.rates["timeout"] and draw() < 0.3 else None,
            max_queue_s=1.0 if self.rates["timeout"] and draw() < 0.3 else None,
        )
        as_text = draw() < 0.5
        self.world.arrive("".join(map(chr, prompt)) if as_text else prompt, params, seed=rng.randint(1, 3))

    def _move(self) -> bool:
        """Make one move; False if there is none."""
        world, rng, rates = self.world, self.rng, self.rates
        moves = world.moves()
        news = world.news()
        if self.frozen and news:
            news = [s for s in news if s not in self.frozen]
        kinds = len(moves) + bool(news)
        if not kinds and not world.timers and not world.late:
            return False
        if world.timers and rng.random() < (rates["timeout"] if kinds else 1.0):
            world.fire_timer(rng.randrange(len(world.timers)))
            return True
        if world.late and rng.random() < (self.lateness if kinds else 1.0):
            world.come_late(rng.randrange(len(world.late)))
            return True
        if rates["cancel"] and world.clients and rng.random() < rates["cancel"] / 8 and self._cancel():
            return True
        if rates["duplicate"] and rng.random() < rates["duplicate"]:
            self._repeat()
        at = rng.randrange(kinds)
        if at == len(moves):
            if rates["stall"] and moves and rng.random() < rates["stall"]:
                return True  # the readers are slow
            world.read(rng.choice(news))
            return True
        move = moves[at]
        if move[0] == "finish_job":
            move = self._outcome()
        elif move[0] == "encode" and rates["encode"] and rng.random() < rates["encode"]:
            move = ("fail_encode", move[1])
        world.make(move)
        return True

    def _outcome(self) -> Move:
        """What becomes of the device's oldest job."""
        rng, rates, job = self.rng, self.rates, self.world.jobs[0]
        if isinstance(job, Run):
            for fault in (Fault.OOM, Fault.EXCEPTION):
                if rates[fault] and rng.random() < rates[fault]:
                    return "fail_step", fault, rng.random() >= (0.5 if rates["unlaunched"] else 0.0)
            return ("finish_job",)
        kind = type(job).__name__
        if kind == "Reclaim":
            fails = rng.random() < rates["reclaim"]
        elif kind == "Close":
            fails = rng.random() < 0.1
        else:
            fails = self.come_up_fails and rng.random() < 0.5
        return ("fail_job",) if fails else ("finish_job",)

    def _cancel(self) -> bool:
        rng, world = self.rng, self.world
        let_in = [s for s, c in world.clients.items() if c.was_let_in and (c.end is None or rng.random() < 0.1)]
        if not let_in:
            return False
        stream_id = rng.choice(let_in)
        if world.clients[stream_id].end is None and rng.random() < 0.2:
            world.abandon(stream_id)
        else:
            world.cancel(stream_id, rng.choice([Cause.CLIENT, Cause.DISCONNECT]))
        return True

    def _repeat(self) -> None:
        rng, world = self.rng, self.world
        if links := world.repeatable():
            link = rng.choice(links)
            if link == TO_WORKER and isinstance(world.links[link][0], JobDone) and rng.random() < 0.3:
                world.contradict(link)
            else:
                world.duplicate(link)


def run_seed(seed: int) -> tuple[World, str]:
    """Run one seed to its end; returns the world and the hash of its trace. Raises `AssertionError`."""
    drawn = Seed(seed)
    drawn.run()
    return drawn.world, drawn.trace.hexdigest()


def run_seeds(seeds: Iterable[int], *, stop_at_first: bool = False) -> Report:
    """Run `seeds`; a violation is reported with the seed that reproduces it."""
    report = Report()
    faults: Counter[str] = Counter()
    rows: Counter[tuple[str, str, str]] = Counter()
    trace = blake2b(digest_size=16)
    for seed in seeds:
        report.seeds += 1
        drawn = Seed(seed)
        world = drawn.world
        try:
            drawn.run()
        except Exception as error:  # whatever a machine raises is a finding
            report.violations.append(f"seed {seed}: {type(error).__name__}: {error}")
            report.failing_seeds.append(seed)
            if stop_at_first:
                break
        trace.update(drawn.trace.digest())
        report.requests += sum(client.arrive.params.n for client in world.clients.values() if client.was_let_in)
        report.tokens += sum(len(t) for client in world.clients.values() for t in client.tokens)
        report.moves += sum(n for (machine, _, _), n in world.taken.items() if machine != "Request")
        faults.update(world.counts)
        rows.update(world.taken)
    report.faults = {str(name): count for name, count in sorted(faults.items())}
    report.rows = dict(sorted(rows.items()))
    report.trace_hash = trace.hexdigest()
    return report


def merge(reports: Iterable[Report]) -> Report:
    """One report of several, in their order; it does not matter who ran them."""
    whole = Report()
    faults: Counter[str] = Counter()
    rows: Counter[tuple[str, str, str]] = Counter()
    trace = blake2b(digest_size=16)
    for report in reports:
        whole.seeds += report.seeds
        whole.requests += report.requests
        whole.tokens += report.tokens
        whole.moves += report.moves
        whole.violations = whole.violations + report.violations
        whole.failing_seeds = whole.failing_seeds + report.failing_seeds
        faults.update(report.faults)
        rows.update(report.rows)
        trace.update(bytes.fromhex(report.trace_hash))
    whole.faults = dict(sorted(faults.items()))
    whole.rows = dict(sorted(rows.items()))
    whole.trace_hash = trace.hexdigest()
    return whole
