"""What the page of the inspector is told: a snapshot of everything, and frames of what has changed since.

`webui/src/inspector/wire.ts` says the same to the page, with what each field means there. Times are in seconds since
1970, and what `_ms` ends is in milliseconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from novainfer.actors.inspection.incidents import IncidentRecord

PhaseName = Literal["schedule", "kernel", "sample", "detokenise", "send"]


class RowCount(msgspec.Struct, frozen=True, gc=False):
    """How often a row of a table was taken: `event` in `state` led to `to`."""

    state: str
    event: str
    to: str
    count: int


class MachineNow(msgspec.Struct, frozen=True):
    """Machines of one kind: how many are in each state, and those of their rows that have changed."""

    name: str
    states: dict[str, int]
    rows: list[RowCount]


class ActorNow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One actor. `mailbox_max` is None where it has a thread's queue, `rung` where it is not the scheduler."""

    name: str
    state: str
    since: float
    deadline_s: float | None
    mailbox_depth: int
    mailbox_max: int | None
    handled_total: int
    restarts: int
    rung: str | None
    pid: int


class RequestNow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One choice of one request; `key` is its own in this engine, and `waits_for` is `RequestRecord.reason`."""

    key: str
    id: str
    choice: int
    state: str
    waits_for: str | None
    owner: str
    arrived: float
    since: float
    prompt_tokens: int | None
    cached_tokens: int
    output_tokens: int
    blocks: int


class KvMap(msgspec.Struct, frozen=True, kw_only=True):
    """Who has each block: `states[owner[b]]` is the state of who has block b, and `readers[b]` how many have it.

    "FREE" and "CACHED" have no owner, "STEP" is read or written by a step for no request, and "ENDED" comes back with
    its step. Both are a byte a block (in JSON: base64); readers are 255 at most.
    """

    layout: Literal["blocks"] = "blocks"
    block_size: int
    total: int
    states: list[str]
    owner: bytes
    readers: bytes
    host_total: int
    host_used: int


class KvChange(msgspec.Struct, frozen=True):
    """Blocks with the index of their new state and their readers; those whose prefix was forgotten for another."""

    blocks: list[tuple[int, int, int]]
    evicted: list[int]
    host_used: int


class Phase(msgspec.Struct, frozen=True, gc=False):
    """A part of a step: it began `began_ms` behind the step."""

    name: PhaseName
    began_ms: float
    took_ms: float


class StepNow(msgspec.Struct, frozen=True, kw_only=True):
    """One step that has ended, and the phases that are known of it, in order; `budget` is the tokens it may have."""

    id: int
    began: float
    phases: list[Phase]
    num_seqs: int
    num_tokens: int
    budget: int
    is_failed: bool
    outcome: str


class Percentiles(msgspec.Struct, frozen=True, gc=False):
    """Of what was observed lately."""

    p50: float
    p95: float
    p99: float


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the last second, requests by now, and times of the last ten seconds; None: there were none."""

    tokens_s: float
    running: int
    waiting: int
    ttft_ms: Percentiles | None
    inter_token_ms: Percentiles | None


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a step, and a request, may have; 0: it is not known yet."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot", tag_field="type"):
    """Everything; what was told before is void. `model` and `can_inject` are a server's to say."""

    time: float
    model: str = ""
    limits: StepLimits
    can_inject: bool = False
    machines: list[MachineNow]
    actors: list[ActorNow]
    requests: list[RequestNow]
    kv: KvMap | None
    steps: list[StepNow]
    rates: Rates
    incidents: list[IncidentRecord]


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag="frame", tag_field="type"):
    """What has changed. `progress` is tokens and blocks of requests of which nothing else has.

    `gone` are the keys of those that are not told of any more, and `lost` is how many steps, evictions and incidents
    are not told, because there were too many of them, or their reader was slow.
    """

    time: float
    machines: list[MachineNow]
    actors: list[ActorNow]
    requests: list[RequestNow]
    progress: list[tuple[str, int, int]]
    gone: list[str]
    kv: KvChange | None
    steps: list[StepNow]
    rates: Rates | None
    incidents: list[IncidentRecord]
    lost: int


class Taken(msgspec.Struct, frozen=True, gc=False):
    """One time when a row was taken; `of` is the id of a request or "" where that is not told, or there is only one."""

    time: float
    state: str
    event: str
    to: str
    of: str
