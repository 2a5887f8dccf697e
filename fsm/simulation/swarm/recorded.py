"""A world that is recorded as a served engine is, so that replays can be tried on everything that may happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from novainfer.fsm.core.machine import Effect, Machine, Send, Start
from novainfer.fsm.messages.events import Arrive, Outputs, Run, StallOver, Stop
from novainfer.fsm.recording.log import (
    RING_BYTES,
    SEGMENT_BYTES,
    STREAMS,
    Codes,
    Image,
    Layout,
    Parts,
    Recording,
    lane_name,
)
from novainfer.fsm.recording.log import read_code as code_of_read
from novainfer.fsm.simulation.world.shape import Shape
from novainfer.fsm.simulation.world.world import Driver, Link, World

LAYOUT: Layout = "links"


class RecordedWorld(World):
    """A `World` whose messages are written into a ring of `ring_bytes`."""

    segment_bytes = SEGMENT_BYTES
    ring_bytes = RING_BYTES

    def __init__(
        self, shape: Shape, trace: Callable[[bytes], None] | None = None, driver: Driver | None = None
    ) -> None:
        if shape.num_speculative_tokens:  # what a draft model has proposed is data; guesses of a world's own are not
            shape = msgspec.structs.replace(shape, drafts_on_device=True)
        self.recording: Recording | None = None
        self._lane: Link | None = None  # the link of the message being delivered; None: it came directly
        self._taking: tuple[Codes, Machine, Any] | None = None
        super().__init__(shape, trace, driver)
        self.recording = Recording(
            self._parts,
            self.scheduler._vocabulary,
            clock_ns=lambda: int(self.now_s * 1e9),
            layout=LAYOUT,
            segment_bytes=self.segment_bytes,
            ring_bytes=self.ring_bytes,
        )

    def image(self) -> Image:
        """All that is recorded."""
        assert self.recording is not None
        return self.recording.image()

    def _parts(self) -> Parts:
        lanes = {
            lane_name(LAYOUT, *link): queue
            for link, queue in self.links.items()
            if link[1] in self.machines or link[1] == STREAMS
        }
        return Parts(self.machines, lanes, self.streams, self._set_timers())

    def _set_timers(self) -> Sequence[tuple[str, Any]]:
        recorded = (*self.machines, STREAMS)  # what grammars do is not: their answers are
        return [(timer[0], event) for timer, event in self.timers.items() if timer[0] in recorded]

    def _codes(self, to: str) -> Codes:
        """Of the lane that the message comes from."""
        assert self.recording is not None
        return self.recording.lane(to, lane_name(LAYOUT, *self._lane) if self._lane else "")

    # ---- what is recorded ----------------------------------------------------------------------------------------

    def perform(self, source: str, effects: Sequence[Effect]) -> None:
        """As `World.perform`; what comes from outside is written in full."""
        recording = self.recording
        if recording is None:
            super().perform(source, effects)
            return
        self._write_taken(recording)
        is_outside = source not in self.machines and source != STREAMS
        for effect in effects:  # one at a time: a snapshot must hold what was written before it
            if type(effect) is Start and type(effect.job) is Run:
                recording.launched(effect.job.plan)
            elif is_outside and type(effect) is Send and (effect.to in self.machines or effect.to == STREAMS):
                codes = recording.lane(effect.to, lane_name(LAYOUT, source, effect.to, effect.urgent))
                write = recording.timer if source == "timer" else recording.told
                write(codes, effect.event)
            super().perform(source, [effect])

    def _write_taken(self, recording: Recording) -> None:
        if self._taking is not None:
            codes, machine, event = self._taking
            self._taking = None
            recording.log.extend(codes[type(event), machine.state])

    def handle(self, name: str, machine: Machine, event: Any) -> Sequence[Effect]:
        """As `World.handle`; a message without a link is written in full."""
        recording = self.recording
        if recording is None or name == STREAMS:
            return super().handle(name, machine, event)
        if isinstance(event, Arrive) and name == "gate":
            recording.adds(self.streams[event.stream_id], False)  # it is there
        codes = self._codes(name)
        if self._lane is None:
            recording.called(codes, event)
        self._lane, before = None, machine.state
        self._taking = (codes, machine, event)
        try:
            return super().handle(name, machine, event)
        except Exception as error:
            if self._taking is not None:  # the machine raised, and no check after it
                self._taking = None
                recording.raised(codes, before, event, error)
            raise

    def deliver(self, link: Link) -> None:
        """As `World.deliver`."""
        self._lane = link
        super().deliver(link)
        self._lane = None

    def _to_streams(self, event: Stop | Outputs | StallOver) -> None:
        recording = self.recording
        if recording is not None:
            codes = self._codes(STREAMS)
            if self._lane is None:
                recording.called(codes, event)
            recording.log.extend(codes[type(event), ""])
            if isinstance(event, Outputs):
                recording.took(event.outputs)
        super()._to_streams(event)

    def read(self, stream_id: int) -> None:
        """As `World.read`."""
        if self.recording is not None:
            self.recording.log.extend(code_of_read(stream_id))
        super().read(stream_id)

    def abandon(self, stream_id: int) -> None:
        """As `World.abandon`."""
        super().abandon(stream_id)
        if self.recording is not None:
            self.recording.forgot(stream_id)
