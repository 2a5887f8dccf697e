"""Drives a `ModelRunner` by hand: sequences with scattered blocks, and steps that say who computes how much."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from torch import Tensor

from novainfer.fsm.messages.step import SAMPLED, SeqParams, StepDone, StepPlan
from novainfer.kernels.masks import packed_mask
from novainfer.kernels.models.registry import read_config
from novainfer.kernels.ops.linear import MkldnnLinear
from novainfer.kernels.ops.precision import precision_of
from novainfer.kernels.ops.registry import Operation, Registry
from novainfer.kernels.ops.selection import build_registry
from novainfer.kernels.runtime.runner import ModelRunner
from novainfer.kernels.sampling.drawn import Draw, DrawnAtOnce
from novainfer.kernels.sampling.verify import Positions, Sampled

__all__ = ["BACKENDS", "Driver", "Sequence", "backend_registry", "make_runner", "seated"]

CPU = torch.device("cpu")
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
BACKENDS = ("reference", "torch", "mkldnn", "native")


def skip_without(backend: str, dtype: str) -> None:
    """Skip the test where this CPU cannot run what it is about."""
    if backend == "mkldnn" and dtype == "bfloat16":
        reason = MkldnnLinear.refuses(1, 1, torch.bfloat16, CPU)
        if reason is None:
            try:
                MkldnnLinear.pack(torch.ones(2, 2, dtype=torch.bfloat16), None)
            except RuntimeError as error:  # oneDNN was told to do with less than this CPU has
                reason = str(error)
        if reason is not None:
            pytest.skip(f"oneDNN's linears in bfloat16: {reason}")


def backend_registry(backend: str) -> Registry:
    """Kernels of one family only; what the family lacks (mkldnn has only linears) is torch's."""
    everything = build_registry(CPU, native="1")
    chosen = Registry()
    for operation in OPERATIONS:
        names = {kernel.name: kernel for kernel in everything.implementations(operation)}
        for name in (backend, "numpy", "torch", "reference", "op-by-op"):
            if name in names:
                chosen.register(operation, names[name])
    for kernel in everything.implementations("linear"):
        if kernel.name in ("torch-int8", "torch-grouped", "torch-fp8") or (
            kernel.name in ("native-int8", "native-grouped") and backend == "native"
        ):
            chosen.register("linear", kernel)
    for attention in everything.implementations("attention"):
        if backend == "native" and attention.name == "torch-native-layout":
            chosen.register("attention", attention)
    return chosen


def make_runner(folder: Path, backend: str = "torch", num_blocks: int = 64, **options: Any) -> ModelRunner:
    """A runner on the kernels of one family, warm."""
    registry = backend_registry(backend)
    defaults = {"max_num_seqs": 6, "max_num_batched_tokens": 256, "max_model_len": None, "registry": registry}
    runner = ModelRunner.load(folder, **(defaults | options))
    if registry is options.get("registry", registry):
        offered = {op: [k.name for k in registry.implementations(op)] for op in OPERATIONS}
        skip_without(backend, runner.info.dtype)
        used = {op: offered[op][0] for op in offered}
        if options.get("quantization", "none") != "none":
            precision = precision_of(options["quantization"])
            kept = [precision.of(is_head=True), precision]
            if any(read_config(folder).has_experts):
                kept.append(precision.of(is_exact=True))
            own = [registry.implementations("linear", one.name)[0].name for one in kept]
            used["linear"] = "+".join(dict.fromkeys(own))
        elif backend == "mkldnn" and read_config(folder).tensor("head") is None:
            used["linear"] = "torch+mkldnn"  # the head's rows are the embeddings, and oneDNN gives no rows back
        # Otherwise a kernel failed its self-test, and the test would be one of its substitute.
        assert runner.info.kernels == used, f"{backend} kernels were not used: {runner.info.kernels}"
    runner.fit(mode="fixed", num_blocks=num_blocks)
    runner.warm()
    return runner


@dataclass
class Sequence:
    """A sequence as the test sees it."""

    slot: int
    tokens: list[int]
    sampling: SeqParams
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    admitted: bool = False
    num_sent_blocks: int = 0


class CapturingSampler:
    """Stands where the sampler does: takes the most likely token and keeps the logits of the step."""

    rows_max = 64
    scratch_bytes = 0

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def admit(self, params: SeqParams) -> None:
        """Nothing to keep."""

    def draw(self, logits: Tensor, at: Positions) -> Draw:
        """Greedy."""
        self.logits += list(logits.float().clone())
        return DrawnAtOnce(Sampled(logits.argmax(-1).tolist(), []), CPU)


def seated(slot: int, params: SeqParams, token_ids: Items[int] | None = None) -> SeqParams:
    """`params` for this slot."""
    return msgspec.structs.replace(params, slot=slot, token_ids=None if token_ids is None else list(token_ids))


