"""Seeds: each draws a world, a workload and a mix of faults, runs it, heals it, and demands that everything ends.

Time is simulated: a message takes `hop_s`, a step milliseconds, a restart seconds, a slow reader minutes, and when
nothing else is left to do the clock jumps to what is due next. A timer fires when it is due; only the faults "early"
and "jump" (the machine slept) say otherwise.
"""

from __future__ import annotations

import math
import random
from hashlib import blake2b
from typing import Any

from novainfer.fsm.device.compiling import COMPILE_LIMIT_S
from novainfer.fsm.device.roster import Find, Open
from novainfer.fsm.health import PERIOD_S
from novainfer.fsm.messages.events import Cause, Close, Fault, Fit, JobDone, Load, Reclaim, Run, Spawn, Switch, Warm
from novainfer.fsm.messages.mode import PRECISIONS
from novainfer.fsm.messages.tenant import ANYONE, Tenant
from novainfer.fsm.simulation.checks.health import DEADLINE_S, Hang, Observer, Rounds
from novainfer.fsm.simulation.checks.retry import Steady
from novainfer.fsm.simulation.swarm.crashes import PLAGUES, draw_crashes
from novainfer.fsm.simulation.swarm.kin import Kin
from novainfer.fsm.simulation.swarm.mix import PER_EVENT, Mix
from novainfer.fsm.simulation.world import faults
from novainfer.fsm.simulation.world.broken import NO_NUMBER, Broken, Relapse
from novainfer.fsm.simulation.world.clock import Clock
from novainfer.fsm.simulation.world.conversations import CONVERSING_EVERY, Conversations
from novainfer.fsm.simulation.world.costs import costing
from novainfer.fsm.simulation.world.device import POISON_HANG
from novainfer.fsm.simulation.world.drafts import going_ahead, speculating
from novainfer.fsm.simulation.world.grammars import CONSTRAINED_EVERY, constrained
from novainfer.fsm.simulation.world.moves import MOVES, Move, is_possible
from novainfer.fsm.simulation.world.pace import Pace, Paces
from novainfer.fsm.simulation.world.pools import POOLED_EVERY, pooled
from novainfer.fsm.simulation.world.resumed import RESUMED_EVERY, draw_committed
from novainfer.fsm.simulation.world.shape import modes_against
from novainfer.fsm.simulation.world.shortage import STEP_DEADLINE_S, Scarcity, Shortage
from novainfer.fsm.simulation.world.tenants import TENANTED_EVERY, Tenants
from novainfer.fsm.simulation.world.world import TO_WORKER, Timer, World

BOTH_EVERY = 4 * TENANTED_EVERY  # has tenants, each with conversations of its own
STOPPED_EVERY = 8  # one seed of so many stops while its processes do something rare
STOPPED_IN = ("SPARED", "PROBING", "NEW", "SPARED", "PROBING", "EMPTY", "FINDING", "PROBING", "HOLDING")
LARGE_EVERY = 100  # one seed of so many has thousands of clients
UNEVEN_EVERY = 9  # has short prompts beside long ones, and much room; in every other of these many begin alike
STEADY_EVERY = 60  # has equal requests that come faster than they are computed
PACED_EVERY = 60  # has steps that take their time by what they hold
CROWD_EVERY = 50  # has more that wait than a step looks at
SLOW_EVERY = 11  # has a slow tokenizer, and clients in a hurry
LANGUID_EVERY = 40  # has slow readers, more than can be parked
SCARCE_EVERY = 25  # has a shortage, and no other fault
CRASHING_EVERY = 12  # loses its processes again and again
SLOW_STEP_EVERY = 25  # has steps of seconds, and a watch that looks on
RELAPSE_EVERY = 40  # has a device that fails again whenever the first mode is tried again, and no other fault
RECONFIGURED_EVERY = 5  # is reconfigured while it works
LOOKS_MAX = 1000  # of one round of the watch: four minutes
FREEZE_ODDS = 0.05  # of each look at which nothing else happens
TURNS_MAX = 40_000  # a world that has not ended by then never will; so many for each 48 clients
# Seconds that a job takes, at most; steps have their own.
JOB_S: dict[type, float] = {
    Open: 1.0,
    Find: 1.0,
    Spawn: 2.0,
    Load: 10.0,
    Fit: 0.1,
    Warm: 1.0,
    Switch: 0.5,
    Reclaim: 0.02,
    Close: 0.1,
}
STEP_TOKENS = 32  # a step of so many tokens takes twice as long as an empty one
HANG_ODDS: dict[type, float] = {Load: 0.15, Fit: 0.05, Warm: 0.05}  # where steps hang; of all others below
HANG_ODDS_ELSE = 0.2
SLOW_LOAD_S, SIGN_S = 600.0, 100.0  # a load may take so long, and says so often that it gets on
SLOW_LOAD_EVERY = 20  # has a large model on a slow disk: its first worker reads for minutes, and gets on
LARGE_LOAD_S, LARGE_SIGN_S = (125.0, 400.0), (2.0, 110.0)
HANG_S = (0.5, 60.0)  # after which the watchdog says so, by missed heartbeats or by the deadline of a step
COMPILE_HANG_ODDS = (0.0, 0.0, 0.05, 0.5)  # of each grammar; one of them in a seed
COMPILE_HANG_S = (0.5, 2.0)  # times what a grammar may take
SPARE_HANG_ODDS = 0.1  # of each of its jobs
LAUNCHES_FAIL = 2.0  # times as often as a step that is alone on the device
KEPT_ODDS, KEPT_S = 0.2, (5.0, 300.0)  # a process that is killed and does not end: it waits for a disk, or a driver
LOOK_COUNTS_S = 0.5  # of a sleep for the watch, at most
SEEDS = (1, 2, 2**64 - 1)  # of streams; behind the last one its choices count on from 0
JUMP_S = (10.0, 3600.0)  # for how long a machine sleeps


