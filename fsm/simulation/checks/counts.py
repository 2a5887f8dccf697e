"""The scheduler's counts, by an account of what the streams were given; and that a request leaves no place behind."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from novainfer.fsm.client.stream import StreamState
from novainfer.fsm.messages.events import Begun, Output
from novainfer.fsm.simulation.checks.oracle import Violation

if TYPE_CHECKING:
    from novainfer.fsm.simulation.world.world import World


class Counts:
    """The account of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._given: Counter[str] = Counter()
        self._begun: dict[tuple[int, int], Begun] = {}  # choices of which no token was sampled here
        self._told: Counter[tuple[int, int]] = Counter()  # tokens of each choice

    def given(self, output: Output) -> None:
        """The streams are given `output`."""
        given, choice = self._given, (output.stream_id, output.choice)
        if output.first is not None:
            self._begun[choice] = output.first
        if output.token_ids and not self._is_told_again(output, len(output.token_ids)):
            given["generation_tokens_total"] += len(output.token_ids)
            self._note_first(choice)
        elif output.embedding is not None:
            self._note_first(choice)
        if output.end is not None and output.request_id >= 0:
            given["finished_total"] += 1

    def _note_first(self, choice: tuple[int, int]) -> None:
        """Its prompt counts when its first token is sampled here."""
        first = self._begun.pop(choice, None)
        if first is not None:
            self._given["prompt_tokens_total"] += first.num_prompt_tokens
            self._given["prefix_query_tokens_total"] += first.num_prompt_tokens
            self._given["prefix_hit_tokens_total"] += first.num_cached_tokens

    def _is_told_again(self, output: Output, num_tokens: int) -> bool:
        """Whether its client came with these tokens: nothing was computed for them."""
        committed = self._world.clients[output.stream_id].arrive.committed
        choice = (output.stream_id, output.choice)
        self._told[choice] += num_tokens
        return bool(committed) and self._told[choice] <= len(committed[output.choice].token_ids)

    def still(self) -> None:
        """All messages have arrived: what ended a stream has ended its requests."""
        world = self._world
        if world.is_stopped or not world.looks_closely:
            return
        queued = set(world.gate.queued)
        for request in world.scheduler.requests.values():
            stream = world.streams.get(request.stream_id)
            if stream is None or stream.state is StreamState.CLOSED:
                raise Violation(f"request {request.request_id} goes on, and its stream has ended")
            if not request.awaits_first and request.stream_id in queued:
                raise Violation(f"request {request.request_id} has run, and its stream is still queued at the gate")

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
