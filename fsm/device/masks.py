"""Masks on their way to steps: which are there when a step is launched, and which it is given while it is computed.

    CLEAR ──Launched: some masks are being made──▶ OWING ──Made, Gone, Landed: none is owed any more──▶ CLEAR

A step is launched as soon as it is planned, also when masks that it names are being made, or cannot be made before the
step in front of it has ended. They are given to it by and by; the device needs them when it draws tokens, and decides
itself how long it waits. A mask that no longer can come is said to be none, so that nothing waits for it.

A mask is named by its request, the number of tokens that this has got by then, and how many drafts follow these. Those
behind drafts are made with the one before them, in one go; where the grammar forbids a draft, nothing may follow it. Of
each request the newest ones are kept: no other is asked for, since a step is planned behind what is committed, or one
token ahead of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core.dwell import Dwell, any_time
from novainfer.fsm.core.machine import Machine, Table, never, on, stay, table

MaskName = tuple[int, int, int]  # a request, how many tokens it has got, and how many drafts are behind them
Prefix = tuple[int, int]  # the first two: all masks behind it are made at once
NONE_YET = -1  # tokens behind which the newest mask stands, where none was made


class DeliveryState(StrEnum):
    """Whether a step on the device lacks masks."""

    CLEAR = "CLEAR"
    OWING = "OWING"


S = DeliveryState


class Held(msgspec.Struct, frozen=True):
    """Masks are going to be made for this request."""

    request_id: int


class Made(msgspec.Struct, frozen=True):
    """All masks behind these are there; they take the place of those that their requests had before."""

    prefixes: list[Prefix]


class Gone(msgspec.Struct, frozen=True):
    """For this request no mask is made any more."""

    request_id: int


class Launched(msgspec.Struct, frozen=True):
    """A step goes to the device, with the masks of these names."""

    step_id: int
    epoch: int
    names: list[MaskName]


class Landed(msgspec.Struct, frozen=True):
    """A step has ended, well or not; what it lacks is of no use any more."""

    step_id: int
    epoch: int


class LaunchWith(msgspec.Struct, frozen=True):
    """Job: launch the step with the masks at the places `here`; those at `to_come` come later, or are none."""

    step_id: int
    here: list[int]
    to_come: list[int]


class Give(msgspec.Struct, frozen=True):
    """Job: give masks to a step that was launched without them, or say that they do not come (`is_none`)."""

    step_id: int
    epoch: int
    places: list[int]
    names: list[MaskName]
    is_none: bool = False


class Owed(msgspec.Struct):
    """What a step on the device lacks: names, by their places among those of its masks."""

    step_id: int
    epoch: int
    names: dict[int, MaskName]


class Delivery(Machine):
    """See the module."""

    TABLE: ClassVar[Table] = table(
        S,
        (Held, Made, Gone, Launched, Landed),
        stay(S, Held, "_hold"),
        stay(S.CLEAR, Made, "_keep"),
        on(S.OWING, Made, "_made", S.CLEAR, S.OWING),
        stay(S.CLEAR, Gone, "_forget"),
        on(S.OWING, Gone, "_gone", S.CLEAR, S.OWING),
        on(S, Launched, "_launch", S.CLEAR, S.OWING),
        never(S.CLEAR, Landed, "it is said of steps that lack masks"),
        on(S.OWING, Landed, "_landed", S.CLEAR, S.OWING),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.CLEAR: any_time("it waits for a step"),
        S.OWING: any_time("the threads that make masks have a deadline, and so have the steps that lack them"),
    }

    def __init__(self) -> None:
        super().__init__(S.CLEAR)
        self.newest: dict[int, int] = {}  # of each request that is held to a grammar
        self.owed: list[Owed] = []  # oldest first

    def lacks(self, step_id: int, epoch: int) -> bool:
        """Whether this step waits for masks."""
        return any((owed.step_id, owed.epoch) == (step_id, epoch) for owed in self.owed)

    def _hold(self, event: Held) -> StrEnum:
        self.newest[event.request_id] = NONE_YET
        return self.state

    def _keep(self, event: Made) -> StrEnum:
        self.newest.update((request_id, num) for request_id, num in event.prefixes if request_id in self.newest)
        return self.state

    def _forget(self, event: Gone) -> StrEnum:
        self.newest.pop(event.request_id, None)
        return self.state

    def _launch(self, event: Launched) -> DeliveryState:
        here, never_made = list[int](), list[int]()
        owed = Owed(event.step_id, event.epoch, {})
        for place, name in enumerate(event.names):
            request_id, num_tokens, _ = name
            newest = self.newest.get(request_id)
            if newest == num_tokens:
                here.append(place)
            elif newest is not None and newest < num_tokens:
                owed.names[place] = name
            else:
                never_made.append(place)
        self.owed = [other for other in self.owed if other.epoch == event.epoch]  # else its worker is lost
        if owed.names:
            self.owed.append(owed)
        self._start(LaunchWith(event.step_id, here, sorted([*owed.names, *never_made])))
        if never_made:
            names = [event.names[place] for place in never_made]
            self._start(Give(event.step_id, event.epoch, never_made, names, is_none=True))
        return self._left()

    def _made(self, event: Made) -> DeliveryState:
        self._keep(event)
        prefixes = set(event.prefixes)
        names = (name for owed in self.owed for name in owed.names.values())
        self._give({name for name in names if name[:2] in prefixes}, is_none=False)
        return self._left()

    def _gone(self, event: Gone) -> DeliveryState:
        self._forget(event)
        names = (name for owed in self.owed for name in owed.names.values())
        self._give({name for name in names if name[0] == event.request_id}, is_none=True)
        return self._left()

    def _give(self, names: Iterable[MaskName], *, is_none: bool) -> None:
        for owed in self.owed:
            found = {place: name for place, name in owed.names.items() if name in names}
            if not found:
                continue
            for place in found:
                del owed.names[place]
            self._start(Give(owed.step_id, owed.epoch, list(found), list(found.values()), is_none))

    def _landed(self, event: Landed) -> DeliveryState:
        self.owed = [owed for owed in self.owed if (owed.step_id, owed.epoch) != (event.step_id, event.epoch)]
        return self._left()

    def _left(self) -> DeliveryState:
        self.owed = [owed for owed in self.owed if owed.names]
        return S.OWING if self.owed else S.CLEAR