class Seed:
    """One seed: everything that it draws, and the world it drives."""

    def __init__(self, seed: int, *, keeps_path: bool = False, world_type: type[World] = World) -> None:
        self.rng = random.Random(seed)
        pace = Pace(seed) if seed % PACED_EVERY == PACED_EVERY // 2 + 1 else None
        is_scarce = seed % SCARCE_EVERY == SCARCE_EVERY - 2 or pace is not None
        is_crashing = seed % CRASHING_EVERY == CRASHING_EVERY - 2 and not is_scarce
        is_slow_step = seed % SLOW_STEP_EVERY == SLOW_STEP_EVERY // 3 and not is_crashing
        kin = None if is_scarce or is_crashing or is_slow_step else draw_kin(seed)
        is_odd = is_scarce or is_crashing or is_slow_step or kin is not None or seed % LARGE_EVERY == LARGE_EVERY - 1
        steady = Steady(seed) if seed % STEADY_EVERY == STEADY_EVERY // 15 and not is_odd else None
        self.mix = Mix(
            self.rng,
            is_large=seed % LARGE_EVERY == LARGE_EVERY - 1,
            is_uneven=seed % UNEVEN_EVERY == UNEVEN_EVERY - 1,
            is_slow=seed % SLOW_EVERY == SLOW_EVERY - 1 and not is_scarce,
            is_languid=seed % LANGUID_EVERY == LANGUID_EVERY - 3 and not is_odd,
            is_scarce=is_scarce,
            plague=PLAGUES[seed // CRASHING_EVERY % len(PLAGUES)] if is_crashing else None,
            is_slow_step=is_slow_step,
            kin=kin,
            pace=pace,
            steady=steady,
        )
        self._broken = Broken(seed, may_be=not is_scarce and not is_crashing and steady is None)
        self.mix.shape = self._broken.shape(self.mix.shape)
        has_relapses = seed % RELAPSE_EVERY == RELAPSE_EVERY // 3 and not is_odd and steady is None
        self._relapse = Relapse(seed) if has_relapses else None
        if self._relapse is not None:
            self.mix.shape = self._relapse.shape(self.mix.shape)
            self.mix.burst, self.mix.burst_gap_s = self._relapse.burst, self._relapse.burst_gap_s
            self.mix.rates = dict.fromkeys(self.mix.rates, 0.0)
            self.mix.come_up_fails, self.mix.is_brisk = False, True
        self.mix.shape = costing(seed, going_ahead(seed, speculating(seed, self.mix.shape)))
        may_share = not is_odd and not has_relapses and steady is None
        self._tenants = Tenants(seed) if seed % TENANTED_EVERY == TENANTED_EVERY - 1 and may_share else None
        if self._tenants is not None:
            self.mix.shape = self._tenants.shape(self.mix.shape)
        # Seeds that converse are even, and tenants' are odd: in some of those both meet.
        is_conversing = (seed % CONVERSING_EVERY == CONVERSING_EVERY // 2 or seed % BOTH_EVERY == 5) and may_share
        self._conversations = Conversations(seed) if is_conversing else None
        if self._conversations is not None:
            self.mix.shape = self._conversations.shape(self.mix.shape)
            self.mix.num_clients += self._conversations.num_more
        self._launches = random.Random(seed * 1_000_003 + 13)  # of its own: every other draw stays what it was
        has_grammars = seed % CONSTRAINED_EVERY == CONSTRAINED_EVERY // 2 and not is_odd and not has_relapses
        self._grammars = random.Random(seed * 1_000_003 + 17) if has_grammars and steady is None else None
        has_pools = seed % POOLED_EVERY == POOLED_EVERY // 2 and not is_odd and not has_grammars
        self._pools = random.Random(seed * 1_000_003 + 19) if has_pools and steady is None else None
        has_resumed = seed % RESUMED_EVERY == RESUMED_EVERY // 2 and not is_odd and steady is None
        self._resumed = random.Random(seed * 1_000_003 + 23) if has_resumed else None
        self._compiles = random.Random(seed * 1_000_003 + 29)  # of its own, as well
        self._compile_hangs = self._compiles.choice(COMPILE_HANG_ODDS)
        self._mask_s = 10 ** self._grammars.uniform(-4.5, -1) if self._grammars is not None else 0.0
        self.trace = blake2b(digest_size=16)
        self.clock = Clock()
        self.path: list[Move] | None = [] if keeps_path else None
        self._now_s = 0.0  # of the last move on the path
        self._rates = self.mix.rates
        self._is_healed = False
        self._num_timers = 0
        self._last_set: dict[Any, int] = {}  # timers, and which setting was their last
        self._job = 0  # number of the job that the device does
        self._is_hung = False
        self._reading: set[int] = set()  # streams whose reader is on its way
        self._turn = 0
        self._turns_max = TURNS_MAX * max(self.mix.num_clients // 48, 3 if is_scarce else 1)
        self._next_mischief = self._turns_max
        self._mischief: list[tuple[str, float]] = []
        self._stop_in = ""
        self._draw_mischief()
        self.world = world_type(self.mix.shape, self.trace.update, self)
        if self.mix.shortage is not None:
            assert self.world.audit is not None
            self.world.audit.scarcity = Scarcity(self.world, self.mix.shortage)
            self.world.audit.paces = Paces(self.world) if pace is not None else None
        if steady is not None:
            assert self.world.audit is not None
            self.world.audit.retry.is_steady = True
        self._arrivals = self.mix.num_clients
        self._expect_client(0.0 if self.rng.random() < 0.02 else 60.0)
        if not (self.mix.is_scarce or is_crashing or has_relapses or steady is not None):
            self._plan_agenda()
        if self.mix.plague is not None:
            until_s = 60 + self.mix.num_clients // self.mix.burst * self.mix.burst_gap_s
            for at_s, kind in draw_crashes(self.rng, self.mix.plague, self.mix.shape, 15.0, until_s):
                self._after(at_s, self._crash, kind)
        if self.mix.has_slow_steps:
            for _ in range(3):
                self._after(self._moment_s(), self._go_round, Rounds(self.world), LOOKS_MAX)
        if not is_odd and not has_relapses and steady is None and seed % RECONFIGURED_EVERY == RECONFIGURED_EVERY // 2:
            self._plan_reconfigurations(random.Random(seed * 1_000_003 + 7))
        self._spells = [] if is_crashing or has_relapses or steady is not None else self._draw_spells()
        self._stop_in = self._plan_stop(seed)  # the roster's state in which all is stopped
        self._slow_load: tuple[float, float] | None = None  # how long the next load takes, and how often it gets on
        if seed % SLOW_LOAD_EVERY == SLOW_LOAD_EVERY // 4 and not is_odd and steady is None:
            own = random.Random(seed * 1_000_003 + 5)  # every other draw stays what it was
            self._slow_load = own.uniform(*LARGE_LOAD_S), own.uniform(*LARGE_SIGN_S)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end. Raises `AssertionError`, mostly `Violation`, or `IllegalEvent`."""
        self._go_on()
        world = self.world
        if world.is_draining and not world.is_stopped:  # the owner waits for the last one, and stops
            world.checks.drained()
            self._make("stop", None)
            self._go_on()
        world.checks.end()
        assert world.audit is not None
        world.audit.end()

    def _go_on(self) -> None:
        """Until nothing can happen any more."""
        world, clock, audit = self.world, self.clock, self.world.audit
        assert audit is not None
        busy, draw, hop_s = world.busy, self.rng.random, self.mix.hop_s
        for turn in range(self._turn + 1, self._turns_max):
            self._turn = turn
            if turn >= self._next_mischief:
                self._do_mischief()
            if clock.is_due(world.now_s):
                _, call, args = clock.pop()
                call(*args)
            elif busy:
                self._make("deliver", busy[int(draw() * len(busy))])
                world.now_s += hop_s
            elif len(clock):
                audit.still()
                if not world.jobs and not self._is_hung and not (world.processes and world.processes.is_busy):
                    world.checks.quiet()
                    audit.quiet()
                world.now_s, call, args = clock.pop()
                call(*args)
            elif world.late:
                self._make("come_late", int(draw() * len(world.late)))
            else:
                return
        raise AssertionError(f"{self._turns_max} turns did not end it: the engine is {world.engine.state}")

    def _make(self, kind: str, *args: Any) -> None:
        world = self.world
        if self.path is not None:
            if world.now_s > self._now_s + 1e-3:
                self.path.append(("wait", world.now_s - self._now_s))
                self._now_s = world.now_s
            self.path.append((kind, *args))
        MOVES[kind][0](world, *args)

    def _after(self, delay_s: float, call: Any, *args: Any) -> None:
        self.clock.at(self.world.now_s + delay_s, call, *args)

    def _heal(self) -> None:
        """No more faults from now on; what is hung was noticed, and slow readers hurry up."""
        self._is_healed = True
        self._rates = self.mix.rates = dict.fromkeys(self._rates, 0.0)
        self._draw_mischief()

    # ---- clients -------------------------------------------------------------------------------------------------

    def _expect_client(self, delay_s: float) -> None:
        self._after(delay_s, self._arrive)

    def _arrive(self) -> None:
        prompt, params, seed = self.mix.prompt(), self.mix.params(), SEEDS[self.rng.randint(0, 2)]
        if self._grammars is not None:
            params = constrained(self._grammars, params) or params
        if self._pools is not None:
            params = pooled(self._pools, params)
        whose: tuple[Tenant, ...] = ()
        if self._tenants is not None:
            params, whose = self._tenants.wishes(params), (self._tenants.next(),)
        if self._conversations is not None:
            prompt, params = self._conversations.goes_on(self.world, prompt, params, whose)
            name = self._conversations.ended()
            if name is not None and self.world.scheduler.sessions:
                self._make("end_session", whose[0].id if whose else "", name)
        num_committed = draw_committed(self._resumed, params) if self._resumed is not None else ()
        if num_committed:
            self._make("arrive", prompt, params, seed, *(whose or (ANYONE,)), num_committed)
        else:
            self._make("arrive", prompt, params, seed, *whose)
        self._arrivals -= 1
        if self._arrivals:
            gap_s = self.mix.arrival_gap_s(len(self.world.clients))
            self._expect_client(gap_s if self._conversations is None else self._conversations.gap_s())
        else:
            self._after(self.mix.heal_after_s, self._heal)

    def prompt_came(self, stream_id: int) -> None:
        """The tokenizer takes a moment."""
        self._after(self.rng.random() * self.mix.encode_s, self._encode, stream_id)

    def _encode(self, stream_id: int) -> None:
        fails = self._rates["encode"] and self.rng.random() < self._rates["encode"]
        self._make("fail_encode" if fails else "encode", stream_id)

    def compile_begun(self, thread: int) -> None:
        """It takes a moment; or returns when nobody waits for it any more, or never."""
        own = self._compiles
        if own.random() >= self._compile_hangs:
            self._after(self._mask_s * own.random(), self._compile, thread)
        elif own.random() < 0.5:
            self._after(COMPILE_LIMIT_S * own.uniform(*COMPILE_HANG_S), self._compile, thread)

    def _compile(self, thread: int) -> None:
        if is_possible(self.world, ("compile", thread)):
            self._make("compile", thread)

    def mask_wanted(self, request_id: int) -> None:
        """It takes a moment, and now and then a long one."""
        own = self._grammars
        assert own is not None, "no client has asked for a grammar"
        slow = 100.0 if own.random() < 0.02 else 1.0
        self._after(slow * self._mask_s * own.random(), self._make_mask, request_id)

    def _make_mask(self, request_id: int) -> None:
        if is_possible(self.world, ("mask", request_id)):
            self._make("mask", request_id)

    def news_came(self, stream_id: int) -> None:
        """The reader comes in its own time, unless it is on its way already."""
        if stream_id not in self._reading:
            self._reading.add(stream_id)
            self._after(self.mix.reading_gap_s(stream_id), self._read, stream_id)

    def _read(self, stream_id: int) -> None:
        self._reading.discard(stream_id)
        stream, client = self.world.streams.get(stream_id), self.world.clients[stream_id]
        if stream is None or client.end is not None or not stream.has_news:
            return
        self._make("read", stream_id)
        if client.end is None and stream.has_news:
            self.news_came(stream_id)

    # ---- time ----------------------------------------------------------------------------------------------------

    def timer_set(self, timer: Timer, delay_s: float) -> None:
        """It fires when it is due, unless it has fired early, was dropped, or was set again."""
        self._after(delay_s, self._fire, timer, self._set(timer))

    def _set(self, timer: Any) -> int:
        """How often a timer was set up to now: the last one counts."""
        self._num_timers += 1
        self._last_set[timer] = self._num_timers
        return self._num_timers

    def _fire(self, timer: Timer, number: int) -> None:
        if timer in self.world.timers and self._last_set[timer] == number:
            self._make("fire_timer", timer)

    # ---- the device ----------------------------------------------------------------------------------------------

    def job_begun(self, job: Any) -> None:
        """The device takes its time, or never comes back."""
        rng = self.rng
        self._job += 1
        self._is_hung = False
        if not isinstance(job, Run):
            if isinstance(job, Load) and self._slow_load is not None:
                self._load_slowly(*self._slow_load)
                return
            if self._hangs_in(job):
                return
            self._after(JOB_S[type(job)] * self.mix.jobs_s * rng.random(), self._finish, self._job)
            return
        if self.mix.shortage is not None:
            self._run_short(job, self.mix.shortage)
            return
        fate = self._fate(job)
        device, spite = self.world.device, 0.0 if self._is_healed else self.mix.spite
        will_fail = fate or (device is not None and device.poison(job.plan) is not None)
        if will_fail and spite and rng.random() < spite:
            self._spoil_sport()
        if fate == "hang":
            self._is_hung = True
            if self.mix.is_watched and not self.world.is_stopped:
                self._observe(Hang("worker", Run, rng.random() < 0.3, is_cold=False))
            else:
                self._after(rng.choice(HANG_S), self._overdue, self._job)
            return
        num_tokens = len(job.plan.input_ids)
        duration_s = self.mix.step_s * (1 + num_tokens / STEP_TOKENS) * (0.5 + rng.random())
        self._after(duration_s, self._finish, self._job, fate, duration_s)

    def may_launch(self) -> None:
        """The device's thread takes a moment, in which the step before may end."""
        self._after(self._launches.random() * self.mix.step_s / 2, self._launch)

    def _launch(self) -> None:
        if not is_possible(self.world, ("launch",)):
            return
        for fault in (Fault.OOM, Fault.EXCEPTION):
            if self._rates[fault] and self._launches.random() < LAUNCHES_FAIL * self._rates[fault]:
                self._make("fail_launch", fault)
                return
        self._make("launch")

    def _is_unsendable(self) -> bool:
        """Whether no message can carry the answer: as rare as other faults, where two steps are on the device."""
        rate = self._rates[Fault.EXCEPTION] if self.mix.shape.computes_beside else 0.0
        return bool(rate) and self._launches.random() < rate / 2

    def _run_short(self, job: Run, shortage: Shortage) -> None:
        """A step while something is short, and nothing else is wrong."""
        shortage.step()
        num_tokens = len(job.plan.input_ids)
        took_s = shortage.took_s(job.plan) or self.mix.step_s * (1 + num_tokens / STEP_TOKENS)
        if took_s >= STEP_DEADLINE_S:
            self._is_hung = True
            self._after(STEP_DEADLINE_S, self._overdue, self._job)
        elif not shortage.is_too_much(job.plan):
            self._after(took_s, self._finish, self._job, "", took_s)
        elif shortage.kind == "deadly":
            self._after(took_s / 2, self._make, "die")
        else:
            self._after(took_s / 2, self._finish, self._job, Fault.OOM)

    def _load_slowly(self, took_s: float, sign_s: float) -> None:
        """A large model is read, and each tensor is a sign that it gets on."""
        self._slow_load = None
        self.world.counts["a load of minutes"] += 1
        self._after(took_s, self._finish, self._job)
        self._observe(Hang("worker", Load, is_silent=False, is_cold=True, seconds_per_sign=sign_s))

    def _hangs_in(self, job: Any) -> bool:
        """Whether a job that is no step never ends, or takes hours: where there is a watch to notice it."""
        kind, draw = type(job), self.rng.random
        processes = self.world.processes
        if processes is not None and processes.is_hung:
            self._is_hung = True
            self._observe(Hang("worker", kind, is_silent=False, is_cold=True))
            return True
        may_hang = self.mix.is_watched and self._rates["hang"] and kind in DEADLINE_S and not self.world.is_stopped
        if not may_hang or draw() >= HANG_ODDS.get(kind, HANG_ODDS_ELSE):
            return False
        if self.world.worker.epoch == 0 and kind in (Load, Fit, Warm) and not self.mix.come_up_fails:
            return False
        self.world.counts[f"{kind.__name__} hangs"] += 1
        process = processes.roster.worker if processes is not None else None
        is_warm = process.is_warm if process is not None else self.world.worker.is_same_device  # it makes another cache
        is_cold = kind in (Load, Fit, Warm) and not is_warm
        if kind is Load and draw() < 0.3:
            self._observe(Hang("worker", kind, is_silent=False, is_cold=True, seconds_per_sign=SIGN_S))
            self._after(SLOW_LOAD_S * draw(), self._finish, self._job)
        else:
            self._is_hung = True
            self._observe(Hang("worker", kind, draw() < 0.3, is_cold))
        return True

    def _observe(self, hang: Hang) -> None:
        self._look(Observer(self.world, hang), hang, self._job if hang.actor == "worker" else self._spare())

    def _spare(self) -> int:
        return self.world.processes.spare if self.world.processes is not None else -1

    def _look(self, observer: Observer, hang: Hang, number: int) -> None:
        """Look again and again, until it is noticed, or is over for another reason."""
        world, is_workers = self.world, hang.actor == "worker"
        while number == (self._job if is_workers else self._spare()) and (world.jobs or not is_workers):
            if world.is_stopped:
                if is_workers:
                    self._overdue(number)
                return
            if observer.look():
                self._make("overdue" if is_workers else "spare_overdue")
                if is_workers:
                    self._after(1.0, self._overdue, number)
                return
            if world.busy or self.clock.is_due(world.now_s + PERIOD_S):
                self._after(PERIOD_S, self._look, observer, hang, number)
                return
            world.now_s += PERIOD_S

    def _go_round(self, rounds: Rounds, looks: int) -> None:
        """Look at all machines, so many times; where all rests, one of them may take no turns for a while."""
        world, rng = self.world, self.rng
        for look in range(looks, 0, -1):
            if world.is_stopped:
                return
            rounds.look()
            if world.busy or self.clock.is_due(world.now_s + PERIOD_S):
                rounds.thaw()
                self._after(PERIOD_S, self._go_round, rounds, look - 1)
                return
            if rng.random() < FREEZE_ODDS:
                world.counts["an actor that takes no turns"] += 1
                rounds.freeze(rng.choice(sorted(world.machines)))
            world.now_s += PERIOD_S

    def _fate(self, job: Run) -> str | Fault:
        """What becomes of a step."""
        device, rates, draw = self.world.device, self._rates, self.rng.random
        if self._relapse is not None:
            return self._relapse.fault_of(job.plan)
        if device is not None and (poison := device.poison(job.plan)) is not None:
            return "hang" if poison == POISON_HANG else ""
        if not self._is_healed and self._broken.is_there:
            is_canary = any(f.canary for f in self.world.scheduler.flights if f.step_id == job.plan.step_id)
            if fault := self._broken.fault_of(job.plan, self.world.now_s, is_canary=is_canary):
                return fault
        if device is not None and device.mode == self.mix.shape.modes[0] == self.world.modes[0] and not self._is_healed:
            for begin_s, end_s, fault in self._spells:
                if begin_s <= self.world.now_s < end_s:
                    return fault
        for fate in (Fault.OOM, Fault.EXCEPTION, "hang"):
            if rates[fate] and draw() < rates[fate]:
                return fate
        return ""

    def _draw_spells(self) -> list[tuple[float, float, Fault]]:
        """From when to when every step of the first mode fails, whatever it holds: what a ladder is there for."""
        rng = self.rng
        first, *others = self.mix.shape.modes
        faults = (Fault.OOM, Fault.EXCEPTION)
        found = [fault for fault in faults if any(mode in others for mode in modes_against(fault, first))]
        if not found or rng.random() < 0.5:
            return []
        begins = [self._moment_s() for _ in range(rng.randint(1, 3))]
        return [(at_s, at_s + 10 ** rng.uniform(-1.5, 1), rng.choice(found)) for at_s in begins]

    def _spoil_sport(self) -> None:
        """Some, all, or all but one of the clients in the step that will fail go away before it does."""
        rng, flight = self.rng, self.world.scheduler.oldest_flight
        stream_ids = sorted({request.stream_id for request, _, _ in flight.rows}) if flight is not None else []
        leaving = rng.sample(stream_ids, rng.choice([1, len(stream_ids) - 1, len(stream_ids)]) if stream_ids else 0)
        for stream_id in leaving:
            self._after(self.mix.step_s * rng.random() / 2, self._leave, stream_id)

    def _leave(self, stream_id: int) -> None:
        if self.world.clients[stream_id].end is None:
            self._make("cancel", stream_id, Cause.CLIENT)

    def _finish(self, number: int, fate: str | Fault = "", took_s: float = 0.0) -> None:
        """The device's job is over, if it is still this one."""
        world, draw = self.world, self.rng.random
        if number != self._job or not world.jobs:
            return
        job = world.jobs[0]
        if isinstance(job, Run) and self._is_unsendable():
            self._make("unsend")
        elif isinstance(fate, Fault):
            self._make("fail_step", fate, draw() >= (0.5 if self._rates["unlaunched"] else 0.0))
        elif fate == NO_NUMBER:
            self._make("no_number")
        elif not isinstance(job, Run) and draw() < self._odds_to_fail(job):
            self._make("fail_job")
        else:
            self._make("finish_job", took_s)

    def _odds_to_fail(self, job: Any) -> float:
        if isinstance(job, Close):
            return 0.1
        if self.world.worker.epoch == 0 and isinstance(job, Open | Find | Spawn | Load | Fit | Warm):
            return 0.5 if self.mix.come_up_fails else 0.0
        rare = isinstance(job, Switch) and not self._is_healed and self._relapse is None  # there are so few of them
        return 0.25 if rare else self._rates["job"]

    def process_move(self, kind: str, delay_s: float, *args: Any) -> None:
        """Timers are punctual; what processes do takes its time."""
        processes = self.world.processes
        if self._stop_in and processes is not None and processes.roster.state == self._stop_in:
            self._stop_in = ""
            self._after(0.0, self._stop_there)
        if kind == "roster_timer":
            name = type(args[0]).__name__
            self._after(delay_s, self._fire_rosters, name, self._set(name))
            return
        delay_s = delay_s * self.rng.random() * 5 + self.mix.hop_s
        if kind == "reap" and self._rates["hang"] and self.rng.random() < KEPT_ODDS:
            self.world.counts["a process that does not end"] += 1
            delay_s = self.rng.uniform(*KEPT_S)
        self._after(delay_s, self._process_move, kind, *args)

    def _fire_rosters(self, name: str, number: int) -> None:
        if self._last_set[name] == number:
            self._process_move("roster_timer", name)

    def _process_move(self, kind: str, *args: Any) -> None:
        if not is_possible(self.world, (kind, *args)):
            return
        if kind == "spare_job" and self._spare_hangs(*args):
            return
        odds = self._rates.get("spare_job", self._rates["job"]) if kind == "spare_job" else 0.0
        fails = odds and self.rng.random() < odds
        self._make("fail_spare_job" if fails else kind, *args)

    def _spare_hangs(self, serial: int) -> bool:
        """Whether the job of a spare never ends, while it beats on: where there is a watch to notice it."""
        processes, world = self.world.processes, self.world
        assert processes is not None
        real = processes.all[serial]
        may_hang = self.mix.is_watched and self._rates["hang"] and isinstance(real.jobs[0], Load | Fit | Warm)
        if not may_hang or world.is_stopped or serial != processes.spare or self.rng.random() >= SPARE_HANG_ODDS:
            return False
        self._make("hang_spare", serial)
        self._observe(Hang("spare", type(real.jobs[0]), is_silent=False, is_cold=True))
        return True

    def _overdue(self, number: int) -> None:
        if number != self._job or not self._is_hung:
            return
        if self.world.is_stopped:
            self._make("give_up")
            return
        self._make("overdue")
        self._after(1.0, self._overdue, number)

    # ---- mischief ------------------------------------------------------------------------------------------------

    def _plan_agenda(self) -> None:
        """What the owner does, at moments of much traffic or of none."""
        rng = self.rng
        if rng.random() < 0.1:
            for _ in range(rng.randint(1, 3)):
                self._after(self._moment_s(), self._make, "cancel_all")
        if rng.random() < 0.1:
            self._after(self._moment_s(), self._make, "drain")
            if rng.random() < 0.3:
                self._after(self._moment_s(), self._make, "drain")
        if rng.random() < 0.1:
            for _ in range(rng.choice([1, 1, 2])):
                to = rng.choice([("engine",), ("engine", "gate", "streams", "worker")])
                self._after(self._moment_s(), self._stop, rng.choice([None, "injected"]), to)

    def _plan_reconfigurations(self, own: random.Random) -> None:
        """The owner wants another engine, at moments of much traffic or of none; some wishes cannot be."""
        shape = self.mix.shape
        for _ in range(own.choice([1, 1, 2, 3, 6])):
            num_blocks = own.randint(max(shape.num_blocks_least - 1, 1), shape.num_blocks_most + 1)
            precision = own.choice([*PRECISIONS, None, None])
            if self._broken.is_there:  # what it breaks by is the first modes'
                precision = None
            wish = own.choice([num_blocks, num_blocks, None]) if precision is not None else num_blocks
            at_s = 60 + own.random() * (self.mix.num_clients // self.mix.burst + 1) * self.mix.burst_gap_s
            at_s += own.random() * self.mix.step_s * 40
            self._after(at_s, self._reconfigure, wish, precision, own.random() < 0.2)
            if own.random() < 0.3:  # just then, or soon after
                delay_s = own.choice([0.0, 4 * self.mix.hop_s, self.mix.step_s, self.mix.jobs_s]) * own.random()
                self._after(at_s + delay_s, self._crash, own.choice(["die", "die", "overdue"]))

    def _reconfigure(self, num_blocks: int | None, precision: str | None, is_twice: bool) -> None:
        if not is_possible(self.world, ("reconfigure", num_blocks, precision)):
            return
        self._make("reconfigure", num_blocks, precision)
        if is_twice:
            self._make("reconfigure", num_blocks, precision)

    def _plan_stop(self, seed: int) -> str:
        """A stop comes mostly between two losses: one seed in some draws it into the midst of one."""
        if self.world.processes is None or seed % STOPPED_EVERY != STOPPED_EVERY // 2:
            return ""
        state = STOPPED_IN[seed // STOPPED_EVERY % len(STOPPED_IN)]
        if state in ("NEW", "FINDING"):
            self._after(0.0 if state == "NEW" else JOB_S[Find] * self.mix.jobs_s * self.rng.random(), self._stop_there)
            return ""
        return state

    def _stop_there(self) -> None:
        """All is stopped, and what was said comes once more."""
        rng = self.rng
        if rng.random() < 0.3:
            self._make("give_up")
        self._stop(None, rng.choice([("engine",), ("worker", "engine", "gate", "streams")]))
        for _ in range(12):
            self._after(rng.random() * 20 * self.mix.hop_s, self._do_echo)

    def _stop(self, error: str | None, to: tuple[str, ...]) -> None:
        """Everything ends; sometimes the link does first, when its task is cancelled."""
        self._make("stop", error, to)
        if self.world.processes is not None and self.rng.random() < 0.3:
            self._make("give_up")

    def _moment_s(self) -> float:
        """While the worker comes up, or shortly after clients have come."""
        rng, mix = self.rng, self.mix
        if rng.random() < 0.2:
            return rng.random() * 20
        bursts = rng.randrange(-(-mix.num_clients // mix.burst))
        return 60 + bursts * mix.burst_gap_s + rng.random() * mix.step_s * 40

    def _draw_mischief(self) -> None:
        """At which turn the next thing happens that belongs to no step."""
        self._mischief = [(kind, self._rates[kind] / rarer) for kind, rarer in PER_EVENT.items() if self._rates[kind]]
        total = sum(rate for _, rate in self._mischief)
        skip = math.log(1 - self.rng.random()) / math.log1p(-total) if total else self._turns_max
        self._next_mischief = self._turn + 1 + int(min(skip, self._turns_max))

    def _do_mischief(self) -> None:
        rng = self.rng
        kinds = [kind for kind, _ in self._mischief]
        if kinds:
            (kind,) = rng.choices(kinds, [rate for _, rate in self._mischief])
            getattr(self, f"_do_{kind}")()
        self._draw_mischief()

    def _do_cancel(self) -> None:
        rng, clients = self.rng, self.world.clients
        let_in = [s for s, c in clients.items() if c.was_let_in and (c.end is None or rng.random() < 0.1)]
        if not let_in:
            return
        stream_id = rng.choice(let_in)
        if clients[stream_id].end is None and rng.random() < 0.2:
            self._make("abandon", stream_id)
        else:
            self._make("cancel", stream_id, rng.choice([Cause.CLIENT, Cause.DISCONNECT]))

    def _do_duplicate(self) -> None:
        rng, world = self.rng, self.world
        if not (links := faults.repeatable(world)):
            return
        link = rng.choice(links)
        if link == TO_WORKER and isinstance(world.links[link][0], JobDone) and rng.random() < 0.7:
            self._make("contradict")
        else:
            self._make("duplicate", link)
        self._after(self.mix.lateness_s * rng.random(), self._come_late)

    def _come_late(self) -> None:
        if self.world.late:
            move = "come_late", self.rng.randrange(len(self.world.late))
            if is_possible(self.world, move):
                self._make(*move)
            else:
                self._after(self.mix.lateness_s, self._come_late)

    def _do_early(self) -> None:
        if timers := list(self.world.timers):
            self._make("fire_early", self.rng.choice(timers))

    def _do_jump(self) -> None:
        self.world.counts["clock jump"] += 1
        slept_s = self.rng.uniform(*JUMP_S)
        self.world.now_s += slept_s
        self.world.slept_s += slept_s - LOOK_COUNTS_S

    def _do_die(self) -> None:
        if self.world.has_begun:
            self._make("die")

    def _do_die_spare(self) -> None:
        if self.world.processes is not None:
            self._make("die_spare")

    def _do_die_both(self) -> None:
        if self.world.processes is not None and self.world.has_begun:
            self._make("die_both")

    def _do_echo(self) -> None:
        if self.world.processes is not None and (said := sorted(self.world.processes.said)):
            self._make("echo", self.rng.choice(said))

    def _do_stop_link(self) -> None:
        """The link ends before the worker has said so: its task was cancelled."""
        if self.world.processes is not None and self.world.is_stopped:
            self._make("give_up")

    def _do_freeze_spare(self) -> None:
        if self.world.processes is not None and self.world.processes.spare >= 0:
            self._make("freeze_spare")
            real = self.world.processes.all[self.world.processes.spare]
            if self.mix.is_watched and real.is_frozen:
                self._observe(Hang("spare", Load, is_silent=True, is_cold="Warm" not in real.done))
            else:
                self._after(self.rng.random() * 10, self._spare_overdue)

    def _spare_overdue(self) -> None:
        world = self.world
        if world.processes is not None and (real := world.processes.all.get(world.processes.spare)) and real.is_frozen:
            self._make("spare_overdue")

    def _crash(self, kind: str) -> None:
        if self.world.has_begun and not self._is_healed:
            self._make(kind)

    def _do_overdue(self) -> None:
        if self.world.has_begun:
            self._make("overdue")


def draw_kin(seed: int) -> Kin | None:
    """What a world has in which many prompts begin alike, if this seed's is one."""
    is_crowd = seed % CROWD_EVERY == CROWD_EVERY // 2 + 1
    is_uneven = seed % UNEVEN_EVERY == UNEVEN_EVERY - 1 and seed // UNEVEN_EVERY % 2 == 1
    is_large = seed % LARGE_EVERY == LARGE_EVERY - 1
    return Kin(seed, is_crowd=is_crowd) if (is_crowd or is_uneven) and not is_large else None


def run_seed(seed: int) -> tuple[World, str]:
    """Run one seed to its end; returns the world and the hash of its trace. Raises `AssertionError`."""
    drawn = Seed(seed)
    drawn.run()
    return drawn.world, drawn.trace.hexdigest()
