"""The small worlds that are explored completely, each around one danger."""

from __future__ import annotations

from typing import Any

from novainfer.fsm.messages.events import Fault
from novainfer.fsm.messages.mode import EAGER, INT8, Mode
from novainfer.fsm.messages.params import SamplingParams
from novainfer.fsm.messages.pooling import Pooling, PoolingKind
from novainfer.fsm.messages.tenant import ANYONE, Tenant
from novainfer.fsm.simulation.explore.explore import SmallWorld
from novainfer.fsm.simulation.world.grammars import FAILS, NOTHING, replaced
from novainfer.fsm.simulation.world.shape import ALL_MODES, BEST, GPU_MODES, LEAN, Shape

NEVER_STALLS = 1 << 20  # unread tokens
OTHER = Tenant("other")


def _ask(max_tokens: int, n: int = 1, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True, temperature=0.0, **more)


def _pooled(kind: PoolingKind) -> SamplingParams:
    """A request that gives a vector."""
    return SamplingParams(pooling=Pooling(kind=kind))


def _held_to(grammar: str, max_tokens: int) -> SamplingParams:
    """A request that is held to a grammar of the simulated kind."""
    return replaced(_ask(max_tokens), grammar)


def _shape(num_blocks: int, block_size: int = 1, max_num_seqs: int = 2, **more: Any) -> Shape:
    """As small as can be; no reader is slow, unless `more` says so."""
    limits: dict[str, Any] = {
        "max_num_batched_tokens": 4,
        "prefill_chunk_tokens": 4,
        "max_model_len": num_blocks * block_size,
        "stall_high": NEVER_STALLS,
        "max_restarts": 1,
    }
    return Shape(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, **(limits | more))


