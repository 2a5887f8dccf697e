"""The processes of a world: the roster's shell without an operating system, and what must hold of them.

The worker's process does what is in `world.jobs`; a spare has a queue of its own. A process that dies first shows it,
where the world's system lets it, and is reaped later: until then nothing but the roster's decisions says what is to be
done. What is checked here is known from the processes themselves: which live, what each has done, and which were told
to end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from novainfer.fsm.core.machine import After, Drop, Effect, Send
from novainfer.fsm.device.process import Answered, Ask, Ended, Finish, Process, ProcessState, Started, StartFailed, Tell
from novainfer.fsm.device.roster import (
    DOWN,
    SPARE_DEATHS_MAX,
    SPARE_WINDOW_S,
    Alive,
    CloseOver,
    Dying,
    Find,
    Found,
    Greet,
    HoldOver,
    Open,
    Probe,
    ProbeOver,
    Roster,
    SpareOverdue,
)
from novainfer.fsm.messages.events import (
    Close,
    DeviceLost,
    Fit,
    Incident,
    JobDone,
    JobFailed,
    Kill,
    Load,
    Run,
    Spawn,
    Stop,
    Switch,
    Warm,
)
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

NEEDED: dict[type, str] = {
    Fit: "Load",
    Warm: "Fit",
    Run: "Warm",
    Switch: "Warm",
}  # what a process must have done before

LIFE_S = 1.0  # for a spare to show that it lives
MEMORY_BACK_S = 10.0  # after which a process that was killed is not waited for any more

ECHOED = (Alive, Answered, Dying, SpareOverdue)


class Real(msgspec.Struct):
    """A process as it is, whatever anybody believes of it."""

    serial: int
    is_started: bool = False
    is_greeted: bool = False
    is_alive: bool = True
    is_told_to_end: bool = False
    is_frozen: bool = False
    is_hung: bool = False  # in its job; it beats all the same
    has_shown_life: bool = False  # since it was asked to
    was_worker: bool = False
    done: list[str] = []
    num_blocks: int = 0  # of its cache
    jobs: list[Any] = []  # of a spare

    def did(self, answer: JobDone) -> None:
        """It has done a job."""
        if answer.job == "Fit":
            self.num_blocks = answer.value["num_blocks"]
            self.done = [name for name in self.done if name not in ("Fit", "Warm")]  # which were of the cache before
        elif answer.job == "Warm":
            self.num_blocks = answer.value.get("num_blocks", self.num_blocks)
        self.done.append(answer.job)

    @property
    def gets_on(self) -> bool:
        """Whether its oldest job will be done."""
        return bool(self.jobs) and not self.is_frozen and not self.is_hung

    @property
    def can_show_life(self) -> bool:
        """Whether it says something when it is asked."""
        return self.is_started and self.is_alive and not self.is_frozen


class Processes:
    """See the module."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.roster = Roster(warm_spare=world.shape.warm_spare)
        self.roster.observer = world.watcher
        self.all: dict[int, Real] = {}  # that are not reaped
        self.dead: list[int] = []  # whose death nobody has shown yet
        self.ending: list[int] = []  # whose end is to come
        self.probed: list[int] = []  # asked for a sign of life
        self.timers: list[Any] = []
        self.said: dict[str, Any] = {}  # the last event of each kind that a process was the cause of
        self.is_told_to_stop = False  # the link is about to be stopped
        self._current = -1  # the worker's process
        self._spare_deaths: list[float] = []
        self._spent_for = -2  # the worker's process that gets no spare any more
        self._waited_for: int | None = None  # the process that has waited for memory as long as it should
        self._has_none_started = False  # the system has refused to start a spare

    # ---- the roster's shell --------------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        """One event for the roster, and its effects, which are performed."""
        world, roster = self.world, self.roster
        if isinstance(event, ECHOED):
            self.said[type(event).__name__] = event
        world.trace(f"roster {type(event).__name__}", event)
        spare, current, was_down = roster.spare, self._current, roster.state in DOWN
        was_ahead = spare is not None and spare.state is ProcessState.AHEAD
        effects = roster.handle(event)
        self._check_incidents(event, effects, spare if not was_down else None, was_ahead=was_ahead)
        self._check_losses(event, effects, current)
        self._turn()
        for effect in effects:
            self._perform(effect)
        self._check()

    def _turn(self) -> None:
        """Whose jobs are the worker's now."""
        world, worker = self.world, self.roster.worker
        serial = worker.serial if worker is not None else -1
        if serial == self._current:
            return
        self._current = serial
        world.jobs = deque(job for job in world.jobs if isinstance(job, Find))
        world.device = None
        if worker is not None and (real := self.all.get(serial)) is not None:  # a spare takes over
            if not real.has_shown_life:
                raise Violation(f"process {serial} takes over, and has not shown that it lives")
            real.was_worker = True
            if real.is_alive:
                world.device = world._new_device(worker.epoch, real.num_blocks)
                world.jobs.extend(real.jobs)
                real.jobs = []
                world._begin_job()

    def put(self, job: Any) -> None:
        """The worker wants this."""
        if isinstance(job, Close):
            self.is_told_to_stop = True
            self._wake("stop_link", 0.0)
        self.handle(job if isinstance(job, Spawn | Kill | Close) else Ask(job))

    def _perform(self, effect: Effect) -> None:
        world = self.world
        if isinstance(effect, Send):
            world.worker_is(effect.event)
            world.tell("device", effect.to, effect.event)
        elif isinstance(effect, After):
            if isinstance(effect.event, HoldOver) and effect.delay_s < MEMORY_BACK_S:
                raise Violation(f"memory that is to be free is waited for {effect.delay_s} s only")
            if isinstance(effect.event, ProbeOver) and effect.delay_s < LIFE_S:
                raise Violation(f"a spare has {effect.delay_s} s only to show that it lives")
            if effect.event in self.timers:
                raise Violation(f"the timer {effect.event} is set twice")
            self.timers.append(effect.event)
            self._wake("roster_timer", effect.delay_s, effect.event)
        elif isinstance(effect, Drop):
            self.timers.remove(effect.event)
        else:
            self._do(effect.job)

    def _do(self, job: Any) -> None:
        if isinstance(job, Open):
            if job.serial != self._current == self._spent_for:
                raise Violation("another spare is started, and too many were lost")
            self.all[job.serial] = Real(job.serial, was_worker=job.serial == self._current)
            self._enqueue(job.serial, job)
        elif isinstance(job, Find):
            self._enqueue(self._current, job)
        elif isinstance(job, Greet):
            real = self.all[job.serial]
            if real.is_greeted or not real.is_started:
                raise Violation(f"process {job.serial} is greeted twice, or before it has started")
            real.is_greeted = True
        elif isinstance(job, Probe):
            real = self.all[job.serial]
            if real.is_alive:
                self.probed.append(job.serial)
            self._wake("show_life", 0.0, job.serial)
        elif isinstance(job, Finish):
            self.all[job.serial].is_told_to_end = True
            self._dies(job.serial)
        elif isinstance(job, Tell):
            real = self.all[job.serial]
            if not real.is_greeted:
                raise Violation(f"process {job.serial} is told {job.job}, and was not greeted")
            self._enqueue(job.serial, job.job)

    def _enqueue(self, serial: int, job: Any) -> None:
        real, world = self.all[serial], self.world
        if serial != self._current:
            if isinstance(job, Fit | Warm) and not world.shape.kv_is_lazy:
                raise Violation("a spare takes the memory that the worker has")
            if isinstance(job, Fit) and job.num_blocks != world.num_blocks:
                raise Violation(f"a spare makes a cache of {job.num_blocks} blocks")
            if isinstance(job, Warm) and job.measures:
                raise Violation("a spare measures steps beside those of the worker")
        is_in_place = serial == self._current and isinstance(job, Fit) and bool(real.num_blocks)
        if is_in_place:
            if job.num_blocks == real.num_blocks and not world.worker._is_changing:
                raise Violation(f"process {serial} has done {job}, and is to do it again")
            world.follow(job)
        elif serial == self._current and isinstance(job, Fit) and not world.shape.kv_is_lazy:
            holders = [other for other in self._kept() if serial != self._waited_for]
            if holders:
                raise Violation(f"process {serial} makes a cache, and the memory of {holders} is not free")
        under_way = world.jobs if serial == self._current else real.jobs
        if type(job).__name__ in real.done and isinstance(job, Load | Fit | Warm) and not is_in_place:
            raise Violation(f"process {serial} has done {job}, and is to do it again")
        if isinstance(job, Load | Fit | Warm) and any(_is_as(other, job) for other in under_way):
            raise Violation(f"process {serial} does {job}, and is to do it again")
        if not real.is_alive and not isinstance(job, Find):
            return  # it is written to a process that is gone: nobody answers
        if serial == self._current:
            world.jobs.append(job)
            world.came_to_device()
            return
        real.jobs.append(job)
        if len(real.jobs) == 1:
            self._wake("spare_job", 1.0, serial)

    def _wake(self, kind: str, delay_s: float, *args: Any) -> None:
        if (driver := self.world._driver) is not None:
            driver.process_move(kind, delay_s, *args)

    # ---- what processes do ---------------------------------------------------------------------------------------

    def answered(self, event: Any) -> None:
        """The worker's process says `event`; one that has closed its device ends."""
        serial = self._current
        if isinstance(event, JobDone):
            self.all[serial].did(event)
        self.handle(Answered(serial, event.epoch, event, self.world.now_s))
        if isinstance(event, JobDone | JobFailed) and event.job == "Close":
            self._dies(serial)

    def must_be_able(self, job: Any) -> None:
        """The worker's process begins `job`: it must have done what that needs."""
        needs = NEEDED.get(type(job))
        if needs is not None and needs not in self.all[self._current].done:
            raise Violation(f"process {self._current} is to do {type(job).__name__}, and has not done {needs}")

    def finish_start(self, job: Open | Find, *, fails: bool) -> None:
        """The worker's process has started, or the model is found; or not."""
        world = self.world
        if isinstance(job, Find):
            self.handle(Found("injected" if fails else None, world.now_s))
        else:
            self._finish_open(job.serial, fails=fails)
        world._begin_job()

    def _finish_open(self, serial: int, *, fails: bool) -> None:
        real = self.all[serial]
        if fails:
            del self.all[serial]
            self._has_none_started |= serial != self._current
            self.probed = [other for other in self.probed if other != serial]
            self.handle(StartFailed(serial, "injected", self.world.now_s))
            return
        real.is_started = True
        if serial in self.probed:
            self._wake("show_life", 0.0, serial)
        if serial == self._current:
            assert self.roster.worker is not None
            self.world.device = self.world._new_device(self.roster.worker.epoch)
        self.handle(Started(serial, 1000 + serial))

    def spare_job(self, serial: int, *, fails: bool = False) -> None:
        """A process that is not the worker's does its oldest job."""
        real = self.all[serial]
        job = real.jobs.pop(0)
        if real.jobs:
            self._wake("spare_job", 1.0, serial)
        name = type(job).__name__
        self.world.counts[f"{name} of a spare{' failed' if fails else ''}"] += 1
        answer: JobDone | JobFailed
        if isinstance(job, Open):
            self._finish_open(serial, fails=fails)
            return
        if fails:
            answer = JobFailed(name, "injected", job.epoch, self.world.now_s)
        else:
            answer = self.world.does(job)
            assert isinstance(answer, JobDone), "a spare does what the worker has done"
            real.did(answer)
        self.handle(Answered(serial, job.epoch, answer, self.world.now_s))

    def show_life(self, serial: int) -> None:
        """A process that was asked for a sign of life gives one."""
        self.probed.remove(serial)
        self.all[serial].has_shown_life = True
        self.handle(Alive(serial))

    def fire(self, event: Any) -> None:
        """A timer of the roster runs out."""
        self.timers.remove(event)
        if isinstance(event, HoldOver):
            self._waited_for = self._current
        now_s = self.world.now_s
        self.handle(ProbeOver(now_s) if isinstance(event, ProbeOver) else event)

    def give_up(self) -> None:
        """The link is to end, and the worker's process does not answer."""
        if self.roster.state != "STOPPED":
            self.stop_link()
        for event in list(self.timers):
            if isinstance(event, CloseOver):
                self.fire(event)

    def stop_link(self) -> None:
        """The link is to end."""
        self.is_told_to_stop = False
        self.handle(Stop())
        self._note_closed()

    # ---- what may happen to them ---------------------------------------------------------------------------------

    def die(self, serial: int) -> bool:
        """A process dies by itself, if it is there."""
        real = self.all.get(serial)
        if real is None or not real.is_alive or not real.is_started:
            return False
        self._dies(serial)
        return True

    def _dies(self, serial: int) -> None:
        real, world = self.all[serial], self.world
        if not real.is_alive:
            return
        real.is_alive = False
        real.jobs = []
        if serial in self.probed:
            self.probed.remove(serial)
        if serial == self._current:
            world.device = None
            world.jobs = deque(job for job in world.jobs if isinstance(job, Find))
            world._begin_job()
        if world.shape.shows_death:
            self.dead.append(serial)
            self._wake("show_death", 0.0, serial)
        self.ending.append(serial)
        self._wake("reap", 0.1, serial)

    def show_death(self, serial: int) -> None:
        """Its pipe is closed."""
        self.dead.remove(serial)
        self.handle(Dying(serial, "injected", self.world.now_s))

    def reap(self, serial: int) -> None:
        """Its end is seen, and its memory is free."""
        self.ending.remove(serial)
        if serial in self.dead:
            self.dead.remove(serial)
        self.handle(Ended(serial, "injected", self.world.now_s))
        del self.all[serial]
        self._note_closed()

    def echo(self, kind: str) -> None:
        """What was said once comes again, late."""
        event = self.said[kind]
        answer = event.answer if isinstance(event, Answered) else None
        process = self.roster._of(event.serial)
        if isinstance(answer, JobDone | JobFailed) and process is not None and process.job == answer.job:
            return  # no process answers a job that it is doing
        self.handle(event)

    def spare_overdue(self) -> None:
        """The watchdog has waited long enough for the spare."""
        if (spare := self.roster.spare) is not None:
            self.world.counts["spare overdue"] += 1
            self.handle(SpareOverdue(spare.serial, "injected", self.world.now_s))

    @property
    def current(self) -> int:
        """The worker's process; -1 while there is none."""
        return self._current

    @property
    def spare(self) -> int:
        """The process that stands by; -1 while there is none."""
        return self.roster.spare.serial if self.roster.spare is not None else -1

    @property
    def is_hung(self) -> bool:
        """Whether the worker's process will never answer: it hung before it took over."""
        return (real := self.all.get(self._current)) is not None and real.is_hung

    @property
    def is_busy(self) -> bool:
        """True while something is to come from the processes."""
        spares = any(real.gets_on for real in self.all.values())
        return bool(self.ending or self.dead or self.probed or self.timers or spares or self.is_told_to_stop)

    # ---- what must hold ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """After every event: as many processes as there should be, and each believed to be what it is."""
        roster = self.roster
        wanted = {p.serial for p in (roster.worker, roster.spare) if p is not None}
        for serial, real in self.all.items():
            if serial in wanted and real.is_told_to_end:
                raise Violation(f"process {serial} was told to end, and is still counted on")
            if serial not in wanted and real.is_alive and not real.is_told_to_end:
                raise Violation(f"process {serial} lives, and nobody knows of it")
        if roster.state == "HOLDING" and not self._kept():
            raise Violation("the worker waits for memory, and all of it is free")
        if roster.state == "HOLDING" and HoldOver() not in self.timers:
            raise Violation("the worker waits for memory, and may do so for ever")
        if roster.spare is not None and not self.world.shape.warm_spare:
            raise Violation("there is a spare, and none was wanted")

    def _kept(self) -> list[int]:
        """Processes that were told to end, and still hold what they held."""
        return [serial for serial in self.ending if self.all[serial].is_told_to_end and serial != self._current]

    def _check_incidents(self, event: Any, effects: list[Effect], spare: Process | None, *, was_ahead: bool) -> None:
        """One for each spare that is lost or fails, and none for one that takes over, or is ended with the rest."""
        roster = self.roster
        is_gone = spare is not None and roster.spare is not spare and roster.worker is not spare
        is_lost = is_gone and not isinstance(event, Stop | Kill | Spawn)  # the last: it has other weights
        if is_lost and isinstance(event, SpareOverdue) and spare is not None and event.serial != spare.serial:
            raise Violation(f"{event}: process {spare.serial} is lost, which has all its time")
        if is_lost and not isinstance(event, StartFailed):
            self._spare_deaths.append(self.world.now_s)
            if self._are_too_many_lost():
                self._spent_for = self._current
        has_failed = spare is not None and isinstance(event, Answered) and isinstance(event.answer, JobFailed)
        has_failed = has_failed and was_ahead and spare is not None and event.serial == spare.serial
        said = sum(isinstance(effect, Send) and isinstance(effect.event, Incident) for effect in effects)
        if said != (is_lost or has_failed):
            raise Violation(f"{event}: {said} incidents, a spare is lost: {is_lost}, or has failed: {has_failed}")

    def _check_losses(self, event: Any, effects: list[Effect], current: int) -> None:
        """A worker is called lost when its process has died by itself, once, and not later than when it is reaped."""
        real = self.all.get(current)
        said = [effect.event for effect in effects if isinstance(effect, Send) and isinstance(effect.event, DeviceLost)]
        if said and (real is None or real.is_alive or real.is_told_to_end):
            raise Violation(f"{event}: a worker is called lost, whose process has not died: {real}")
        if said and isinstance(event, Dying) and "Warm" not in self.all[self.spare].done:
            raise Violation(f"{event}: the worker's memory is not free, and the spare needs it")
        if said and said[0].at_s != self.world.now_s:
            raise Violation(f"a worker is lost at {said[0].at_s} when it is {self.world.now_s}")
        is_over = isinstance(event, Ended) and event.serial == current and self.roster.state not in DOWN
        if is_over and len(said) != 1:
            raise Violation(f"{event}: the worker has no process any more, and was not told")

    def check_rest(self) -> None:
        """When nothing but a client could do anything: whoever should stand by does."""
        roster, shape = self.roster, self.world.shape
        if self.is_busy or self.world.is_stopped or not shape.warm_spare or roster.worker is None:
            return
        real = self.all[roster.worker.serial]
        if "Warm" not in real.done or self.world.jobs or roster.spare is not None:
            return
        if not self._are_too_many_lost() and not self._has_none_started:
            raise Violation("the worker is warm, and nobody stands by")

    def _are_too_many_lost(self) -> bool:
        last = self._spare_deaths[-SPARE_DEATHS_MAX:]
        return len(last) == SPARE_DEATHS_MAX and last[-1] - last[0] < SPARE_WINDOW_S

    def check_end(self) -> None:
        """At the end of a world that was stopped: nobody is left."""
        if self.all or self.dead or self.ending:
            raise Violation(f"processes are left: {sorted(self.all)}")

    def _note_closed(self) -> None:
        alive = any(not real.is_told_to_end and real.is_alive for real in self.all.values())
        if self.roster.state == "STOPPED" and not alive:
            self.world.is_closed = True


def next_moves(processes: Processes) -> list[tuple[Any, ...]]:
    """What the processes can do next."""
    found: list[tuple[Any, ...]] = [("show_death", serial) for serial in processes.dead]
    found += [("reap", serial) for serial in processes.ending]
    found += [("show_life", s) for s in processes.probed if processes.all[s].can_show_life]
    found += [("spare_job", s) for s, real in processes.all.items() if real.gets_on]
    if processes.is_told_to_stop:
        found.append(("stop_link",))
    return found


def _is_as(job: Any, other: Any) -> bool:
    """Whether one of the two is enough: caches of two sizes are two jobs."""
    sizes = [one.num_blocks if isinstance(one, Fit) else None for one in (job, other)]
    return type(job) is type(other) and sizes[0] == sizes[1]
