"""What is tried after a step has failed, and what has to end: as little as possible, and only for a reason of its own.

docs/reliability.md has the rules in full ("Who is blamed"). In short: a failed step's requests are bisected: half of
them are tried alone, then the other half, until all have run or the step that fails holds one request. That one is
tried with fewer tokens, as long as that can help, then once more; then a canary is computed, a step as large that holds
nothing of any client. If the canary goes well, the request ends with the error, and nothing else changes. If it fails
too, the engine goes down the ladder: no number of requests that fail can bring that about.

A worker that dies takes no request with it: all are computed again. When it dies twice under a request that got no
token in between, that one is tried in halves too, until it has a token. Groups to be tried take turns, so that good
steps come between the bad ones, and the worker's restart budget is not spent on one bad request.

Beside that, steps that fail or are slow are made smaller, whatever they hold (`allowance`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from novainfer.fsm.core.machine import Effect, Send
from novainfer.fsm.messages.events import Fault, Incident, Quiet, StepFailed, WorkerLost
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.schedule.allowance import PATIENCE, Sizes
from novainfer.fsm.schedule.batching import Flight
from novainfer.fsm.schedule.ladder import Broken, Freed, Held, Ladder, Offered, Pressure, Steady, Switched, SwitchFailed
from novainfer.fsm.schedule.planner import Planner
from novainfer.fsm.schedule.request import Request

OOM_STEPS_MAX = 2  # steps of several requests out of memory, with fewer than PATIENCE good ones after each: the first
# may be chance, from the second on each makes the next ones smaller
LOSSES_SUSPECT = 2  # workers lost under a request since its last token: once is chance, twice is a reason to look
LOST_DIVISOR = 8  # a step that cost its worker is made so much smaller: the next try may cost another
TRIES_ALONE = 2  # a request that fails alone is tried once more: the first failure may have been another program's
MODES_TRIED = 3  # in which one request is tried alone; as many as there are on the way down, where those are more

HOW = {Fault.OOM: "ran out of memory", Fault.LOST: "ended the worker", Fault.TIMEOUT: "never ended"}
Doomed = list[tuple[Request, str]]  # requests that must end, and the sentence that their clients are told


class Trial(msgspec.Struct, frozen=True):
    """A request that has failed alone, and may be without fault: a canary of `num_tokens` will tell."""

    request_id: int
    outcome: StepFailed
    num_tokens: int


class FailurePolicy:
    """Which requests the scheduler has to try alone, with how many tokens, and on which rung of the ladder.

    Each method that may have effects appends them to `effects`.
    """

    def __init__(
        self,
        planner: Planner,
        modes: Sequence[Mode] = (Mode(),),
        *,
        ladder_quiet_s: float = 60.0,
        step_timeout_s: float = 60.0,
    ) -> None:
        self.planner = planner
        self.limits = limits = planner.limits
        self.ladder = Ladder(modes, quiet_s=ladder_quiet_s)
        self.sizes = Sizes(limits.max_num_seqs, limits.prefill_chunk_tokens, limits.block_size, step_timeout_s)
        self.suspects: deque[list[int]] = deque()  # groups of request ids to be tried alone, the next one first
        self.trial: Trial | None = None  # the next step is its canary, or the step on the device
        self._good_steps = 0
        self._oom_steps = 0  # of several requests, lately
        self._is_held = False  # the ladder was told that steps hold less than was configured
        self._is_quiet_due = False  # a quiet time went by without a good step

    @property
    def chunk(self) -> int:
        """Prompt tokens that the next step may hold."""
        return self.sizes.prompt_tokens.limit

    # ---- what to try ---------------------------------------------------------------------------------------------

    def next_group(self, requests: Mapping[int, Request]) -> list[int]:
        """The ids of `requests` that are to be tried alone next; none when none is suspected.

        A group may come from a time when steps held more: of that, as many are next as a step may hold now.
        """
        while self.suspects:
            group = [i for i in self.suspects.popleft() if i in requests]
            most = self.sizes.requests.limit
            if len(group) > most:
                self.suspects.appendleft(group[most:])
            if group:
                self.suspects.appendleft(group[:most])
                return group[:most]
        return []

    def next_trial(self, requests: Mapping[int, Request]) -> Trial | None:
        """What the next step is a canary for; for no request that has ended since."""
        if self.trial is not None and self.trial.request_id not in requests:
            self.trial = None
        return self.trial

    @property
    def is_searching(self) -> bool:
        """Whether the next steps are to find out what it was that failed: each waits for the one before."""
        return self.trial is not None or bool(self.suspects)

    def skip_group(self) -> None:
        """That group cannot run now, and will not be tried alone."""
        self.suspects.popleft()

    # ---- how steps end -------------------------------------------------------------------------------------------

    def step_done(self, flight: Flight, took_s: float, requests: Mapping[int, Request], effects: list[Effect]) -> None:
        """A good step; `requests` are those that have not ended with it."""
        self._good_steps += 1
        if self._good_steps % PATIENCE == 0:
            self._oom_steps = 0
        self._note_mode(flight, effects)
        was_fast = self.sizes.went_well(len(flight.rows), flight.num_prompt_tokens, took_s)
        self._note_sizes("" if was_fast else f"a step took {took_s:.1f} s", effects)
        if self._is_quiet_due:
            self._is_quiet_due = False
            self.climb(Steady(), effects)
        # What has seen two workers die stays apart until it has a token: the first chunk of a prompt clears no request.
        if self.suspects and not any(requests[i].losses >= LOSSES_SUSPECT for i in self.suspects[0] if i in requests):
            self.suspects.popleft()

    def step_failed(self, flight: Flight, outcome: StepFailed, effects: list[Effect]) -> Doomed:
        """The step was taken back: decide what to try next, or what has to end."""
        self._good_steps = 0
        if outcome.fault is Fault.SWITCH:  # the step was not tried
            self.climb(SwitchFailed(flight.mode, outcome.message), effects)
            return []
        self._note_mode(flight, effects)
        if self.suspects:
            self.suspects.popleft()
        members = members_of(flight)
        is_short = outcome.fault is Fault.OOM
        num_rows, num_tokens = len(flight.rows), flight.num_prompt_tokens
        if len(members) > 1:
            if is_short:
                self._oom_steps += 1
                if self._oom_steps >= OOM_STEPS_MAX or self.sizes.is_try(num_rows, num_tokens):
                    self.sizes.was_too_much(num_rows, num_tokens)
                    self._note_sizes(outcome.message, effects)
            self._bisect(members)
            self._report(outcome, flight, members, "its requests are tried in halves", effects)
            return []
        doomed: Doomed = []
        for request in members:
            if not is_alone(flight):  # the others have ended meanwhile, and it may have been theirs
                self.suspects.append([request.request_id])
                self._report(outcome, flight, members, "it is tried alone", effects)
            elif is_short and self._shrink(flight, 2, outcome, effects):
                self.suspects.append([request.request_id])
                self._report(outcome, flight, members, f"it is tried with {self.chunk} tokens", effects)
            else:
                doomed += self._blame(request, flight, outcome, effects)
        return doomed

    def worker_lost(self, flight: Flight, event: WorkerLost, effects: list[Effect]) -> Doomed:
        """The worker died under a step, which was taken back."""
        self._good_steps = 0
        self.trial = None
        if self.suspects and not flight.canary:  # which was none of theirs
            self.suspects.popleft()
        members = members_of(flight)
        for request in members:
            request.losses += 1
        most = max((request.losses for request in members), default=0)
        suspects = [request for request in members if request.losses >= LOSSES_SUSPECT]
        is_slow = event.fault is Fault.TIMEOUT
        if suspects or (members and is_slow):  # one that died may have been killed by chance; one that was slow was not
            is_first = most == (1 if is_slow else LOSSES_SUSPECT)
            whole = max(flight.num_prompt_tokens, len(flight.rows), 1)  # by so much: as small as can be
            did_shrink = self._shrink(flight, LOST_DIVISOR if is_first else whole, event, effects)
        if not suspects:
            return []
        if len(members) > 1 or not is_alone(flight):
            self._bisect(suspects)
            self._report(event, flight, suspects, "these requests are tried in halves", effects)
        elif did_shrink:
            self.suspects.append([suspects[0].request_id])
            self._report(event, flight, suspects, f"it is tried with {self.chunk} tokens", effects)
        else:
            return self._blame(suspects[0], flight, event, effects)
        return []

    def _shrink(self, flight: Flight, divisor: int, what: StepFailed | WorkerLost, effects: list[Effect]) -> bool:
        """Make the next steps smaller than this one; False if it held no more of a prompt than a block."""
        did = flight.num_prompt_tokens > self.limits.block_size
        self.sizes.was_too_much(len(flight.rows), flight.num_prompt_tokens, divisor)
        self._note_sizes(what.message, effects)
        return did

    def _note_mode(self, flight: Flight, effects: list[Effect]) -> None:
        """A step that was run, well or not, was run in the mode that it asked for."""
        if self.ladder.device_mode != flight.mode:
            self.climb(Switched(flight.mode), effects)

    def _bisect(self, members: list[Request]) -> None:
        """Try half of them alone, then the other half, after those that are to be tried already."""
        ids = [r.request_id for r in members]
        half = (len(ids) + 1) // 2
        self.suspects += [ids[:half], ids[half:]]

    # ---- blame ---------------------------------------------------------------------------------------------------

    def _blame(self, request: Request, flight: Flight, what: StepFailed | WorkerLost, effects: list[Effect]) -> Doomed:
        """A step failed in which `request` stood alone: try it once more, or a canary instead; else it ends."""
        request.failures += 1
        action = "it is tried once more"
        if request.failures % TRIES_ALONE == 0:
            may_be_innocent = isinstance(what, StepFailed) and self.ladder.helps(_trouble_of(what))
            failures_max = TRIES_ALONE * max(MODES_TRIED, self.ladder.depth)
            if request.failures >= failures_max or not isinstance(what, StepFailed) or not may_be_innocent:
                self._report(what, flight, [request], "the request ended with an error", effects)
                self._excuse(effects)
                return [(request, _sentence(what))]
            num_tokens = sum(count for _, count, _ in flight.rows)
            self.trial = Trial(request.request_id, what, max(num_tokens, 1))
            action = "a step without it is tried instead, to see whether anything can be computed"
        if isinstance(what, StepFailed) and self.trial is None:  # at once: what fails now and then fails seldom twice
            self.suspects.appendleft([request.request_id])
        else:
            self.suspects.append([request.request_id])
        self._report(what, flight, [request], action, effects)
        return []

    def convict(self, requests: Mapping[int, Request], effects: list[Effect]) -> Doomed:
        """The canary went well, or there is no room for one: the request that is on trial ends."""
        trial, self.trial = self.trial, None
        assert trial is not None
        request = requests.get(trial.request_id)
        if request is None:  # it has ended meanwhile
            return []
        what = trial.outcome
        self._tell(what, what.step_id, [request.stream_id], "the request ended with an error", effects)
        self._excuse(effects)
        return [(request, _sentence(trial.outcome))]

    def canary_failed(self, flight: Flight, outcome: StepFailed, effects: list[Effect]) -> None:
        """No request is to blame: go down the ladder. What was on trial is tried again."""
        self._good_steps = 0
        if outcome.fault is Fault.SWITCH:
            self.climb(SwitchFailed(flight.mode, outcome.message), effects)
            return
        self._note_mode(flight, effects)
        self.trial = None
        self.climb(_trouble_of(outcome)(outcome.message), effects)
        action = f"no request is to blame: the engine is at {self.ladder.rung}"
        self._tell(outcome, flight.step_id, [], action, effects)

    def _excuse(self, effects: list[Effect]) -> None:
        """Steps were made smaller while the one to blame was looked for: that was not their size."""
        self._oom_steps = 0
        self.sizes.excuse()
        self._note_sizes("", effects)

    def _report(
        self,
        what: StepFailed | WorkerLost,
        flight: Flight,
        requests: list[Request],
        action: str,
        effects: list[Effect],
    ) -> None:
        self._tell(what, flight.step_id, sorted({request.stream_id for request in requests}), action, effects)

    def _tell(
        self, what: StepFailed | WorkerLost, step_id: int, stream_ids: list[int], action: str, effects: list[Effect]
    ) -> None:
        incident = Incident(
            kind=what.fault,
            message=what.message,
            action=action,
            step_id=step_id,
            epoch=what.epoch,
            stream_ids=stream_ids,
        )
        effects.append(Send("incidents", incident))

    # ---- the ladder ----------------------------------------------------------------------------------------------

    def climb(
        self,
        event: Held | Freed | Pressure | Broken | Steady | Offered | Switched | SwitchFailed | Quiet,
        effects: list[Effect],
    ) -> None:
        """Let the ladder take `event`."""
        effects += self.ladder.handle(event)

    def quiet(self, event: Quiet, requests: Mapping[int, Request], effects: list[Effect]) -> None:
        """Nothing went wrong for a while; where nothing went well either, the time begins with the next good step.

        When no request is left there will be none, and the time begins then.
        """
        if requests and not self._good_steps and self.ladder.is_down:
            self._is_quiet_due = True
        else:
            self.climb(event, effects)

    def none_left(self, effects: list[Effect]) -> None:
        """The last request has ended."""
        if self._is_quiet_due:
            self._is_quiet_due = False
            self.climb(Steady(), effects)

    def _note_sizes(self, why: str, effects: list[Effect]) -> None:
        """The next steps hold what they may, and the ladder is told when that is less than was configured, or not."""
        self.planner.max_running = self.sizes.requests.limit
        if self.sizes.is_short is not self._is_held:
            self._is_held = self.sizes.is_short
            self.climb(Held(why) if self._is_held else Freed(), effects)


def members_of(flight: Flight) -> list[Request]:
    """The requests that a step computed or fetched, and that have not ended."""
    computed = [request for request, _, _ in flight.rows]
    return [request for request in (*computed, *flight.fetched) if not request.ended]


def is_alone(flight: Flight) -> bool:
    """Whether the step held one request, whatever has become of the others."""
    return len(flight.rows) + len(flight.fetched) == 1


def _trouble_of(outcome: StepFailed) -> type[Pressure | Broken]:
    return Pressure if outcome.fault is Fault.OOM else Broken


def _sentence(what: StepFailed | WorkerLost) -> str:
    return f"the step that computed this request {HOW.get(what.fault, 'failed')}: {what.message}"
