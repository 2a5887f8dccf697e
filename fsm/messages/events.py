"""The messages between actors, by boundary. Small Structs, so that each can be sent, recorded, replayed or encoded.

Identity: a *stream* is what a client asked for, a *request* one choice of it. Both ids are integers that only grow,
so a message about an id that is gone, or not there yet, can be told apart. A step has (step_id, epoch): the epoch
grows whenever the worker is replaced, and an answer from an older one is dropped by state, never asserted.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec

from novainfer.fsm.messages.mode import Mode
from novainfer.fsm.messages.outputs import FinishReason, Mark, TokenLogprob
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.step import StepDone, StepPlan
from novainfer.fsm.messages.structured import StructuredOutputsParams, Thoughts
from novainfer.fsm.messages.tenant import ANYONE, Tenant


class Cause(StrEnum):
    """Why a request was ended before its time."""

    CLIENT = "client"  # the API's cancel, or the generator was left early
    DISCONNECT = "disconnect"  # the client went away
    TIMEOUT = "timeout"  # the request's own deadline passed
    SIBLING = "sibling"  # another choice of the same stream failed
    DRAIN = "drain"  # the engine shuts down
    QUEUE = "queue"  # it had no token within the time it was willing to wait for its first one
    STALLED = "stalled"  # its reader stayed away for too long


class Fault(StrEnum):
    """What went wrong with a step, or with the worker under it."""

    OOM = "oom"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"  # it took longer than its deadline, or its process no longer says that it lives
    LOST = "lost"  # the process of the device is gone
    SWITCH = "switch"  # the device could not change its mode for the step


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to be rendered by the model's chat template, which is given the `tools` that may be called."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []


Prompt = str | list[int] | Chat
PromptKind = Literal["chat", "text", "token_ids"]  # the most that a model's prompts can be


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice had got before, from an engine that is no more: its first tokens, and what was said with them.

    `logprobs` are of these tokens, where they are wanted, and `prompt_logprobs` of its prompt. `num_cached_tokens` of
    the prompt were found in the prefix cache then.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0
    is_degraded: bool = False


# ---- client -> gate -> engine -------------------------------------------------------------------------------------


class Arrive(msgspec.Struct, frozen=True, kw_only=True):
    """A client's wish. `num_tokens` is what admission reserves for the prompt, settled once it is tokenised.

    `committed` is what its choices have got already, for each of them, if it goes on from there: they are told all of
    it again, as if it had just been sampled.
    """

    stream_id: int
    prompt: Prompt
    params: SamplingParams
    seed: int
    num_tokens: int
    tenant: Tenant = ANYONE
    committed: list[Committed] = []


class Cancel(msgspec.Struct, frozen=True):
    """End the stream, whatever state it is in; legal always, and twice is as good as once.

    It goes to the gate, which may have the stream on its overflow list, and passes it on to the engine; `arrived` is
    how many Arrives the gate had sent by then. It may overtake them; the engine counts those it has seen.
    """

    stream_id: int
    cause: Cause
    arrived: int = 0


class CancelAll(msgspec.Struct, frozen=True):
    """End every stream; it goes to the gate and, with `arrived` as in `Cancel`, on to the engine."""

    cause: Cause
    arrived: int = 0


class Drain(msgspec.Struct, frozen=True):
    """Take no new streams; those here may finish."""


class Open(msgspec.Struct, frozen=True):
    """The engine is warm: take streams."""


class Stop(msgspec.Struct, frozen=True):
    """End everything now. `error` is what streams still open are told, if they should hear of a failure."""

    error: str | None = None


class Rejected(msgspec.Struct, frozen=True):
    """The gate's answer to an Arrive it will not take: `reason` is "overloaded", "draining" or "closed".

    `limit` says what is exhausted when overloaded: "requests", "tokens", or "overflow" for who wanted to wait.
    """

    stream_id: int
    reason: str
    message: str
    limit: str = ""


class Departed(msgspec.Struct, frozen=True):
    """The engine's word to the gate: these streams have left the queue (they run, or have ended)."""

    stream_ids: list[int]


class Settled(msgspec.Struct, frozen=True):
    """The engine's word to the gate: this prompt, whose length was guessed, has `num_tokens` tokens."""

    stream_id: int
    num_tokens: int


class QueueOver(msgspec.Struct, frozen=True):
    """Timer of the gate: this stream has waited for its first token for as long as it was willing to."""

    stream_id: int


# ---- engine <-> tokenizer -----------------------------------------------------------------------------------------


class Encode(msgspec.Struct, frozen=True):
    """Render and tokenise `prompt`, unless it is token ids; and `bad_words`, each alone and behind a space."""

    stream_id: int
    prompt: Prompt
    bad_words: list[str] = []


