"""Bugs planted in steps planned ahead: when that may be, and what becomes of them when the step before fails."""

from __future__ import annotations

from novainfer.fsm.device.process import Process
from novainfer.fsm.device.worker import Worker
from novainfer.fsm.engine import Engine
from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

AHEAD_MUTANTS = [
    Mutant(
        "a step behind one that failed is kept", Scheduler, "_roll_back", "self._discard_behind(flight, behind)", "pass"
    ),
    Mutant(
        "what departed with a step behind is given back before the one before is taken back",
        Scheduler,
        "_discard_behind",
        "first.departed += flight.departed",
        "self.planner.settle(flight)",
    ),
    Mutant(
        "a request that ends in two steps departs with the first",
        Scheduler,
        "_end",
        "reversed(others)",
        "()",
    ),
    Mutant(
        "a step is planned ahead while the one to blame is looked for",
        Scheduler,
        "_may_plan_ahead",
        "not self.recovery.is_searching and",
        "",
    ),
    Mutant(
        "a step is planned ahead though the mode is to change",
        Scheduler,
        "_may_plan_ahead",
        "self.recovery.ladder.mode == self.planner.mode",
        "True",
    ),
    Mutant(
        "a step does not say which one it follows",
        Scheduler,
        "_try_ahead",
        "planned[0].after = self.flights[-1].step_id",
        "pass",
    ),
    Mutant(
        "the worker's loss is blamed on the step behind",
        Worker,
        "_lose",
        "step_id = self._plans[0].step_id",
        "step_id = self._plans[-1].step_id",
    ),
    Mutant(
        "the worker rests though another step is at the device",
        Worker,
        "_step_done",
        "return S.RUNNING if self._plans else S.READY",
        "return S.READY",
    ),
    Mutant(
        "only the first of the plans that waited for a switch is begun",
        Worker,
        "_switched",
        "for plan in self._plans:",
        "for plan in self._plans[:1]:",
    ),
    Mutant(
        "what waits for a switch is kept when that fails",
        Worker,
        "_switch_failed",
        "self._drop_plans()",
        "del self._plans[0]",
    ),
    Mutant(
        "a process is thought to rest though it was asked for two steps",
        Process,
        "_answered",
        "return S.RUNNING if self.asked else S.READY",
        "return S.READY",
    ),
    Mutant(
        "the engine waits for the outcome of a step behind one that failed",
        Engine,
        "_step_failed",
        "self.steps.clear()",
        "del self.steps[0]",
    ),
    Mutant(
        "the engine hands over a step behind one that has failed meanwhile",
        Engine,
        "_batch",
        "if event.plan is not None and not isinstance(outcome, StepFailed):",
        "if event.plan is not None:",
    ),
    Mutant(
        "an outcome that comes while the scheduler plans is forgotten",
        Engine,
        "_done_early",
        "self._outcome = event",
        "pass",
    ),
    Mutant(
        "the engine asks for a step behind one when it may not",
        Engine,
        "_batch",
        "if event.may_follow and self._wanted is None:",
        "if event.plan is not None and self._wanted is None:",
    ),
    Mutant(
        "an outcome outlives the worker",
        Engine,
        "_lost",
        "self._outcome = None",
        "pass",
    ),
    Mutant(
        "a block is expected to hold a token that is not known",
        StepBuilder,
        "add_decodes",
        "if end >= kv.commits_at and is_known and request.mask != COMING:",
        "if end >= kv.commits_at and request.mask != COMING:",
    ),
    Mutant(
        "a request is computed behind the step that gives it its last token",
        StepBuilder,
        "add_decodes",
        "if not is_known and (end >= request.max_len or at > len(token_ids)):",
        "if not is_known and at > len(token_ids):",
    ),
    Mutant(
        "the token before the last is taken for one that is not known",
        StepBuilder,
        "add_decodes",
        "input_ids.append(token_ids[at] if is_known else SAMPLED)",
        "input_ids.append(token_ids[min(at, len(token_ids) - 1)])",
    ),
    Mutant(
        "nothing runs that a step planned ahead would have to leave room for",
        StepBuilder,
        "__init__",
        "self.had_running = is_ahead or bool(planner.running)",
        "self.had_running = bool(planner.running)",
    ),
    Mutant(
        "a step is planned ahead though not all that decode have room",
        Planner,
        "plan_ahead",
        "self._short_of_room(None) is not None",
        "False",
    ),
    Mutant(
        "who keeps a place for too long while a step holds it loses it at once",
        Planner,
        "_park_overstayed",
        "if request.is_in_flight:",
        "if False:",
    ),
    Mutant(
        "what has ended in a step still promises a prefix",
        BlockCache,
        "abandon",
        "self._break_promises(request.request_id)",
        "pass",
    ),
    Mutant(
        "a block is named after a token that never came",
        BlockCache,
        "commit_row",
        "num_full = min(end, len(request.token_ids)) // size",
        "num_full = end // size",
    ),
]
