"""Bugs planted by a reader of the machines who had not read the checks: all were chosen before one was looked for."""

from __future__ import annotations

from novainfer.fsm.client.gate import Gate, _Room
from novainfer.fsm.client.stream import Stream
from novainfer.fsm.engine import Engine
from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.kv.blocks import BlockPool
from novainfer.fsm.schedule import answer
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.simulation.bugs.mutants import Mutant
from novainfer.fsm.text import TextAssembler

BLOCKS = (
    # A prompt that is cached to its last token has nothing to compute: it is admitted and gets no token.
    Mutant(
        "a prompt may be found in the cache to its last token",
        BlockCache,
        "find_prefix",
        "for at in range((len(request.token_ids) - 1) // size):",
        "for at in range(len(request.token_ids) // size):",
    ),
    # The block that had the name first is evicted later, and takes the entry of the other one along.
    Mutant(
        "a name that is taken goes to the newer block",
        BlockPool,
        "name",
        "if name in self._index or name in self._expected or self._name[block]:",
        "if self._name[block]:",
    ),
    # Whoever sends the same prompt next computes on what has made the first answer not a number.
    Mutant(
        "what has spoilt an answer loses its names when it is owned no longer",
        Scheduler,
        "_end_not_a_number",
        "self.planner.cache.distrust(request)",
        "output = self._end(request, RequestState.FINISHED_ERROR, End(error=NOT_A_NUMBER)); "
        "self.planner.cache.distrust(request); return output",
    ),
    # Its reader comes back, and it goes on from what the host of another process holds.
    Mutant(
        "the copy of a parked request outlives the worker",
        Planner,
        "refit",
        "for request in (*self.waiting, *self.parked.values()):",
        "for request in self.waiting:",
    ),
    # Two prompts that differ in that token alone get one answer.
    Mutant(
        "the last token of a block is not in its name",
        BlockCache,
        "_name_next",
        "request.token_ids[at : at + size]",
        "request.token_ids[at : at + size - 1]",
    ),
    # In a long queue every 33rd request is never looked at in turn: its work is not judged again while it is there.
    Mutant(
        "a look in turn leaves out one request",
        StepBuilder,
        "_whom_to_look_at",
        "in_turn = by_age[max(after, LOOKS) :][:LOOKS]",
        "in_turn = by_age[max(after, LOOKS) + 1 :][:LOOKS]",
    ),
    # A request is admitted where there is no slot: the scheduler dies.
    Mutant(
        "blocks that were kept are given back as slots",
        StepBuilder,
        "_keep",
        "self.kept_slots -= kept[1]",
        "self.kept_slots -= kept[0]",
    ),
    # What decodes is preempted a few steps after each admission.
    Mutant(
        "an admission that was never preempted leaves no headroom",
        Planner,
        "headroom",
        "<< min(request.num_preemptions, 2)",
        "* min(request.num_preemptions, 2)",
    ),
)

