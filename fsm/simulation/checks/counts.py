"""The scheduler's counts, by an account of what the streams were given; and that no request outlives its stream."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from novainfer.fsm.client.stream import StreamState
from novainfer.fsm.messages.events import Output
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World


class Counts:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._given: Counter[str] = Counter()

    def given(self, output: Output) -> None:
        """The streams are given `output`."""
        given = self._given
        given["generation_tokens_total"] += len(output.token_ids)
        if output.first is not None:
            given["prompt_tokens_total"] += output.first.num_prompt_tokens
            given["prefix_query_tokens_total"] += output.first.num_prompt_tokens
            given["prefix_hit_tokens_total"] += output.first.num_cached_tokens
        if output.end is not None and output.request_id >= 0:
            given["finished_total"] += 1

    def still(self) -> None:
        """All messages have arrived: what ended a stream has ended its requests."""
        world = self._world
        if world.is_stopped or not world.looks_closely:
            return
        for request in world.scheduler.requests.values():
            stream = world.streams.get(request.stream_id)
            if stream is None or stream.state is StreamState.CLOSED:
                raise Violation(f"request {request.request_id} goes on, and its stream has ended")

    def quiet(self) -> None:
        """Nothing is on its way, and no step is on the device."""
        world = self._world
        if world.is_stopped:
            return
        said = world.scheduler.statistics()
        counts = {name: getattr(said, name) for name in self._given if name != "finished_total"}
        counts["finished_total"] = sum(said.finished_total.values())
        for name, count in counts.items():
            if count != self._given[name]:
                raise Violation(f"{name} is {count}, and streams were given {self._given[name]}")
