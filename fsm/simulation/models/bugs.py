"""Bugs planted in the router and its models; seeds, or a small world, must find each of them."""

from __future__ import annotations

from novainfer.fsm.models.model import Model
from novainfer.fsm.models.router import Router
from novainfer.fsm.simulation.bugs.mutants import Mutant, planted
from novainfer.fsm.simulation.models.explore import SMALL_ROUTED, explore_routed
from novainfer.fsm.simulation.models.swarm import run_routers

SEEDS_MAX = 2000
SEEDS_AT_ONCE = 50
STATES_MAX = 3000  # of each small world


def hunt_routed(mutant: Mutant) -> str | None:
    """How the planted bug was found; None where it was not."""
    with planted(mutant):
        for first in range(0, SEEDS_MAX, SEEDS_AT_ONCE):
            if found := run_routers(range(first, first + SEEDS_AT_ONCE)).violations:
                seed, violation = next(iter(found.items()))
                return f"seed {seed}: {violation}"
        for small in SMALL_ROUTED:
            if wrong := explore_routed(small, states_max=STATES_MAX).violation:
                return f"in {small.name!r}: {wrong}"
    return None


ROUTER_MUTANTS = [
    Mutant(
        "a place is given away while the engine that has it goes down",
        Model,
        "_stop",
        "self._start(StopEngine(self.name, self.serial))",
        "self._start(StopEngine(self.name, self.serial)); self.place = None",
    ),
    Mutant(
        "a place is never given back",
        Router,
        "_tell",
        "self._free.append(place)",
        "pass",
    ),
    Mutant(
        "an engine with live requests makes room",
        Model,
        "_yield",
        "return S.YIELDING",
        "self._stop(_); return S.YIELDING",
    ),
    Mutant(
        "the model that was used last makes room",
        Router,
        "_by_use",
        "for name in self._used if",
        "for name in reversed(self._used) if",
    ),
    Mutant(
        "the end of a request is no use of its model",
        Router,
        "_gone",
        "self._touch(name)",
        "pass",
    ),
    Mutant(
        "a model makes room as soon as it is there",
        Router,
        "_make_room",
        "if num_leaving < len(self._line) and not model.is_fresh:",
        "if num_leaving < len(self._line):",
    ),
    Mutant(
        "no model with live requests ever makes room",
        Router,
        "_make_room",
        "if num_leaving < num_impatient and not model.is_fresh:",
        "if False:",
    ),
    Mutant(
        "two models make room for one",
        Router,
        "_make_room",
        "num_leaving = sum(model.state in LEAVING for model in self.models.values())",
        "num_leaving = 0",
    ),
    Mutant(
        "a model that makes room does so though none needs it any more",
        Router,
        "_make_room",
        "if num_leaving > len(self._line):",
        "if False:",
    ),
    Mutant(
        "requests that waited for a model that goes on are forgotten",
        Router,
        "_make_room",
        "self._tell(model, Resume())\n            self._grant_waiting(model)",
        "self._tell(model, Resume())",
    ),
    Mutant(
        "requests that wait are not let to the model that came up",
        Router,
        "_of_job",
        "self._grant_waiting(model)",
        "pass",
    ),
    Mutant(
        "requests that wait do not hear that the load failed",
        Router,
        "_of_job",
        'self._refuse_waiting(model.name, "failed", model.failure, model.backoff_s)',
        "pass",
    ),
    Mutant(
        "a request that is let in keeps its deadline",
        Router,
        "_forget",
        "self._drop(AskOver(request_id))",
        "pass",
    ),
    Mutant(
        "a request that waits has no deadline",
        Router,
        "_ask",
        "self._after(event.timeout_s, AskOver(event.request_id))",
        "pass",
    ),
    Mutant(
        "a model that failed is tried again at once",
        Router,
        "_ask",
        "if model.state is ModelState.FAILED and not event.by_hand:",
        "if False:",
    ),
    Mutant(
        "pauses do not grow",
        Model,
        "_fail",
        "self.num_failures += 1",
        "self.num_failures = 1",
    ),
    Mutant(
        "failures are never forgiven",
        Model,
        "_fresh_over",
        "self.num_failures = 0",
        "pass",
    ),
    Mutant(
        "any number of requests wait for one model",
        Router,
        "_ask",
        "elif len(waiting) >= self._max_waiting:",
        "elif False:",
    ),
    Mutant(
        "a request of an engine that is gone counts for the next one",
        Model,
        "_let_go",
        "self.num_live = 0",
        "pass",
    ),
    Mutant(
        "requests of an engine are counted once too often",
        Model,
        "_left_as_it_goes",
        "self.num_live -= 1",
        "pass",
    ),
    Mutant(
        "who waits hears nothing of an unload by hand",
        Router,
        "_unload",
        'self._refuse_waiting(model.name, "unloaded", "it was unloaded by hand")',
        "pass",
    ),
    Mutant(
        "a model that was unloaded by hand stays in the line",
        Router,
        "_unload",
        "self._line.pop(model.name, None)",
        "pass",
    ),
    Mutant(
        "at the end requests wait on",
        Router,
        "_drain_all",
        'self._refuse_waiting(model.name, "draining", "the server is shutting down")',
        "pass",
    ),
    Mutant(
        "the end is said while engines are there",
        Router,
        "_ending",
        "is_over = all(model.state not in RESIDENT for model in self.models.values())",
        "is_over = True",
    ),
    Mutant(
        "an engine that died keeps its place",
        Model,
        "_died",
        "return self._stop(event)",
        "return S.STOPPING",
    ),
    Mutant(
        "a timer of an engine outlives it",
        Model,
        "_stop",
        "self._drop(FreshOver(self.name, self.serial))",
        "pass",
    ),
    Mutant(
        "who leaves goes on waiting",
        Router,
        "_gone",
        "self._forget(request_id)",
        "pass",
    ),
    Mutant(
        "a model waits on though no request does",
        Router,
        "_line_up",
        "elif not waiting and model.state is ModelState.WAITING:",
        "elif False:",
    ),
    Mutant(
        "room is made before the check",
        Router,
        "_make_room",
        "num_leaving < len(self._line) and not model.is_fresh:",
        "num_leaving < len(self._line) + sum(one.state is ModelState.CHECKING for one in self.models.values()) "
        "and not model.is_fresh:",
    ),
    Mutant(
        "a model whose files are sound never gets into the line",
        Router,
        "_of_job",
        "self._line[model.name] = None",
        "pass",
    ),
    Mutant(
        "what is said of a check that was given up is taken for the next one's",
        Model,
        "TABLE",
        "Checked",
        "",
    ),
    Mutant(
        "what is said of an engine that is gone is taken for the next one's",
        Model,
        "TABLE",
        "Stopped",
        "",
    ),
]
