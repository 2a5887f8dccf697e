"""What must hold of a router at each moment, looked at from outside: by what engines are and clients got.

places      no two engines have one place, and none has one that there is not
clients     each is answered once: let to an engine that is up, or refused; none is forgotten, or waits too long
victims     an engine with live requests is stopped by a deadline of its own only, or because it died; of those
            without, the one goes that was used least recently; none goes for another before it has been there for
            as long as it took to come up
files       a model is loaded, and makes others go, when its files were looked at and nothing was wrong with them; they
            are looked at once for all that wait, and not where it is loaded
no idling   a model does not wait while there is a place for it, or a model that could make room
failures    a model that failed is left alone until its pause is over, unless it is asked for by hand
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from novainfer.fsm.models.model import (
    COMING,
    LEAVING,
    LOADED,
    BackoffOver,
    Checked,
    CheckFailed,
    CheckFiles,
    Died,
    DrainOver,
    FreshOver,
    IdleOver,
    Loaded,
    LoadEngine,
    LoadFailed,
    PatienceOver,
    StopEngine,
    Stopped,
)
from novainfer.fsm.models.model import ModelState as M
from novainfer.fsm.models.router import Ask, AskOver, Granted, Refused
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.simulation.models.world import Move, RoutedWorld

EPSILON_S = 1e-9  # sums of floats
PAUSE_S_MAX = 30.0


class Checks:
    """What one world's clients and engines have seen so far."""

    def __init__(self, world: RoutedWorld) -> None:
        self._world = world
        self._move: Move = ()
        self._due_s: dict[int, float] = {}  # of clients without an answer
        self._used: list[str] = []  # models, the one last that was used last
        self._fresh: dict[tuple[str, int], float] = {}  # engines that are left alone, until when
        self._impatient: set[str] = set()  # models that have waited for long
        self._sound: set[str] = set()  # models that wait for room, and nothing is wrong with their files
        self._failed: dict[str, float] = {}  # models that are left alone, until when
        self._num_failures: Counter[str] = Counter()  # one after the other
        self._died: set[tuple[str, int]] = set()  # engines of which the router has heard that
        self._is_ending = False  # the server is
        self._before = dict.fromkeys(world.router.models, M.ABSENT)  # their states, before this move

    # ---- what happens --------------------------------------------------------------------------------------------

    def begins(self, move: Move) -> None:
        """`move` is about to happen."""
        self._move = move
        kind = move[0]
        if kind == "deliver":
            self._hears(self._world.mail[0])
        elif kind == "unload" and self._before[move[1]] is M.FAILED:
            self._failed.pop(move[1], None)
            self._num_failures[move[1]] = 0
        elif kind == "drain":
            self._is_ending = True
        elif kind == "gone" and move[1] in self._world.granted:
            self._use(self._world.granted[move[1]][0])

    def _hears(self, said: Any) -> None:
        world, model = self._world, self._world.router.models[said.model]
        if said.serial != model.serial:
            return
        if isinstance(said, Loaded) and model.state is M.LOADING:
            self._fresh[said.model, said.serial] = world.now_s + said.load_s
            self._use(said.model)
        elif isinstance(said, Died) and model.state in LOADED:
            self._died.add((said.model, said.serial))
        elif isinstance(said, Checked) and model.state is M.CHECKING:
            self._sound.add(said.model)
        elif (
            (isinstance(said, CheckFailed) and model.state is M.CHECKING)
            or (isinstance(said, LoadFailed) and model.state is M.LOADING)
            or (isinstance(said, Stopped) and (said.model, said.serial) in self._died)
        ):
            self._num_failures[said.model] += 1
            pause_s = min(2.0 ** (self._num_failures[said.model] - 1), PAUSE_S_MAX)
            self._failed[said.model] = world.now_s + pause_s
        if isinstance(said, Stopped | LoadFailed | Died):
            self._fresh.pop((said.model, said.serial), None)

    def fires(self, event: Any) -> None:
        """A timer has run out."""
        now_s = self._world.now_s + EPSILON_S
        if isinstance(event, FreshOver):
            if self._fresh.pop((event.model, event.serial)) > now_s:
                raise Violation(f"{event.model} is said to have been there for as long as it took to load, too early")
            self._num_failures[event.model] = 0
        elif isinstance(event, PatienceOver):
            self._impatient.add(event.model)
        elif isinstance(event, BackoffOver):
            until_s = self._failed.pop(event.model)
            if until_s > now_s or (until_s < now_s - 2 * EPSILON_S and not self._world.has_any_order):
                num_failures = self._num_failures[event.model]
                raise Violation(f"the pause of {event.model} has another length than after {num_failures} failures")

    def asks(self, event: Ask) -> None:
        """A client comes."""
        self._due_s[event.request_id] = self._world.now_s + event.timeout_s
        if event.by_hand:
            self._failed.pop(event.model, None)

    def grants(self, granted: Granted) -> None:
        """A client is let to an engine."""
        world = self._world
        if granted.request_id not in world.asked:
            raise Violation(f"request {granted.request_id} was answered before, or has left")
        model = world.asked[granted.request_id].model
        its = [one.state for one in world.engines if (one.model, one.serial) == (model, granted.serial)]
        if its not in (["UP"], ["DEAD"]):
            raise Violation(f"request {granted.request_id} was let to an engine of {model} that is not up: {its}")
        self._use(model)

    def refuses(self, refused: Refused) -> None:
        """A client is refused."""
        world, request_id = self._world, refused.request_id
        if request_id not in world.asked:
            raise Violation(f"request {request_id} was answered before, or has left")
        ask = world.asked[request_id]
        kind = self._move[0]
        is_due = {
            "failed": ask.model in self._failed,
            "full": kind == "ask" and len(self._waiting_for(ask.model)) > world.shape.max_waiting,
            "timeout": self._move == ("fire", AskOver(request_id)),
            "unloaded": self._move[:2] == ("unload", ask.model),
            "draining": self._is_ending,
        }
        if not is_due[refused.reason]:
            raise Violation(f"request {request_id} was refused as {refused.reason}, and there is no reason for that")
        if not refused.message or not refused.retry_after_s > 0:
            raise Violation(f"request {request_id} was refused without a reason, or without a time to come again")

    def looks(self, job: CheckFiles) -> None:
        """A model's files are looked at."""
        before = self._before[job.model]
        if before in (*COMING, *LOADED):
            raise Violation(f"the files of {job.model} are looked at, and it is {before}")
        if job.model in self._failed:
            raise Violation(f"{job.model} is tried again before its pause is over")
        if not self._waiting_for(job.model):
            raise Violation(f"the files of {job.model} are looked at, and no request waits for it")

    def loads(self, job: LoadEngine) -> None:
        """An engine is made."""
        world = self._world
        if job.model not in self._sound:
            raise Violation(f"{job.model} is loaded, and its files were not looked at")
        self._sound.remove(job.model)
        if not 0 <= job.place < world.shape.max_loaded:
            raise Violation(f"{job.model} loads into place {job.place}, and there are {world.shape.max_loaded}")
        for engine in world.engines:
            if engine.place == job.place:
                raise Violation(f"{job.model} loads into the place of {engine.model}")
        if job.model in self._failed:
            raise Violation(f"{job.model} is tried again before its pause is over")
        if not self._waiting_for(job.model):
            raise Violation(f"{job.model} is loaded, and no request waits for it")
        self._impatient.discard(job.model)

    def stops(self, job: StopEngine) -> None:
        """An engine is ended."""
        world, key = self._world, (job.model, job.serial)
        live = [request_id for request_id, has in world.granted.items() if has == key]
        kind, by_deadline = self._move[0], self._move == ("fire", DrainOver(job.model))
        is_asked = kind == "drain" or self._move[:2] == ("unload", job.model)
        if live and not (by_deadline or (is_asked and self._move[-1] <= 0) or key in self._died):
            raise Violation(f"the engine of {job.model} was stopped, and requests {live} have it")
        is_idle_over = self._move == ("fire", IdleOver(job.model))
        if is_asked or by_deadline or is_idle_over or key in self._died or self._before[job.model] is M.DRAINING:
            return
        if key in self._fresh:
            raise Violation(f"the engine of {job.model} made room for another, and was there for a moment only")
        self._is_needed(job.model)
        if self._before[job.model] is not M.YIELDING:
            self._check_choice(job.model, M.IDLE)

    def _is_needed(self, name: str) -> None:
        """`name` makes room, which another can use."""
        if not any(self._waiting_for(one) for one in self._sound):
            raise Violation(f"{name} makes room, and no model needs it whose files were looked at")

    def _check_choice(self, name: str, state: M) -> None:
        """`name` makes room, of those in this state."""
        others = [one for one, model in self._world.router.models.items() if model.state is state and one != name]
        older = [one for one in others if not self._is_fresh(one) and self._rank(one) < self._rank(name)]
        if older:
            raise Violation(f"{name} makes room, and {older} were not used for longer")

    # ---- what must hold between moves ----------------------------------------------------------------------------

    def holds(self) -> None:
        """After a move."""
        world, models = self._world, self._world.router.models
        places = Counter(engine.place for engine in world.engines)
        if len(world.engines) > world.shape.max_loaded or any(count > 1 for count in places.values()):
            raise Violation(f"{len(world.engines)} engines have memory for {world.shape.max_loaded}")
        self._impatient -= {name for name in self._impatient if models[name].state is not M.WAITING}
        self._sound = {name for name in self._sound if self._waiting_for(name)}
        for name, model in models.items():
            waiting = self._waiting_for(name)
            if model.state in (M.IDLE, M.READY) and waiting:
                raise Violation(f"{len(waiting)} requests wait for {name}, which takes requests")
            if len(waiting) > world.shape.max_waiting:
                raise Violation(f"{len(waiting)} requests wait for {name}")
            if waiting and model.state in (M.ABSENT, M.FAILED):
                raise Violation(f"requests wait for {name}, and it is not on its way")
            if model.state is M.WAITING and not waiting:
                raise Violation(f"{name} waits for room, and no request waits for it")
            live = sum(has == (name, model.serial) for has in world.granted.values())
            if model.place is not None and model.num_live != live:
                raise Violation(f"{name} counts {model.num_live} live requests, and has {live}")
            if model.state is M.YIELDING and self._before[name] is not M.YIELDING:
                self._is_needed(name)
                self._check_choice(name, M.READY)
            if (model.state is M.READY and not live) or (model.state is M.IDLE and live):
                raise Violation(f"{name} is {model.state} with {live} live requests")
        self._no_idling()
        if self._move[0] == "unload" and self._before[name := self._move[1]] in COMING:
            self._no_waiting(name)
        late = [one for one in world.asked if self._due_s[one] < world.now_s - EPSILON_S]
        if late and not world.has_any_order:
            raise Violation(f"requests {late} wait for longer than they wanted to")
        self._before = {name: M(model.state) for name, model in models.items()}

    def _no_waiting(self, name: str) -> None:
        if waiting := self._waiting_for(name):
            raise Violation(f"{name} was unloaded by hand, and {len(waiting)} requests wait for it")

    def _no_idling(self) -> None:
        world, models = self._world, self._world.router.models
        wanting = [name for name, model in models.items() if model.state is M.WAITING]
        leaving = sum(model.state in LEAVING for model in models.values())
        if not wanting:
            yielding = [name for name, model in models.items() if model.state is M.YIELDING]
            if yielding:
                raise Violation(f"{yielding} make room, and no model needs it")
            return
        if world.router.num_free:
            raise Violation(f"{wanting} wait for room, and there is a place")
        idle = [name for name, model in models.items() if model.state is M.IDLE and not self._is_fresh(name)]
        if idle and leaving < len(wanting):
            raise Violation(f"{wanting} wait for room, and a model that no request has keeps its place")
        busy = [name for name, model in models.items() if model.state is M.READY and not self._is_fresh(name)]
        if busy and leaving < len(self._impatient):
            raise Violation(f"{sorted(self._impatient)} have waited for long, and none of {busy} makes room")

    def rests(self) -> None:
        """Nothing but time is left."""
        world = self._world
        if world.asked or world.granted:
            raise Violation(f"requests {[*world.asked, *world.granted]} have no end")

    def ends(self) -> None:
        """The server has ended."""
        world, router = self._world, self._world.router
        left = {
            "engines": world.engines,
            "timers": list(world.timers),
            "requests": [*world.asked, *router.live, *(one for name in router.models for one in router.waiting(name))],
            "places": [] if router.num_free == world.shape.max_loaded else [router.num_free],
        }
        if str(router.state) != "CLOSED" or any(left.values()):
            raise Violation(f"at the end the router is {router.state}, and this is left: {left}")

    # ---- looks ---------------------------------------------------------------------------------------------------

    def _waiting_for(self, name: str) -> list[Ask]:
        return [ask for ask in self._world.asked.values() if ask.model == name]

    def _use(self, name: str) -> None:
        if name in self._used:
            self._used.remove(name)
        self._used.append(name)

    def _rank(self, name: str) -> int:
        return self._used.index(name)

    def _is_fresh(self, name: str) -> bool:
        return (name, self._world.router.models[name].serial) in self._fresh
