"""The bugs that are planted, and why some of them survive."""

from __future__ import annotations

from novainfer.fsm.client.gate import Gate
from novainfer.fsm.client.stream import Stream
from novainfer.fsm.core.guards import OfJob, OfStep
from novainfer.fsm.device.worker import Worker
from novainfer.fsm.engine import Engine
from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.kv.blocks import BlockPool
from novainfer.fsm.messages.events import Batch, DeviceLost, Encoded, Launch, Overdue, StepFailed
from novainfer.fsm.messages.step import StepDone
from novainfer.fsm.schedule import answer
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.recovery import FailurePolicy
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.ahead import AHEAD_MUTANTS
from novainfer.fsm.simulation.bugs.blame import BLAME_MUTANTS
from novainfer.fsm.simulation.bugs.compiling import COMPILING_MUTANTS
from novainfer.fsm.simulation.bugs.copy import COPY_MUTANTS
from novainfer.fsm.simulation.bugs.core import CORE_MUTANTS
from novainfer.fsm.simulation.bugs.costs import COSTS_MUTANTS
from novainfer.fsm.simulation.bugs.deadline import DEADLINE_MUTANTS
from novainfer.fsm.simulation.bugs.drain import DRAIN_MUTANTS
from novainfer.fsm.simulation.bugs.flights import FLIGHTS_MUTANTS
from novainfer.fsm.simulation.bugs.gate import GATE_MUTANTS
from novainfer.fsm.simulation.bugs.ladder import LADDER_MUTANTS
from novainfer.fsm.simulation.bugs.masks import MASKS_MUTANTS
from novainfer.fsm.simulation.bugs.mutants import Edit, Mutant, unguarded
from novainfer.fsm.simulation.bugs.pooling import POOLING_MUTANTS
from novainfer.fsm.simulation.bugs.process import PROCESS_MUTANTS
from novainfer.fsm.simulation.bugs.queue import QUEUE_MUTANTS
from novainfer.fsm.simulation.bugs.reconfiguration import RECONFIGURATION_MUTANTS
from novainfer.fsm.simulation.bugs.resumed import RESUMED_MUTANTS
from novainfer.fsm.simulation.bugs.routers import ROUTERS_MUTANTS
from novainfer.fsm.simulation.bugs.sampling import SAMPLING_MUTANTS
from novainfer.fsm.simulation.bugs.sessions import SESSION_MUTANTS
from novainfer.fsm.simulation.bugs.share import SHARE_MUTANTS
from novainfer.fsm.simulation.bugs.speculation import SPECULATION_MUTANTS
from novainfer.fsm.simulation.bugs.turn import TURN_MUTANTS
from novainfer.fsm.simulation.bugs.unseen import UNSEEN_MUTANTS
from novainfer.fsm.simulation.bugs.unseen_policy import UNSEEN_POLICY_MUTANTS
from novainfer.fsm.simulation.bugs.unseen_third import UNSEEN_THIRD_MUTANTS
from novainfer.fsm.text import TextAssembler

