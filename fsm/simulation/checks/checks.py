"""What must hold in a world after every event, and what when nothing can happen any more.

    every block and slot has exactly its owners           free + cached + owned = total
    a step taken back leaves what was there before it     (exactly, when it was never launched)
    the mirror that routers keep of the index is the index
    blocks of a cancelled request return with its step    and not before it
    the oldest request that may run is in every plan      first come, first served, also after a preemption
    nobody is computed while its reader is slow           nor after a cancel
    each stream ends exactly once, and says why           nothing comes after the end
    an idle engine has nothing left to do                 no wake-up is lost

That each token is the one its context demands, whatever was batched, preempted, shared or retried, is what `Client`
checks at every read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.device.worker import WorkerState
from novainfer.fsm.engine import EngineState
from novainfer.fsm.kv.blocks import Journal
from novainfer.fsm.messages.events import (
    Advance,
    Arrive,
    Batch,
    Cancel,
    CancelAll,
    CancelRequest,
    Cause,
    Configure,
    Drain,
    Fault,
    Incident,
    KeepOver,
    MakeBatch,
    Open,
    Output,
    Outputs,
    Pause,
    PauseRequest,
    QueueOver,
    Rejected,
    StallOver,
    StepFailed,
    Stop,
    Submit,
    WorkerLost,
)
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule.batching import Flight
from novainfer.fsm.schedule.request import AWAITED, ENDED, Request, RequestState
from novainfer.fsm.schedule.scheduler import SchedulerState
from novainfer.fsm.simulation.checks.blame import ends_in_flight, goes_nowhere
from novainfer.fsm.simulation.checks.masks import check_masks, is_waited_for
from novainfer.fsm.simulation.checks.mirror import Mirror
from novainfer.fsm.simulation.checks.oracle import Violation
from novainfer.fsm.simulation.checks.places import Places
from novainfer.fsm.simulation.checks.restarts import Restarts
from novainfer.fsm.simulation.checks.turns import ADMISSIONS_MAX, WAITING_MAX
from novainfer.fsm.simulation.checks.verified import without_number

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World

COMPUTED = (RequestState.PREFILL, RequestState.DECODE)
ADMITTED = (*COMPUTED, RequestState.WAITING_FOR_REMOTE_KVS)
_MOVES_BLOCKS = frozenset([MakeBatch, CancelRequest, WorkerLost, KeepOver, Configure])
FAILED_ALONE_MIN = 2  # the first failure of a request alone may have been another program's
_TOLD = frozenset([Cancel, CancelAll, Pause])  # what the engine passes on to requests

# Kinds of incidents that tell of no failed step.
UNBLAMED = frozenset(["draft_model", "ladder", "not_a_number", "stall"])


class Checks:
    """The checks of one world; they keep what they must remember."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.restarts = Restarts(world.shape)
        self.mirror = Mirror()
        self.at_once: Counter[int] = Counter()  # plans, by the number of requests that were there
        self._ended: set[int] = set()  # requests
        self._quiet = False  # nothing but MakeBatch reached the scheduler since its last savepoint
        self._step_blocks: list[int] = []  # all blocks that the step on the device may touch
        self._failed: tuple[int, set[int]] | None = None  # the step that failed, and the streams that it concerned
        self._before: Any = None  # what a rollback of the step on the device must give back
        self._rung = ""  # of the ladder, before the event
        self._last_alone: tuple[Fault, int, list[int]] | None = None  # the step that last failed, if of one stream
        self._on_trial: tuple[Fault, int, list[int]] | None = None  # the same, while a canary is on the device
        self._oldest: Request | None = None  # of those that run, before the step being planned
        self._cancelled: set[int] = set()  # requests
        self._paused: dict[int, tuple[int, int]] = {}  # the last pause of each request, and its stream, in their order
        self._leaving: Request | None = None  # the one being cancelled
        self._paused_as: int | None = None  # which pause the one is in that is told to pause; None: in none
        self._to_be_told: set[int] = set()  # requests that the event at the engine concerns
        self._gate_heard: set[type] = set()  # kinds of events
        self._sampled: list[Request] = []  # who got a token in the step being committed
        self._not_a_number: dict[int, int] = {}  # requests, and their streams, of which the step gave no number
        self._spoilt: list[int] = []  # blocks of those
        self._failed_alone: Counter[int] = (
            Counter()
        )  # by request: failed steps that held no other, since its last token
        self._cancelled_early: set[int] = set()  # streams cancelled before anything was submitted for them

    @property
    def num_ended(self) -> int:
        """Requests that have ended, as their streams were told."""
        return len(self._ended)

    # ---- the scheduler -------------------------------------------------------------------------------------------

    def before_scheduler(self, event: Any) -> None:
        """`event` is about to be handled by the scheduler."""
        if isinstance(event, Submit) and event.stream_id in self._cancelled_early:
            raise Violation(f"stream {event.stream_id} was cancelled, and is submitted all the same")
        if (
            isinstance(event, CancelRequest) and event.cause is not Cause.QUEUE
        ):  # that one may come too late: `deadlines`
            self._cancelled.add(event.request_id)
            self._leaving = self.world.scheduler.requests.get(event.request_id)
        scheduler = self.world.scheduler
        if isinstance(event, PauseRequest):
            known = scheduler.requests.get(event.request_id)
            self._paused_as = known.paused_as if known is not None and known.state is RequestState.PAUSED else None
        self._rung = scheduler.recovery.ladder.rung
        flight = scheduler.oldest_flight
        self._on_trial = None if flight is None or not flight.canary else self._last_alone
        if isinstance(event, WorkerLost) and scheduler.flights:
            lost = (flight for flight in scheduler.flights if flight.step_id == event.step_id)
            self._note_failure(next(lost, scheduler.flights[0]))
        if not isinstance(event, MakeBatch):
            return
        self._watch_planning()
        if isinstance(event.outcome, StepDone) and flight is not None:
            if flight.canary and event.outcome.token_ids[0] < 0:
                self._note_failure(flight)
            if len(scheduler.flights) > 1:  # what is committed now is not taken back with the step behind it
                self._before = None
            self._sampled = flight.samples
            blank = without_number(self.world, flight, event.outcome)
            self._not_a_number = {request.request_id: request.stream_id for request in blank}
            self._spoilt = [block for request in blank for block in request.kv.blocks]
        running = [r for r in scheduler.planner.running.values() if r.state in ADMITTED]
        is_free = not scheduler.recovery.suspects and not isinstance(event.outcome, StepFailed) and not event.vacates
        is_free = is_free and self._is_by_age
        self._oldest = min(running, key=lambda r: r.request_id) if running and is_free else None
        if isinstance(event.outcome, StepFailed) and flight is not None:
            self._note_failure(flight)
            self._watch_rollback(event.outcome, exact=self._quiet)

    def _watch_planning(self) -> None:
        """Wrap the beginning of the coming plan: what is there then is what a rollback has to give back."""
        world = self.world
        pool = world.cache.pool
        begin = pool.open

        def watched(journal: Journal) -> None:
            if not world.scheduler.flights:
                self._before = world.scheduler.fingerprint() if world.looks_closely else None
            begin(journal)

        pool.open = watched  # type: ignore[method-assign]

    def _note_failure(self, flight: Flight) -> None:
        """A step has failed, or was lost: if one request stood alone in it, that one may be to blame."""
        held = list(flight.held())
        members = [request.stream_id for request in held if not request.ended]
        self._failed = flight.step_id, set(members)
        if len(held) == len(members) == 1:
            self._failed_alone[held[0].request_id] += 1

    def _watch_rollback(self, outcome: StepFailed, *, exact: bool) -> None:
        """Wrap the coming rollback: afterwards the state must be that of before the plan."""
        planner = self.world.scheduler.planner
        rollback = planner.rollback

        def watched(flight: Flight, *, launched: bool) -> None:
            rollback(flight, launched=launched)
            if flight.step_id > outcome.step_id:  # it was planned behind the one that failed
                if launched is not outcome.launched_behind:
                    began = "was begun" if outcome.launched_behind else "was never begun"
                    raise Violation(f"step {flight.step_id} {began}, and is taken back as launched={launched}")
                return
            del planner.rollback
            if launched is not outcome.launched:
                raise Violation(f"step {flight.step_id} was taken back as launched={launched}")
            if exact and self._before is not None:
                now, before = self.world.scheduler.fingerprint(), self._before
                if launched or outcome.launched_behind:  # names of blocks that were evicted for the step stay lost
                    now, before = now[1:], before[1:]
                if now != before:
                    raise Violation(f"rollback of step {flight.step_id}: " + "; ".join(_differences(before, now)))
                self.world.counts["rollbacks checked"] += 1

        planner.rollback = watched  # type: ignore[method-assign]

    def after_scheduler(self, event: Any, effects: Sequence[Effect]) -> None:
        """The scheduler has handled `event`."""
        scheduler = self.world.scheduler
        self._incidents(event, effects)
        self._outcomes(effects)
        self.world.counts["blocks told to routers"] += self.mirror.told(effects)
        if scheduler.state is SchedulerState.STARTING:
            return
        if type(event) in _MOVES_BLOCKS and self.world.looks_closely:
            self.mirror.check(self.world)
        planner = scheduler.planner
        if isinstance(event, MakeBatch):
            del self.world.cache.pool.open
            if self.world.planned is not None and len(scheduler.flights) == 1:  # else the savepoint is an older one
                self._quiet = True
            elif any(output.end is not None for output in _outputs(effects)):  # while a step was planned behind one
                self._quiet = False
            if "rollback" in planner.__dict__:
                raise Violation("a step failed and was not taken back")
            if self._oldest is not None and self._oldest.state is RequestState.PREEMPTED:
                raise Violation(f"request {self._oldest.request_id} is the oldest, and was preempted")
            self._oldest = None
            self._plan(self.world.planned)
            self._check_masks(effects)
            pool, spoilt, self._spoilt = self.world.cache.pool, self._spoilt, []
            if found := [block for block in spoilt if not pool._refs[block] and pool._name[block]]:
                raise Violation(f"blocks {found} gave no number, and can be found by others")
            self.at_once[len(scheduler.requests)] += 1
            admitted = [request for flight in scheduler.flights for request in flight.admitted]
            for request in self._sampled:
                if request.state is RequestState.PREFILL and request not in admitted:
                    raise Violation(f"request {request.request_id} has its first token, and is in PREFILL")
            self._sampled = []
        else:
            self._quiet = False
            if isinstance(event, WorkerLost):
                self._step_blocks = []
        if self.world.looks_closely:
            self._look_closely(event)
        if isinstance(event, PauseRequest):
            paused = scheduler.requests.get(event.request_id)
            if self._paused_as is not None and (paused is None or paused.paused_as != self._paused_as):
                raise Violation(f"request {event.request_id} was paused already, and counts as paused anew")
            self._paused_as = None
            self._note_pause(paused)
            if paused is not None and paused.state is RequestState.DECODE:
                raise Violation(f"request {event.request_id} was paused and decodes")
        if isinstance(event, CancelRequest) and event.cause is Cause.QUEUE:
            self._ended_whole(effects)
        if isinstance(event, CancelRequest) and self._leaving is not None:
            if event.request_id in scheduler.requests or not self._leaving.ended:
                raise Violation(f"request {event.request_id} was cancelled and has not ended")
            self._leaving = None

    def _ended_whole(self, effects: Sequence[Effect]) -> None:
        """A queue deadline ends all choices of a stream at once: one that went on could get its first token yet."""
        ended = {output.stream_id for output in _outputs(effects)}
        for request in self.world.scheduler.requests.values() if ended else ():
            if request.stream_id in ended:
                raise Violation(f"stream {request.stream_id} ended in the queue, but not its choice {request.choice}")

    def _look_closely(self, event: Any) -> None:
        """What takes a time that grows with the world."""
        scheduler = self.world.scheduler
        planner = scheduler.planner
        if type(event) in _MOVES_BLOCKS:
            scheduler.check()
            refs = self.world.cache.pool._refs
            if 0 in [refs[block] for block in self._step_blocks]:
                raise Violation("a block that the step on the device may touch has no owner")
        arrivals = [request.request_id for request in planner.waiting]
        if arrivals != sorted(arrivals):
            raise Violation(f"the queue is out of order: {arrivals}")

    def _outcomes(self, effects: Sequence[Effect]) -> None:
        """An error ends a request that failed twice with no other in its step, and had no token since.

        First tokens come before all others of their step.
        """
        outputs = _outputs(effects)
        if any(before.first is None and output.first is not None for before, output in pairwise(outputs)):
            raise Violation(f"first tokens are handed on behind others: {[o.request_id for o in outputs if o.first]}")
        for output in outputs:
            end = output.end
            if end is not None and end.error is not None and end.code == "step_failed":
                is_no_number = self._not_a_number.pop(output.request_id, None) is not None
                if not is_no_number and self._failed_alone[output.request_id] < FAILED_ALONE_MIN:
                    raise Violation(f"request {output.request_id} ended with {end}, and no two failures were its own")
                if is_no_number and any(output.request_id in each for each in self.world.cache.tails.values()):
                    raise Violation(f"request {output.request_id} gave no number, and its prompt can be found")
                self.world.clients[output.stream_id].was_blamed = True
            if end is not None or output.token_ids:
                self._failed_alone.pop(output.request_id, None)
        if self._not_a_number:
            raise Violation(f"{self._not_a_number} gave no number, and go on")

    def _incidents(self, event: Any, effects: Sequence[Effect]) -> None:
        """What went wrong was reported, and nothing else."""
        incidents = [e.event for e in effects if isinstance(e, Send) and e.to == "incidents"]
        failed, self._failed = self._failed, None
        rung = self.world.scheduler.recovery.ladder.rung
        if (rung != self._rung) is not any(incident.kind == "ladder" for incident in incidents):
            raise Violation(f"the ladder went from {self._rung} to {rung}, and was reported so: {incidents}")
        for incident in incidents:
            if incident.kind == "stall":
                self._ended_for_room(incident)
        faults = [incident for incident in incidents if incident.kind not in UNBLAMED]
        told = sorted(i for incident in incidents if incident.kind == "not_a_number" for i in incident.stream_ids)
        if told != sorted(self._not_a_number.values()):
            raise Violation(f"{self._not_a_number} gave no number, and {told} were reported")
        outcome = event.outcome if isinstance(event, MakeBatch) else event
        of_drafts = [incident.message for incident in incidents if incident.kind == "draft_model"]
        error = outcome.draft_error if isinstance(outcome, StepDone) else None
        if of_drafts != ([] if error is None else [f"the draft model has failed: {error}"]):
            raise Violation(f"the draft model's error was {error}, and {of_drafts} were reported")
        if failed is not None and isinstance(outcome, StepDone):  # a canary without a number has failed
            outcome = StepFailed(outcome.step_id, outcome.epoch, Fault.EXCEPTION, "no number")
        if isinstance(outcome, StepDone) and self._on_trial is not None:  # a canary went well, and told who it was
            faults = [i for i in faults if (i.kind, i.step_id, i.stream_ids) != self._on_trial]
        if failed is None or not isinstance(outcome, StepFailed | WorkerLost):
            if faults:
                raise Violation(f"nothing went wrong, and {faults} were reported")
            return
        step_id, streams = failed
        for incident in faults:
            if (incident.kind, incident.step_id) != (outcome.fault, step_id) or not streams.issuperset(
                incident.stream_ids
            ):
                raise Violation(f"step {step_id} failed by {outcome.fault}, and {incident} was reported")
        if isinstance(outcome, StepFailed) and outcome.fault is not Fault.SWITCH and len(streams) == 1:
            self._last_alone = outcome.fault, step_id, sorted(streams)
            if len(faults) == 2 and len(self.world.modes) > 1:  # there was no room for a canary
                del faults[-1]
        if isinstance(outcome, StepFailed) and outcome.fault is not Fault.SWITCH and streams and len(faults) != 1:
            raise Violation(f"step {step_id} failed by {outcome.fault}, and {len(faults)} incidents were reported")

    def _ended_for_room(self, incident: Incident) -> None:
        """A request was ended because too many are parked: it is the one that has been paused longest."""
        world = self.world
        scheduler, order = world.scheduler, list(self._paused)
        parked = scheduler.planner.parked
        if len(parked) < 2 * world.shape.max_num_seqs:
            raise Violation(f"{incident}, and there was room")
        ended = [i for i in order if self._paused[i][1] in incident.stream_ids and i not in scheduler.requests]
        if all(order.index(i) > min(map(order.index, parked)) for i in ended):
            raise Violation(f"{incident}, and others are paused for longer")
        for stream_id in incident.stream_ids:
            world.clients[stream_id].causes.add(Cause.STALLED)

    def _note_pause(self, request: Request | None) -> None:
        """`request` was told to pause: whether that is a new pause, its state and its number say."""
        if request is not None and request.state is RequestState.PAUSED:
            known = self._paused.get(request.request_id)
            if known is None or known[0] != request.paused_as:
                self._paused.pop(request.request_id, None)
                self._paused[request.request_id] = request.paused_as, request.stream_id

    def _check_masks(self, effects: Sequence[Effect]) -> None:
        sent = [effect.event for effect in effects if isinstance(effect, Send)]
        guessed = [event.drafts for event in sent if isinstance(event, Advance)]
        told = {request_id: bytes(drafts) for request_id, drafts in chain.from_iterable(guessed)}
        for batch in sent:
            if isinstance(batch, Batch) and batch.plan is not None and self.world.planned is not None:
                check_masks(self.world, batch.plan, self.world.planned, told)

    def _plan(self, flight: Flight | None) -> None:
        """A step was planned, or nothing was."""
        world = self.world
        scheduler = world.scheduler
        planner, shape = scheduler.planner, world.shape
        rows = [row for flight in scheduler.flights for row in flight.rows]
        self._step_blocks = [block for request, _, _ in rows for block in request.kv.blocks]
        if flight is None:
            return
        planned = {request.request_id for request, _, _ in flight.rows}
        if planned & self._cancelled:
            raise Violation(f"step {flight.step_id} computes {planned & self._cancelled}, which were cancelled")
        if len(planned) != len(flight.rows):
            raise Violation(f"step {flight.step_id} computes a request twice")
        for request, _, _ in flight.rows:
            if request.state not in COMPUTED:
                raise Violation(
                    f"request {request.request_id} is {request.state}, and step {flight.step_id} computes it"
                )
        for request, count, start in flight.rows:
            if start + count - flight.drafts.get(request.request_id, 0) >= request.max_len:
                raise Violation(f"step {flight.step_id} computes the last token of request {request.request_id}")
        num_tokens = sum(count for _, count, _ in flight.rows)
        if num_tokens > max(shape.max_num_batched_tokens, len(planned)) or len(planned) > shape.max_num_seqs:
            raise Violation(f"step {flight.step_id} has {num_tokens} tokens of {len(planned)} requests")
        if not scheduler.recovery.suspects:
            self._nobody_overtakes(flight)
        may_run = [
            i
            for i, r in planner.running.items()
            if r.state in COMPUTED and (i in planned or not (ends_in_flight(r) or goes_nowhere(r) or r.mask == AWAITED))
        ]
        is_free = not scheduler.recovery.suspects and self._is_by_age  # else who waits may be before who runs
        if is_free and may_run and min(may_run) not in planned:
            raise Violation(f"request {min(may_run)} is the oldest, and step {flight.step_id} leaves it out")

    def before(self, to: str, event: Any) -> None:
        """`event` is about to be handled by the engine, the gate or the worker."""
        engine = self.world.engine
        if to == "worker":
            self.restarts.before(self.world.worker)
        if to == "gate":
            self._gate_heard.add(type(event))
        if to != "engine" or type(event) not in _TOLD:
            return
        coming = [e.stream_id for e in self.world.links.get(("gate", "engine", False), ())]
        if isinstance(event, Cancel):
            stream_id = event.stream_id
            if stream_id in engine._encoding or stream_id in coming:
                self._cancelled_early.add(stream_id)
            self._to_be_told = set(engine._live.get(stream_id, ()))
        elif isinstance(event, CancelAll):
            self._cancelled_early.update(engine._encoding)
            self._cancelled_early.update(coming[: max(event.arrived - engine._num_arrived, 0)])
            self._to_be_told = {request_id for live in engine._live.values() for request_id in live}
        elif isinstance(event, Pause):
            live = engine._live.get(event.stream_id, {})
            self._to_be_told = {i for i, choice in live.items() if event.choice is None or choice == event.choice}

    def after(self, to: str, event: Any, effects: Sequence[Effect]) -> None:
        """The engine, the gate or the worker has handled `event`: what concerns requests was passed on to each."""
        if to == "worker":
            self.restarts.after(self.world.worker, event, effects)
            if self.world.worker.state is WorkerState.FAILED and not self.world.is_stopped:
                self.world.stopped()
        elif to == "engine" and type(event) in _TOLD:
            queue = self.world.links.get(("engine", "scheduler", not isinstance(event, Pause)), ())
            kind = PauseRequest if isinstance(event, Pause) else CancelRequest
            if missing := self._to_be_told - {e.request_id for e in queue if isinstance(e, kind)}:
                raise Violation(f"{event} was not passed on to the requests {missing}")

    @property
    def _is_by_age(self) -> bool:
        """Whether age alone says whose turn it is."""
        is_shared = len({request.tenant.id for request in self.world.scheduler.requests.values()}) > 1
        return not is_shared and self.world.shape.scheduling_policy == "fcfs"

    def _nobody_overtakes(self, flight: Flight) -> None:
        """Who was admitted has less work than older ones that wait, except those that wait for a prefix."""
        num_admitted, awaited = len(flight.admitted), self.world.scheduler.planner.awaited
        num_waited = num_admitted + len(self.world.scheduler.planner.waiting)
        if num_admitted >= ADMISSIONS_MAX or num_waited > WAITING_MAX:  # the step has not looked at all of them
            return
        audit = self.world.audit
        if audit is None and not self._is_by_age:
            return
        places = audit.places if audit is not None else Places(self.world)
        place = places.of_all(flight)
        for request in self.world.scheduler.planner.waiting:
            for admitted in flight.admitted:
                work = 0 if admitted in flight.fetched else admitted.work
                is_less = places.key(admitted)[:2] < places.key(request)[:2]  # else it is by work
                overtook = place[admitted.request_id] > place[request.request_id]
                has_more = (work, admitted.request_id) > (request.work, request.request_id)
                overtook = overtook and not is_less and has_more
                if overtook and request.waits_for is None and request.request_id not in awaited:
                    raise Violation(f"request {admitted.request_id} overtook request {request.request_id}")

    # ---- clients -------------------------------------------------------------------------------------------------

    def output(self, output: Output) -> None:
        """The streams are about to get `output`."""
        if output.stream_id not in self.world.clients:
            raise Violation(f"output for stream {output.stream_id}, which nobody asked for")
        if output.request_id in self._ended:
            raise Violation(f"request {output.request_id} got something after its end")
        if output.end is not None and output.request_id >= 0:
            self._ended.add(output.request_id)

    def answered(self) -> None:
        """The gate has seen an Arrive: it said yes, no or later, and yes only where it may."""
        answers = [self.world.links.get(("gate", to, False)) for to in ("client", "engine")]
        arrive = answers[1][-1] if answers[1] else None
        stream_id = len(self.world.clients) - 1
        let_in = isinstance(arrive, Arrive) and arrive.stream_id == stream_id
        overflowed = self.world.gate.is_overflowed(stream_id)
        if let_in + overflowed + bool(answers[0]) != 1:
            raise Violation("the gate gave no answer, or two")
        if (let_in or overflowed) and (self._gate_heard & {Drain, Stop} or Open not in self._gate_heard):
            raise Violation("the gate let somebody in when it was closed")

    def rejection(self, rejected: Rejected, was_full: bool) -> None:
        """The gate has refused somebody."""
        right = {
            "overloaded": was_full,
            "draining": Drain in self._gate_heard,
            "closed": bool(self._gate_heard & {Drain, Stop}) or Open not in self._gate_heard,
        }
        if not right[rejected.reason]:
            raise Violation(f"stream {rejected.stream_id} was rejected as {rejected.reason}, for no reason")

    # ---- time and the end -----------------------------------------------------------------------------------------

    def timer_set(self, event: Any) -> None:
        """A machine has set a timer, after which it will get `event`."""
        if isinstance(event, StallOver):
            self.world.clients[event.stream_id].reads_when_stalled = self.world.clients[event.stream_id].num_reads

    def timer(self, event: Any) -> None:
        """A timer has run out."""
        world = self.world
        if isinstance(event, KeepOver):
            if event.request_id not in world.scheduler.requests:
                raise Violation(f"request {event.request_id} has ended, and the timer of its pause has not")
        elif isinstance(event, Cancel):
            world.counts["timeout"] += 1
            world.clients[event.stream_id].causes.add(event.cause)
        elif isinstance(event, QueueOver):
            world.counts["queue timeout"] += 1
            world.clients[event.stream_id].causes.add(Cause.QUEUE)
        elif isinstance(event, StallOver):
            client = world.clients[event.stream_id]
            is_due = world.audit is None or world.audit.deadlines.is_overdue(event)
            if is_due and client.num_reads == client.reads_when_stalled:
                world.counts["stall timeout"] += 1
                client.causes.add(Cause.STALLED)

    def quiet(self) -> None:
        """What holds while everybody waits for time to pass, or for clients: nobody waits for nothing."""
        if self.world.processes is not None:
            self.world.processes.check_rest()
        world = self.world
        if world.engine.state is not EngineState.IDLE:
            return
        for request in world.scheduler.requests.values():
            if request.state not in (RequestState.PAUSED,) and not is_waited_for(world, request):
                raise Violation(f"request {request.request_id} is {request.state}, and nobody is going to compute it")

    def drained(self) -> None:
        """What holds when a drain has nothing left to wait for, before the stop that follows it."""
        if self.world.engine.num_streams or self.world.gate.num_queued:
            raise Violation("everybody has left, and the drain would wait on")

    def end(self) -> None:
        """What holds when nothing can happen any more."""
        world = self.world
        engine, scheduler = world.engine, world.scheduler
        world.reconfigurations.end(world)
        if engine.state not in (EngineState.IDLE, EngineState.STOPPED):
            raise Violation(f"nothing can happen, but the engine is {engine.state}")
        for stream_id, client in world.clients.items():
            if client.end is None:
                raise Violation(f"stream {stream_id} never ended: it is {world.streams[stream_id].state}")
        if engine.num_streams or world.gate.num_queued:
            raise Violation("the engine knows streams, or the gate holds credits, and nobody is there")
        if engine.state is EngineState.STOPPED:
            if not world.is_stopped:
                raise Violation("the engine stopped, and nobody had asked for that")
            if world.processes is not None:
                world.processes.check_end()
            if world.worker.state is not WorkerState.STOPPED or not world.is_closed:
                raise Violation(f"the engine is stopped, and the worker is {world.worker.state}")
            return
        if world.is_stopped:
            raise Violation("the engine was stopped, and is not")
        stats = scheduler.planner.cache.statistics()
        if stats.num_owned or scheduler.requests or scheduler._tombstones or engine._tombstones:
            raise Violation(f"something is left behind: {stats}, {scheduler._tombstones}, {engine._tombstones}")
        if set(scheduler.statistics().finished_total) != set(ENDED):
            raise Violation("the counts by end are not complete")


def _outputs(effects: Sequence[Effect]) -> list[Output]:
    """What these effects bring to streams."""
    events = [effect.event for effect in effects if isinstance(effect, Send)]
    return [output for event in events if isinstance(event, Batch | Outputs) for output in event.outputs]


def _differences(before: Any, now: Any) -> list[str]:
    """What differs in two values of nested tuples, part by part."""
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        return [text for was, is_ in zip(before, now, strict=True) if was != is_ for text in _differences(was, is_)]
    return [f"{before} became {now}"]
