"""What may go wrong in a world, and what its owner and clients may do to it: each a move, made on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from novainfer.fsm.device.flights import Landed
from novainfer.fsm.device.roster import Find, Open
from novainfer.fsm.messages.events import (
    Cancel,
    CancelAll,
    Cause,
    Close,
    Drain,
    EncodeFailed,
    Fault,
    JobFailed,
    Overdue,
    StepFailed,
    Stop,
)
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.simulation.world.world import FROM_WORKER, TO_WORKER

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import Link, Timer, World

# ---- the device and the tokenizer ---------------------------------------------------------------------------------


def fail_step(world: World, fault: Fault, launched: bool) -> None:
    """The device fails its oldest job, which is a step; a launched one leaves garbage behind."""
    world.fail_step(fault, launched=launched)


def no_number(world: World) -> None:
    """The device does its oldest job, a canary, and makes no number of it."""
    job = world.jobs.popleft()
    assert world.device is not None
    world.device.run(job.plan)
    world.device.unstage(job.plan.step_id)
    world.counts["a canary without a number"] += 1
    world.answer(*world.device.flights.handle(Landed(StepDone(job.plan.step_id, job.plan.epoch, [-1]))))


def fail_job(world: World) -> None:
    """The device fails its oldest job, which is no step."""
    job = world.jobs.popleft()
    if world.processes is not None and isinstance(job, Open | Find):
        world.counts[f"{type(job).__name__} failed"] += 1
        world.processes.finish_start(job, fails=True)
        return
    if isinstance(job, Close):
        world.is_closed = True
    world.counts[f"{type(job).__name__} failed"] += 1
    world.answer(JobFailed(type(job).__name__, "injected", job.epoch, world.now_s))


def die(world: World) -> None:
    """The device's process dies, whatever it does."""
    world.counts["worker death"] += 1
    world.lose_device()


def overdue(world: World) -> None:
    """The watchdog has waited long enough for the device, which hangs, or is slow and answers just now."""
    world.counts["overdue"] += 1
    world.tell("watchdog", "worker", Overdue(world.worker.epoch, "injected", world.now_s))


def die_spare(world: World) -> None:
    """The process that stands by dies."""
    if world.processes is not None and world.processes.die(world.processes.spare):
        world.counts["spare death"] += 1


def die_both(world: World) -> None:
    """Whatever kills the worker kills the spare as well."""
    die_spare(world)
    die(world)


def freeze_spare(world: World) -> None:
    """The process that stands by is stopped, and says nothing any more."""
    assert world.processes is not None
    if (real := world.processes.all.get(world.processes.spare)) is not None and real.is_alive:
        real.is_frozen = True
        world.counts["spare frozen"] += 1


def hang_spare(world: World, serial: int) -> None:
    """A spare hangs in its oldest job, and beats all the same."""
    assert world.processes is not None
    world.processes.all[serial].is_hung = True
    world.counts["spare hangs"] += 1


def fail_spare_job(world: World, serial: int) -> None:
    """A spare fails its oldest job."""
    assert world.processes is not None
    world.processes.spare_job(serial, fails=True)


def give_up(world: World) -> None:
    """The engine is closed, and the device does not answer: its link ends it all the same."""
    if world.processes is not None:
        world.processes.give_up()
    elif world.device is not None:
        world.end_device(world.device.epoch)


def fail_encode(world: World, stream_id: int) -> None:
    """The tokenizer cannot do one of its prompts."""
    world.encodings.pop(stream_id)
    world.counts["encode failed"] += 1
    world.clients[stream_id].encoding_failed = True
    world.tell("tokenizer", "engine", EncodeFailed(stream_id, "injected", "prompt"))


# ---- messages and time --------------------------------------------------------------------------------------------


def duplicate(world: World, link: Link) -> None:
    """What is first on `link` will come once more, at any later time."""
    world.late.append((link, world.links[link][0]))
    world.counts["duplicate"] += 1


def contradict(world: World) -> None:
    """The job that is done will be called failed as well, when its device dies a little later."""
    done = world.links[TO_WORKER][0]
    world.late.append((TO_WORKER, JobFailed(done.job, "injected", done.epoch, world.now_s)))
    world.counts["contradiction"] += 1


def come_late(world: World, at: int) -> None:
    """A duplicate arrives."""
    link, event = world.late.pop(at)
    world.arrives(link[1], event)


def repeatable(world: World) -> list[Link]:
    """Links whose first message may come twice: the device's, unless a roster hears it first, and the worker's."""
    found = [TO_WORKER] if world.links.get(TO_WORKER) and world.processes is None else []
    queue = world.links.get(FROM_WORKER)
    if queue and isinstance(queue[0], StepDone | StepFailed):
        found.append(FROM_WORKER)
    return found


def fire_early(world: World, timer: Timer) -> None:
    """A timer runs out before its time."""
    world.counts["early timeout"] += 1
    audit = world.audit
    if audit is not None:
        audit.deadlines.is_early = True
        audit.rungs.early(world.timers[timer])
    world.fire_timer(timer)
    if audit is not None:
        audit.deadlines.is_early = False


# ---- clients and the owner ----------------------------------------------------------------------------------------


def cancel(world: World, stream_id: int, cause: Cause = Cause.CLIENT) -> None:
    """A client gives up, or its connection is lost; it may do so twice, and when its stream has ended."""
    world.clients[stream_id].causes.add(cause)
    world.counts["cancel"] += 1
    world.ask_gate(Cancel(stream_id, cause))


def abandon(world: World, stream_id: int) -> None:
    """A client goes away without reading on: its stream is forgotten, and its requests are cancelled."""
    cancel(world, stream_id, Cause.DISCONNECT)
    world.abandon(stream_id)


def cancel_all(world: World) -> None:
    """Somebody ends every stream."""
    world.counts["cancel all"] += 1
    world.everybody(Cause.CLIENT)
    world.ask_gate(CancelAll(Cause.CLIENT))


def drain(world: World) -> None:
    """The owner takes no new streams."""
    world.is_draining = True
    world.counts["drain"] += 1
    world.tell("owner", "gate", Drain())


def stop(world: World, error: str | None, to: Sequence[str] = ("engine",)) -> None:
    """The owner ends everything now: tells the engine, or everybody at once, as the shell does when it dies."""
    world.stopped()
    world.counts["stop"] += 1
    for name in to:
        world.tell("owner", name, Stop(error), urgent=True)