class Encoded(msgspec.Struct, frozen=True):
    """The tokens of a prompt, and of the words that came with it, in each way that they may stand in a text."""

    stream_id: int
    token_ids: list[int]
    bad_word_ids: list[list[int]] = []


class EncodeFailed(msgspec.Struct, frozen=True):
    """The prompt cannot be rendered or tokenised; `message` says why, for the client, and `param` which field."""

    stream_id: int
    message: str
    param: str | None = None
    code: str = "invalid_value"


# ---- engine <-> scheduler -----------------------------------------------------------------------------------------


class Configure(msgspec.Struct, frozen=True):
    """The worker is warm: this is how much it holds. It comes again, with a higher epoch, when a worker was replaced.

    `num_host_blocks` is the room for swapped blocks; `modes` are what `StepPlan.mode` may say, best first:
    the worker comes up in the first. `step_costs` are (tokens, milliseconds) of steps, where they were measured.
    `keeps_host`: what was swapped to the host is still there.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    epoch: int = 0
    num_host_blocks: int = 0
    modes: tuple[Mode, ...] = (Mode(),)
    step_costs: list[tuple[int, float]] = []
    keeps_host: bool = False


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a stream, tokenised and ready to be scheduled. `request_id`s are given in this order.

    Each choice has a seed of its own.
    """

    request_id: int
    stream_id: int
    choice: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    tenant: Tenant = ANYONE
    committed: Committed | None = None


class CancelRequest(msgspec.Struct, frozen=True):
    """End one request. One that overtakes its own Submit leaves a tombstone that the Submit meets.

    With `Cause.QUEUE` it ends the stream of the request, unless that has its first token.
    """

    request_id: int
    cause: Cause


class Pause(msgspec.Struct, frozen=True):
    """The reader of this stream is slow: compute no more of it for now; or of this choice, which went on."""

    stream_id: int
    choice: int | None = None


class Resume(msgspec.Struct, frozen=True):
    """The reader has caught up."""

    stream_id: int


class PauseRequest(msgspec.Struct, frozen=True):
    """Leave this request out of the batch; it keeps its KV while memory lasts."""

    request_id: int


class ResumeRequest(msgspec.Struct, frozen=True):
    """Take this request into the batch again."""

    request_id: int


class Begun(msgspec.Struct, frozen=True):
    """What a client learns when its request first runs: counts in tokens, the seed, and what its prompt scored."""

    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: list[int]
    seed: int
    prompt_logprobs: list[TokenLogprob] | None = None


class End(msgspec.Struct, frozen=True):
    """How a request ended. `finish_reason` when well; otherwise `cause` (cancelled) or `error` with its `code`.

    Of the guesses that its steps verified, `num_accepted_tokens` were right.
    """

    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cause: Cause | None = None
    error: str | None = None
    code: str = "step_failed"
    param: str | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class Output(msgspec.Struct, gc=False):
    """What a step (or a cancel) brought for one request; `end` on the last one."""

    request_id: int
    stream_id: int
    choice: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    first: Begun | None = None
    end: End | None = None
    is_degraded: bool = False  # some of it was computed in another mode than the one the engine was started in
    marks: list[Mark] | None = None
    embedding: bytes | None = None


class MakeBatch(msgspec.Struct, frozen=True):
    """Commit or roll back the oldest step in flight, if that has ended with this `outcome`, and plan the next one.

    With `vacates` no request is computed any more: when nothing is in flight all leave the KV cache, which is about to
    be another one. What the host has room for is copied there first, by a step that does nothing else.
    """

    outcome: StepDone | StepFailed | None = None
    vacates: bool = False


class Batch(msgspec.Struct, frozen=True):
    """The scheduler's answer to MakeBatch: the next step (None: nothing to do), and what the last one brought.

    `work_seen` counts the Submit, Resume and Cancel messages seen before planning: if the engine has sent more since,
    an empty plan is not the last word. `may_follow`: another step may be planned behind this one before it has ended.
    `is_vacant`: as was asked for, the KV cache holds nothing that any request needs, and no step is in flight.
    """

    plan: StepPlan | None
    outputs: list[Output]
    started: list[int]
    work_seen: int
    epoch: int = 0
    may_follow: bool = False
    is_vacant: bool = False


class Outputs(msgspec.Struct, frozen=True):
    """Outputs that did not come from a step: requests refused or cancelled.

    `wakes`: one of these held up others until its mask came, which does not come now: they can go on.
    """

    outputs: list[Output]
    wakes: bool = False


def ended_early(stream_id: int, end: End) -> Outputs:
    """The end of a stream that the scheduler never saw."""
    return Outputs([Output(-1, stream_id, 0, [], "", end=end)])


