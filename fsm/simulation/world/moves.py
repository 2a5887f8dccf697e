"""Every kind of move: what it does, and when it can be made. A path of moves is data: it can be kept and made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from novainfer.fsm.client.gate import GateState
from novainfer.fsm.messages.events import Fault, JobDone, JobFailed, Run
from novainfer.fsm.simulation.world import faults, process
from novainfer.fsm.simulation.world.device import POISON_HANG, POISON_LOST, POISON_OOM
from novainfer.fsm.simulation.world.world import TO_WORKER, Link, World

Move: TypeAlias = tuple[Any, ...]  # its kind, then the arguments


def _wait(world: World, duration_s: float) -> None:
    world.now_s += duration_s


def _go(world: World, num_moves: int) -> None:
    """So many moves of the machine room, in plain order."""
    for _ in range(num_moves):
        if found := next_moves(world):
            make(world, found[0])


def _finish_job(world: World, took_s: float = 0.0) -> None:
    """The device does its oldest job: well, unless it is a step with poison in it."""
    job, device = world.jobs[0], world.device
    poison = device.poison(job.plan) if isinstance(job, Run) and device is not None else None
    if poison is None:
        world.finish_job(took_s)
    elif poison == POISON_LOST:
        faults.die(world)
    elif poison == POISON_HANG:
        faults.give_up(world) if world.is_stopped else faults.overdue(world)
    else:
        faults.fail_step(world, Fault.OOM if poison == POISON_OOM else Fault.EXCEPTION, True)


def _launch(world: World) -> None:
    """The device is told of a step behind the one that it computes: well, unless it is one with poison in it."""
    job, device = world.launchable, world.device
    poison = device.poison(job.plan) if device is not None and job is not None else None
    if poison == POISON_LOST:
        world.counts["worker death by the step behind"] += 1
        faults.die(world)
    elif poison == POISON_OOM:
        world.fail_launch(Fault.OOM)
    else:
        world.launch()


def _fail_launch(world: World, fault: Fault) -> None:
    world.fail_launch(fault)


def _unsend(world: World) -> None:
    world.unsend_step()


def _can_launch(world: World, *_: Any) -> bool:
    return world.launchable is not None


def _deliver(world: World, link: Link) -> None:
    world.deliver(link)  # a recorded world has its own


def _read(world: World, stream_id: int) -> None:
    world.read(stream_id)


def _always(world: World, *_: Any) -> bool:
    return True


def _has_begun(world: World) -> bool:
    return world.has_begun


def _has_client(world: World, stream_id: int, *_: Any) -> bool:
    return stream_id in world.clients and world.clients[stream_id].was_let_in


def _has_stream(world: World, stream_id: int) -> bool:
    return _has_client(world, stream_id) and stream_id in world.streams


def _has_message(world: World, link: Link) -> bool:
    return bool(world.links.get(link))


def _has_prompt(world: World, stream_id: int) -> bool:
    return stream_id in world.encodings


def _wants_mask(world: World, request_id: int) -> bool:
    return request_id in world.grammars.due


def _compiles(world: World, thread: int) -> bool:
    return thread in world.grammars.at_work


def _has_timer(world: World, timer: Any) -> bool:
    return timer in world.timers


def _has_news(world: World, stream_id: int) -> bool:
    stream = world.streams.get(stream_id)
    return stream is not None and stream.has_news and world.clients[stream_id].end is None


def _has_job(world: World, *_: Any) -> bool:
    return bool(world.jobs) and not (world.processes is not None and world.processes.is_hung)


def _has_step(world: World, *_: Any) -> bool:
    return bool(world.jobs) and isinstance(world.jobs[0], Run)


def _has_canary(world: World) -> bool:
    flight = world.scheduler.oldest_flight
    return _has_step(world) and flight is not None and bool(flight.canary)


def _has_other_job(world: World) -> bool:
    return _has_job(world) and not isinstance(world.jobs[0], Run)


def _has_answer_to_job(world: World) -> bool:
    return isinstance((world.links.get(TO_WORKER) or [None])[0], JobDone)


def _has_late(world: World, at: int) -> bool:
    if at >= len(world.late):
        return False
    link, event = world.late[at]  # what contradicts an answer comes behind it
    answers = [e for e in world.links.get(link, ()) if isinstance(e, JobDone) and isinstance(event, JobFailed)]
    return all((answer.job, answer.epoch) != (event.job, event.epoch) for answer in answers)


def _of_processes(name: str) -> Callable[..., None]:
    def make_it(world: World, *args: Any) -> None:
        getattr(world.processes, name)(*args)

    return make_it


def _has_processes(world: World, *_: Any) -> bool:
    return world.processes is not None


def _can(kind: str) -> Callable[..., bool]:
    def is_there(world: World, *args: Any) -> bool:
        return world.processes is not None and (kind, *args) in process.next_moves(world.processes)

    return is_there


def _is_up(world: World, *_: Any) -> bool:
    return world.gate.state is not GateState.STARTING


def _has_sessions(world: World, *_: Any) -> bool:
    return bool(world.scheduler.sessions)


def _has_roster_timer(world: World, kind: str, *_: Any) -> bool:
    return world.processes is not None and any(type(event).__name__ == kind for event in world.processes.timers)


def _roster_timer(world: World, kind: str, *_: Any) -> None:
    """A timer of the roster runs out."""
    assert world.processes is not None
    event = next(event for event in world.processes.timers if type(event).__name__ == kind)
    world.processes.fire(event)


MOVES: dict[str, tuple[Callable[..., None], Callable[..., bool]]] = {
    "deliver": (_deliver, _has_message),
    "finish_job": (_finish_job, _has_job),
    "launch": (_launch, _can_launch),
    "fail_launch": (_fail_launch, _can_launch),
    "unsend": (_unsend, _has_step),
    "encode": (World.encode, _has_prompt),
    "compile": (World.compile, _compiles),
    "mask": (World.make_mask, _wants_mask),
    "fire_timer": (World.fire_timer, _has_timer),
    "arrive": (World.arrive, _always),
    "read": (_read, _has_news),
    "wait": (_wait, _always),
    "go": (_go, _always),
    "fail_step": (faults.fail_step, _has_step),
    "no_number": (faults.no_number, _has_canary),
    "fail_job": (faults.fail_job, _has_other_job),
    "fail_encode": (faults.fail_encode, _has_prompt),
    "die": (faults.die, _has_begun),
    "overdue": (faults.overdue, _has_begun),
    "give_up": (faults.give_up, _always),
    "duplicate": (faults.duplicate, _has_message),
    "contradict": (faults.contradict, _has_answer_to_job),
    "come_late": (faults.come_late, _has_late),
    "fire_early": (faults.fire_early, _has_timer),
    "cancel": (faults.cancel, _has_client),
    "abandon": (faults.abandon, _has_stream),
    "cancel_all": (faults.cancel_all, _always),
    "drain": (faults.drain, _always),
    "stop": (faults.stop, _always),
    "reconfigure": (World.reconfigure, _is_up),
    "end_session": (World.end_session, _has_sessions),
    **{
        name: (_of_processes(name), _can(name))
        for name in ("show_death", "reap", "show_life", "spare_job", "stop_link")
    },
    "fail_spare_job": (faults.fail_spare_job, _can("spare_job")),
    "hang_spare": (faults.hang_spare, _can("spare_job")),
    "roster_timer": (_roster_timer, _has_roster_timer),
    "spare_overdue": (_of_processes("spare_overdue"), _has_processes),
    "echo": (_of_processes("echo"), lambda world, kind: world.processes is not None and kind in world.processes.said),
    "die_spare": (faults.die_spare, _has_processes),
    "die_both": (faults.die_both, _has_processes),
    "freeze_spare": (faults.freeze_spare, _has_processes),
}


def make(world: World, move: Move) -> None:
    """Make `move`; whatever a machine or a check raises is a finding."""
    MOVES[move[0]][0](world, *move[1:])


def is_possible(world: World, move: Move) -> bool:
    """Whether `move` can be made now: a path that was cut may have lost what it needs."""
    return MOVES[move[0]][1](world, *move[1:])


def next_moves(world: World) -> list[Move]:
    """What the machine room can do next: each link's first message, the device's oldest job, any prompt."""
    found: list[Move] = [("deliver", link) for link in world.busy]
    if _has_job(world):
        found.append(("finish_job",))
        if world.launchable is not None:
            found.append(("launch",))
    found += [("encode", stream_id) for stream_id in world.encodings]
    found += [("compile", thread) for thread in world.grammars.at_work]
    found += [("mask", request_id) for request_id in world.grammars.due]
    if world.shape.processes and world.processes is not None:
        found += process.next_moves(world.processes)
    return found


def describe(world: World, move: Move) -> str:
    """What `move` will do in `world`, in one line."""
    kind, *args = move
    if kind == "deliver":
        (source, to, urgent) = link = args[0]
        return f"{source} {'⇒' if urgent else '→'} {to}: {_short(world.links[link][0])}"
    if kind in ("finish_job", "fail_job", "fail_step"):
        how = {"finish_job": "does", "fail_job": "fails"}.get(kind) or "fails ({}, launched={})".format(*args)
        return f"the device {how} {_short(world.jobs[0])}"
    if kind == "arrive":
        return f"a client arrives with {args[0]!r} for {args[1].n} x {args[1].max_tokens} tokens"
    if kind in ("duplicate", "contradict"):
        return f"{kind}: {_short(world.links[args[0] if args else TO_WORKER][0])}"
    if kind == "come_late":
        return f"late: {_short(world.late[args[0]][1])}"
    return " ".join([kind, *map(str, args)])


def _short(event: Any) -> str:
    text = repr(event)
    return text if len(text) < 120 else text[:117] + "..."
