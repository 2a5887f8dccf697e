"""A scheduler with a device that answers at once, and nothing around it."""

from __future__ import annotations

from typing import Any

import msgspec

from novainfer.fsm.core.machine import After, Drop, Send
from novainfer.fsm.messages.events import (
    Batch,
    Begun,
    CancelRequest,
    Cause,
    Configure,
    End,
    Fault,
    Incident,
    MakeBatch,
    Output,
    Outputs,
    StepFailed,
    Submit,
    WorkerLost,
)
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.messages.tenant import ANYONE, Tenant
from novainfer.fsm.schedule.planner import Limits
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.schedule.scheduler import Scheduler
from novainfer.fsm.schedule.speculation import Speculation
from novainfer.fsm.simulation.checks.oracle import VOCABULARY
from novainfer.fsm.simulation.world.device import EOS, VOCAB_SIZE, ScriptedDevice
from novainfer.fsm.simulation.world.shape import BEST


class Bench:
    """Drives one scheduler step by step; `sampled`, if given, is what the device says next, one list per step."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        max_model_len: int = 64,
        num_host_blocks: int = 0,
        modes: tuple[Mode, ...] = (BEST,),
        speculation: Speculation | None = None,
        step_costs: list[tuple[int, float]] | None = None,
        **limits: Any,
    ) -> None:
        fields = {"max_num_seqs": 8, "block_size": 4, "max_num_batched_tokens": 64, "prefill_chunk_tokens": 32}
        self.limits = Limits(**{**fields, **limits})
        self.scheduler = Scheduler(self.limits, VOCABULARY, speculation=speculation)
        self.outputs: list[Output] = []
        self.incidents: list[Incident] = []
        self.timers: list[After] = []
        self.plan: StepPlan | None = None
        self._next_id = 0
        self.configuration = Configure(
            num_blocks, max_model_len, VOCAB_SIZE, [EOS], 0, num_host_blocks, modes, step_costs or []
        )
        self._epoch = 0
        self.device = self._new_device()
        self.tell(self.configuration)

    def tell(self, event: Any) -> None:
        """One event; its outputs are kept, and so is the plan it brings. A timer that is told has run out."""
        self.timers = [timer for timer in self.timers if timer.event != event]
        for effect in self.scheduler.handle(event):
            if isinstance(effect, After | Drop):
                self.timers = [timer for timer in self.timers if timer.event != effect.event]
                self.timers += [effect] if isinstance(effect, After) else []
                continue
            assert isinstance(effect, Send)
            if isinstance(effect.event, Incident):
                self.incidents.append(effect.event)
            elif isinstance(effect.event, Batch):
                self.plan = effect.event.plan
                self.outputs += effect.event.outputs
            else:
                assert isinstance(effect.event, Outputs)
                self.outputs += effect.event.outputs
        self.scheduler.check()

    def submit(
        self, token_ids: list[int], *, max_tokens: int | None = 8, tenant: Tenant = ANYONE, **params: Any
    ) -> int:
        """A new request; returns its id."""
        request_id = self._next_id
        self._next_id += 1
        params = {"ignore_eos": True, "temperature": 0.0, **params}
        self.tell(
            Submit(
                request_id=request_id,
                stream_id=request_id,
                choice=0,
                token_ids=token_ids,
                params=SamplingParams(max_tokens=max_tokens, **params),
                seed=1,
                tenant=tenant,
            )
        )
        return request_id

    def cancel(self, request_id: int) -> None:
        """End it."""
        self.tell(CancelRequest(request_id, Cause.CLIENT))

    def start(self) -> None:
        """Ask for a plan when none is on the device."""
        self.tell(MakeBatch())

    def step(self, sampled: list[int] | None = None, took_s: float = 0.0, draft_s: float = 0.0) -> None:
        """The device does the step that is planned (or starts, if none is), and the next one is planned."""
        if self.plan is None:
            self.start()
            return
        self.device.mode = self.plan.mode
        done = self.device.run(self.plan)
        if sampled is not None:
            done = StepDone(done.step_id, done.epoch, sampled)
        done = msgspec.structs.replace(done, took_s=took_s, draft_s=draft_s)
        self.tell(MakeBatch(done))

    def fail(self, fault: Fault = Fault.EXCEPTION, *, launched: bool = True) -> None:
        """The step that is planned fails, and the next one is planned."""
        assert self.plan is not None
        if launched:
            self.device.mode = self.plan.mode
            self.device.spoil(self.plan)
        self.tell(MakeBatch(StepFailed(self.plan.step_id, self.plan.epoch, fault, "broken", launched)))

    def lose(self, fault: Fault = Fault.LOST) -> None:
        """The worker is gone, with the step that is planned and all that it held."""
        step_id = self.plan.step_id if self.plan is not None else -1
        self.plan = None
        self.tell(WorkerLost(self._epoch, fault, "killed", step_id))
        self._epoch += 1
        self.device = self._new_device()

    def recover(self) -> None:
        """There is a worker again, and the engine asks for a plan."""
        self.tell(msgspec.structs.replace(self.configuration, epoch=self._epoch))
        self.start()

    def _new_device(self) -> ScriptedDevice:
        wanted = self.configuration
        return ScriptedDevice(
            wanted.num_blocks,
            self.limits.block_size,
            self.limits.max_num_seqs,
            num_host_blocks=wanted.num_host_blocks,
            epoch=self._epoch,
        )

    def run(self) -> None:
        """Until nothing is left to do."""
        self.step()
        while self.plan is not None:
            self.step()

    def rows(self) -> dict[int, int]:
        """The step on the device: tokens by request id."""
        flight = self.scheduler.newest_flight
        return {request.request_id: count for request, count, _ in flight.rows} if flight else {}

    def request(self, request_id: int) -> Request:
        """The request itself."""
        return self.scheduler.requests[request_id]

    def text(self, request_id: int) -> str:
        """All text it was given so far."""
        return "".join(o.text for o in self.outputs if o.request_id == request_id)

    def end(self, request_id: int) -> Output:
        """The output that ended it; there is exactly one."""
        (output,) = [o for o in self.outputs if o.request_id == request_id and o.end is not None]
        return output

    def end_of(self, request_id: int) -> End | None:
        """How it ended, if it has."""
        return next((o.end for o in self.outputs if o.request_id == request_id and o.end is not None), None)

    def first(self, request_id: int) -> Begun:
        """What was said of it when it began."""
        (first,) = [o.first for o in self.outputs if o.request_id == request_id and o.first is not None]
        return first