# ---- scheduler -> grammars -> engine -> scheduler -----------------------------------------------------------------
# A mask says which tokens a request may be given next. Machines know its number; its bits join the step on its way.


class Constrain(msgspec.Struct, frozen=True):
    """Hold this new request to a grammar: its first mask is wanted, or that behind the tokens that it came with.

    Before its answer may come `thoughts`, which the prompt may have opened. Without a grammar, nothing else is held.
    """

    request_id: int
    grammar: StructuredOutputsParams | None
    token_ids: list[int] = []
    thoughts: Thoughts | None = None
    is_thinking: bool = False


class Advance(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step is committed: these requests have got these tokens, and the mask behind the last of each is wanted.

    The next step verifies `drafts` of some of them: the mask behind each of these is wanted as well. Nothing else is
    ever said of what may follow these tokens, so a mask is named by their number, and that of the drafts behind them.
    """

    tokens: list[tuple[int, int]]  # request, token; those of a request in their order
    drafts: list[tuple[int, list[int]]] = []  # requests among those, and what is guessed to follow
    wants_forced: bool = False  # what must follow is wanted, too: it is the best of guesses


class Release(msgspec.Struct, frozen=True):
    """This request has ended: no more masks are wanted for it."""

    request_id: int


class Masked(msgspec.Struct, frozen=True, omit_defaults=True):
    """These masks are there: what each request may be given behind the tokens that it has got."""

    masks: list[tuple[int, int]]  # request, how many tokens it has got
    forced: list[tuple[int, list[int]]] = []  # requests among those, and the only tokens that may follow, two or more


class GrammarFailed(msgspec.Struct, frozen=True):
    """No mask can be made for this request (any more); `message` says why, `code` whose fault it is."""

    request_id: int
    message: str
    code: str = "invalid_value"


# ---- engine <-> worker --------------------------------------------------------------------------------------------


class Launch(msgspec.Struct, frozen=True):
    """Run this step."""

    plan: StepPlan


class StepFailed(msgspec.Struct, frozen=True):
    """The step did not run to its end. `launched`: the device may have written into the step's blocks.

    `launched_behind`: into those of the steps as well that were planned behind it, which have failed with it.
    """

    step_id: int
    epoch: int
    fault: Fault
    message: str
    launched: bool = True
    launched_behind: bool = False


class WorkerReady(msgspec.Struct, frozen=True):
    """Loaded, fitted and warm; `facts` is all that Load and Fit found out, for people to read.

    After a `Reconfigure` it comes again: `error` says why the worker is as it was before, if it is.
    """

    epoch: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    facts: dict[str, Any] = {}
    num_host_blocks: int = 0
    modes: tuple[Mode, ...] = (Mode(),)
    step_costs: list[tuple[int, float]] = []
    keeps_host: bool = False  # what was swapped to the host is still there
    error: str | None = None


class WorkerLost(msgspec.Struct, frozen=True):
    """The worker of this epoch is gone with all that its device held; another one is coming up.

    `step_id` is the step that its device had begun; -1: none, as it was lost between two steps or in a switch of mode.
    """

    epoch: int
    fault: Fault
    message: str
    step_id: int = -1


class WorkerFailed(msgspec.Struct, frozen=True):
    """The worker will not come up (any more); `message` is one clear sentence for the caller that started it."""

    message: str


# ---- client -> engine -> worker: another configuration --------------------------------------------------------------


class Reconfigure(msgspec.Struct, frozen=True):
    """Go on with a KV cache of `num_blocks` blocks, and with weights in `precision`; None: as it is.

    The engine lets the steps in flight end, and has the KV cache vacated, before it sends this on to the worker, with
    the `epoch` of the worker that it is for. `serial` only grows.
    """

    serial: int
    num_blocks: int | None = None
    precision: str | None = None
    epoch: int = 0


class Reconfigured(msgspec.Struct, frozen=True):
    """The answer to `Reconfigure`, which comes once. `error`: it was not done, and all is as before.

    `ready` is the worker's word, if it has come up since.
    """

    serial: int
    error: str | None = None
    ready: WorkerReady | None = None


# ---- streams <-> reader --------------------------------------------------------------------------------------------


class Read(msgspec.Struct, frozen=True):
    """The reader takes what is there."""


class Finished(msgspec.Struct, frozen=True):
    """All choices have ended well, and everything was read."""


class StallOver(msgspec.Struct, frozen=True):
    """Timer of a stream: its reader has taken nothing for too long."""

    stream_id: int


# ---- scheduler -> routers -------------------------------------------------------------------------------------------


class StoredBlock(msgspec.Struct, frozen=True, gc=False):
    """A full block that can be found: its name, the name of the one before it (b"": none), and its own tokens.

    `salt`, of a first block: requests find it that bring the same, or that are of whoever it stands for; "": all do.
    """

    name: bytes
    parent: bytes
    token_ids: list[int]
    salt: str = ""


class IndexChanged(msgspec.Struct, frozen=True):
    """Blocks that can be found since the last one of these, and names of those that cannot any more.

    `is_cleared`: first of all, none that was told of before can be found.
    """

    stored: list[StoredBlock]
    removed: list[bytes]
    is_cleared: bool = False


# ---- any actor -> incidents ------------------------------------------------------------------------------------------


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Something went wrong, or changed because of it: for the error queue, the log and the metrics.

    `kind` is a `Fault` or "not_a_number", "ladder", "swap", "stall", "restart", "gave_up", "spare", "frozen"; `action`
    says what was done.
    """

    kind: str
    message: str
    action: str
    step_id: int = -1
    epoch: int = 0
    stream_ids: list[int] = []


# ---- worker <-> device --------------------------------------------------------------------------------------------
# Every job and every answer carries the epoch of its worker: an answer of an older one is dropped by state.


class Begin(msgspec.Struct, frozen=True):
    """Come up."""


class Spawn(msgspec.Struct, frozen=True):
    """Job: have a device to talk to: a process of its own, a spare that is loaded already, or nothing to do.

    It will be asked to load weights in `precision`.
    """

    epoch: int = 0
    precision: str | None = None


class Load(msgspec.Struct, frozen=True):
    """Job: read the weights, in `precision` (None: in the one that the engine was started with).

    A device that has loaded before lets the other weights go first.
    """

    epoch: int = 0
    precision: str | None = None


class Fit(msgspec.Struct, frozen=True):
    """Job: allocate the KV cache, in the place of the one that is there; of exactly `num_blocks`, if that is given.

    So whichever process makes a cache, it is as large as the one before. Blocks on the host stay as they are. `is_new`:
    there was none of this size before, and whether there is room for it has to be looked at.
    """

    epoch: int = 0
    num_blocks: int | None = None
    is_new: bool = False


class Warm(msgspec.Struct, frozen=True):
    """Job: run the kernels once, and measure what steps cost.

    A spare `measures` nothing: a worker computes beside it, whose steps would wait, and whose costs it takes over.
    """

    epoch: int = 0
    measures: bool = True


class Run(msgspec.Struct, frozen=True):
    """Job: one step."""

    plan: StepPlan


class Switch(msgspec.Struct, frozen=True):
    """Job: compute in this mode from the next step on."""

    mode: Mode
    epoch: int = 0


class Reclaim(msgspec.Struct, frozen=True):
    """Job: give back what an out-of-memory step left behind."""

    epoch: int = 0


class Close(msgspec.Struct, frozen=True):
    """Job: free the device."""

    epoch: int = 0


class Kill(msgspec.Struct, frozen=True):
    """Job: end the device's process at once, whatever it does. Nothing answers."""

    epoch: int = 0


class JobDone(msgspec.Struct, frozen=True):
    """The job of this name ended; `value` is what it found (a dict, for Load, Fit and Warm)."""

    job: str
    value: Any = None
    epoch: int = 0


class JobFailed(msgspec.Struct, frozen=True):
    """The job of this name failed; `message` is one clear sentence, `at_s` is when, as in `DeviceLost`."""

    job: str
    message: str
    epoch: int = 0
    at_s: float = 0.0


class DeviceLost(msgspec.Struct, frozen=True):
    """The device's process has ended, or its link broke; `at_s` is when, on any clock that only grows."""

    epoch: int
    message: str
    at_s: float = 0.0


class Overdue(msgspec.Struct, frozen=True):
    """The watchdog: the device gave no sign of life, or its job has outlasted its deadline; `at_s` as above."""

    epoch: int
    message: str
    at_s: float = 0.0


class Restart(msgspec.Struct, frozen=True):
    """Timer: bring up the next worker."""


# ---- client -> scheduler: conversations ------------------------------------------------------------------------------


class EndSession(msgspec.Struct, frozen=True):
    """Keep nothing more of this tenant's conversation."""

    tenant: str
    session_id: str


# ---- timers of the scheduler ----------------------------------------------------------------------------------------


class Quiet(msgspec.Struct, frozen=True):
    """Timer: nothing has gone wrong since it was set: climb one rung."""


class KeepOver(msgspec.Struct, frozen=True):
    """Timer: this request has been paused for as long as it may keep its KV on the device."""

    request_id: int


class AgeOver(msgspec.Struct, frozen=True):
    """Timer: requests up to this one have waited for as long as others may go before them, by priority."""

    request_id: int


class SessionOver(msgspec.Struct, frozen=True):
    """Timer: nothing of this conversation has come for as long as it is kept."""

    number: int
