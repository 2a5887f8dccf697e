"""A device that can be told to fail: faults are rehearsed on the very device that serves, not on a copy of it.

Until one is injected this costs a step one look at an empty queue.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import Any, Literal, get_args

import msgspec

from novainfer.actors.device.device import Device, Flight
from novainfer.fsm.messages.errors import InvalidParameter
from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.step import StepDone, StepMasks, StepPlan

FaultKind = Literal["oom", "exception", "stall", "hang", "freeze", "kill", "eat_memory"]
# These would take the engine with them where the device is a thread of its process.
PROCESS_ONLY = ("hang", "freeze", "kill", "eat_memory")
ARMED_MAX = 64  # faults that wait for their step: a drill has a few
EATEN_MIB_MAX = 256  # what "eat_memory" may take: enough for a real MemoryError under a limit, too little to hurt
MIB = 2**20


class Injection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault for the device, from its next step on.

    oom, exception   the next `num_steps` steps raise; with `slot`, those that hold this slot, up to and with the one
                     that holds nothing else
    stall            each of the next `num_steps` steps takes `seconds` longer; with `slot`, of those that hold it
    hang             the next step never returns
    eat_memory       the next step takes memory until the system says no (256 MiB at most), and fails with that
    freeze, kill     at once, without waiting for a step: SIGSTOP, SIGKILL
    """

    kind: FaultKind
    slot: int | None = None
    num_steps: int = 1
    seconds: float = 2.0


def injection(kind: str, how: dict[str, Any]) -> Injection:
    """The fault of that kind, checked; raises `InvalidParameter`, naming the field."""
    if kind not in get_args(FaultKind):
        raise InvalidParameter(
            f"there is no fault {kind!r}: it is one of {', '.join(get_args(FaultKind))}", param="kind"
        )
    try:
        found = msgspec.convert({**how, "kind": kind}, Injection)
    except msgspec.ValidationError as error:
        raise InvalidParameter(f"the fault cannot be injected: {error}", param="kind") from None
    for name in ("num_steps", "seconds"):
        if not 0 < getattr(found, name) <= 3600:
            raise InvalidParameter(f"{name} must be more than 0 and at most 3600", param=name)
    return found


class FaultyDevice:
    """`device`, which fails as it was told by `arm`; that may be called from any thread."""

    def __init__(self, device: Device) -> None:
        self.device = device
        # Appended by any thread, changed by the device's thread; the oldest makes room.
        self._armed: deque[Injection] = deque(maxlen=ARMED_MAX)

    def arm(self, fault: Injection) -> None:
        """Fail so from the next step that it concerns; one of a slot is void when the slot is given to another."""
        self._armed.append(fault)

    def run(self, plan: StepPlan) -> StepDone | Flight:
        """One step, or the fault that is due."""
        if self._armed:
            self._fail(plan)
        return self.device.run(plan)

    def give(self, masks: StepMasks) -> None:
        """To the device, from any thread."""
        self.device.give(masks)

    def load(self, precision: str | None = None) -> dict[str, Any]:
        """As the device does."""
        return self.device.load(precision)

    def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
        """As the device does."""
        return self.device.fit(num_blocks, is_new=is_new)

    def warm(self, *, measures: bool = True) -> dict[str, Any] | None:
        """As the device does."""
        return self.device.warm(measures=measures)

    def switch(self, mode: Mode) -> None:
        """As the device does."""
        self.device.switch(mode)

    def reclaim(self) -> None:
        """As the device does."""
        self.device.reclaim()

    def close(self) -> None:
        """As the device does."""
        self.device.close()

    def is_usable(self) -> bool:
        """As the device says."""
        return self.device.is_usable()

    def _fail(self, plan: StepPlan) -> None:
        given = {spec.slot for spec in plan.admissions}  # the requests that they were meant for have them no more
        for void in tuple(self._armed):  # a copy: another thread may arm one meanwhile
            if void.slot in given:
                self._armed.remove(void)
        fault = next((f for f in tuple(self._armed) if f.slot is None or f.slot in plan.slots), None)
        if fault is None:
            return
        self._armed.remove(fault)
        # A step that fails and holds nothing else is the last: there the request is found to be at fault, and ended.
        is_found = fault.kind != "stall" and fault.slot is not None and plan.slots == [fault.slot]
        if fault.num_steps > 1 and not is_found:
            self._armed.appendleft(msgspec.structs.replace(fault, num_steps=fault.num_steps - 1))
        if fault.kind == "oom":
            raise MemoryError("an injected fault: out of memory")
        if fault.kind == "exception":
            raise RuntimeError("an injected fault")
        if fault.kind == "stall":
            time.sleep(fault.seconds)
        elif fault.kind == "hang":
            threading.Event().wait()
        elif fault.kind == "eat_memory":
            _eat_memory()


def _eat_memory() -> None:
    """Take memory until there is none; raises the MemoryError that this meets, with everything given back."""
    if sys.platform != "linux":
        raise MemoryError(f"an injected fault: {EATEN_MIB_MAX} MiB eaten")
    import resource

    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + EATEN_MIB_MAX * MIB
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if before[1] == resource.RLIM_INFINITY else min(limit, before[1]), before[1])
    )
    eaten: list[bytearray] = []
    try:
        while True:
            eaten.append(bytearray(8 * MIB))
    except MemoryError:
        num_eaten = len(eaten)
    finally:
        eaten.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)
    raise MemoryError(f"an injected fault: no memory left after {8 * num_eaten} MiB")
