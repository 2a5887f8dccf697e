"""What a page knows of an engine: a snapshot, and the frames behind it, taken in as webui's model/state.ts does."""

from __future__ import annotations

from typing import Any

from novainfer.actors.inspection.frames import Frame, RequestNow, Snapshot, StepNow


class Mirror:
    """All of it, comparable with `known(snapshot)` of one who comes later."""

    def __init__(self) -> None:
        self.machines: dict[str, tuple[dict[str, int], dict[tuple[str, str, str], int]]] = {}
        self.requests: dict[str, tuple[str, str | None, int, int, int]] = {}
        self.owner = bytearray()
        self.readers = bytearray()
        self.evicted: list[int] = []
        self.host_used = 0
        self.steps: list[StepNow] = []
        self.incidents: list[int] = []
        self.lost = 0
        self.num_snapshots = self.num_frames = 0

    def take(self, one: Snapshot | Frame) -> None:
        """The next of what a watcher gives."""
        if isinstance(one, Snapshot):
            self._begin(one)
        else:
            self._apply(one)

    def _begin(self, one: Snapshot) -> None:
        self.num_snapshots += 1
        self.machines, self.requests, self.steps = {}, {}, list(one.steps)
        self._count(one)
        for now in one.requests:
            self.requests[now.key] = shown(now)
        self.incidents = [record.number for record in one.incidents]
        if one.kv is not None:
            self.owner, self.readers = bytearray(one.kv.owner), bytearray(one.kv.readers)
            self.host_used = one.kv.host_used

    def _apply(self, one: Frame) -> None:
        self.num_frames += 1
        self._count(one)
        for now in one.requests:
            self.requests[now.key] = shown(now)
        for key, num_tokens, num_blocks in one.progress:
            if key in self.requests:
                self.requests[key] = (*self.requests[key][:3], num_tokens, num_blocks)
        for key in one.gone:
            self.requests.pop(key, None)
        if one.kv is not None:
            for block, owner, readers in one.kv.blocks:
                self.owner[block], self.readers[block] = owner, readers
            self.evicted += one.kv.evicted
            self.host_used = one.kv.host_used
        self.steps += one.steps
        self.incidents += [record.number for record in one.incidents]
        self.lost += one.lost

    def _count(self, one: Snapshot | Frame) -> None:
        for machine in one.machines:
            _, counts = self.machines.get(machine.name, ({}, {}))
            counts = counts | {(row.state, row.event, row.to): row.count for row in machine.rows}
            self.machines[machine.name] = machine.states, counts

    def known(self) -> dict[str, Any]:
        """What must be as one who begins now is told; a machine without states and rows is none."""
        return {
            "machines": {name: found for name, found in self.machines.items() if any(found)},
            "requests": self.requests,
            "owner": bytes(self.owner),
            "readers": bytes(self.readers),
            "host_used": self.host_used,
        }


def shown(now: RequestNow) -> tuple[str, str | None, int, int, int]:
    """What changes of a request."""
    return now.state, now.waits_for, now.cached_tokens, now.output_tokens, now.blocks


def known(snapshot: Snapshot) -> dict[str, Any]:
    """What a snapshot tells, as `Mirror.known`."""
    mirror = Mirror()
    mirror.take(snapshot)
    return mirror.known()
