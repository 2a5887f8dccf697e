"""The small worlds that are explored completely, each around one danger."""

from __future__ import annotations

from novainfer.fsm.params import SamplingParams
from novainfer.fsm.simulation.explore import SmallWorld
from novainfer.fsm.simulation.shape import Shape

NEVER_STALLS = 1 << 20  # unread tokens


def _ask(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True, temperature=0.0)


SMALL_WORLDS = [
    SmallWorld(
        name="two requests, too few blocks for both",
        shape=Shape(
            num_blocks=4,
            block_size=1,
            max_num_seqs=2,
            max_num_batched_tokens=4,
            prefill_chunk_tokens=4,
            max_model_len=4,
            stall_high=NEVER_STALLS,
        ),
        clients=[([1], _ask(3)), ([2], _ask(2))],
        budget={"oom": 1, "unlaunched": 1, "cancel": 1},
    ),
    SmallWorld(
        name="a prefix that one computes and the other waits for",
        shape=Shape(
            num_blocks=5,
            block_size=2,
            max_num_seqs=2,
            max_num_batched_tokens=4,
            prefill_chunk_tokens=2,
            max_model_len=8,
            stall_high=NEVER_STALLS,
        ),
        clients=[([1, 2, 3, 4, 5], _ask(1)), ([1, 2, 3, 4, 6], _ask(2))],
        budget={"oom": 1, "exception": 1, "cancel": 1},
    ),
    SmallWorld(
        name="completions that come twice, at any time",
        shape=Shape(
            num_blocks=3,
            block_size=1,
            max_num_seqs=2,
            max_num_batched_tokens=4,
            prefill_chunk_tokens=4,
            max_model_len=3,
            stall_high=NEVER_STALLS,
        ),
        clients=[([1], _ask(2)), ([2], _ask(1))],
        budget={"oom": 1, "duplicate": 2},
    ),
    SmallWorld(
        name="coming up, draining and stopping",
        shape=Shape(
            num_blocks=2,
            block_size=2,
            max_num_seqs=1,
            max_num_batched_tokens=4,
            prefill_chunk_tokens=4,
            max_model_len=4,
            stall_high=NEVER_STALLS,
        ),
        clients=[("a", _ask(1))],
        budget={"fail_job": 1, "stop": 1, "drain": 1, "cancel": 1, "fail_encode": 1},
        from_start=True,
    ),
    SmallWorld(
        name="readers that stall",
        shape=Shape(
            num_blocks=4,
            block_size=1,
            max_num_seqs=2,
            max_num_batched_tokens=4,
            prefill_chunk_tokens=4,
            max_model_len=4,
            stall_high=0,
            stall_low=0,
        ),
        clients=[([1], _ask(3)), ([2], _ask(2))],
        budget={},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="two choices of two tokens, one of which fails",
        shape=Shape(
            num_blocks=3,
            block_size=1,
            max_num_seqs=2,
            max_num_batched_tokens=4,
            prefill_chunk_tokens=4,
            max_model_len=3,
            stall_high=NEVER_STALLS,
        ),
        clients=[([1], _ask(2, n=2)), ([2], _ask(1))],
        budget={"exception": 2, "cancel": 1},
    ),
]
