"""Bugs planted in what a prefix is, and in what the device is told of how a request samples."""

from __future__ import annotations

from novainfer.fsm.kv.block_cache import BlockCache
from novainfer.fsm.schedule.batching import StepBuilder
from novainfer.fsm.schedule.request import Request
from novainfer.fsm.simulation.bugs.mutants import Mutant

SAMPLING_MUTANTS = [
    # ---- prefixes that differ in the middle
    Mutant(
        "a block is known by its own tokens alone",
        BlockCache,
        "_name_next",
        "block_name(names[-1] if names else table.space,",
        "block_name(table.space,",
    ),
    Mutant(
        "a block is known by its own tokens and those of the one before it",
        BlockCache,
        "_name_next",
        "block_name(names[-1] if names else table.space,",
        'block_name(block_name(b"", request.token_ids[max(at - size, 0) : at]) if names else b"",',
    ),
    Mutant("a prefix goes on behind a block that is not there", BlockCache, "find_prefix", "break", "continue"),
    # ---- what must survive a recovery, a preemption and a swap
    Mutant(
        "penalties forget what was sampled before a preemption",
        Request,
        "sampling_spec",
        "spec.token_ids = list(self.token_ids)",
        "spec.token_ids = self.token_ids[: self.num_prompt]",
    ),
    Mutant(
        "penalties take what was sampled before a preemption for the prompt",
        Request,
        "sampling_spec",
        "spec.num_prompt_tokens = self.num_prompt",
        "spec.num_prompt_tokens = len(self.token_ids)",
    ),
    Mutant(
        "the end of a sequence is no stop id that min_tokens bans",
        Request,
        "sampling_spec",
        "spec.stop_token_ids = sorted(self.stop_ids)",
        "spec.stop_token_ids = sorted(self.params.stop_token_ids)",
    ),
    Mutant(
        "who is fetched samples as the slot's last owner did",
        StepBuilder,
        "_fetch",
        "self.plan.admissions.append(request.sampling_spec())",
        "pass",
    ),
    Mutant(
        "min_tokens counts the tokens since the last preemption",
        Request,
        "sampling_spec",
        "spec.min_position = self.num_prompt + params.min_tokens",
        "spec.min_position = self.num_prompt + (params.min_tokens if self.num_generated < 3 else 0)",
    ),
]