MUTANTS = [
    # ---- taking a step back
    Mutant("a rollback keeps the blocks of the step", BlockCache, "undo", "del table.blocks[num_blocks:]", "pass"),
    Mutant("a rollback keeps the tokens counted", Planner, "rollback", "request.num_planned = start", "pass"),
    Mutant(
        "a rollback does not undo the pool",
        BlockCache,
        "undo",
        "self.pool.undo(journal, launched=launched)",
        "pass",
    ),
    Mutant("a rollback keeps the slot", Planner, "rollback", "self.free_slots.append(request.slot)", "pass"),
    Mutant(
        "a rollback forgets a promise",
        BlockCache,
        "undo",
        "self.producers[name] = request_id",
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
        "del self._expected[name]",
        "self.name(self._expected.pop(name), name)",
    ),
    # ---- who owns what
    Mutant(
        "a cancel frees blocks of the step on the device",
        Scheduler,
        "_end",
        "if self.flights and request.is_in_flight:",
        "if False:",
    ),
    Mutant(
        "blocks of the cancelled stay when their step is done",
        Scheduler,
        "_commit",
        "self.planner.settle(flight)",
        "pass",
    ),
    Mutant("blocks are released twice", BlockCache, "release", "table.blocks.clear()", "pass"),
    Mutant("a slot is not given back", Planner, "release", "self.free_slots.append(request.slot)", "pass"),
    Mutant("an evicted block keeps its place in the index", BlockPool, "allocate", "del self._index[name]", "pass"),
    Mutant(
        "a block is named before it is full",
        BlockCache,
        "commit_row",
        "num_full = min(end, len(request.token_ids)) // size",
        "num_full = min(-(-end // size), len(request.token_ids) // size)",
    ),
    Mutant(
        "a promise outlives who gave it",
        BlockCache,
        "release",
        "self._break_promises(request.request_id)",
        "pass",
    ),
    Mutant(
        "a preempted request keeps its count", Request, "_vacate", "self.num_computed = self.num_planned = 0", "pass"
    ),
    # ---- who runs
    Mutant(
        "the oldest request is preempted",
        Planner,
        "_preempt_one",
        "if r is not keep and r.kv.capacity",
        "if r.kv.capacity",
    ),
    Mutant(
        "a request is computed while its reader is slow",
        StepBuilder,
        "add_decodes",
        "if request.state is not decode and",
        "if request.state not in (decode, RequestState.PAUSED) and",
    ),
    Mutant(
        "the oldest request gets no block while it prefills",
        Planner,
        "_short_of_room",
        "if r is first or r.state",
        "if r.state",
        seeds=0,
        small="a long prompt, and an answer beside it that takes the blocks it was to have",
    ),
    Mutant(
        "a small request overtakes one that does not fit yet",
        StepBuilder,
        "_admissible",
        "break",
        "continue",
        seeds=1000,
    ),
    Mutant(
        "a wake-up is lost when work comes while the scheduler plans",
        Engine,
        "_batch",
        "if self._wanted is not None or event.work_seen != self._work_sent:",
        "if self._wanted is not None:",
    ),
    Mutant("nobody resumes a request", Engine, "_resume", 'self._send("scheduler", ResumeRequest(request_id))', "pass"),
    Mutant("a stream forgets to resume", Stream, "_read", 'self._send("engine", Resume(self.stream_id))', "pass"),
    # ---- late, twice, too early
    unguarded("the engine takes a late StepDone for the current one", Engine, StepDone),
    unguarded("the engine takes a late StepFailed for the current one", Engine, StepFailed),
    unguarded("the worker takes a late StepDone for the current one", Worker, StepDone),
    Mutant(
        "the worker forgets to reclaim memory",
        Worker,
        "_step_failed",
        "self._ask(Reclaim(self.epoch))",
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
        "everybody in a failed step is blamed",
        FailurePolicy,
        "step_failed",
        "if len(members) > 1:",
        "if len(members) > 99:",
    ),
    Mutant("credits stay with the cancelled", Engine, "_settle", 'self._send("gate", Departed(over))', "pass"),
    Mutant("part of a stop string is sent", TextAssembler, "_release", "keep = self._overlap(held)", "keep = 0"),
    Mutant(
        "a character is split",
        TextAssembler,
        "push",
        "if text is None or not self.is_whole:",
        "if text is None:",
    ),
    Mutant(
        "a stop token is text like any other, behind the first token",
        answer,
        "next_output",
        "if len(token_ids) < request.plain_until and token_id not in request.stop_ids:",
        "if len(token_ids) < request.plain_until:",
    ),
    Mutant(
        "a character is split, where nothing else is asked for",
        answer,
        "next_output",
        "if text.is_whole and _is_plain(request)",
        "if _is_plain(request)",
    ),
    Mutant(
        "plain text has one token too many",
        answer,
        "next_output",
        "if len(token_ids) < request.plain_until and",
        "if len(token_ids) <= request.plain_until and",
    ),
    Mutant(
        "an unfinished character is forgotten",
        TextAssembler,
        "_decoded",
        "self.is_whole = not self._decoder.getstate()[0]",
        "pass",
    ),
    Mutant("stop strings are text like any other", answer, "_is_plain", "not params.stop_strings and", ""),
    Mutant("log probabilities are lost, but for the first", answer, "_is_plain", "params.logprobs is None and", ""),
    Mutant(
        "a request that is computed again stays in prefill",
        Request,
        "_admit",
        "self.plain_until = 0",
        "pass",
    ),
    Mutant("what was held back is lost at the end", answer, "next_output", "output.text += text.flush()", "pass"),
    Mutant(
        "min_tokens is not heeded",
        answer,
        "next_output",
        "may_stop = len(token_ids) - request.num_prompt >= params.min_tokens",
        "may_stop = True",
    ),
    Mutant(
        "log probabilities of the wrong row",
        Scheduler,
        "_commit",
        "logprobs[at] if logprobs",
        "logprobs[0] if logprobs",
    ),
    Mutant("a choice samples with the seed of another", Engine, "_submit", "arrival.seed + choice", "arrival.seed"),
    *GATE_MUTANTS,
    *DRAIN_MUTANTS,
    *QUEUE_MUTANTS,
    *BLAME_MUTANTS,
    *LADDER_MUTANTS,
    *CORE_MUTANTS,
    *COSTS_MUTANTS,
    *MASKS_MUTANTS,
    *COMPILING_MUTANTS,
    *POOLING_MUTANTS,
    *DEADLINE_MUTANTS,
    *RESUMED_MUTANTS,
    *SAMPLING_MUTANTS,
    *TURN_MUTANTS,
    *SHARE_MUTANTS,
    *ROUTERS_MUTANTS,
    *SESSION_MUTANTS,
    *COPY_MUTANTS,
    *RECONFIGURATION_MUTANTS,
    *SPECULATION_MUTANTS,
    *AHEAD_MUTANTS,
    *FLIGHTS_MUTANTS,
    *PROCESS_MUTANTS,
    *UNSEEN_MUTANTS,
    *UNSEEN_POLICY_MUTANTS,
    *UNSEEN_THIRD_MUTANTS,
    # ---- blocks on the host
    Mutant(
        "a rollback forgets what was to be copied out",
        BlockCache,
        "undo",
        "self.leaving[request_id] = table, blocks",
        "pass",
    ),
    Mutant(
        "a copy that a failed step may have spoilt is trusted",
        BlockCache,
        "undo",
        "if launched:  # what was copied may have been overwritten first",
        "if False:",
    ),
    Mutant("host blocks of who ended in a step stay", Planner, "settle", "self.cache.drop_copy(request)", "pass"),
    Mutant("host blocks of who ended while it waited stay", Planner, "remove", "self.cache.drop_copy(request)", "pass"),
    Mutant(
        "a copy is made for who has ended",
        BlockCache,
        "drop_copy",
        "self.leaving.pop(request.request_id, None)",
        "pass",
    ),
    Mutant("what was fetched stays on the host", Planner, "commit", "cache.drop_copy(request)", "pass"),
    Mutant(
        "a fetch counts a token that the host does not have",
        StepBuilder,
        "_fetch",
        "request.num_planned = request.kv.num_swapped",
        "request.num_planned = request.kv.num_swapped + 1",
    ),
    Mutant(
        "the first host block is fetched for all",
        BlockCache,
        "fetch",
        "plan.swap_in_hosts.append(host_block)",
        "plan.swap_in_hosts.append(table.host_blocks[0])",
    ),
    Mutant(
        "blocks are copied out in the wrong order",
        BlockCache,
        "close",
        "plan.swap_out_blocks += blocks",
        "plan.swap_out_blocks += blocks[::-1]",
    ),
    Mutant(
        "who is parked while its step is on the device loses its blocks at once",
        Scheduler,
        "_keep_over",
        "if request.is_in_flight:",
        "if False:",
        seeds=1000,
    ),
    Mutant("who was parked never comes back", Scheduler, "_resume", "self.planner.unpark(request)", "pass"),
    Mutant("who comes back is not queued", Planner, "unpark", "self.enqueue(request)", "pass"),
    # ---- a lost worker
    Mutant("prefixes outlive the worker that held them", Planner, "lose", "self.cache.forget()", "pass"),
    Mutant("copies on the host outlive the worker", Planner, "refit", "if not keeps_host:", "if False:"),
    Mutant(
        "paused requests are lost with the worker",
        Planner,
        "lose",
        "self.parked[request.request_id] = request",
        "pass",
    ),
    Mutant("nobody recovers", Planner, "recover", "request.handle(RECOVER)", "pass"),
    unguarded(
        "a plan for a dead worker is launched by the next one",
        Worker,
        Launch,
        seeds=0,
        small="a worker that dies, and what it said comes late",
    ),
    Mutant(
        "a step is known by its number alone",
        OfStep,
        "holds",
        "machine.step == (event.step_id, event.epoch)",
        "machine.step[0] == event.step_id",
    ),
    Mutant(
        "answers of a dead device count",
        OfJob,
        "holds",
        "(event.job, event.epoch) == machine.asked",
        "event.job == machine.asked[0]",
        seeds=0,
        small="answers of a device that is gone",
    ),
    Mutant(
        "an answer to any job is one to the job under way",
        OfJob,
        "holds",
        "(event.job, event.epoch) == machine.asked",
        "event.epoch == machine.epoch",
    ),
    unguarded("a death that was known already ends the next worker", Worker, DeviceLost),
    unguarded(
        "an old alarm ends the next worker",
        Worker,
        Overdue,
        seeds=0,
        small="a cache that waited for memory, and a worker that is lost again",
    ),
    Mutant("good steps do not restore the restart budget", Worker, "_step_done", "self._losses.clear()", "pass"),
    Mutant(
        "the restart budget is one short",
        Worker,
        "_lose",
        "if len(self._losses) > policy.max_restarts:",
        "if len(self._losses) >= policy.max_restarts:",
    ),
    Mutant(
        "the engine does not hear of a loss",
        Worker,
        "_lose",
        'self._send("engine", WorkerLost(lost, fault, message, step_id))',
        "pass",
    ),
    Mutant("a device that hangs is not killed", Worker, "_lose", "self._start(Kill(self.epoch))", "pass"),
    Mutant("a loss is not reported", Worker, "_lose", 'self._send("incidents", Incident(', "str(Incident("),
    Mutant(
        "a new device is believed to be in the mode of the old one",
        Worker,
        "_loaded",
        "self._mode = self._modes[0]",
        "pass",
        seeds=1000,
    ),
    Mutant(
        "the engine does not hear that the worker has given up",
        Worker,
        "_give_up",
        'self._send("engine", WorkerFailed(message))',
        "pass",
    ),
    Mutant(
        "a switch that fails leaves its step unanswered",
        Worker,
        "_switch_failed",
        'self._send("engine", failed)',
        "pass",
        seeds=1000,
    ),
    unguarded(
        "a plan made for a dead worker is launched",
        Engine,
        Batch,
        seeds=0,
        small="a worker that dies, and what it said comes late",
    ),
    Mutant(
        "nobody wakes the scheduler when the worker is back",
        Engine,
        "_recovered",
        "self._ask_for_batch()",
        "pass",
    ),
    Mutant(
        "the scheduler does not hear of a loss",
        Engine,
        "_lost",
        'self._send("scheduler", event)',
        "pass",
    ),
    Mutant(
        "what was sampled before a loss is thrown away",
        Engine,
        "_stale_batch",
        "self._hand_on(event)",
        "pass",
    ),
    # ---- who is to blame
    Mutant(
        "a prompt that kills every worker is tried for ever",
        FailurePolicy,
        "worker_lost",
        "request.losses += 1",
        "pass",
    ),
    Mutant(
        "the first chunk of a prompt clears it of suspicion",
        FailurePolicy,
        "step_done",
        "requests[i].losses >= LOSSES_SUSPECT",
        "False",
        seeds=1000,
    ),
    Mutant("a request that fails alone is tried for ever", FailurePolicy, "_blame", "request.failures += 1", "pass"),
    Mutant(
        "a failed step is not reported", FailurePolicy, "_tell", 'effects.append(Send("incidents", incident))', "pass"
    ),
    # ---- readers, and the gate
    Mutant(
        "a reader that has read, and not enough, has the rest of the old time",
        Stream,
        "_read",
        "self._set_timer()",
        "pass",
    ),
    Mutant(
        "work goes on for a reader that stays away",
        Stream,
        "_stall_over",
        'self._send("gate", Cancel(self.stream_id, Cause.STALLED), urgent=True)',
        "pass",
    ),
    Mutant(
        "a stream has no end",
        Stream,
        "_read_rest",
        'self._send("reader", Finished() if self._end is None else self._end)',
        "pass",
    ),
    Mutant(
        "who waits for room is forgotten when there is some",
        Gate,
        "_departed",
        "return self._let_in_who_fits()",
        "return self.state",
    ),
    Mutant(
        "who was let in keeps its place in the waiting room",
        Gate,
        "_let_in_who_fits",
        "self._waiting_room.give_back(stream_id)",
        "pass",
    ),
    # ---- bugs that other engines had
    Mutant(
        "vLLM #46240: a transfer completes for a request that was aborted",
        Planner,
        "commit",
        "if not request.ended:",
        "if True:",
        seeds=1000,
    ),
    Mutant(
        "vLLM #46240: one transfer is remembered where several are on their way",
        BlockCache,
        "swap_out",
        "self.leaving[request.request_id] = table, table.blocks[:num_blocks]",
        "self.leaving = {request.request_id: (table, table.blocks[:num_blocks])}",
    ),
    Mutant(
        "vLLM #42157: a token for a request that was aborted after it was scheduled",
        Scheduler,
        "_commit",
        "if state in finished:",
        "if self.requests[request.request_id].ended:",
    ),
    unguarded("vLLM #43226: what completes late for a dead request kills the engine", Engine, Encoded),
    Mutant(
        "vLLM #57082: a request that was aborted ends as a success",
        Stream,
        "_output",
        "if end is not None and end.finish_reason is None:",
        "if end is not None and end.error is not None:",
    ),
    Mutant(
        "SGLang #26265: prompts are admitted beyond what the pool holds",
        StepBuilder,
        "_admissible",
        "if needed + planner.headroom(request) > room and (self.had_running or found):",
        "if False:",
        more=(
            Edit(StepBuilder, "_try_to_admit", "if needed > self.cache.room - self.reserved and (", "if False and ("),
        ),
    ),
    Mutant(
        "llama.cpp #16467: who waits cannot be cancelled",
        Gate,
        "_cancel",
        "if event.stream_id in self._overflow:",
        "if False:",
    ),
    Mutant(
        "first tokens are handed on behind all others", Scheduler, "_commit", "outputs.sort(key=_has_begun)", "pass"
    ),
]

# By name: why neither seeds nor small worlds can find it.
SURVIVORS: dict[str, str] = {
    "a step is known by its number alone": "steps are numbered once for all epochs, so the number is enough; the "
    "epoch is compared as well, because a scheduler that is restarted might count from the beginning",
}
