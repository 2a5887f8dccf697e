"""Bugs planted in how two steps are on one device: when the second is launched, and what becomes of both."""

from __future__ import annotations

from novainfer.fsm.device.flights import Flights
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant

FLIGHTS_MUTANTS = [
    Mutant(
        "a launch that fails is answered before the step that is computed",
        Flights,
        "_landed",
        "self.steps[1].failed, self.steps[1].has_landed = answer, True",
        'self._send("worker", answer); self.steps.pop(); return S.FAILING',
    ),
    Mutant(
        "the answer to a launch that failed is forgotten",
        Flights,
        "_came_down",
        'self._send("worker", step.failed)',
        "pass",
    ),
    Mutant(
        "a launch that fails leaves its step one that can be followed",
        Flights,
        "_landed",
        "self.last_step_id = 0",
        "pass",
    ),
    Mutant(
        "a step is launched behind one that has failed",
        Flights,
        "_fail",
        "self.last_step_id = 0",
        "pass",
    ),
    Mutant(
        "of a step that fails late nothing says that another was launched behind it",
        Flights,
        "_fail",
        "launched_behind=failed.launched_behind or bool(self.steps)",
        "launched_behind=False",
    ),
    Mutant(
        "a step that is launched behind one that fails is taken back as if it had not been",
        Scheduler,
        "_roll_back",
        "if outcome.launched_behind else",
        "if False else",
    ),
    Mutant(
        "every step behind one that fails is taken back as if it had been launched",
        Scheduler,
        "_roll_back",
        "if outcome.launched_behind else set[int]()",
        "",
    ),
    Mutant(
        "nothing waits for what was launched behind a step that failed",
        Flights,
        "_fail",
        "return S.FAILING if self.steps else S.CLEAR",
        "self.steps.clear(); return S.CLEAR",
    ),
    Mutant(
        "a step is begun beside one that was launched behind a step that failed",
        Flights,
        "takes",
        "self.state is S.FLYING and",
        "",
        first=55,
    ),
    Mutant(
        "the newest step is taken for the one that has ended",
        Flights,
        "_landed",
        "del self.steps[0]",
        "del self.steps[-1]",
    ),
    Mutant(
        "an answer that no message carries is said to be good all the same",
        Flights,
        "_unsent",
        "return self._fail(event.failed)",
        "return S.FAILING if self.steps else S.CLEAR",
    ),
]
