"""What crosses the border to the device: one step's plan and its tokens, in plain lists of ints and floats."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["NO_TOKEN", "Admission", "Batch", "Logprobs", "Sampled", "SamplingRow"]

NO_TOKEN = -1  # what a row gets from which no token can be drawn: its logits hold a NaN, or their largest is infinite

Logprobs = tuple[float, list[int], list[float]]
"""Log probability of the sampled token, the most likely token ids, their log probabilities."""


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """Everything the sampler must know of one sequence; sent once, when the sequence is given a slot.

    `temperature` of 0 is greedy. `top_k` of 0 (or less), `top_p` of 1 and `min_p` of 0 switch those filters
    off, penalties of 1 (repetition) and 0 (presence, frequency) likewise. `prompt_len` tokens of the
    history are prompt. The tokens in `stop_ids` are banned while the sampled token's absolute position is
    below `min_position`. `logprobs=k` asks for the sampled token's log probability and the k most likely
    tokens (k may be 0).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    prompt_len: int = 0
    min_position: int = 0
    stop_ids: list[int] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_ids: list[int] | None = None
    banned_ids: list[int] = field(default_factory=list)
    logprobs: int | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must know the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(slots=True)
class Admission:
    """A sequence takes a slot; `token_ids` are all its tokens so far, given when `sampling.needs_history`."""

    slot: int
    sampling: SamplingRow
    token_ids: list[int] | None = None


@dataclass(slots=True)
class Batch:
    """One step. Sequences are numbered 0..num_seqs-1 in the order of `slots`; tokens lie flat in that order.

    Blocks are copied first: `swap_out_blocks[i]` to host block `swap_out_hosts[i]`, all of them, then
    `swap_in_hosts[i]` to block `swap_in_blocks[i]`. Then the block-table updates are applied:
    `block_table[table_slots[i], table_indexes[i]] = table_blocks[i]`. A step may compute nothing: no sequences,
    no tokens.
    """

    slots: list[int]  # [num_seqs] the persistent row of each sequence
    query_lens: list[int]  # [num_seqs] tokens computed in this step, at least 1
    context_lens: list[int]  # [num_seqs] tokens in the KV cache after this step
    input_ids: list[int]  # [num_tokens]
    table_slots: list[int] = field(default_factory=list)
    table_indexes: list[int] = field(default_factory=list)
    table_blocks: list[int] = field(default_factory=list)
    sample_seqs: list[int] = field(default_factory=list)  # [num_samples] sequences that get a token
    admissions: list[Admission] = field(default_factory=list)
    swap_out_blocks: list[int] = field(default_factory=list)
    swap_out_hosts: list[int] = field(default_factory=list)
    swap_in_hosts: list[int] = field(default_factory=list)
    swap_in_blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    """One token (or `NO_TOKEN`) for each of `sample_seqs`; `logprobs` is empty when no row asked for them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs | None] = field(default_factory=list)
