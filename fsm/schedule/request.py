"""One choice of one stream, from its submission to its end.

    WAITING ──Admit──▶ PREFILL ──Prefilled──▶ DECODE ⇄ PAUSED (its reader is slow)
       ▲ Unadmit ◀────────┘                     │
    PREEMPTED ◀──Preempt── PREFILL, DECODE      └──Finish──▶ FINISHED_*   (from every state)
       ▲ ◀──────Vacate────┘
       └──Fetch──▶ WAITING_FOR_REMOTE_KVS ──Fetched──▶ PREFILL, DECODE
    RECOVERING ◀──Lose── PREFILL, DECODE (the worker is gone);  RECOVERING ──Recover──▶ WAITING

A request owns KV blocks and a slot from Admit or Fetch on; PREEMPTED, RECOVERING and the ended states own none, except
that a request ended while its step is on the device keeps what it owns until the step has returned. A PAUSED request
keeps its blocks while memory lasts: it is the first to be preempted. What was preempted is computed again from its own
tokens, or, where there is room on the host for its blocks, fetched from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar

import msgspec

from novainfer.fsm.core import dwell
from novainfer.fsm.core.dwell import COMES_UP_AGAIN, Dwell, any_time
from novainfer.fsm.core.machine import Machine, Table, ignore, never, on, table
from novainfer.fsm.kv.blocks import BlockTable
from novainfer.fsm.messages.events import PauseRequest, ResumeRequest, Submit
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.pooling import added
from novainfer.fsm.messages.step import Logprobs, SeqParams
from novainfer.fsm.schedule.session import Session
from novainfer.fsm.text import Vocabulary, text_assembler

# The mask of its next token; below 0: it has not come, and no request is admitted without it.
UNCONSTRAINED = 0  # there is none: any token may be sampled
READY = 1
COMING = -1  # a step that decodes may be launched before it: there is time until tokens are drawn
AWAITED = -2  # it is waited for: a grammar is compiled, or the mask came too late for a step

# What the device is told as it was asked for: the fields that both records have.
SAMPLED_AS_ASKED = tuple(name for name in SeqParams.__struct_fields__ if name in SamplingParams.__struct_fields__)


class RequestState(StrEnum):
    """Where a request is; the names are those of the inspector and the metrics."""

    WAITING = "WAITING"
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    PAUSED = "PAUSED"
    PREEMPTED = "PREEMPTED"
    WAITING_FOR_REMOTE_KVS = "WAITING_FOR_REMOTE_KVS"
    RECOVERING = "RECOVERING"
    FINISHED_STOPPED = "FINISHED_STOPPED"
    FINISHED_LENGTH = "FINISHED_LENGTH"
    FINISHED_ABORTED = "FINISHED_ABORTED"
    FINISHED_TIMEOUT = "FINISHED_TIMEOUT"
    FINISHED_IGNORED = "FINISHED_IGNORED"
    FINISHED_ERROR = "FINISHED_ERROR"


S = RequestState
ENDED = frozenset(s for s in S if s.name.startswith("FINISHED"))
CANCELLED = frozenset([S.FINISHED_ABORTED, S.FINISHED_TIMEOUT, S.FINISHED_ERROR])
QUEUED = (S.WAITING, S.PREEMPTED)
FETCHING = S.WAITING_FOR_REMOTE_KVS
LIVE = (*QUEUED, S.PREFILL, S.DECODE, S.PAUSED, FETCHING, S.RECOVERING)
LIVE_BUT_PREEMPTED = tuple(s for s in LIVE if s is not S.PREEMPTED)
NOTHING_WRITTEN = (*QUEUED, S.PREFILL, FETCHING, S.RECOVERING)  # no token of it is sampled in these states


class Admit(msgspec.Struct, frozen=True):
    """It gets a slot and its first blocks, in the step being planned."""


class Unadmit(msgspec.Struct, frozen=True):
    """The step that admitted it was rolled back."""


class Prefilled(msgspec.Struct, frozen=True):
    """All its tokens are in the KV cache, and the next one is sampled."""


class Preempt(msgspec.Struct, frozen=True):
    """Its blocks are needed by an older request; they are copied to the host, or computed again later."""


class Vacate(msgspec.Struct, frozen=True):
    """The KV cache is about to be another one: it leaves it, as if it were preempted, which is not counted."""


class Fetch(msgspec.Struct, frozen=True):
    """It gets a slot and blocks, into which the step being planned copies back what the host holds."""


class Fetched(msgspec.Struct, frozen=True):
    """Its blocks are back."""


class Lose(msgspec.Struct, frozen=True):
    """The worker is gone, and with it all blocks."""


class Recover(msgspec.Struct, frozen=True):
    """There is a worker again."""


class Finish(msgspec.Struct, frozen=True):
    """It ends in `state`."""

    state: RequestState


ADMIT, UNADMIT, PREFILLED, PREEMPT = Admit(), Unadmit(), Prefilled(), Preempt()
VACATE, FETCH, FETCHED, LOSE, RECOVER = Vacate(), Fetch(), Fetched(), Lose(), Recover()


_NONE = frozenset[int]()
_shared = cache(frozenset[int])  # the end tokens of the models that there were


class Request(Machine):
    """A request's state and everything that is known of it. The scheduler owns it, and nothing else changes it."""

    TABLE: ClassVar[Table] = table(
        S,
        (
            Admit,
            Unadmit,
            Prefilled,
            Preempt,
            Vacate,
            Fetch,
            Fetched,
            Lose,
            Recover,
            PauseRequest,
            ResumeRequest,
            Finish,
        ),
        on(QUEUED, Admit, "_admit", S.PREFILL),
        never((S.PREFILL, S.DECODE, S.PAUSED, FETCHING), Admit, "it is admitted already"),
        never(S.RECOVERING, Admit, "there is no worker to be admitted to"),
        never(ENDED, Admit, "an ended request is in no queue"),
        on((S.PREFILL, FETCHING), Unadmit, "_unadmit", S.WAITING, S.PREEMPTED),
        never((*QUEUED, S.DECODE, S.PAUSED, S.RECOVERING), Unadmit, "only the step being undone can have admitted it"),
        ignore(CANCELLED, Unadmit, "it was cancelled while the step was on the device"),
        never(ENDED - CANCELLED, Unadmit, "while its step is on the device it can only be cancelled"),
        on(S.PREFILL, Prefilled, "_prefilled", S.DECODE),
        never((*QUEUED, S.DECODE, S.PAUSED, FETCHING, S.RECOVERING), Prefilled, "only a prefill can complete"),
        never(ENDED, Prefilled, "the scheduler drops the tokens of ended requests"),
        on((S.PREFILL, S.DECODE), Preempt, "_preempt", S.PREEMPTED),
        on(S.PAUSED, Preempt, "_stay_paused", S.PAUSED),
        never((*QUEUED, S.RECOVERING), Preempt, "it owns nothing that could be taken"),
        never(FETCHING, Preempt, "its step is on the device, and no request is preempted then"),
        never(ENDED, Preempt, "it owns nothing that could be taken"),
        on((S.PREFILL, S.DECODE), Vacate, "_vacate", S.PREEMPTED),
        on(S.PAUSED, Vacate, "_vacate_paused", S.PAUSED),
        never((*QUEUED, S.RECOVERING), Vacate, "it has nothing of the KV cache"),
        never(FETCHING, Vacate, "no step is in flight then"),
        never(ENDED, Vacate, "it has nothing of the KV cache"),
        on(S.PREEMPTED, Fetch, "_fetch", FETCHING),
        never(LIVE_BUT_PREEMPTED, Fetch, "the host holds nothing of it"),
        never(ENDED, Fetch, "an ended request is in no queue"),
        on(FETCHING, Fetched, "_fetched", S.PREFILL, S.DECODE),
        never((*QUEUED, S.PREFILL, S.DECODE, S.PAUSED, S.RECOVERING), Fetched, "nothing was fetched for it"),
        never(ENDED, Fetched, "the scheduler forgets ended requests, and drops what comes for them"),
        on((S.PREFILL, S.DECODE), Lose, "_lose", S.RECOVERING),
        never(FETCHING, Lose, "its step is taken back first"),
        on(S.PAUSED, Lose, "_lose_paused", S.PAUSED),
        never((*QUEUED, S.RECOVERING), Lose, "it has no blocks to lose"),
        never(ENDED, Lose, "it has no blocks to lose"),
        on(S.RECOVERING, Recover, "_recover", S.WAITING),
        never((*QUEUED, S.PREFILL, S.DECODE, S.PAUSED, FETCHING), Recover, "it had lost nothing"),
        never(ENDED, Recover, "the scheduler forgets ended requests"),
        on(S.DECODE, PauseRequest, "_pause", S.PAUSED),
        ignore(NOTHING_WRITTEN, PauseRequest, "nothing is written now; a stalled stream asks again"),
        ignore(S.PAUSED, PauseRequest, "a stalled stream asks at each delivery"),
        never(ENDED, PauseRequest, "the scheduler forgets ended requests, and drops what comes for them"),
        on(S.PAUSED, ResumeRequest, "_resume", S.DECODE, S.PREEMPTED),
        ignore((*NOTHING_WRITTEN, S.DECODE), ResumeRequest, "its pause was ignored, or came to nothing"),
        never(ENDED, ResumeRequest, "the scheduler forgets ended requests, and drops what comes for them"),
        on(LIVE, Finish, "_finish", *sorted(ENDED)),
        never(ENDED, Finish, "a request ends once"),
    )
    DWELLS: ClassVar[Mapping[Any, Dwell]] = {
        S.WAITING: any_time("its turn depends on the others; its own timeout ends it"),
        S.PREFILL: any_time("a prompt may take many steps, and each step has a deadline"),
        S.DECODE: any_time("an answer may be long, and each step has a deadline"),
        S.PAUSED: any_time("its reader's time, which the stall timeout ends"),
        S.PREEMPTED: any_time("its turn depends on the others; its own timeout ends it"),
        S.WAITING_FOR_REMOTE_KVS: any_time("its blocks come back with a step, and each step has a deadline"),
        S.RECOVERING: COMES_UP_AGAIN,
        **dict.fromkeys(ENDED, dwell.ENDED),
    }
    __slots__ = (
        "choice",
        "draft_hits",
        "draft_state",
        "draft_trials",
        "drafted_at",
        "drafts",
        "drafts_at",
        "failures",
        "forced",
        "forced_at",
        "has_forced",
        "is_degraded",
        "is_first_output",
        "kv",
        "losses",
        "mask",
        "max_len",
        "num_accepted_tokens",
        "num_cached",
        "num_committed",
        "num_computed",
        "num_draft_tokens",
        "num_indexed",
        "num_planned",
        "num_pooled",
        "num_preemptions",
        "num_prompt",
        "params",
        "paused_as",
        "plain_until",
        "pool_sum",
        "pooling",
        "queued_as",
        "request_id",
        "scores",
        "seed",
        "session",
        "slot",
        "stop_ids",
        "stream_id",
        "tells_tokens",
        "tenant",
        "text",
        "token_ids",
        "waits_for",
        "work",
    )
    state: RequestState

    def __init__(self, submit: Submit, vocabulary: Vocabulary, eos_token_ids: Sequence[int], max_len: int) -> None:
        super().__init__(S.WAITING)
        params = submit.params
        self.request_id = submit.request_id
        self.stream_id = submit.stream_id
        self.choice = submit.choice
        self.tenant = submit.tenant
        self.params = params
        self.seed = submit.seed
        self.token_ids = list(submit.token_ids)  # the prompt, then what was sampled
        self.num_prompt = len(submit.token_ids)
        self.max_len = max_len  # tokens, prompt included, at which it ends with "length"
        # One object for all requests that say nothing else of it: each step looks into it for each.
        eos_ids = _NONE if params.ignore_eos else _shared(tuple(eos_token_ids))
        self.stop_ids = eos_ids.union(params.stop_token_ids) if params.stop_token_ids else eos_ids
        self.text = text_assembler(
            vocabulary,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            marked_ids=params.mark_token_ids,
        )
        # What the tokens of its prompt scored, the first left out, until they are told; None: nobody asks.
        self.scores: list[Logprobs] | None = None if params.prompt_logprobs is None else []
        self.pooling = params.pooling  # None: it is to write tokens
        self.pool_sum = b""  # of the hidden states of `num_pooled` tokens, as far as they are computed for good
        self.num_pooled = 0
        self.session: Session | None = None  # the conversation that keeps what it has computed
        self.kv = BlockTable()  # what it has of the KV cache
        self.num_computed = 0  # tokens whose keys and values are computed
        self.num_planned = 0  # the same, when the steps on the device have ended well: more while it is in one
        self.num_committed = 0  # tokens of its answer that it came with
        self.num_cached = 0  # tokens of the prompt that the prefix cache had when it first ran
        self.slot = -1
        self.mask = UNCONSTRAINED if params.structured_outputs is None and params.thoughts is None else AWAITED
        self.waits_for: bytes | None = None  # the name it waits for another request to compute
        self.work = self.num_prompt  # tokens to compute before its next one, when it was last looked at in the queue
        self.num_preemptions = 0
        self.paused_as = -1  # its last pause, counted among those of all requests
        # Since its last token: failed steps in which it stood alone, and steps with it that died with their worker.
        self.failures = self.losses = 0
        # Of what was guessed of its next tokens (`novainfer.fsm.schedule.speculation`), the latest counts most:
        self.draft_hits = self.draft_trials = 0.0
        self.num_draft_tokens = self.num_accepted_tokens = 0  # guesses that steps have verified, and the right ones
        self.drafted_at = self.num_prompt  # its tokens when a step last verified a guess
        self.draft_state: Any = None  # the proposer's
        self.num_indexed = 0  # tokens whose places it knows: what is made again from a recording knows as many
        self.drafts: list[int] = []  # what the device's draft model has proposed behind its tokens,
        self.drafts_at = 0  # when they were so many
        self.forced: list[int] = []  # what its grammar says must follow them,
        self.forced_at = 0  # when they were so many
        self.has_forced = False  # the drafts that it was last given are some of those
        self.tells_tokens = bool(params.banned_sequences)  # whether the device must know them: or for its draft model
        self.queued_as = S.WAITING  # the state it was admitted from
        self.is_first_output = True
        # It decodes, has no unfinished character, and wants nothing but text: while it has fewer tokens than this, one
        # more that is plain text and no stop token is given to its client as it is. 0: it is looked at closely.
        self.plain_until = 0
        self.is_degraded = False  # some of it was computed in another mode than the exact one

    # ---- questions -----------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """True once it is in one of the FINISHED states."""
        return self.state in ENDED

    @property
    def is_in_flight(self) -> bool:
        """True while a step on the device reads or writes what it has of the KV cache."""
        return self.num_planned > self.num_computed

    @property
    def is_prefill_planned(self) -> bool:
        """True while the step that computes the end of its prompt is in flight: the next one may decode it."""
        return self.state is S.PREFILL and self.num_planned >= len(self.token_ids) and self.pooling is None

    @property
    def num_remaining(self) -> int:
        """Tokens still to be planned before the next one can be sampled."""
        return len(self.token_ids) - self.num_planned

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def awaits_first(self) -> bool:
        """True until a token of it has been sampled here."""
        return self.num_generated == self.num_committed

    @property
    def is_unscored(self) -> bool:
        """True while some tokens of its prompt have to be scored."""
        return self.scores is not None and len(self.scores) < self.num_prompt - 1

    @property
    def needs_every_row(self) -> bool:
        """True while something is to be said of each token of its prompt: it takes nothing from the prefix cache."""
        return self.is_unscored or (self.pooling is not None and self.pooling.kind == "mean")

    def first_to_pool(self, start: int) -> int:
        """The first token whose hidden state its vector still wants, where the next step begins at `start`."""
        assert self.pooling is not None, "it is to write tokens"
        return self.num_prompt - 1 if self.pooling.kind == "last" else max(start, self.num_pooled)

    def note_pooled(self, first: int, count: int, found: bytes) -> None:
        """The hidden states of `count` tokens from place `first` on are computed for good, and `found` is their sum."""
        assert self.pooling is not None, "it is to write tokens"
        assert self.pooling.kind == "last" or first == self.num_pooled, "each token counts once, and none is left out"
        self.pool_sum = added(self.pool_sum, found)
        self.num_pooled = first + count

    def note_scores(self, first: int, scores: Sequence[Logprobs]) -> None:
        """What the tokens behind those from place `first` on have scored; those that are known already stay."""
        assert self.scores is not None, "nobody asks, or it was told"
        assert first <= len(self.scores), "the prompt is computed from its beginning"
        self.scores += scores[len(self.scores) - first :]

    def next_forced(self) -> list[int]:
        """What must follow its tokens, as far as its grammar has said so."""
        forced, at = self.forced, self.forced_at
        num_since = len(self.token_ids) - at
        if num_since >= len(forced) or self.token_ids[at:] != forced[:num_since]:
            return []
        return forced[num_since:]

    def sampling_spec(self) -> SeqParams:
        """What the device must know before it can sample this request."""
        params = self.params
        spec = SeqParams(slot=self.slot, **{name: getattr(params, name) for name in SAMPLED_AS_ASKED})
        spec.temperature = 0.0 if params.is_greedy else params.temperature
        spec.top_k = max(params.top_k, 0)
        spec.seed = self.seed
        spec.num_prompt_tokens = self.num_prompt
        spec.min_position = self.num_prompt + params.min_tokens
        spec.stop_token_ids = sorted(self.stop_ids)
        if spec.needs_history or self.tells_tokens:
            spec.token_ids = list(self.token_ids)
        return spec

    # ---- actions -------------------------------------------------------------------------------------------------

    def _admit(self, _: Admit) -> RequestState:
        self.queued_as = self.state
        self.plain_until = 0
        return S.PREFILL

    def _unadmit(self, _: Unadmit) -> RequestState:
        return self.queued_as

    def _prefilled(self, _: Prefilled) -> RequestState:
        return S.DECODE

    def _preempt(self, event: Preempt) -> RequestState:
        self.num_preemptions += 1
        return self._vacate(event)

    def _stay_paused(self, event: Preempt) -> RequestState:
        self.num_preemptions += 1
        return self._vacate_paused(event)

    def _vacate(self, _: Preempt | Vacate) -> RequestState:
        self.num_computed = self.num_planned = 0
        return S.PREEMPTED

    def _vacate_paused(self, _: Preempt | Vacate) -> RequestState:
        self.num_computed = self.num_planned = 0
        return S.PAUSED

    def _lose_paused(self, _: Lose) -> RequestState:
        self.num_computed = self.num_planned = 0
        return S.PAUSED

    def _fetch(self, _: Fetch) -> RequestState:
        self.queued_as = self.state
        self.plain_until = 0
        return FETCHING

    def _fetched(self, _: Fetched) -> RequestState:
        was_decoding = self.num_remaining == 1 and not self.is_first_output
        return S.DECODE if was_decoding else S.PREFILL

    def _lose(self, _: Lose) -> RequestState:
        self.num_computed = self.num_planned = 0
        return S.RECOVERING

    def _recover(self, _: Recover) -> RequestState:
        return S.WAITING

    def _pause(self, _: PauseRequest) -> RequestState:
        return S.PAUSED

    def _resume(self, _: ResumeRequest) -> RequestState:
        return S.DECODE if self.slot >= 0 else S.PREEMPTED

    def _finish(self, event: Finish) -> RequestState:
        return event.state
