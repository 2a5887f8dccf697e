"""What the inspector tells: immutable records of requests, blocks, actors and health, as they are sent to clients.

Times called `time` are in seconds since 1970, and `dwell_s` is for how long something has been as it is.
"""

from __future__ import annotations

import msgspec

from novainfer.fsm.health import Late


class Transition(msgspec.Struct, frozen=True, gc=False):
    """The request came into `state` at `time` (seconds since 1970)."""

    state: str
    time: float


class ChoiceRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One choice of a request; see `RequestRecord`."""

    index: int
    state: str
    reason: str | None
    dwell_s: float
    cached_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    blocks: int
    host_blocks: int
    preemptions: int
    history: list[Transition]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request: where it is, since when (`dwell_s`; 0 once it has ended), and why it waits, if it does.

    `reason` is "model" (it is being loaded), "overflow", "tokenizing", "queue", "blocks", "slots", "prefix", "swapped",
    "recovering", "reconfiguring" or "paused: slow reader"; None when nothing keeps it from running. `position` is its
    place in the queue. With several choices, state, reason and history are those of the first one that has not ended;
    counts of blocks and tokens are sums, but for the prompt, which counts once: `cached_tokens` of it were in the
    prefix cache when the first choice ran. Of the guesses that steps have verified (`draft_tokens`),
    `accepted_draft_tokens` were right. `model` is the name of the engine's, where a server tells of several.
    """

    id: str
    model: str = ""
    state: str
    reason: str | None
    position: int | None
    time: float
    dwell_s: float
    prompt_tokens: int | None
    cached_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    max_tokens: int | None
    blocks: int
    host_blocks: int
    preemptions: int
    choices: list[ChoiceRecord]
    history: list[Transition]


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation of which the KV is kept: BUSY while requests of it are here, else KEPT for `ttl_left_s` more.

    Of the tokens that its last request has computed, `num_tokens` would be found by the next one: so many of them on
    the device, and so many on the host.
    """

    session_id: str
    tenant: str
    state: str
    num_tokens: int
    num_on_device: int
    num_on_host: int
    ttl_left_s: float | None = None


class KvRecord(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks by where they are: `free`, `cached`, or the state of the request that owns them; they sum to `total`.

    A block that several requests share counts once, for the first of them. "ENDED" are blocks of requests that ended
    while their step is on the device: they come back with it.
    """

    block_size: int
    total: int
    blocks: dict[str, int]
    host_total: int
    host_used: int


class ActorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One actor: its machine's state, messages that wait, and the process that it (or its device) lives in.

    `wait_s` is for how long it has been asked for a turn that it did not take; 0 when all is well.
    """

    name: str
    state: str
    dwell_s: float
    mailbox_depth: int
    pid: int
    handled_total: int
    wait_s: float


class HealthRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Whether everything moves (`is_live`), and whether a request sent now would be taken (`is_ready`).

    `reason` says why not, in a sentence; `state` is the engine's. `late` are those beyond a deadline.
    """

    is_live: bool
    is_ready: bool
    state: str
    reason: str | None
    late: list[Late]
    lag_s: float