SMALL_WORLDS = [
    SmallWorld(
        name="two requests, too few blocks for both",
        shape=_shape(3),
        clients=[([1], _ask(2)), ([2], _ask(2))],
        budget={"oom": 1, "cancel": 1},
    ),
    SmallWorld(
        name="a long prompt, and an answer beside it that takes the blocks it was to have",
        shape=_shape(11, prefill_chunk_tokens=2, max_num_batched_tokens=2),
        clients=[([1, 2, 3, 4, 5, 6, 7], _ask(1)), ([8], _ask(6))],
        budget={"cancel": 1},
    ),
    SmallWorld(
        name="two requests, a step that was never launched, and a worker that dies",
        shape=_shape(4),
        clients=[([1], _ask(3)), ([2], _ask(2))],
        budget={"unlaunched": 1, "die": 1},
    ),
    SmallWorld(
        name="a prefix that one computes and the other waits for",
        shape=_shape(5, 2, max_model_len=8, prefill_chunk_tokens=2),
        clients=[([1, 2, 3, 4, 5], _ask(1)), ([1, 2, 3, 4, 6], _ask(2))],
        budget={"oom": 1, "cancel": 1},
    ),
    SmallWorld(
        name="a request that gives the mean of its prompt, in two steps, beside one that decodes",
        shape=_shape(7, prefill_chunk_tokens=2, max_num_batched_tokens=3, max_model_len=4),
        clients=[([1, 2, 3], _pooled("mean")), ([4], _ask(2))],
        budget={"oom": 1, "cancel": 1},
    ),
    SmallWorld(
        name="vectors of two prompts that begin alike, and a worker that dies",
        shape=_shape(8, 2, prefill_chunk_tokens=2, max_num_batched_tokens=4, max_model_len=8),
        clients=[([1, 2, 3, 4], _pooled("last")), ([1, 2, 3], _pooled("mean"))],
        budget={"die": 1},
    ),
    SmallWorld(
        name="a request that is held to a grammar, and one that is not",
        shape=_shape(4),
        clients=[([1], _held_to("1", 2)), ([2], _ask(1))],
        budget={"cancel": 1, "fire_early": 1},
    ),
    SmallWorld(
        name="two requests that are held to grammars, and a step that fails",
        shape=_shape(6),
        clients=[([1], _held_to("1", 2)), ([2], _held_to("2", 1))],
        budget={"exception": 1},
    ),
    SmallWorld(
        name="a request that is held to a grammar, and a worker that dies, or all stops",
        shape=_shape(3, max_num_seqs=1),
        clients=[([1], _held_to("1", 2))],
        budget={"die": 1, "stop": 1, "oom": 1},
    ),
    SmallWorld(
        name="a request that is held to a grammar, guesses of what follows, and a step that fails",
        shape=_shape(4, max_num_seqs=1, num_speculative_tokens=2),
        clients=[([1], _held_to("1", 3))],
        budget={"oom": 1},
    ),
    SmallWorld(
        name="a grammar that fails, or leaves nothing",
        shape=_shape(4),
        clients=[([1], _held_to(f"1 {FAILS} 1", 2)), ([2], _held_to(f"2 {NOTHING} 0", 1))],
        budget={"stop": 1},
    ),
    SmallWorld(
        name="completions that come twice, at any time",
        shape=_shape(3),
        clients=[([1], _ask(2)), ([2], _ask(1))],
        budget={"oom": 1, "duplicate": 1},
    ),
    SmallWorld(
        name="answers that contradict themselves",
        shape=_shape(2, 1, 1),
        clients=[([1], _ask(1))],
        budget={"contradict": 1, "die": 1},
        from_start=True,
    ),
    SmallWorld(
        name="answers of a device that is gone",
        shape=_shape(2, 1, 1),
        clients=[],
        budget={"duplicate": 1, "die": 1, "fire_early": 1},
        from_start=True,
    ),
    SmallWorld(
        name="coming up, draining and stopping",
        shape=_shape(2, 1, 1),
        clients=[("a", _ask(1))],
        budget={"fail_job": 1, "stop": 1, "drain": 1, "fail_encode": 1},
        from_start=True,
    ),
    SmallWorld(
        name="cancelled before it begins",
        shape=_shape(2, 1, 1),
        clients=[("a", _ask(1))],
        budget={"cancel": 2, "cancel_all": 1, "drain": 2},
        from_start=True,
    ),
    SmallWorld(
        name="all is ended at once",
        shape=_shape(2, 1, 1, max_num_queued_reqs=1),
        clients=[([1], _ask(1, max_queue_s=1.0))],
        budget={"stop_all": 1, "cancel_all": 1},
    ),
    SmallWorld(
        name="everybody is cancelled, in a world that breaks",
        shape=_shape(2, 1, 1),
        clients=[([1], _ask(1))],
        budget={"cancel_all": 1, "exception": 1, "die": 1},
    ),
    SmallWorld(
        name="a full queue, and who waits for it",
        shape=_shape(2, 1, 1, max_num_queued_reqs=1),
        clients=[([1], _ask(1)), ([2], _ask(1, max_queue_s=1.0, timeout_s=1.0))],
        budget={"drain": 1, "fire_early": 1},
    ),
    SmallWorld(
        name="readers that stall",
        shape=_shape(4, stall_high=0, stall_low=0),
        clients=[([1], _ask(3)), ([2], _ask(1))],
        budget={"read": 0},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="two choices, one of which stalls both",
        shape=_shape(5, 1, 2, max_model_len=4, stall_high=0, stall_low=0, prefill_chunk_tokens=1),
        clients=[([1, 2], _ask(2, n=2))],
        budget={"fire_early": 1, "read": 0},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="two choices in one slot, one of which stalls both",
        shape=_shape(4, 1, 1, stall_high=0, stall_low=0),
        clients=[([1], _ask(2, n=2))],
        budget={"read": 1},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="a stall that ends while another choice begins",
        shape=_shape(2, 1, 1, stall_high=0, stall_low=0),
        clients=[([1], _ask(1, n=2))],
        budget={"fire_early": 1, "exception": 1, "read": 0},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="two choices that are swapped, one of which stalls both",
        shape=_shape(4, 1, 2, stall_high=0, stall_low=0, num_host_blocks=4),
        clients=[([1], _ask(3, n=2))],
        budget={"read": 0},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="a reader that stalls while the worker dies",
        shape=_shape(4, 1, 1, stall_high=0, stall_low=0),
        clients=[([1], _ask(3))],
        budget={"die": 1, "read": 0},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="a reader that stalls while a step fails",
        shape=_shape(4, 1, 1, stall_high=0, stall_low=0),
        clients=[([1], _ask(3))],
        budget={"exception": 1, "read": 1},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="a reader that stalls until everything stops",
        shape=_shape(4, 1, 1, stall_high=0, stall_low=0),
        clients=[([1], _ask(3))],
        budget={"stop": 1, "read": 0},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="a paused request is parked on the host, and comes back",
        shape=_shape(4, 1, 1, stall_high=0, stall_low=0, num_host_blocks=2),
        clients=[([1], _ask(3)), ([2], _ask(1))],
        budget={"read": 0},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="two choices of two tokens, one of which fails",
        shape=_shape(3),
        clients=[([1], _ask(2, n=2))],
        budget={"exception": 3, "cancel": 1},
    ),
    SmallWorld(
        name="prompts that come at any moment",
        shape=_shape(3),
        clients=[("a", _ask(1)), ("b", _ask(1))],
        budget={"fail_encode": 1, "exception": 1},
    ),
    SmallWorld(
        name="a prompt that comes while the worker dies",
        shape=_shape(2, 1, 1),
        clients=[("a", _ask(1))],
        budget={"fail_encode": 1, "die": 1},
    ),
    SmallWorld(
        name="a worker that dies, and what it said comes late",
        shape=_shape(2, 1, 1),
        clients=[([1], _ask(1))],
        budget={"die": 1, "exception": 1, "duplicate": 1, "fire_early": 1},
    ),
    SmallWorld(
        name="a worker that dies or hangs, and a request that is cancelled",
        shape=_shape(3, 1, 1, prefill_chunk_tokens=1),
        clients=[([1, 2], _ask(1))],
        budget={"overdue": 1, "cancel": 1},
    ),
    SmallWorld(
        name="a worker that dies too often",
        shape=_shape(2, 1, 1),
        clients=[([1], _ask(1))],
        budget={"die": 1, "overdue": 1},
    ),
    SmallWorld(
        name="a worker that hangs, and a stop",
        shape=_shape(2, 1, 1),
        clients=[([1], _ask(1))],
        budget={"overdue": 1, "stop": 1},
    ),
    SmallWorld(
        name="a worker that cannot come up again",
        shape=_shape(2, 1, 1),
        clients=[([1], _ask(1))],
        budget={"overdue": 1, "fail_job": 2, "contradict": 1},
    ),
    SmallWorld(
        name="a device that is a thread",
        shape=_shape(2, 1, 1, max_restarts=0),
        clients=[([1], _ask(1))],
        budget={"die": 1, "overdue": 1, "duplicate": 1},
    ),
    SmallWorld(
        name="a process that comes up, and a stop",
        shape=_shape(2, 1, 1, processes=True),
        clients=[],
        budget={"stop": 1, "die": 1, "give_up": 1},
        from_start=True,
    ),
    SmallWorld(
        name="a process that dies, and what it said comes late",
        shape=_shape(2, 1, 1, processes=True),
        clients=[],
        budget={"die": 1, "fail_job": 1, "echo": 1},
    ),
    SmallWorld(
        name="a spare that takes over, or dies with the worker",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True),
        clients=[],
        budget={"die": 1, "die_spare": 1, "fire_early": 1},
    ),
    SmallWorld(
        name="a spare that fails, is late, or says things twice",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, shows_death=False),
        clients=[],
        budget={"die": 1, "fail_spare_job": 1, "spare_overdue": 1, "echo": 1},
    ),
    SmallWorld(
        name="a spare that only loads, and cannot fit",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, kv_is_lazy=False),
        clients=[],
        budget={"overdue": 1, "fail_job": 2},
    ),
    SmallWorld(
        name="a worker that is lost again after its spare has taken over",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, shows_death=False, max_restarts=3),
        clients=[],
        budget={"die_both": 1, "overdue": 1, "fail_job": 1},
    ),
    SmallWorld(
        name="a spare that is frozen when it is needed",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True),
        clients=[],
        budget={"overdue": 1, "freeze_spare": 1},
    ),
    SmallWorld(
        name="a spare that is needed, and a stop",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, shows_death=False),
        clients=[],
        budget={"overdue": 1, "stop": 1, "give_up": 1},
    ),
    SmallWorld(
        name="a cache that waits for memory, and a stop",
        shape=_shape(2, 1, 1, processes=True, kv_is_lazy=False, shows_death=False),
        clients=[],
        budget={"overdue": 1, "stop": 1, "give_up": 1, "fire_early": 2},
    ),
    SmallWorld(
        name="a process that comes up, and hangs or fails",
        shape=_shape(2, 1, 1, processes=True),
        clients=[],
        budget={"overdue": 1, "fail_job": 1},
        from_start=True,
    ),
    SmallWorld(
        name="a worker that is lost twice, and what was said comes once more",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, shows_death=False, max_restarts=2),
        clients=[],
        budget={"overdue": 2, "echo": 1},
    ),
    SmallWorld(
        name="a cache that waits for memory, and what was said comes once more",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, kv_is_lazy=False, shows_death=False),
        clients=[],
        budget={"overdue": 1, "spare_overdue": 1, "echo": 1, "fire_early": 1},
    ),
    SmallWorld(
        name="a cache that waited for memory, and a worker that is lost again",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, kv_is_lazy=False, shows_death=False, max_restarts=2),
        clients=[],
        budget={"overdue": 2, "fire_early": 1},
    ),
    SmallWorld(
        name="a spare that is late or fails, and a stop",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, shows_death=False),
        clients=[],
        budget={"stop": 1, "spare_overdue": 1, "fail_spare_job": 1, "echo": 1},
    ),
    SmallWorld(
        name="a spare that is probed, and a stop",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, shows_death=False),
        clients=[],
        budget={"stop": 1, "fire_early": 1},
        prelude=(
            *(("overdue",), ("go", 20)),
            *(("fire_timer", ("worker", "Restart")), ("deliver", ("timer", "worker", True))),
        ),
    ),
    SmallWorld(
        name="a spare that is probed while it loads, and a stop",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, shows_death=False),
        clients=[],
        budget={"stop": 1},
        prelude=(
            *(("spare_overdue",), ("reap", 1), ("spare_job", 2)),
            *(("overdue",), ("deliver", ("watchdog", "worker", False)), ("reap", 0)),
            *(("fire_early", ("worker", "Restart")), ("deliver", ("timer", "worker", True))),
        ),
    ),
    SmallWorld(
        name="the ladder, down and up",
        shape=_shape(2, 1, 1, modes=ALL_MODES),
        clients=[([1], _ask(1))],
        budget={"oom": 4, "fail_job": 1, "fire_early": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="the ladder of a GPU, down by each fault and up",
        shape=_shape(2, 1, 1, modes=GPU_MODES),
        clients=[([1], _ask(1))],
        budget={"exception": 2, "oom": 2, "fail_job": 1, "fire_early": 1},
        opening=(Fault.EXCEPTION, Fault.EXCEPTION, Fault.EXCEPTION),
    ),
    SmallWorld(
        name="kernels of a GPU that fail one after the other",
        shape=_shape(2, 1, 1, modes=GPU_MODES),
        clients=[([1], _ask(1))],
        budget={"exception": 3, "oom": 1, "fire_early": 1},
        opening=(Fault.EXCEPTION,) * 6,
    ),
    SmallWorld(
        name="graphs that are let go for memory, and what was computed with them",
        shape=_shape(4, 1, 1, modes=(BEST, Mode(EAGER), LEAN)),
        clients=[([1], _ask(2)), ([1], _ask(1))],
        budget={"oom": 2, "fire_early": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="a switch of mode, interrupted",
        shape=_shape(2, 1, 1, modes=(BEST, LEAN)),
        clients=[([1], _ask(1))],
        budget={"oom": 1, "die": 1, "overdue": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="a switch of mode, and a stop",
        shape=_shape(2, 1, 1, modes=(BEST, LEAN)),
        clients=[([1], _ask(1))],
        budget={"oom": 1, "stop": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="a switch of mode, and old answers",
        shape=_shape(2, 1, 1, modes=(BEST, LEAN)),
        clients=[([1], _ask(1))],
        budget={"oom": 2, "duplicate": 1, "fail_job": 1},
        opening=(Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="a switch of mode, and steps of the mode before",
        shape=_shape(3, 1, 1, modes=(BEST, LEAN)),
        clients=[([1], _ask(2))],
        budget={"oom": 1, "duplicate": 1, "fire_early": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="a canary for which the device cannot be switched",
        shape=_shape(4, 1, 2, modes=ALL_MODES, prefill_chunk_tokens=1),
        clients=[([1, 2], _ask(1))],
        budget={"exception": 3, "oom": 1, "fail_job": 1, "fire_early": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="kernels that fail, and then memory that is short",
        shape=_shape(2, 1, 1, modes=ALL_MODES),
        clients=[([1], _ask(1))],
        budget={"oom": 3, "exception": 1},
        opening=(Fault.EXCEPTION, Fault.EXCEPTION, Fault.EXCEPTION),
    ),
    SmallWorld(
        name="blocks swapped to the host",
        shape=_shape(4, num_host_blocks=2),
        clients=[([1], _ask(3)), ([2], _ask(2))],
        budget={"oom": 1, "cancel": 1},
    ),
    SmallWorld(
        name="blocks on the host of a worker that dies",
        shape=_shape(4, num_host_blocks=2),
        clients=[([1], _ask(3)), ([2], _ask(2))],
        budget={"die": 1},
    ),
    SmallWorld(
        name="two choices that share a block that their prompt does not fill, until they write into it",
        shape=_shape(4, 4),
        clients=[([1, 2, 3], _ask(2, n=2))],
        budget={"oom": 1, "cancel": 1},
    ),
    SmallWorld(
        name="two that share a block, one of which leaves when the step that copies it has failed",
        shape=_shape(8, 4, 3, max_num_batched_tokens=8, prefill_chunk_tokens=8),
        clients=[([9], _ask(1)), ([1, 2, 3], _ask(2)), ([1, 2, 3], _ask(2))],
        budget={"oom": 1, "cancel": 1},
    ),
    SmallWorld(
        name="a choice that comes later, and copies what the first one has of its prompt's last block",
        shape=_shape(4, 4, 2),
        clients=[([1, 2, 3], _ask(1, n=2)), ([1, 2, 3], _ask(3))],
        budget={"oom": 1, "unlaunched": 1},
    ),
    SmallWorld(
        name="guesses that are committed by twos and threes, and a step that fails",
        shape=_shape(6, 2, num_speculative_tokens=2, wrong_drafts_of_16=5),
        clients=[([1], _ask(4)), ([2], _ask(3))],
        budget={"oom": 1, "cancel": 1},
    ),
    SmallWorld(
        name="guesses, and a worker that dies",
        shape=_shape(4, 2, num_speculative_tokens=2, wrong_drafts_of_16=3),
        clients=[([1], _ask(4))],
        budget={"die": 1, "unlaunched": 1, "stop": 1},
    ),
    SmallWorld(
        name="two steps in flight, and one that fails",
        shape=_shape(6, 2, max_in_flight=2),
        clients=[([1], _ask(3)), ([2], _ask(2))],
        budget={"oom": 1, "cancel": 1},
    ),
    SmallWorld(
        name="two steps in flight, and too few blocks for both requests",
        shape=_shape(3, max_in_flight=2),
        clients=[([1], _ask(2)), ([2], _ask(2))],
        budget={"oom": 1, "unlaunched": 1},
    ),
    SmallWorld(
        name="two steps in flight, and a worker that dies",
        shape=_shape(4, max_in_flight=2),
        clients=[([1], _ask(3)), ([2, 3], _ask(2))],
        budget={"die": 1, "unlaunched": 1},
    ),
    SmallWorld(
        name="two steps in flight, and answers that come twice",
        shape=_shape(4, max_in_flight=2),
        clients=[([1], _ask(3))],
        budget={"exception": 1, "duplicate": 1},
    ),
    SmallWorld(
        name="two steps in flight, and a switch of mode",
        shape=_shape(4, 1, 1, modes=(BEST, LEAN), max_in_flight=2),
        clients=[([1], _ask(3))],
        budget={"oom": 1, "fail_job": 1, "fire_early": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="two steps in flight, and readers that stall",
        shape=_shape(6, stall_high=0, stall_low=0, max_in_flight=2),
        clients=[([1], _ask(3)), ([2], _ask(1))],
        budget={"read": 0},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="two steps in flight, at a process that dies",
        shape=_shape(5, 1, 1, processes=True, max_in_flight=2),
        clients=[([1], _ask(3))],
        budget={"die": 1, "oom": 1},
    ),
    SmallWorld(
        name="two steps on the device, and a launch, a step or an answer that fails",
        shape=_shape(6, 2, max_in_flight=2, computes_beside=True),
        clients=[([1], _ask(3)), ([2], _ask(1))],
        budget={"oom": 1, "fail_launch": 1, "unsend": 1},
    ),
    SmallWorld(
        name="two steps on the device, and too few blocks for both requests",
        shape=_shape(3, max_in_flight=2, computes_beside=True),
        clients=[([1], _ask(2)), ([2], _ask(2))],
        budget={"exception": 1, "cancel": 1},
    ),
    SmallWorld(
        name="two steps on the device, the second of which takes the blocks of a prompt that was",
        shape=_shape(4, max_in_flight=2, computes_beside=True),
        clients=[([1, 2], _ask(1)), ([3], _ask(3)), ([1, 2], _ask(1))],
        budget={"exception": 1},
    ),
    SmallWorld(
        name="two steps on the device of a process that dies",
        shape=_shape(5, 1, 1, processes=True, max_in_flight=2, computes_beside=True),
        clients=[([1], _ask(3))],
        budget={"die": 1, "exception": 1, "fail_launch": 1},
    ),
    SmallWorld(
        name="two steps on the device, another KV cache, and what the host has room for",
        shape=_shape(4, max_model_len=3, num_host_blocks=2, max_in_flight=2, computes_beside=True),
        clients=[([1], _ask(2)), ([2], _ask(2))],
        budget={"reconfigure": 1, "exception": 1},
        wishes=((6, None),),
    ),
    SmallWorld(
        name="another KV cache, smaller or larger, and a step that fails",
        shape=_shape(4, max_model_len=3),
        clients=[([1], _ask(2)), ([2], _ask(1))],
        budget={"reconfigure": 1, "oom": 1, "cancel": 1},
        wishes=((3, None), (6, None)),
    ),
    SmallWorld(
        name="another KV cache while a reader stalls",
        shape=_shape(4, 1, 1, stall_high=0, stall_low=0, num_host_blocks=1),
        clients=[([1], _ask(3))],
        budget={"reconfigure": 1, "read": 1},
        slow_readers=frozenset([0]),
        wishes=((5, None),),
    ),
    SmallWorld(
        name="another KV cache, two steps in flight, and what the host has room for",
        shape=_shape(4, max_model_len=3, num_host_blocks=2, max_in_flight=2),
        clients=[([1], _ask(2)), ([2], _ask(2))],
        budget={"reconfigure": 1, "exception": 1, "unlaunched": 1},
        wishes=((6, None),),
    ),
    SmallWorld(
        name="another KV cache, for which there is no room, or a worker that dies on the way",
        shape=_shape(3, 1, 1, max_model_len=2, num_host_blocks=1, max_restarts=2),
        clients=[([1], _ask(1))],
        budget={"reconfigure": 1, "die": 1, "fail_job": 2},
        wishes=((4, None), (7, None)),
    ),
    SmallWorld(
        name="a KV cache that is as large as the one before, and holds nothing of it",
        shape=_shape(4, 1, 1, max_model_len=3),
        clients=[([1, 2], _ask(1)), ([1, 2], _ask(1))],
        budget={"reconfigure": 1},
        wishes=((4, None),),
    ),
    SmallWorld(
        name="another KV cache when there is to be no spare any more",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, shows_death=False),
        clients=[],
        budget={"reconfigure": 1, "die_spare": 3},
        wishes=((3, None),),
    ),
    SmallWorld(
        name="a wish that comes when its worker has been replaced",
        shape=_shape(2, 1, 1),
        clients=[],
        budget={"reconfigure": 1, "die": 1, "fire_early": 1},
        wishes=((3, None),),
    ),
    SmallWorld(
        name="another precision, a wish too many, and a stop",
        shape=_shape(2, 1, 1, modes=(BEST, LEAN)),
        clients=[([1], _ask(1))],
        budget={"reconfigure": 2, "stop": 1, "duplicate": 1},
        wishes=((None, INT8),),
    ),
    SmallWorld(
        name="another precision, and what the host has of the one before",
        shape=_shape(4, 1, 1, num_host_blocks=4),
        clients=[([1], _ask(3))],
        budget={"reconfigure": 1, "cancel": 1},
        wishes=((None, INT8), (5, INT8)),
    ),
    SmallWorld(
        name="another precision while the ladder is down",
        shape=_shape(2, 1, 1, modes=(BEST, LEAN)),
        clients=[([1], _ask(1))],
        budget={"reconfigure": 1, "oom": 1, "fail_job": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM),
        wishes=((None, INT8), (3, None)),
    ),
    SmallWorld(
        name="another device in a thread",
        shape=_shape(2, 1, 1, max_restarts=0, modes=(BEST, LEAN)),
        clients=[([1], _ask(1))],
        budget={"reconfigure": 2, "fail_job": 2},
        wishes=((3, None), (None, INT8)),
    ),
    SmallWorld(
        name="another KV cache, and a spare that has the one of before",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True),
        clients=[],
        budget={"reconfigure": 1, "die": 1, "fail_job": 1},
        wishes=((3, None),),
    ),
    SmallWorld(
        name="another precision, and a spare that has the one of before",
        shape=_shape(2, 1, 1, processes=True, warm_spare=True, shows_death=False),
        clients=[],
        budget={"reconfigure": 1, "overdue": 1},
        wishes=((3, INT8),),
    ),
    SmallWorld(
        name="two steps in flight, and a prompt that is cancelled or fails while it is encoded",
        shape=_shape(4, 1, 1, max_in_flight=2),
        clients=[([1], _ask(2)), ("a", _ask(1))],
        budget={"cancel": 1, "fail_encode": 1, "oom": 1},
    ),
    SmallWorld(
        name="a worker that dies, and a prompt that is cancelled or fails while it is encoded",
        shape=_shape(3, 1, 1),
        clients=[([1], _ask(1)), ("a", _ask(1))],
        budget={"cancel": 1, "fail_encode": 1, "die": 1},
    ),
    SmallWorld(
        name="two steps in flight, and a stop while a prompt is encoded",
        shape=_shape(3, 1, 1, max_in_flight=2),
        clients=[([1], _ask(2)), ("a", _ask(1))],
        budget={"stop": 1, "fail_encode": 1},
    ),
    SmallWorld(
        name="two steps in flight, and all is cancelled",
        shape=_shape(4, 1, 1, max_in_flight=2),
        clients=[([1], _ask(3)), ([2], _ask(1))],
        budget={"cancel_all": 1},
    ),
    SmallWorld(
        name="two steps in flight, and a reader that is away for long and comes back",
        shape=_shape(4, stall_high=0, stall_low=0, max_in_flight=2),
        clients=[([1], _ask(2)), ([2], _ask(2))],
        budget={"read": 1, "fire_early": 1},
        slow_readers=frozenset([0]),
    ),
    SmallWorld(
        name="another KV cache, and a prompt that is encoded or cancelled meanwhile",
        shape=_shape(3, 1, 1),
        clients=[("a", _ask(1))],
        budget={"reconfigure": 1, "cancel_all": 1, "fail_encode": 1},
        wishes=((4, None),),
    ),
    SmallWorld(
        name="another KV cache, and the failure of a step that comes twice",
        shape=_shape(3, 1, 1),
        clients=[([1], _ask(1))],
        budget={"reconfigure": 1, "exception": 1, "duplicate": 1},
        wishes=((4, None),),
    ),
    SmallWorld(
        name="a death that is told twice, and a device without memory",
        shape=_shape(2, 1, 1),
        clients=[([1], _ask(1))],
        budget={"die": 1, "duplicate": 1, "oom": 1},
    ),
    SmallWorld(
        name="a death that is told twice, and a switch of mode",
        shape=_shape(3, 1, 1, modes=(BEST, LEAN)),
        clients=[([1], _ask(2))],
        budget={"die": 1, "duplicate": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="a switch that fails when the request that it was for has gone, and all has been quiet",
        shape=_shape(3, 1, 1, modes=(BEST, LEAN)),
        clients=[([1], _ask(2))],
        budget={"fire_early": 1, "fail_job": 1, "cancel": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="smaller steps, and a switch that fails when the request that it was for has gone",
        shape=_shape(8, 1, 2, modes=(BEST, LEAN)),
        clients=[([1, 2, 3], _ask(2))],
        budget={"fire_early": 1, "fail_job": 1, "cancel": 1},
        opening=(Fault.OOM, Fault.OOM, Fault.OOM, Fault.OOM),
    ),
    SmallWorld(
        name="two tenants, one of which has both slots and more to come",
        shape=_shape(6),
        clients=[([1], _ask(2), 1, OTHER), ([2], _ask(2), 1, OTHER), ([3], _ask(1), 1, ANYONE)],
        budget={},
    ),
    SmallWorld(
        name="two tenants with one prompt, whose ends neither finds at the other",
        shape=_shape(6, 2, max_model_len=4),
        clients=[([1, 2, 3], _ask(1), 1, OTHER), ([1, 2, 3], _ask(1), 1, ANYONE), ([1, 2, 3], _ask(1), 1, OTHER)],
        budget={"exception": 1},
    ),
    SmallWorld(
        name="what is urgent, and what has waited for too long",
        shape=_shape(3, max_num_seqs=1, scheduling_policy="priority"),
        clients=[([1], _ask(1, priority=1)), ([2], _ask(1))],
        budget={"fire_early": 1, "cancel": 1},
    ),
    SmallWorld(
        name="what waits by priority, and a worker that dies",
        shape=_shape(2, max_num_seqs=1, scheduling_policy="priority"),
        clients=[([1], _ask(1, priority=1)), ([2], _ask(1))],
        budget={"die": 1, "fire_early": 1},
    ),
    SmallWorld(
        name="a conversation that goes on when another request has taken its blocks",
        shape=_shape(4, 1, 1, num_host_blocks=2, session_ttl_s=60.0),
        clients=[([1, 2], _ask(1, session_id="a")), ([3, 4, 5], _ask(1)), ([1, 2, 6], _ask(1, session_id="a"))],
        budget={"unlaunched": 1, "end_session": 1},
    ),
    SmallWorld(
        name="a conversation on the host, and steps that fail when they copy it back",
        shape=_shape(4, 1, 1, num_host_blocks=3, session_ttl_s=60.0, max_in_flight=2),
        clients=[([1, 2], _ask(1, session_id="a")), ([3, 4, 5], _ask(1)), ([1, 2, 6], _ask(1, session_id="a"))],
        budget={"exception": 1, "fire_early": 1},
    ),
    SmallWorld(
        name="two requests of a conversation, one of another, and a worker that dies",
        shape=_shape(3, session_ttl_s=60.0, max_sessions=1, num_host_blocks=1),
        clients=[([1], _ask(1, session_id="a")), ([1, 2], _ask(1, session_id="a")), ([3], _ask(1, session_id="b"))],
        budget={"die": 1},
    ),
    SmallWorld(
        name="a conversation and another KV cache",
        shape=_shape(3, 1, 1, session_ttl_s=60.0, num_host_blocks=2),
        clients=[([1], _ask(1, session_id="a")), ([1, 2], _ask(1, session_id="a"))],
        budget={"reconfigure": 1, "end_session": 1},
        wishes=((4, None),),
    ),
]
