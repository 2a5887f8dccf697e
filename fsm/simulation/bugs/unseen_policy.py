"""Bugs of policy, planted by a reader of the machines who had not read the checks: ladder, blame, turns, processes."""

from __future__ import annotations

from novainfer.fsm.device.roster import Roster
from novainfer.fsm.device.worker import Worker
from novainfer.fsm.health import Watch
from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.messages.events import JobFailed
from novainfer.fsm.schedule.allowance import Allowance, Sizes
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.ladder import Ladder
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.recovery import FailurePolicy
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant, unguarded

LADDER = [
    Mutant(  # the engine flaps between INT8 and the mode it was started in once a minute, for hours
        "trouble right after a way up does not make the next quiet time longer",
        Ladder,
        "_down",
        "if self._is_settling:",
        "if not self._is_settling:",
    ),
    Mutant(
        "trouble does not begin the quiet time anew",
        Ladder,
        "_bear",
        "self._set_timer()",
        "pass",
    ),
    Mutant(  # every second failed canary costs a switch that is known to fail
        "a rung that the device cannot switch to is tried again",
        Ladder,
        "_back",
        "if self._modes.index(failed) > self._modes.index(target):",
        "if self._modes.index(failed) < self._modes.index(target):",
    ),
    Mutant(  # the inspector says FULL while half of the requests may not run
        "that steps are held back is forgotten on a lower rung",
        Ladder,
        "_still_held",
        "self._is_held = True",
        "self._is_held = self.state is S.SMALLER_BATCH",
    ),
    Mutant(  # answers stay those of INT8 as long as there is load
        "a quiet time with good steps does not count",
        FailurePolicy,
        "quiet",
        "if requests and not self._good_steps and self.ladder.is_down:",
        "if requests and self._good_steps and self.ladder.is_down:",
    ),
    Mutant(  # a canary that raises takes the engine to INT8, which runs on the broken kernels
        "the rung is chosen by what the request did, and not by what its canary did",
        FailurePolicy,
        "canary_failed",
        "self.trial = None\n    self.climb(_trouble_of(outcome)(",
        "blamed, self.trial = (self.trial.outcome if self.trial else outcome), None\n"
        "    self.climb(_trouble_of(blamed)(",
    ),
    Mutant(  # the client is not told that a part of its prompt was computed in INT8
        "only who was sampled in another mode is degraded",
        Scheduler,
        "_commit",
        "for request, _, _ in flight.rows:",
        "for request in flight.samples:",
    ),
    Mutant(  # another client's greedy answer changes: it shares blocks of INT8
        "what was swapped out in another mode is shared when it is back",
        BlockCache,
        "distrust_all",
        "request.kv.is_mixed = request.kv.num_swapped > 0",
        "request.kv.is_mixed = False",
    ),
]

SIZES = [
    Mutant(  # one bad request leaves all others with small steps
        "only the last of the falls that one request caused is taken back",
        Allowance,
        "was_too_much",
        "self._before = self._before or self._all()",
        "self._before = self._all()",
    ),
    Mutant(  # where there is room for less, each good step is followed by one that fails
        "patience is not begun again when the limit changes",
        Allowance,
        "_set",
        "self._num_good = 0",
        "self._num_good = min(self._num_good, self._patience)",
    ),
    Mutant(  # prompts get smaller and smaller while too many requests go on failing
        "the one of requests and tokens that was no try is made less",
        Sizes,
        "was_too_much",
        "are_tokens = self.prompt_tokens.is_try(num_tokens)",
        "are_tokens = self.requests.is_try(num_requests)",
    ),
    Mutant(  # on a slow machine the worker is killed in the midst of a prompt
        "a step is slow only when it took its whole deadline",
        Sizes,
        "went_well",
        "if took_s > self._slow_s and",
        "if took_s > SLOW_SHARE * self._slow_s and",
    ),
    Mutant(  # prompts stay at 128 tokens a step for ever
        "how many tokens fit in a time is told by the number of requests",
        Sizes,
        "went_well",
        "self._most_tokens = int(num_tokens *",
        "self._most_tokens = int(num_requests *",
    ),
    Mutant(  # a prompt whose step holds just one block is tried for ever
        "a step of one block is believed to have been made smaller",
        FailurePolicy,
        "_shrink",
        "did = flight.num_prompt_tokens > self.limits.block_size",
        "did = flight.num_prompt_tokens >= self.limits.block_size",
    ),
    Mutant(  # after one bad request all steps are small for minutes
        "steps stay small when the canary has convicted a request",
        FailurePolicy,
        "convict",
        "self._excuse(effects)",
        'self._note_sizes("", effects)',
    ),
]

