"""The record of a step, one for all rooms: what the scheduler plans, the link carries, and kernels compute.

It and `mode` are the only modules of `fsm` that kernels import, so they import nothing else of the project, and name no
request: a row of a step is a sequence in a slot. The recorder, the replay and the link to a device's process encode it
as it is.
"""

from __future__ import annotations

import msgspec

from novainfer.fsm.messages.mode import Mode

SAMPLED = -1  # in `input_ids`: the token that the step before has given this slot, which only the device knows yet
NO_TOKEN = -1  # what a row gets from which no token can be drawn: its logits hold a NaN, or their largest is infinite
NONE_ALLOWED = -2  # what a row with a mask gets, where its sequence may be given none of the tokens that it allows
NO_MASK = -3  # what a row gets whose mask had not come when it was to be sampled: nothing was

STEPS_IN_FLIGHT_MAX = 2  # on a device: one that is computed, and one that waits for it there

Logprobs = tuple[float, list[int], list[float]]
"""Log probability of the sampled token, the most likely token ids, their log probabilities."""


class SeqParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All that the device must know to sample one sequence, sent once, when the sequence is given a slot.

    Names are those of `SamplingParams`, values are final: `temperature` of 0 is greedy; `top_k` of 0, `top_p` of 1 and
    `min_p` of 0 switch those filters off, penalties of 1 (repetition) and 0 (presence, frequency) likewise.
    `token_ids` are all tokens so far, of which the first `num_prompt_tokens` are prompt; they must be given where
    `needs_history` or there are `banned_sequences`, of which the last token is not drawn behind the others, and where a
    draft model is to propose drafts. The tokens in `stop_token_ids` are banned while the
    sampled token's absolute position is below `min_position`. `logprobs=k` asks for the sampled token's log probability
    and the k most likely tokens (k may be 0).
    """

    slot: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    num_prompt_tokens: int = 0
    min_position: int = 0
    stop_token_ids: list[int] = []
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] = []
    banned_sequences: list[list[int]] = []
    logprobs: int | None = None
    token_ids: list[int] | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must know the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class StepPlan(msgspec.Struct, omit_defaults=True):
    """One step for the device, as flat lists of integers. Sequences are numbered in the order of `slots`.

    Before anything is computed, and in this order: `mode` (one of the device's) is switched to if it is another; block
    `swap_out_blocks[i]` is copied to host block `swap_out_hosts[i]`, all of them, then host block `swap_in_hosts[i]` to
    block `swap_in_blocks[i]`, then block `copy_from_blocks[i]` to block `copy_to_blocks[i]` (none is in both, nor twice
    in the latter); `admissions` take their slots; and
    `block_table[table_slots[i], table_indexes[i]] = table_blocks[i]`. A step may compute nothing: no sequences, no
    tokens.

    A block may be in several sequences' tables. Where two of them write the same cell of it in one step, the tokens up
    to there are the same, and so is what they write.

    A row of `sample_seqs` may end in drafts, `num_drafts[i]` of them: guesses of the tokens that follow the one before
    them. Then its last 1 + `num_drafts[i]` positions are sampled, one after the other: each with the random number of
    its own position, and as if the drafts before it were the sequence's tokens; up to the first whose token is not the
    draft that stands there. So the row's tokens are those that as many steps without drafts give.

    Each position that is sampled may have a mask, drafts' positions among them: the tokens that may be drawn there, in
    this step only. They are numbered from 0 on, those of the first of `sample_seqs` first; `mask_positions` are those
    that have a mask, in ascending order, and `masks` are these one after the other: ceil(vocab_size / 32) words each,
    32 bits with the lowest byte first, of which bit i % 32 of word i // 32 allows token i. Logits of all other tokens
    are as if they were minus infinity, also where log probabilities are asked for. Machines name masks by `mask_ids`,
    which `masks` replace on the way to the device. Those at `masks_to_come` are not among them, and come while the step
    is computed (`StepMasks`): they are needed when tokens are drawn. Where one does not come, nothing is sampled.

    Tokens of prompts may be scored: behind the token at `score_rows[i]`, an index into `input_ids`, the log probability
    of `score_ids[i]` is asked for, and those of the `score_tops[i]` most likely tokens. None of these rows is sampled.

    Rows may be pooled: of sequence `pool_seqs[i]` the hidden states of its last `pool_lens[i]` tokens in this step,
    behind the last norm, are summed. None of these rows is sampled or scored.

    A step may be handed over before the one before it has ended: that is the step `after`, and if it did not end well
    just before on this device, this one is not begun (`launched=False`), and changes nothing. Only such a step holds
    `SAMPLED` among its `input_ids`: the device puts the token there that its slot was given last, which must stand at
    that very position (any token, if it was `NO_TOKEN`).
    """

    slots: list[int] = []  # [num_seqs] the persistent row of each sequence
    query_lens: list[int] = []  # [num_seqs] tokens computed in this step, at least 1
    context_lens: list[int] = []  # [num_seqs] tokens in the KV cache after this step
    input_ids: list[int] = []  # [num_tokens], those of the first sequence first
    table_slots: list[int] = []  # [num_table_updates]
    table_indexes: list[int] = []
    table_blocks: list[int] = []
    sample_seqs: list[int] = []  # [num_samples] the sequences that are sampled
    admissions: list[SeqParams] = []
    num_drafts: list[int] = []  # [num_samples] drafts at the end of each; empty: none has any
    num_drafts_wanted: list[int] = []  # [num_samples] that the device's own draft model may propose; empty: none
    mask_positions: list[int] = []  # [num_masks] of the positions that are sampled; empty: none has a mask
    # [num_masks] request, tokens it has got by then, drafts behind them; where there are no `masks`
    mask_ids: list[tuple[int, int, int]] = []
    masks: bytes = b""  # [num_masks - len(masks_to_come), ceil(vocab_size / 32)] int32
    masks_to_come: list[int] = []  # indexes of `mask_positions`, ascending
    score_rows: list[int] = []  # [num_scores], ascending; empty: nothing is scored
    score_ids: list[int] = []
    score_tops: list[int] = []
    pool_seqs: list[int] = []  # [num_pools], ascending; empty: nothing is pooled
    pool_lens: list[int] = []
    swap_out_blocks: list[int] = []
    swap_out_hosts: list[int] = []
    swap_in_hosts: list[int] = []
    swap_in_blocks: list[int] = []
    copy_from_blocks: list[int] = []
    copy_to_blocks: list[int] = []
    mode: Mode = Mode()
    step_id: int = 0
    epoch: int = 0
    after: int = 0  # the step that must have ended well just before this one is begun; 0: any


class StepMasks(msgspec.Struct, frozen=True):
    """Masks of a step that was launched without them, at some of its `masks_to_come`; or that these will not come."""

    step_id: int
    epoch: int
    places: list[int]  # [num_masks] indexes of the plan's `mask_positions`
    masks: bytes = b""  # [num_masks, ceil(vocab_size / 32)] int32; empty: they do not come


class StepDone(msgspec.Struct, frozen=True, omit_defaults=True):
    """The step ran, and gave the tokens of each of the plan's `sample_seqs`, one after the other.

    `num_tokens` says how many tokens each of them got: at least 1, at most 1 + its drafts, the last of them being no
    draft; empty: one each. `NO_TOKEN` is the last one of a row whose output is not a number, `NONE_ALLOWED` of one
    whose mask allows nothing, and `NO_MASK` of one whose mask has not come, or that goes on (`SAMPLED`) from such a
    one. `logprobs` are those of the tokens, and empty when no row asked; `scores` are what the
    plan's `score_rows` ask for, and `pooled` the sums of its `pool_seqs`: doubles, little-endian. `took_s` is how long
    the step took, in seconds, and `sample_s` how long of that it chose tokens; 0 where that was not measured.
    """

    step_id: int
    epoch: int
    token_ids: list[int] = []
    logprobs: list[Logprobs | None] = []
    took_s: float = 0.0
    num_tokens: list[int] = []  # [num_samples]
    draft_token_ids: list[list[int]] = []  # [num_samples] the draft model's guesses behind them, where they are wanted
    draft_error: str | None = None  # why it proposes nothing; the step itself went well
    draft_s: float = 0.0  # seconds of `took_s` that the draft model took
    cycle_s: float = 0.0  # seconds since the step before it ended on this device; 0 where none has, or none well
    scores: list[Logprobs] = []  # [num_scores]
    pooled: list[bytes] = []  # [num_pools] of hidden_size doubles each
    sample_s: float = 0.0
