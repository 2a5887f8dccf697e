"""How steps end: what they have computed is committed, or taken back, and what follows from it for their requests."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import chain

from novainfer.fsm.messages.events import End, Fault, Incident, Output, StepFailed
from novainfer.fsm.messages.pooling import vector
from novainfer.fsm.messages.step import NO_MASK, NONE_ALLOWED, StepDone
from novainfer.fsm.schedule import answer
from novainfer.fsm.schedule.batching import Flight
from novainfer.fsm.schedule.lifetimes import Lifetimes
from novainfer.fsm.schedule.planner import Limits
from novainfer.fsm.schedule.request import AWAITED, COMING, ENDED, PREFILLED, Request, RequestState
from novainfer.fsm.schedule.speculation import Speculation
from novainfer.fsm.text import Vocabulary

NOT_A_NUMBER = "the model's output for this request is not a number: no token can be drawn from it"
NO_VECTOR = "the model's output for this request is not a number: it has no vector"
NONE_LEFT = (
    "no token is left for this request: its grammar allows none of those that allowed_token_ids and banned_token_ids "
    "have left"
)
NO_TOKEN_ALLOWED = "no_token_allowed"  # the code of that error: what the request asks for excludes itself
BEHIND = "behind"  # the cause why a step is taken back that was planned behind one that failed
UNDRAWN = (NO_MASK, NONE_ALLOWED)  # behind a draft, such an outcome decides nothing
NO_NUMBERS = "the model's output for tokens of no request is not a number either"


class Outcomes(Lifetimes):
    """The part of the scheduler that is told how each step has ended; it plans none."""

    def __init__(
        self,
        state: StrEnum,
        limits: Limits,
        vocabulary: Vocabulary,
        *,
        stall_keep_s: float,
        speculation: Speculation | None,
    ) -> None:
        super().__init__(state, limits, vocabulary, stall_keep_s=stall_keep_s, speculation=speculation)
        self._steps = self._failures = self._prompt_tokens = self._generated = 0
        self._rollbacks: dict[str, int] = {}  # steps that were taken back, by cause
        self._queried = self._hit = 0
        self._swapped_out = self._swapped_in = self._copied = 0  # blocks

    def _end_vacating(self, flight: Flight, outcome: StepDone | StepFailed) -> list[Output]:
        """What has left the KV cache is on the host; or it is computed again, where the step has failed."""
        if isinstance(outcome, StepDone):
            self._steps += 1
            self._swapped_out += flight.journal.num_blocks_out
            self.planner.commit(flight)
            return []
        self._failures += 1
        self._note_rollback(outcome.fault)
        self.planner.rollback(flight, launched=outcome.launched)
        self.planner.stay_behind()
        incident = Incident(
            kind=outcome.fault,
            message=outcome.message,
            action="nothing is copied to the host before the KV cache is another one: it is computed again",
            step_id=outcome.step_id,
            epoch=outcome.epoch,
        )
        self._send("incidents", incident)
        return []

    def _end_canary(self, flight: Flight, outcome: StepDone | StepFailed) -> list[Output]:
        """What the canary says of the request that is on trial."""
        if isinstance(outcome, StepDone) and outcome.token_ids[0] < 0:
            outcome = StepFailed(flight.step_id, outcome.epoch, Fault.EXCEPTION, NO_NUMBERS)
        if isinstance(outcome, StepDone):
            self._steps += 1
            self._swapped_out += flight.journal.num_blocks_out
            self.planner.dismiss(flight)
            return self._end_doomed(self.recovery.convict(self.requests, self._effects))
        self._failures += 1
        self._note_rollback(outcome.fault)
        self.planner.rollback(flight, launched=outcome.launched)
        self.recovery.canary_failed(flight, outcome, self._effects)
        return []

    def _commit(self, flight: Flight, outcome: StepDone) -> list[Output]:
        """Append what was sampled, end what has ended, and say what is new."""
        self._steps += 1
        self._swapped_out += flight.journal.num_blocks_out
        self._swapped_in += flight.journal.num_blocks_in
        self._copied += len(flight.journal.copies)
        logprobs, samples = outcome.logprobs, flight.samples
        if outcome.num_tokens:
            samples = [r for r, count in zip(samples, outcome.num_tokens, strict=True) for _ in range(count)]
        assert len(outcome.token_ids) == len(samples), "one token per sampled row, or as many as the outcome says"
        if NO_MASK in outcome.token_ids:
            flight.late = _late(samples, outcome)
        self.planner.commit(flight)
        if not flight.mode.computes_as(self.recovery.ladder.exact_mode):
            for request, _, _ in flight.rows:
                request.is_degraded = True
        if flight.scored:
            _note_scores(flight, outcome)
        prefill, finished = RequestState.PREFILL, ENDED
        outputs: list[Output] = []
        num_generated = 0
        next_output, vocabulary, eos_token_ids = answer.next_output, self._vocabulary, self._eos_token_ids
        drafts, was = flight.drafts, None
        if drafts:
            self._note_drafts(flight, outcome)
        for at, (request, token_id) in enumerate(zip(samples, outcome.token_ids, strict=True)):
            state = request.state
            if state in finished:  # before the step returned, or by an earlier one of its tokens
                continue
            if drafts:
                if request is was:
                    if token_id in UNDRAWN:  # what the grammar really says there is asked behind committed tokens
                        continue
                    self.planner.commit_draft(request)
                was = request
            if token_id < 0:
                outputs += self._go_without(request, token_id, outcome)
                continue
            if not request.plain_until:
                if answer.has_no_number(request):
                    outputs.append(self._end_not_a_number(request, outcome))
                    continue
                if state is prefill:
                    request.handle(PREFILLED)
                if request.awaits_first:
                    self._note_first(request)
            logprob = logprobs[at] if logprobs else None
            output = next_output(request, token_id, logprob, vocabulary, eos_token_ids)
            if (end := output.end) is not None and end.finish_reason is not None:
                self._end(request, answer.ENDED_AS[end.finish_reason], end)
            elif request.mask:
                request.mask = COMING
                self.planner.awaited[request.request_id] = request
                self.planner.advanced.setdefault(request.request_id, []).append(token_id)
            outputs.append(output)
            num_generated += 1
        if flight.pooled:
            outputs += self._note_pooled(flight, outcome)
        self._generated += num_generated
        if flight.num_prompt_tokens:
            outputs.sort(key=_has_begun)  # who has waited longest waits for nobody else's reader
            self.planner.chunks.took(sum(count for _, count, _ in flight.rows), 1e3 * outcome.took_s)
        if flight.is_noted:
            self._note_speed(flight, outcome)
        if drafts:
            for request in flight.samples:
                if request.request_id in drafts and not request.ended:
                    self.planner.set_back(request)
        if outcome.draft_error is not None:
            self._report_draft_model(outcome, outcome.draft_error)
        self.planner.settle(flight)
        self.recovery.step_done(flight, outcome.took_s, self.requests, self._effects)
        return outputs

    def _go_without(self, request: Request, token_id: int, outcome: StepDone) -> list[Output]:
        """`request` got no token, for the reason that stands in the place of `token_id`; its end, if it has one."""
        if token_id == NO_MASK:
            self._set_back(request)
            return []
        if token_id == NONE_ALLOWED:
            none_left = End(error=NONE_LEFT, code=NO_TOKEN_ALLOWED, param="structured_outputs")
            return [self._end(request, RequestState.FINISHED_ERROR, none_left)]
        return [self._end_not_a_number(request, outcome)]

    def _set_back(self, request: Request) -> None:
        """Its mask came too late for its step: its last token is computed again, in a step that waits for the mask.

        A step behind it goes on from a token that never came, and gives it none either.
        """
        if request.mask == COMING:  # else it has come since
            request.mask = AWAITED
        behind = next((flight for flight in self.flights if flight.holds(request)), None)
        if behind is None:
            self.planner.set_back(request)
        else:
            at = request.num_computed
            behind.rows = [(r, n, at if r is request else start) for r, n, start in behind.rows]

    def _note_first(self, request: Request) -> None:
        """Its first token is there: its prompt counts, and the deadline of a first token is over."""
        self._hurried.discard(request.stream_id)
        self._prompt_tokens += request.num_prompt
        self._queried += request.num_prompt
        self._hit += request.num_cached

    def _note_pooled(self, flight: Flight, outcome: StepDone) -> list[Output]:
        """What the step has summed of prompts, to the requests that want a vector; the ends of those that have it."""
        outputs: list[Output] = []
        for (request, first, count), found in zip(flight.pooled, outcome.pooled, strict=True):
            if request.ended:
                continue
            request.note_pooled(first, count, found)
            if request.num_pooled < request.num_prompt:
                continue
            pooling = request.pooling
            assert pooling is not None, "it wants a vector"
            embedding = vector(pooling, request.pool_sum, 1 if pooling.kind == "last" else request.num_prompt)
            if embedding is None:
                outputs.append(self._end_not_a_number(request, outcome))
                continue
            self._note_first(request)
            output = answer.pooled_output(request, embedding)
            assert output.end is not None, "it has no more to give"
            self._end(request, RequestState.FINISHED_STOPPED, output.end)
            outputs.append(output)
        return outputs

    def _note_drafts(self, flight: Flight, outcome: StepDone) -> None:
        """What the step has verified counts for what is guessed next."""
        speculation = self.planner.speculation
        assert speculation is not None
        for request, count in zip(flight.samples, outcome.num_tokens, strict=True):
            num_drafts = flight.drafts.get(request.request_id)
            if num_drafts is None or request.request_id in flight.late or request in flight.departed:
                continue
            speculation.verified(request, num_drafts, count - 1)

    def _note_speed(self, flight: Flight, outcome: StepDone) -> None:
        """What the step took says whether guesses pay; and it may have brought some for the next one."""
        speculation = self.planner.speculation
        assert speculation is not None
        if flight.num_prompt_tokens:
            num_more = len(outcome.token_ids) - len(flight.samples)
            speculation.took_beside_prompt(outcome, sum(flight.drafts.values()), num_more, flight.num_passes)
        elif flight.samples:
            num_tokens = sum(count for _, count, _ in flight.rows)
            speculation.took(outcome, num_tokens, len(flight.rows), flight.num_passes)
        speculation.proposed(flight.samples, outcome)

    def _report_draft_model(self, outcome: StepDone, error: str) -> None:
        incident = Incident(
            kind="draft_model",
            message=f"the draft model has failed: {error}",
            action="the step's tokens are kept, and the next one verifies no guesses",
            step_id=outcome.step_id,
            epoch=outcome.epoch,
        )
        self._send("incidents", incident)

    def _end_not_a_number(self, request: Request, outcome: StepDone) -> Output:
        """A fault of this request: the step was good for all others, and what it has computed is of no use to them."""
        message = NOT_A_NUMBER if request.pooling is None else NO_VECTOR
        incident = Incident(
            kind="not_a_number",
            message=message,
            action="the request ended with an error",
            step_id=outcome.step_id,
            epoch=outcome.epoch,
            stream_ids=[request.stream_id],
        )
        self._send("incidents", incident)
        self.planner.cache.distrust(request)
        return self._end(request, RequestState.FINISHED_ERROR, End(error=message))

    def _roll_back(self, flight: Flight, outcome: StepFailed) -> list[Output]:
        self._failures += 1
        behind = {other.step_id for other in self.flights} if outcome.launched_behind else set[int]()
        self._discard_behind(flight, behind)
        self._note_rollback(outcome.fault)
        self.planner.rollback(flight, launched=outcome.launched)
        return self._end_doomed(self.recovery.step_failed(flight, outcome, self._effects))

    def _discard_behind(self, first: Flight, launched: set[int]) -> None:
        """Take back what was planned behind `first`, latest first; what departed leaves with `first`, which is next."""
        while self.flights:
            flight = self.flights.pop()
            first.departed += flight.departed
            flight.departed = []
            self._note_rollback(BEHIND)
            self.planner.rollback(flight, launched=flight.step_id in launched)

    def _note_rollback(self, cause: str) -> None:
        self._rollbacks[cause] = self._rollbacks.get(cause, 0) + 1


def _late(samples: Sequence[Request], outcome: StepDone) -> set[int]:
    """The ids of requests whose rows began without a mask; `samples` are those of each token."""
    befores = chain([None], samples)
    rows = zip(befores, samples, outcome.token_ids, strict=False)
    return {request.request_id for before, request, token_id in rows if request is not before and token_id == NO_MASK}


def _has_begun(output: Output) -> bool:
    """Whether the client of `output` had some of it before."""
    return output.first is None


def _note_scores(flight: Flight, outcome: StepDone) -> None:
    """What the step has scored of prompts, to the requests that asked."""
    at = 0
    for request, first, count in flight.scored:
        if not request.ended:
            request.note_scores(first, outcome.scores[at : at + count])
        at += count
    assert at == len(outcome.scores), "one score for each that was planned"
