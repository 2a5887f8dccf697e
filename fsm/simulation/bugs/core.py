"""Bugs planted in what the machine core does for all machines, and in guards: which answer is the one waited for."""

from __future__ import annotations

from novainfer.fsm.core.guards import OfEpoch
from novainfer.fsm.core.machine import Machine
from novainfer.fsm.device.process import Answered, Ended
from novainfer.fsm.device.roster import Dying, OfWorker, Roster
from novainfer.fsm.device.worker import OfSpawn, Worker
from novainfer.fsm.simulation.bugs.mutants import Mutant, unguarded

CORE_MUTANTS = [
    Mutant(
        "what a guard refuses is ignored, though a row is for it",
        Machine,
        "_row_for",
        "row = row.otherwise",
        'return Row("", frozenset([self.state]))',
    ),
    Mutant("every epoch is this one", OfEpoch, "holds", "event.epoch == machine.epoch", "event.epoch <= machine.epoch"),
    Mutant(
        "what the first process of all says is taken for the worker's",
        OfWorker,
        "holds",
        "event.serial == machine.worker.serial",
        "event.serial <= machine.worker.serial",
    ),
    Mutant("Spawn is done whatever job is", OfSpawn, "holds", 'bool(event.job == "Spawn")', "True"),
    unguarded("the end of a process that was ended is the worker's end", Roster, Ended),
    unguarded("the death of a process that was ended is the worker's death", Roster, Dying),
    unguarded("what a process says that was ended is the worker's answer", Roster, Answered),
    Mutant(
        "a state that is entered from itself does not have its time anew",
        Machine,
        "handle",
        "self.num_renewals += 1",
        "pass",
    ),
    Mutant("a timer outlives its state", Machine, "_end_timer", "self._drop(timer)", "pass"),
    Mutant(
        "a timer that has ended is dropped once more", Machine, "_end_timer", "if self._timer is timer:", "if False:"
    ),
    Mutant("no timer is known to end with a state", Machine, "_until_left", "self._timer = event", "pass"),
    Mutant("the pause between two workers ends after the stop", Worker, "_lose", "self._until_left(", "self._after("),
]
