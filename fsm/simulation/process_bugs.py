"""Bugs planted in what counts a worker's losses, and in what becomes of its processes."""

from __future__ import annotations

from novainfer.fsm.health import Watch
from novainfer.fsm.process import Process
from novainfer.fsm.roster import Roster
from novainfer.fsm.simulation.mutants import Mutant
from novainfer.fsm.worker import Worker

PROCESS_MUTANTS = [
    # ---- the restart budget
    Mutant(
        "a job that fails counts as lost when the loss before it was",
        Worker,
        "_job_failed",
        "event.message, event.at_s)",
        "event.message, (self._losses or [event.at_s])[-1])",
        seeds=1000,
    ),
    Mutant(
        "a loss of long ago still counts",
        Worker,
        "_lose",
        "if loss_s > at_s - policy.window_s]",
        "if True]",
    ),
    Mutant(
        "a loss is forgotten before its window is over",
        Worker,
        "_lose",
        "if loss_s > at_s - policy.window_s]",
        "if loss_s > at_s - policy.window_s / 2]",
    ),
    Mutant(
        "a worker that is up again has its whole budget",
        Worker,
        "_warmed",
        "self._was_ready = True",
        "self._was_ready = not self._losses.clear()",
    ),
    Mutant(
        "a step that fails restores the restart budget",
        Worker,
        "_step_failed",
        "if event.fault is Fault.OOM:",
        "if not self._losses.clear() and event.fault is Fault.OOM:",
        seeds=1000,
    ),
    Mutant(
        "a new process after a spare that failed is taken for a spare as well",
        Worker,
        "_do_without_spare",
        "self._stood_by = False",
        "pass",
        small="a spare that only loads, and cannot fit",
    ),
    Mutant(
        "a worker that took over once is a spare in every epoch",
        Worker,
        "_lose",
        "self._stood_by = False",
        "pass",
        seeds=0,
        small="a worker that is lost again after its spare has taken over",
    ),
    Mutant(
        "a spare that fails keeps its process",
        Worker,
        "_do_without_spare",
        "self._start(Kill(self.epoch))",
        "pass",
    ),
    # ---- what a process was asked
    Mutant(
        "an answer to the step before is one to this step",
        Process,
        "_is_answer",
        "return self._asked == (job, event.epoch, step_id)",
        "return self._asked is not None and self._asked[:2] == (job, event.epoch)",
    ),
    Mutant(
        "what a spare did ahead is answered in the epoch that it was done in",
        Process,
        "_take_ahead",
        'self._send("worker", msgspec.structs.replace(answer, epoch=self.epoch))',
        'self._send("worker", answer)',
    ),
    Mutant(
        "a job that was begun ahead is answered in the epoch that it was begun in",
        Process,
        "_answered",
        "answer = msgspec.structs.replace(answer, epoch=self.epoch)",
        "pass",
    ),
    Mutant(
        "a job that is under way ahead is begun again",
        Process,
        "_ask_ahead",
        "if self.job != type(event.job).__name__:",
        "if True:",
    ),
    Mutant(
        "a spare whose Warm failed is ready",
        Process,
        "_got_ahead",
        "if not isinstance(event.answer, JobDone):\n        return S.IDLE",
        "if not isinstance(event.answer, JobDone):\n        return S.READY if job == 'Warm' else S.IDLE",
        seeds=1000,
    ),
    # ---- who stands by, and who takes over
    Mutant(
        "a spare takes over unseen",
        Roster,
        "_alive",
        "if event.serial != spare.serial:",
        "if False:",
        seeds=1000,
        small="a spare that fails, is late, or says things twice",
    ),
    Mutant(
        "a spare that is not ready takes over before the worker's memory is free",
        Roster,
        "_dying",
        "or not spare.is_ready_to_step_in:",
        "or spare.state is ProcessState.STARTING:",
    ),
    Mutant(
        "a spare that is needed and dies leaves the worker without a process",
        Roster,
        "_ended",
        "if self.state is S.PROBING:\n        return self._take_another()",
        "if self.state is S.PROBING:\n        return S.SINGLE",
        seeds=1000,
    ),
    Mutant(
        "the process that is started for a dead spare is of the spare's epoch",
        Roster,
        "_take_another",
        "self.worker = self._open(self._epoch)",
        "self.worker = self._open(SPARE_EPOCH)",
    ),
    Mutant(
        "a silent spare is asked for ever",
        Roster,
        "_probe",
        "self._after(PROBE_S, ProbeOver(self.spare.serial))",
        "pass",
        seeds=0,
        small="a spare that is frozen when it is needed",
    ),
    Mutant(
        "a spare is replaced though three were lost",
        Roster,
        "_lose_spare",
        "self._lost_spare = None\n    else:",
        "self._lost_spare = serial\n    else:",
        seeds=1000,
    ),
    Mutant(
        "a spare that was lost while the worker was away is never replaced",
        Roster,
        "_stand_by_again",
        "return self._stand_by() if self.worker.is_warm else S.SINGLE",
        "return S.SINGLE",
    ),
    Mutant(
        "a spare makes a cache of its own size",
        Roster,
        "_pass_and_note",
        'self._num_blocks = answer.value["num_blocks"]',
        'self._num_blocks = answer.value["num_blocks"] + 1',
    ),
    Mutant(
        "a spare takes memory that the worker needs",
        Roster,
        "_went_ahead",
        'answer.value.get("kv_is_lazy", False)',
        'answer.value.get("kv_is_lazy", True) is not None',
    ),
    Mutant(
        "a device that does not close is waited for",
        Roster,
        "_stop",
        "self._after(CLOSE_S, CloseOver())",
        "pass",
        seeds=1000,
    ),
    Mutant(
        "a loss is dated by the one before",
        Roster,
        "_lose_worker",
        "DeviceLost(worker.epoch, sentence, at_s)",
        "DeviceLost(worker.epoch, sentence, self._deaths[-1] if self._deaths else at_s)",
    ),
    # ---- the watch
    Mutant(
        "a load that stands still is never noticed",
        Watch,
        "_judge",
        "if dwell.by_signs and seen.num_signs is None:",
        "if dwell.by_signs:",
    ),
    Mutant(
        "a load that gets on is taken for one that stands still",
        Watch,
        "_update",
        "entry.since_s == seen.since_s and entry.num_signs == seen.num_signs",
        "entry.since_s == seen.since_s",
    ),
    Mutant(
        "silence is told by the last look alone",
        Watch,
        "_update",
        "entry.silent_s += watched_s",
        "entry.silent_s = watched_s",
    ),
]
