"""Bugs planted in how an engine becomes another one while it works: with another KV cache, or in another precision."""

from __future__ import annotations

from novainfer.fsm.device.process import Process
from novainfer.fsm.device.roster import Roster
from novainfer.fsm.device.worker import Worker
from novainfer.fsm.engine import Engine
from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.messages.events import Reconfigure
from novainfer.fsm.schedule.ladder import Ladder
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant, unguarded

RECONFIGURATION_MUTANTS = [
    # ---- the wish
    Mutant(
        "a wish never comes to its turn",
        Engine,
        "_ask_for_batch",
        "vacates=self._wanted is not None",
        "vacates=False",
    ),
    Mutant(
        "the KV cache becomes another one while requests have blocks of it",
        Engine,
        "_batch",
        "if self._wanted is not None and event.is_vacant:",
        "if self._wanted is not None:",
        small="another KV cache while a reader stalls",
        seeds=0,
    ),
    Mutant(
        "a wish that comes while another one is under way gets no answer",
        Engine,
        "_reconfigure",
        'self._send("client", Reconfigured(event.serial, ONE_AT_A_TIME))',
        "pass",
    ),
    Mutant(
        "a wish takes the place of another one",
        Engine,
        "_reconfigure",
        "if self._wanted is not None:",
        "if False:",
    ),
    Mutant("a wish is answered, and stays", Engine, "_answer", "self._wanted = None", "pass"),
    Mutant(
        "a wish whose worker is lost gets no answer",
        Engine,
        "_lost_meanwhile",
        'self._answer(f"{LOST}: {event.message}")',
        "self._wanted = None",
        small="another KV cache, for which there is no room, or a worker that dies on the way",
        seeds=0,
    ),
    Mutant("a wish gets no answer when the engine stops", Engine, "_stop", "if self._wanted is not None:", "if False:"),
    Mutant(
        "a wish that comes after the end gets no answer",
        Engine,
        "_reconfigure_too_late",
        'self._send("client", Reconfigured(event.serial, "the engine has stopped"))',
        "pass",
    ),
    Mutant("a wish that came to nothing is called done", Engine, "_reconfigured", "event.error, event", "None, event"),
    Mutant(
        "a wish is sent to the first worker there was",
        Engine,
        "_batch",
        "msgspec.structs.replace(self._wanted, epoch=self.epoch)",
        "self._wanted",
    ),
    # ---- how the requests leave
    Mutant(
        "requests are computed on while the KV cache is to be vacated",
        Scheduler,
        "_plan",
        "if asked.vacates:",
        "if asked.vacates and not self.planner.running:",
    ),
    Mutant(
        "what a failed step was to copy out is thought to be on the host",
        Scheduler,
        "_end_vacating",
        "self.planner.rollback(flight, launched=outcome.launched)",
        "pass",
        small="another KV cache, two steps in flight, and what the host has room for",
        seeds=0,
    ),
    Mutant(
        "a device's host memory outlives it",
        Scheduler,
        "_recover",
        "keeps_host=event.keeps_host",
        "keeps_host=True",
        small="another precision, and what the host has of the one before",
        seeds=0,
    ),
    Mutant(
        "a request that leaves the KV cache is not in the queue",
        Planner,
        "_put_out",
        "self.enqueue(request)",
        "pass",
    ),
    Mutant(
        "a step that only copies counts as one that was tried alone",
        Scheduler,
        "_next",
        "if flight.is_vacating:",
        "if False:",
    ),
    # ---- what is there afterwards
    Mutant(
        "the scheduler has as many blocks as before",
        BlockCache,
        "refit",
        "self.pool = BlockPool(num_blocks, self._size)",
        "pass",
    ),
    Mutant(
        "prefixes outlive their KV cache",
        Scheduler,
        "_reconfigure",
        "self.planner.cache.forget()",
        "pass",
        seeds=0,
        small="a KV cache that is as large as the one before, and holds nothing of it",
    ),
    Mutant("the ladder has the rungs of before", Ladder, "_offer", "if event.modes == self._offered:", "if True:"),
    Mutant(
        "steps are for the mode of before",
        Ladder,
        "_offer",
        "self.mode = self.device_mode = self.exact_mode",
        "self.device_mode = self.exact_mode",
    ),
    # ---- the worker
    unguarded(
        "a wish is for any worker",
        Worker,
        Reconfigure,
        small="a wish that comes when its worker has been replaced",
        seeds=0,
    ),
    Mutant(
        "a worker that was made anew has the host's memory",
        Worker,
        "_spawn",
        "self.device_epoch = self.epoch",
        "pass",
    ),
    Mutant(
        "what cannot be is tried again",
        Worker,
        "_go_back",
        "self._error, self._wanted = event.message, None",
        "self._error = event.message",
    ),
    Mutant(
        "a worker that went back does not say so",
        Worker,
        "_go_back",
        "self._error, self._wanted = event.message, None",
        "self._wanted = None",
    ),
    Mutant(
        "a worker that was lost on the way there goes on to be there",
        Worker,
        "_lose",
        "self._wanted = self._error = None",
        "self._error = None",
        small="another KV cache, for which there is no room, or a worker that dies on the way",
        seeds=0,
    ),
    Mutant(
        "nobody hears of a worker that is lost on the way",
        Worker,
        "_lose",
        "was_up = self.state in UP or self._is_changing",
        "was_up = self.state in UP",
        small="another KV cache, for which there is no room, or a worker that dies on the way",
        seeds=0,
    ),
    Mutant(
        "a worker that is replaced has the first precision",
        Worker,
        "_warmed",
        'self._num_blocks, self._precision = found["num_blocks"], self._precision_wanted',
        'self._num_blocks = found["num_blocks"]',
    ),
    Mutant(
        "a worker that is replaced makes a cache of its own size",
        Worker,
        "_warmed",
        'self._num_blocks, self._precision = found["num_blocks"], self._precision_wanted',
        "self._precision = self._precision_wanted",
    ),
    Mutant(
        "another precision is thought to be there already",
        Worker,
        "_reconfigure",
        "in_place=event.precision in (None, first.precision) and self._mode == first",
        "in_place=self._mode == first",
    ),
    Mutant(
        "a device stays in the mode that it was switched to",
        Worker,
        "_reconfigure",
        "in_place=event.precision in (None, first.precision) and self._mode == first",
        "in_place=event.precision in (None, first.precision)",
        small="another precision while the ladder is down",
        seeds=0,
    ),
    Mutant(
        "nobody looks whether there is room for another cache",
        Worker,
        "_fit",
        "num_blocks, is_new = self._wanted.num_blocks, True",
        "num_blocks, is_new = self._wanted.num_blocks, False",
    ),
    # ---- its processes
    Mutant(
        "a process with another cache answers as the worker of before",
        Roster,
        "_ask",
        "self._pass(worker, Adopt(event.job.epoch))",
        "pass",
    ),
    Mutant(
        "a spare takes over whose weights are in another precision",
        Roster,
        "_probe",
        "if event.precision != self._precision:",
        "if False:",
    ),
    Mutant(
        "a spare loads weights in the first precision",
        Roster,
        "_started",
        "Load(SPARE_EPOCH, self._precision)",
        "Load(SPARE_EPOCH)",
        small="another precision, and a spare that has the one of before",
        seeds=0,
    ),
    Mutant(
        "a spare is started for each cache",
        Roster,
        "_pass_and_note",
        "and self._is_new and",
        "and",
        seeds=0,
        small="another KV cache when there is to be no spare any more",
    ),
    Mutant(
        "a spare has a cache of another size, and it is taken",
        Process,
        "_take_ahead",
        'if isinstance(job, Fit) and job.num_blocks != answer.value["num_blocks"]:',
        "if False:",
        small="another KV cache, and a spare that has the one of before",
        seeds=0,
    ),
    Mutant(
        "a spare makes another cache, and is not warmed",
        Process,
        "_take_ahead",
        'self.ahead.pop("Warm", None)',
        "pass",
        small="another KV cache, and a spare that has the one of before",
        seeds=0,
    ),
]