SAMPLING = (
    # A request with such a penalty alone is sampled without it.
    Mutant(
        "a frequency penalty below zero is none",
        Request,
        "sampling_spec",
        "if spec.needs_history or",
        "if spec.repetition_penalty != 1.0 or spec.presence_penalty != 0.0 or spec.frequency_penalty > 0.0 or",
    ),
    # With the highest seed and n=2 the second choice has a seed that no device takes, and that cannot be sent again.
    Mutant(
        "the seeds of later choices have more than 64 bits",
        Engine,
        "_submit",
        "seed=(arrival.seed + choice) & SEED_MASK,",
        "seed=(arrival.seed & SEED_MASK) + choice,",
    ),
    # The text goes on behind a stop string that came with the first token that might stop.
    Mutant(
        "a stop string is not seen at the first token that may stop",
        answer,
        "next_output",
        "may_stop = len(token_ids) - request.num_prompt >= params.min_tokens",
        "may_stop = len(token_ids) - request.num_prompt > params.min_tokens",
    ),
    # A request with ignore_eos and stop_token_ids runs to its length.
    Mutant(
        "who ignores the end of a sequence ignores its own stop ids",
        Request,
        "__init__",
        "if params.stop_token_ids else eos_ids",
        "if params.stop_token_ids and not params.ignore_eos else eos_ids",
    ),
    # It samples from a context of which the end is missing: another token than without the preemption.
    Mutant(
        "who was preempted while it was computed again decodes too soon",
        Request,
        "_fetched",
        "was_decoding = self.num_remaining == 1 and not self.is_first_output",
        "was_decoding = not self.is_first_output",
        first=1049,  # seen in one seed of a thousand
    ),
    # A fetch that comes after it, from WAITING, kills the scheduler.
    Mutant(
        "a fetch that is taken back leaves it as it was before its last admission",
        Request,
        "_fetch",
        "self.queued_as = self.state",
        "pass",
    ),
    # An answer from a prompt that was partly computed by INT8 weights is not called degraded.
    Mutant(
        "only what samples is degraded",
        Scheduler,
        "_commit",
        "for request, _, _ in flight.rows:",
        "for request in flight.samples:",
    ),
    # Each choice goes on behind the tokens of the others.
    Mutant(
        "the choices of a stream have one list of tokens",
        Request,
        "__init__",
        "self.token_ids = list(submit.token_ids)",
        "self.token_ids = submit.token_ids",
    ),
    # A request that the context would just hold is refused.
    Mutant(
        "a request that fills the context is refused",
        answer,
        "refusal",
        "if num_prompt + params.num_tokens_needed <= max_len:",
        "if num_prompt + params.num_tokens_needed < max_len:",
    ),
    # The second choice cannot be had again: its deltas name no seed of its own.
    Mutant(
        "every choice tells its seed as that of the first",
        Stream,
        "_output",
        "self._seeds[choice] = first.seed",
        "self._seeds[0] = first.seed",
    ),
)

DEADLINES = (
    # A stream with timeout_s runs on after it once it has its first token.
    Mutant(
        "a deadline is taken for one of the queue",
        Gate,
        "_arrive",
        "Cancel(event.stream_id, Cause.TIMEOUT)",
        "Cancel(event.stream_id, Cause.QUEUE)",
    ),
    # A stream with both is never ended by timeout_s.
    Mutant(
        "of two deadlines only that of the queue is set",
        Gate,
        "_arrive",
        "if params.timeout_s is not None:",
        "if params.timeout_s is not None and params.max_queue_s is None:",
    ),
    # It waits for its first token behind a recovery for as long as that takes.
    Mutant(
        "queue deadlines are forgotten with the worker",
        Scheduler,
        "_recover",
        "planner.recover()",
        "planner.recover(); self._hurried.clear()",
    ),
    # With room in the queue, max_queue_s is no deadline for the first token.
    Mutant(
        "who need not wait for room has no queue deadline",
        Gate,
        "_arrive",
        "if params.max_queue_s is not None:",
        "if params.max_queue_s is not None and event.stream_id in self._overflow:",
    ),
    # A slow reader keeps its slot and blocks for twice stall_keep_s.
    Mutant(
        "the time to keep begins anew where it ends in a step",
        Scheduler,
        "_keep_over",
        "self.planner.overstayed.add(request.request_id)",
        "self._after(self._stall_keep_s, event)",
        first=83,
    ),
    # A choice that gets its token meanwhile goes on for a stream that has ended.
    Mutant(
        "a queue deadline ends one choice at a time",
        Scheduler,
        "_cancel",
        "ending = self._siblings(request) if request.stream_id in self._hurried else []",
        "ending = [request] if request.stream_id in self._hurried else []",
    ),
    # A stream with less patience than the one that waits longest is ended in its place.
    Mutant(
        "where too many are parked the oldest request ends",
        Scheduler,
        "_end_longest_paused",
        "key=lambda r: r.paused_as",
        "key=lambda r: r.request_id",
    ),
)