BLAME = [
    Mutant(  # a request fails six times where one canary that cannot help comes first
        "a canary is computed where only the other trouble has a rung",
        FailurePolicy,
        "_blame",
        "self.ladder.helps(_trouble_of(what))",
        "self.ladder.helps(Broken)",
    ),
    Mutant(  # a device that fails at large steps ends innocent requests, one after the other
        "a canary holds one token",
        FailurePolicy,
        "_blame",
        "max(num_tokens, 1)",
        "1",
    ),
    Mutant(  # a request lives on after its last failure
        "a seventh failure is waited for",
        FailurePolicy,
        "_blame",
        "if request.failures >= failures_max or",
        "if request.failures > failures_max or",
    ),
    Mutant(  # who came a moment ago is computed apart, and waits for its first token
        "all requests of a lost step are suspected when one of them is",
        FailurePolicy,
        "worker_lost",
        "self._bisect(suspects)",
        "self._bisect(members)",
    ),
    Mutant(  # a group that was never tried is let go, and costs all others another worker
        "a lost step takes the last group off the list, and not its own",
        FailurePolicy,
        "worker_lost",
        "self.suspects.popleft()",
        "self.suspects.pop()",
    ),
    Mutant(  # the restart budget goes to one bad request, and the engine with it
        "a group that failed is tried again before the others have had their turn",
        FailurePolicy,
        "_bisect",
        "self.suspects += [ids[:half], ids[half:]]",
        "self.suspects.extendleft([ids[half:], ids[:half]])",
    ),
    Mutant(  # the engine spins when the reader of a suspected request is slow
        "a group that cannot run is put off, and not off the list",
        FailurePolicy,
        "skip_group",
        "self.suspects.popleft()",
        "self.suspects.rotate(-1)",
    ),
    Mutant(  # the step that breaks everything is tried with all requests again
        "a switch that fails clears the group of the step that waited for it",
        FailurePolicy,
        "step_failed",
        "self.climb(SwitchFailed(flight.mode, outcome.message), effects)",
        "self.climb(SwitchFailed(flight.mode, outcome.message), effects); self.suspects and self.suspects.popleft()",
    ),
    Mutant(  # a request ends for kernels that make no number of anything
        "a canary of which no number came has gone well",
        Scheduler,
        "_end_canary",
        "outcome.token_ids[0] < 0",
        "outcome.token_ids[0] < -1",
    ),
    Mutant(  # requests whose step was never at the worker are suspected
        "a plan that was thrown away counts as lost with the worker",
        Scheduler,
        "_lost",
        "if flight.step_id == event.step_id",
        "if flight.step_id >= event.step_id",
    ),
]

