"""Frames joined: one that tells what two would, as large as what there is, and no larger than a reader is owed.

What only grows (steps, evictions, incidents) is bounded: the newest are kept, and how many were before them is told.
"""

from __future__ import annotations

import msgspec

from novainfer.actors.inspection.frames import Frame, KvChange, MachineNow, RowCount
from novainfer.actors.inspection.incidents import IncidentRecord

STEPS_MAX = 512  # in one frame: a second of steps of 2 ms
EVICTED_MAX = 1024
INCIDENTS_MAX = 100


def empty(now: float, incidents: list[IncidentRecord]) -> Frame:
    """One that tells of nothing but `incidents`."""
    return Frame(
        time=now,
        machines=[],
        actors=[],
        requests=[],
        progress=[],
        gone=[],
        kv=None,
        steps=[],
        rates=None,
        incidents=incidents,
        lost=0,
    )


def tells(frame: Frame) -> bool:
    """Whether there is anything in it."""
    lists = (frame.machines, frame.actors, frame.requests, frame.progress, frame.gone, frame.steps, frame.incidents)
    return any(lists) or frame.kv is not None or frame.rates is not None or frame.lost > 0


def bounded(frame: Frame) -> Frame:
    """The newest of what only grows, and how many there were before."""
    kv, lost = frame.kv, frame.lost
    num_steps, num_incidents = len(frame.steps) - STEPS_MAX, len(frame.incidents) - INCIDENTS_MAX
    num_evicted = len(kv.evicted) - EVICTED_MAX if kv is not None else 0
    if num_steps <= 0 and num_incidents <= 0 and num_evicted <= 0:
        return frame
    lost += max(num_steps, 0) + max(num_incidents, 0) + max(num_evicted, 0)
    if kv is not None:
        kv = KvChange(kv.blocks, kv.evicted[-EVICTED_MAX:], kv.host_used)
    steps, incidents = frame.steps[-STEPS_MAX:], frame.incidents[-INCIDENTS_MAX:]
    return msgspec.structs.replace(frame, kv=kv, steps=steps, incidents=incidents, lost=lost)


def joined(before: Frame, after: Frame) -> Frame:
    """One frame that tells what two would."""
    requests = {now.key: now for now in before.requests}
    progress = {key: (key, tokens, blocks) for key, tokens, blocks in before.progress}
    for now in after.requests:
        requests[now.key] = now
        progress.pop(now.key, None)
    for key, tokens, blocks in after.progress:
        if key in requests:
            requests[key] = msgspec.structs.replace(requests[key], output_tokens=tokens, blocks=blocks)
        else:
            progress[key] = key, tokens, blocks
    for key in after.gone:
        requests.pop(key, None)
        progress.pop(key, None)
    return bounded(
        Frame(
            time=after.time,
            machines=_joined_machines(before.machines, after.machines),
            actors=list(({now.name: now for now in before.actors} | {now.name: now for now in after.actors}).values()),
            requests=list(requests.values()),
            progress=list(progress.values()),
            gone=before.gone + after.gone,
            kv=_joined_kv(before.kv, after.kv),
            steps=before.steps + after.steps,
            rates=after.rates or before.rates,
            incidents=before.incidents + after.incidents,
            lost=before.lost + after.lost,
        )
    )


def _joined_machines(before: list[MachineNow], after: list[MachineNow]) -> list[MachineNow]:
    found = {machine.name: machine for machine in before}
    for machine in after:
        rows: dict[tuple[str, str, str], RowCount] = {}
        for row in (*(found[machine.name].rows if machine.name in found else ()), *machine.rows):
            rows[row.state, row.event, row.to] = row
        found[machine.name] = MachineNow(machine.name, machine.states, list(rows.values()))
    return list(found.values())


def _joined_kv(before: KvChange | None, after: KvChange | None) -> KvChange | None:
    if before is None or after is None:
        return after or before
    blocks = {change[0]: change for change in (*before.blocks, *after.blocks)}
    return KvChange(list(blocks.values()), before.evicted + after.evicted, after.host_used)