class Driver:
    """Blocks are handed out in a scrambled order, so that no test passes because blocks happen to be in order."""

    def __init__(
        self,
        runner: ModelRunner,
        seed: int = 0,
        capture: bool = False,
        num_drafts: int = 0,
        ahead: bool = False,
        allowed: Callable[[Items[int]], Items[int] | None] | None = None,
    ) -> None:
        """`num_drafts` are wanted of the runner's draft model for each sampled row of each step.

        `allowed` says what may follow some tokens, or None: anything.

        `ahead`: plans are those that would be made before the step before has ended: what it samples is not in them.
        """
        self.num_drafts = num_drafts
        self.ahead = ahead
        self.allowed = allowed
        self.num_hidden = 0  # tokens that plans did not tell
        self._step_id = 0
        self._sampled: list[Sequence] = []  # in the step before
        self.runner = runner
        self.block_size = runner.info.block_size
        self.free = list(range(runner.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.capturing = CapturingSampler()
        if capture:
            runner._sampler = self.capturing  # type: ignore[assignment]

    def add(self, slot: int, tokens: Items[int], sampling: SeqParams | None = None) -> Sequence:
        """A new sequence in a slot."""
        return Sequence(slot, list(tokens), sampling or SeqParams(slot=slot))

    def share(self, slot: int, tokens: Items[int], other: Sequence) -> Sequence:
        """A new sequence whose first full blocks are another's: they hold the same tokens."""
        sequence = self.add(slot, tokens)
        common = 0
        limit = min(len(tokens) - 1, len(other.tokens))
        while common < limit and sequence.tokens[common] == other.tokens[common]:
            common += 1
        num_blocks = common // self.block_size
        assert num_blocks
        self._grow(other, num_blocks * self.block_size)
        sequence.blocks = other.blocks[:num_blocks]
        sequence.num_computed = num_blocks * self.block_size
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Give the blocks back and start over (what a preemption does)."""
        self.free += sequence.blocks
        sequence.blocks, sequence.num_computed, sequence.num_sent_blocks = [], 0, 0
        sequence.admitted = False

    def step(self, *work: Sequence | tuple[Sequence, int]) -> list[int]:
        """One step: a sequence alone computes all its tokens, (sequence, n) the next n; ends are sampled."""
        plan = StepPlan()
        sampled: list[Sequence] = []
        for item in work:
            sequence, count = item if isinstance(item, tuple) else (item, len(item.tokens) - item.num_computed)
            end = sequence.num_computed + count
            assert 0 < count <= len(sequence.tokens) - sequence.num_computed
            if end == len(sequence.tokens):
                plan.sample_seqs.append(len(plan.slots))
                sampled.append(sequence)
            is_hidden = self.ahead and end == len(sequence.tokens) and any(sequence is other for other in self._sampled)
            self._add_row(
                plan, sequence, [*sequence.tokens[: end - 1], SAMPLED if is_hidden else sequence.tokens[end - 1]]
            )
            self.num_hidden += is_hidden
            sequence.num_computed = end
        self._sampled = sampled
        self._mask(plan, [sequence.tokens for sequence in sampled])
        result = self._run(plan)
        for sequence, token_id in zip(sampled, result.token_ids, strict=True):
            sequence.tokens.append(token_id)
        return result.token_ids

    def verify(self, sequences: Items[Sequence], drafts: Items[list[int]]) -> list[int]:
        """One step in which each sequence, computed but for its last token, brings drafts; the tokens each got."""
        plan = StepPlan(sample_seqs=list(range(len(sequences))), num_drafts=[len(guesses) for guesses in drafts])
        for sequence, guesses in zip(sequences, drafts, strict=True):
            self._add_row(plan, sequence, sequence.tokens + guesses)
        pairs = list(zip(sequences, drafts, strict=True))
        self._mask(plan, [row.tokens + guesses[:at] for row, guesses in pairs for at in range(len(guesses) + 1)])
        result = self._run(plan)
        at = 0
        for sequence, count in zip(sequences, result.num_tokens, strict=True):
            sequence.tokens += result.token_ids[at : at + count]
            sequence.num_computed = len(sequence.tokens) - 1
            at += count
        return result.num_tokens

    def _mask(self, plan: StepPlan, contexts: Items[list[int]]) -> None:
        """The mask of each position that is sampled, by what stands before it."""
        if self.allowed is None:
            return
        for position, tokens in enumerate(contexts):
            if (ids := self.allowed(tokens)) is not None:
                plan.mask_positions.append(position)
                plan.masks += packed_mask(ids, self.runner.info.vocab_size).astype("<i4").tobytes()

    def _run(self, plan: StepPlan) -> StepDone:
        plan.num_drafts_wanted = [self.num_drafts for _ in plan.sample_seqs] if self.num_drafts else []
        self._step_id += 1
        plan.step_id, plan.after = self._step_id, self._step_id - 1 if self.ahead else 0
        self.last = self.runner.execute(plan)
        return self.last

    def _add_row(self, plan: StepPlan, sequence: Sequence, tokens: list[int]) -> None:
        self._grow(sequence, len(tokens))
        if not sequence.admitted:
            way = sequence.sampling
            history = list(sequence.tokens) if way.needs_history or way.banned_sequences or self.num_drafts else None
            plan.admissions.append(seated(sequence.slot, sequence.sampling, history))
            sequence.admitted = True
        for index in range(sequence.num_sent_blocks, len(sequence.blocks)):
            plan.table_slots.append(sequence.slot)
            plan.table_indexes.append(index)
            plan.table_blocks.append(sequence.blocks[index])
        sequence.num_sent_blocks = len(sequence.blocks)
        plan.slots.append(sequence.slot)
        plan.query_lens.append(len(tokens) - sequence.num_computed)
        plan.context_lens.append(len(tokens))
        plan.input_ids += tokens[sequence.num_computed :]

    def generate(self, sequences: Items[Sequence], num_tokens: int) -> list[list[int]]:
        """Prefill all in one step, decode together, give what was generated."""
        starts = [len(sequence.tokens) for sequence in sequences]
        for _ in range(num_tokens):
            self.step(*sequences)
        return [s.tokens[start:] for s, start in zip(sequences, starts, strict=True)]

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.blocks) * self.block_size < num_tokens:
            sequence.blocks.append(self.free.pop())
