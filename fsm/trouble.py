"""What is tried after a step has failed, and who has to end: as few as possible, and only for a reason of their own.

A failed step's requests are bisected: half of them are tried alone, then the other half, until all have run or the
step that fails holds one request. That one is tried once more (with a smaller chunk, if memory was short and it is a
prompt; on the next rung of the ladder, if there is one), and then ends with the error. Nobody else does.

A worker that dies takes nobody with it: all are computed again. When it dies twice under a request that got no token
in between, that one is tried in halves too, until it has a token. Groups to be tried take turns, so that good steps
come between the bad ones, and the worker's restart budget is not spent on one bad request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from novainfer.fsm.draft import Flight
from novainfer.fsm.events import Fault, Incident, Quiet, StepFailed, WorkerLost
from novainfer.fsm.ladder import Ladder, Pressure, Rung, Steady, Switched, SwitchFailed
from novainfer.fsm.machine import Effect, Send
from novainfer.fsm.planner import Planner
from novainfer.fsm.request import Request

CHUNK_RECOVERY_STEPS = 64  # good steps after which a chunk that was halved for lack of memory is doubled again
OOM_STEPS_MAX = 2  # steps of several requests that ran out of memory, with fewer than the above good ones after each
FAILED_ALONE_MAX = 3  # requests that failed alone, one after the other and without a good step: it is not their fault
LOSSES_SUSPECT = 2  # workers lost under a request since its last token: once is chance, twice is a reason to look
TRIES_ALONE = 2  # a request that fails alone is tried once more: the first failure may have been another program's
FAILURES_MAX = TRIES_ALONE * len(Rung)  # of one request alone, whichever way the ladder was climbed meanwhile

HOW = {Fault.OOM: "ran out of memory", Fault.LOST: "ended the worker", Fault.TIMEOUT: "never ended"}
Doomed = list[tuple[Request, str]]  # requests that must end, and the sentence that their clients are told


class Trouble:
    """Whom the scheduler has to try alone, with how many tokens, and on which rung of the ladder.

    Each method that may have effects appends them to `effects`.
    """

    def __init__(self, planner: Planner, modes: Sequence[str] = ("full",), *, ladder_quiet_s: float = 60.0) -> None:
        self.planner = planner
        self.limits = planner.limits
        self.ladder = Ladder(modes, quiet_s=ladder_quiet_s)
        self.chunk = planner.limits.prefill_chunk_tokens  # prompt tokens in one step
        self.suspects: deque[list[int]] = deque()  # groups of request ids to be tried alone, the next one first
        self._good_steps = 0
        self._oom_steps = 0  # of several requests, lately
        self._failed_alone = 0  # requests, since the last good step
        self._is_quiet_due = False  # a quiet time went by without a good step

    # ---- whom to try ---------------------------------------------------------------------------------------------

    def next_group(self, requests: Mapping[int, Request]) -> list[int]:
        """The ids of `requests` that are to be tried alone next; none when nobody is suspected."""
        while self.suspects:
            if group := [i for i in self.suspects[0] if i in requests]:
                return group
            self.suspects.popleft()
        return []

    def skip_group(self) -> None:
        """That group cannot run now, and will not be tried alone."""
        self.suspects.popleft()

    # ---- how steps end -------------------------------------------------------------------------------------------

    def step_done(self, flight: Flight, requests: Mapping[int, Request], effects: list[Effect]) -> None:
        """A good step; `requests` are those that have not ended with it."""
        self._failed_alone = 0
        self._good_steps += 1
        if self._good_steps % CHUNK_RECOVERY_STEPS == 0:
            self.chunk = min(self.chunk * 2, self.limits.prefill_chunk_tokens)
            self._oom_steps = 0
        self._note_mode(flight, effects)
        if self._is_quiet_due:
            self._is_quiet_due = False
            self.climb(Steady(), effects)
        # Who has seen workers die stays apart until it has a token: the first chunk of a prompt clears nobody.
        if self.suspects and not any(requests[i].losses for i in self.suspects[0] if i in requests):
            self.suspects.popleft()

    def step_failed(self, flight: Flight, outcome: StepFailed, effects: list[Effect]) -> Doomed:
        """The step was taken back: decide whom to try next, or who has to end."""
        self._good_steps = 0
        if outcome.fault is Fault.SWITCH:  # the step was not tried
            self.climb(SwitchFailed(flight.mode, outcome.message), effects)
            return []
        self._note_mode(flight, effects)
        if self.suspects:
            self.suspects.popleft()
        members = members_of(flight)
        is_short = outcome.fault is Fault.OOM
        if len(members) > 1:
            if is_short and self.ladder.state is Rung.FULL:  # lower rungs are for steps that cannot be made smaller
                self._oom_steps += 1
                if self._oom_steps >= OOM_STEPS_MAX:
                    self._oom_steps = 0
                    self._go_down(outcome.message, flight, effects)
            self._bisect(members)
            self._report(outcome, flight, members, "its requests are tried in halves", effects)
            return []
        doomed: Doomed = []
        for request in members:
            num_tokens = sum(count for row, count, _ in flight.rows if row is request)
            if not is_alone(flight):  # the others have ended meanwhile, and it may have been theirs
                self.suspects.append([request.request_id])
                self._report(outcome, flight, members, "it is tried alone", effects)
            elif is_short and num_tokens > self.limits.block_size:
                self.chunk = max(num_tokens // 2, self.limits.block_size)  # fewer tokens need less memory
                self.suspects.append([request.request_id])
                self._report(outcome, flight, members, f"it is tried with {self.chunk} tokens", effects)
            else:
                doomed += self._blame(request, flight, outcome, effects)
        return doomed

    def worker_lost(self, flight: Flight, event: WorkerLost, effects: list[Effect]) -> Doomed:
        """The worker died under a step, which was taken back."""
        self._good_steps = 0
        if self.suspects:
            self.suspects.popleft()
        members = members_of(flight)
        for request in members:
            request.losses += 1
        suspects = [request for request in members if request.losses >= LOSSES_SUSPECT]
        if len(members) == len(suspects) == 1 and is_alone(flight):
            return self._blame(suspects[0], flight, event, effects)
        if suspects:
            self._bisect(suspects)
            self._report(event, flight, suspects, "these requests are tried in halves", effects)
        return []

    def _note_mode(self, flight: Flight, effects: list[Effect]) -> None:
        """A step that was run, well or not, was run in the mode that it asked for."""
        if self.ladder.device_mode != flight.mode:
            self.climb(Switched(flight.mode), effects)

    def _bisect(self, members: list[Request]) -> None:
        """Try half of them alone, then the other half, after those that are to be tried already."""
        ids = [r.request_id for r in members]
        half = (len(ids) + 1) // 2
        self.suspects += [ids[:half], ids[half:]]

    def _blame(self, request: Request, flight: Flight, what: StepFailed | WorkerLost, effects: list[Effect]) -> Doomed:
        """A step failed in which `request` stood alone: try it once more, or on a lower rung; else it ends."""
        request.failures += 1
        action = "it is tried once more"
        if request.failures % TRIES_ALONE == 0:
            self._failed_alone += 1
            is_systematic = what.fault is Fault.OOM or self._failed_alone >= FAILED_ALONE_MAX
            is_hopeless = request.failures >= FAILURES_MAX
            if is_hopeless or not is_systematic or not self._go_down(what.message, flight, effects):
                self._report(what, flight, [request], "the request ended with an error", effects)
                how = HOW.get(what.fault, "failed")
                return [(request, f"the step that computed this request {how}: {what.message}")]
            action = f"it is tried again, with the engine at {self.ladder.state}"
        self.suspects.append([request.request_id])
        self._report(what, flight, [request], action, effects)
        return []

    def _report(
        self,
        what: StepFailed | WorkerLost,
        flight: Flight,
        requests: list[Request],
        action: str,
        effects: list[Effect],
    ) -> None:
        incident = Incident(
            kind=what.fault,
            message=what.message,
            action=action,
            step_id=flight.step_id,
            epoch=what.epoch,
            stream_ids=sorted({request.stream_id for request in requests}),
        )
        effects.append(Send("incidents", incident))

    # ---- the ladder ----------------------------------------------------------------------------------------------

    def climb(self, event: Pressure | Steady | Switched | SwitchFailed | Quiet, effects: list[Effect]) -> None:
        """Let the ladder take `event`; at the top all limits are what they were."""
        effects += self.ladder.handle(event)
        if self.ladder.state is Rung.FULL:
            self.planner.max_running = self.limits.max_num_seqs
            self.planner.max_tokens = self.limits.max_num_batched_tokens

    def quiet(self, event: Quiet, requests: Mapping[int, Request], effects: list[Effect]) -> None:
        """Nothing went wrong for a while; where nothing went well either, the time begins with the next good step."""
        if requests and not self._good_steps:
            self._is_quiet_due = self.ladder.state is not Rung.FULL
        else:
            self.climb(event, effects)

    def _go_down(self, why: str, flight: Flight, effects: list[Effect]) -> bool:
        """One rung down, if there is one; the first halves what was too much."""
        before = self.ladder.state
        self.climb(Pressure(why), effects)
        if before is Rung.FULL and self.ladder.state is not Rung.FULL:
            planner = self.planner
            num_tokens = sum(count for _, count, _ in flight.rows) if len(flight.rows) > 1 else planner.max_tokens
            planner.max_running = max(len(flight.rows) // 2, len(planner.running) // 2, 1)
            planner.max_tokens = max(num_tokens // 2, planner.max_running, self.limits.block_size)
        return self.ladder.state is not before


def members_of(flight: Flight) -> list[Request]:
    """The requests that a step computed or fetched, and that have not ended."""
    computed = [request for request, _, _ in flight.rows]
    return [request for request in (*computed, *flight.fetched) if not request.ended]


def is_alone(flight: Flight) -> bool:
    """Whether the step held one request, whatever has become of the others."""
    return len(flight.rows) + len(flight.fetched) == 1