TURNS = [
    Mutant(  # once two requests were preempted, all need four times the room to be admitted
        "the headroom grows with everybody's preemptions",
        Planner,
        "headroom",
        "min(request.num_preemptions, 2)",
        "min(self.num_preemptions, 2)",
    ),
    Mutant(  # a long prompt that is nearly done goes before a short one
        "work shrinks while a prompt is computed",
        StepBuilder,
        "add_prefills",
        "key=planner.order.by_work)",
        "key=lambda r: (self._to_compute(r), r.request_id))",
    ),
    Mutant(  # a short request has its first token when a long one has computed their common beginning
        "a short request waits for the prefix of a long one, and not the other way round",
        StepBuilder,
        "_is_worth_waiting_for",
        "producer.work <= 2 * work",
        "work <= 2 * producer.work",
    ),
    Mutant(  # a request of which nearly all is cached waits for a long one
        "what is cached counts as work when a prefix is waited for",
        StepBuilder,
        "_look",
        "work = len(request.token_ids) - prefix.num_tokens",
        "work = len(request.token_ids)",
    ),
    Mutant(  # the oldest waiting one takes the last block, and is preempted in the next step
        "the oldest request needs no headroom, whoever runs",
        StepBuilder,
        "_try_to_admit",
        "(self.had_running or request is not self.oldest)",
        "(self.had_running and request is not self.oldest)",
    ),
    Mutant(  # behind hundreds a request with little work is found after minutes
        "the look in turn goes on by one request a step",
        StepBuilder,
        "_whom_to_look_at",
        "planner.looked_at = in_turn[-1].request_id",
        "planner.looked_at = in_turn[0].request_id",
    ),
    Mutant(  # the slow reader that came last loses its slot
        "the paused request that was admitted last is parked",
        Planner,
        "_make_slots",
        "next((r for r in self.running.values() if",
        "next((r for r in reversed(self.running.values()) if",
    ),
    Mutant(  # the oldest request starts again whenever the batch gets smaller
        "the youngest is kept when fewer may run",
        Planner,
        "_make_slots",
        "keep=min(active, key=self.order.turn)",
        "keep=max(active, key=self.order.turn)",
    ),
    Mutant(  # an answer pauses for a step though a block could be had
        "one decoding request too many is believed to have its block",
        Planner,
        "_short_of_room",
        "if cache.room >= len(self.running):",
        "if cache.room >= len(self.running) - 1:",
    ),
    Mutant(  # of too many slow readers one that has been away for a moment ends
        "a stalled stream that asks again counts as paused anew",
        Scheduler,
        "_pause",
        "if request.state is RequestState.PAUSED and not was_paused:",
        "if request.state is RequestState.PAUSED:",
    ),
]

PROCESSES = [
    Mutant(  # the engine waits for ever: the step that ran out of memory is never answered
        "a worker that is lost while it gives memory back is not told of",
        Worker,
        "_lose",
        "was_up = self.state in UP",
        "was_up = self.state in (S.READY, S.RUNNING, S.SWITCHING)",
    ),
    Mutant(  # the server ends when the next worker finds other free memory
        "a worker that is started anew makes a cache of its own size",
        Worker,
        "_fit",
        "num_blocks, is_new = self._num_blocks, False",
        "num_blocks, is_new = self._num_blocks if self._stood_by else None, False",
    ),
    # An answer that comes twice costs a healthy worker.
    unguarded("the failure of any job ends a worker that gives memory back", Worker, JobFailed),
    Mutant(  # a server of some months has no spare any more
        "three spares lost in all are three too many",
        Roster,
        "_lose_spare",
        "at_s - deaths[0] < SPARE_WINDOW_S",
        "at_s - deaths[-1] < SPARE_WINDOW_S",
    ),
    Mutant(
        "the timer of an older probe ends the next spare",
        Roster,
        "_probe",
        "self._until_left(",
        "self._after(",
    ),
    Mutant(  # under load a lost spare is never replaced
        "a spare is replaced only while the worker has nothing to do",
        Roster,
        "_stand_by_again",
        "if self.worker.is_warm else",
        "if self.worker.is_ready_to_step_in else",
    ),
    Mutant(  # a busy worker is killed though each of its steps was quick
        "a state that was left and entered again counts as one",
        Watch,
        "_update",
        "entry.seen_in is seen.state and entry.since_s == seen.since_s and",
        "entry.seen_in is seen.state and",
    ),
    Mutant(  # a machine that wakes up has its worker killed
        "time that nobody saw counts for a state",
        Watch,
        "_update",
        "entry.dwell_s = entry.dwell_s + watched_s if is_same else 0.0",
        "entry.dwell_s = entry.dwell_s + elapsed_s if is_same else 0.0",
    ),
    Mutant(  # a frozen actor is never reported
        "turns are counted from the first look on",
        Watch,
        "_update",
        "entry.num_turns = seen.num_turns",
        "entry.num_turns = entry.num_turns or seen.num_turns",
    ),
]

UNSEEN_POLICY_MUTANTS = [*LADDER, *SIZES, *BLAME, *TURNS, *PROCESSES]
