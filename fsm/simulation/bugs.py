"""The bugs that are planted, and why some of them survive."""

from __future__ import annotations

from novainfer.fsm.blocks import BlockPool
from novainfer.fsm.draft import Draft
from novainfer.fsm.engine import Engine
from novainfer.fsm.planner import Planner
from novainfer.fsm.request import Request
from novainfer.fsm.scheduler import Scheduler
from novainfer.fsm.simulation.gate_bugs import GATE_MUTANTS
from novainfer.fsm.simulation.mutants import Mutant
from novainfer.fsm.stream import Stream
from novainfer.fsm.text import TextAssembler
from novainfer.fsm.trouble import Trouble
from novainfer.fsm.worker import Worker

MUTANTS = [
    # ---- taking a step back
    Mutant("a rollback keeps the blocks of the step", Planner, "rollback", "del request.blocks[num_blocks:]", "pass"),
    Mutant("a rollback keeps the tokens counted", Planner, "rollback", "request.num_computed -= num_tokens", "pass"),
    Mutant(
        "a rollback does not undo the pool",
        Planner,
        "rollback",
        "self.pool.undo(flight.journal, launched=launched)",
        "pass",
    ),
    Mutant("a rollback keeps the slot", Planner, "rollback", "self.free_slots.append(request.slot)", "pass"),
    Mutant(
        "a rollback forgets a promise",
        Planner,
        "rollback",
        "self.producers[name] = request.request_id",
        "pass",
    ),
    Mutant("a rollback keeps the blocks of the cancelled", Planner, "settle", "self.release(request)", "pass"),
    Mutant(
        "undo revives what a launched step may have overwritten",
        BlockPool,
        "undo",
        "if launched or name in self._index:",
        "if name in self._index:",
        seeds=1000,
    ),
    Mutant(
        "undo leaves the names that the step gave",
        BlockPool,
        "undo",
        "if self._index.get(name) == block:",
        "if False:",
    ),
    # ---- who owns what
    Mutant(
        "a cancel frees blocks of the step on the device",
        Scheduler,
        "_end",
        "if self.flight is not None and self._is_in_flight(request):",
        "if False:",
    ),
    Mutant(
        "blocks of the cancelled stay when their step is done",
        Scheduler,
        "_commit",
        "self.planner.settle(flight)",
        "pass",
    ),
    Mutant("blocks are released twice", Planner, "release", "request.blocks.clear()", "pass"),
    Mutant("a slot is not given back", Planner, "release", "self.free_slots.append(request.slot)", "pass"),
    Mutant("an evicted block keeps its place in the index", BlockPool, "allocate", "del self._index[name]", "pass"),
    Mutant(
        "a block is named before it is full",
        Draft,
        "_name_blocks",
        "num_full = request.num_computed // self.size",
        "num_full = -(-request.num_computed // self.size)",
    ),
    Mutant(
        "a promise outlives who gave it",
        Planner,
        "release",
        "self._stop_producing(request)",
        "request.producing.clear()",
    ),
    Mutant("a preempted request keeps its count", Request, "_preempt", "self.num_computed = 0", "pass"),
    # ---- who runs
    Mutant("the oldest request is preempted", Planner, "_preempt_one", "if r is not keep and r.blocks", "if r.blocks"),
    Mutant(
        "a request is computed while its reader is slow",
        Draft,
        "add_decodes",
        "if request.state is not decode or",
        "if request.state not in (decode, RequestState.PAUSED) or",
    ),
    Mutant(
        "the oldest request gets no block while it prefills",
        Planner,
        "_make_room",
        "if r is oldest or r.state",
        "if r.state",
        seeds=4000,
    ),
    Mutant(
        "a small request overtakes one that does not fit yet",
        Draft,
        "add_prefills",
        "break  # first come, first served",
        "continue  # first come, first served",
        seeds=1000,
    ),
    Mutant(
        "a wake-up is lost when work comes while the scheduler plans",
        Engine,
        "_batch",
        "if event.work_seen != self._work_sent:",
        "if False:",
    ),
    Mutant("nobody resumes a request", Engine, "_resume", 'self._send("scheduler", ResumeRequest(request_id))', "pass"),
    Mutant("a stream forgets to resume", Stream, "_read", 'self._send("engine", Resume(self.stream_id))', "pass"),
    # ---- late, twice, too early
    Mutant(
        "the engine takes a late StepDone for the current one",
        Engine,
        "_step_done",
        "if (event.step_id, event.epoch) != self._step:",
        "if False:",
    ),
    Mutant(
        "the engine takes a late StepFailed for the current one",
        Engine,
        "_step_failed",
        "if (event.step_id, event.epoch) != self._step:",
        "if False:",
    ),
    Mutant(
        "the worker takes a late StepDone for the current one",
        Worker,
        "_step_done",
        "if not self._is_current(event):",
        "if False:",
    ),
    Mutant(
        "the worker forgets to reclaim memory",
        Worker,
        "_step_failed",
        "self._start(Reclaim(self.epoch))",
        "pass",
    ),
    Mutant(
        "a cancel that overtakes its Arrive is lost",
        Engine,
        "_cancel",
        "self._tombstones.setdefault(event.stream_id, (event.cause, event.arrived))",
        "pass",
    ),
    Mutant(
        "a cancel that overtakes its Submit is lost",
        Scheduler,
        "_cancel",
        "self._tombstones[event.request_id] = event.cause",
        "pass",
    ),
    Mutant("a stop does not reach the streams", Engine, "_stop", 'self._send("streams", event)', "pass"),
    # ---- who is told what
    Mutant(
        "everybody in a failed step is blamed", Trouble, "step_failed", "if len(members) > 1:", "if len(members) > 99:"
    ),
    Mutant("credits stay with the cancelled", Engine, "_settle", 'self._send("gate", Departed(over))', "pass"),
    Mutant("part of a stop string is sent", TextAssembler, "_release", "keep = self._overlap(held)", "keep = 0"),
    Mutant(
        "a character is split",
        TextAssembler,
        "push",
        "if plain is not None and not self._decoder.getstate()[0]:",
        "if plain is not None:",
    ),
    Mutant("what was held back is lost at the end", Scheduler, "_append", "output.text += text.flush()", "pass"),
    Mutant(
        "min_tokens is not heeded",
        Scheduler,
        "_append",
        "may_stop = num_generated >= request.params.min_tokens",
        "may_stop = True",
    ),
    Mutant(
        "log probabilities of the wrong row",
        Scheduler,
        "_commit",
        "logprobs[at] if logprobs",
        "logprobs[0] if logprobs",
    ),
    Mutant("a choice samples with the seed of another", Request, "sampling_spec", "choice=self.choice", "choice=0"),
    *GATE_MUTANTS,
]

# By name: why neither seeds nor small worlds can find it.
SURVIVORS: dict[str, str] = {}