LIVENESS = (
    # The choices that are paused never go on: the reader waits for ever.
    Mutant(
        "a token that comes while half is read opens a stalled stream",
        Stream,
        "_output",
        "if self.state is S.STALLED:",
        "if self.state is S.STALLED and self._unread > self._stall_high:",
    ),
    # A small request behind a large one that has left waits, though there is room.
    Mutant(
        "who stands behind one that leaves the overflow list is not looked at",
        Gate,
        "_cancel",
        "return self._let_in_who_fits()",
        "return self.state",
    ),
    # Running requests lose their blocks for a group that waits for one of them.
    Mutant(
        "a group that is tried apart waits for a prefix of another",
        StepBuilder,
        "_is_worth_waiting_for",
        "return False",
        "return True",
    ),
    # The engine asks for steps for ever, and an idle server burns a core.
    Mutant(
        "a resume that comes too late is not counted",
        Scheduler,
        "_resume",
        "self._work_seen += 1",
        "self._work_seen += event.request_id in self.requests",
    ),
    # A stream whose prompt was at the tokenizer has no end.
    Mutant(
        "prompts at the tokenizer are lost with the worker",
        Engine,
        "_lost",
        "self.steps.clear()",
        "self.steps.clear(); self._encoding.clear()",
    ),
    # Requests that were in no step of the dead worker are suspected, and after two such plans tried apart.
    Mutant(
        "a plan that was not launched is lost with the worker",
        Scheduler,
        "_lost",
        "if flight.step_id == event.step_id",
        "if flight.step_id >= event.step_id",
    ),
)

CONTAINERS = (
    # Each cancel that comes after the end of the newest request leaves an entry for good.
    Mutant(
        "a cancel of the newest request that has ended is remembered",
        Scheduler,
        "_cancel",
        "if event.request_id > self._last_submitted:",
        "if event.request_id >= self._last_submitted:",
    ),
    # Each such stream leaves an entry for good.
    Mutant(
        "a stream of several choices stays among those with a queue deadline",
        Scheduler,
        "_end",
        "if request.stream_id in self._hurried and not self._siblings(request):",
        "if request.stream_id in self._hurried and request.params.n == 1:",
    ),
    # A stream that the queue would just hold is refused, or waits.
    Mutant(
        "the last token of room in the queue is not given",
        _Room,
        "has_room",
        "self.num_tokens + wanted[1] <= self._max_tokens",
        "self.num_tokens + wanted[1] < self._max_tokens",
    ),
    # The hit rate in the metrics is near 1 whatever the cache finds.
    Mutant(
        "what was computed counts as found in the cache",
        Scheduler,
        "_note_first",
        "self._hit += request.num_cached",
        "self._hit += request.num_computed",
    ),
    # A stream with log probabilities is never stalled again, and what is unread has no bound.
    Mutant(
        "what log probabilities count is taken off at each read",
        Stream,
        "_give_one",
        "self._weights.pop(delta.index, 0)",
        "self._weights.get(delta.index, 0)",
    ),
    # After as many prompts that cannot be tokenised as the queue holds, every stream is refused.
    Mutant(
        "credits stay with a prompt that cannot be tokenised",
        Engine,
        "_encode_failed",
        "return self._end_unsubmitted(event.stream_id, end)",
        'self._send("streams", ended_early(event.stream_id, end)); return self.state',
    ),
    # They run to their length for a stream that has ended.
    Mutant(
        "the siblings of a choice that failed go on",
        Engine,
        "_settle",
        "if end.error is not None:",
        "if end.cause is not None:",
    ),
)

TEXT = (
    # The client reads the beginning of a stop string such as "aab", and the text goes on behind it.
    Mutant(
        "the shorter of two beginnings of a stop string is held back",
        TextAssembler,
        "_overlap",
        "for length in range(min(self._longest_stop - 1, len(text)), 0, -1):",
        "for length in range(1, min(self._longest_stop - 1, len(text)) + 1):",
    ),
    # Where one token completes two stop strings, the text holds the one that came first.
    Mutant(
        "of two stop strings the one that was named first counts",
        TextAssembler,
        "_release",
        "first = min(((at, stop) for stop in self._stops if (at := held.find(stop)) >= 0), default=None)",
        "first = next(((at, stop) for stop in self._stops if (at := held.find(stop)) >= 0), None)",
    ),
    # Answers end in <|im_end|>.
    Mutant(
        "the end of a sequence is shown as a stop string is",
        answer,
        "next_output",
        "if params.include_stop_str_in_output and not is_eos:",
        "if params.include_stop_str_in_output:",
    ),
)

UNSEEN_MUTANTS = (*BLOCKS, *SAMPLING, *DEADLINES, *LIVENESS, *CONTAINERS, *TEXT)
