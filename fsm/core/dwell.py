"""How long a state may last, and for what reason: said beside each machine's table, and watched by `health`."""

from __future__ import annotations

import msgspec

ANSWER_LIMIT_S = 5.0  # for a message between two actors of one loop, and the turns that it causes
RECLAIM_LIMIT_S = 30.0  # collecting garbage, and giving cached memory back to the driver
SWITCH_LIMIT_S = 300.0  # packing the weights of a large model anew
MEMORY_LIMIT_S = 600.0  # allocating a KV cache; compiling and running every kernel once, on a machine that swaps
LOAD_STALL_LIMIT_S = 120.0  # without another tensor read: the largest is 2.5 GB, and a slow disk gives 20 MB a second
DYING_LIMIT_S = 10.0  # for a process that was killed: it takes the system 0.5 s to take back 1 GiB
BACKOFF_LIMIT_S = 60.0  # longer than any pause between two restarts
GRAMMAR_LIMIT_S = 60.0  # one step's masks, or what a grammar is compiled with; a grammar has COMPILE_LIMIT_S
ENCODE_LIMIT_S = 60.0  # one batch at the tokenizer: 64 prompts of the largest body took 9 s


class Dwell(msgspec.Struct, frozen=True):
    """How long a state may last, and why: `limit_s` seconds, those of a step beside if `and_step`; None: any time.

    The time counts from the last entry, also one from the state itself, by a row that renews it. `by_signs`: it counts
    from one sign that the actor gets on to the next; an actor that gives no such signs has any time.
    """

    limit_s: float | None
    why: str
    and_step: bool = False
    by_signs: bool = False

    def seconds(self, step_timeout_s: float) -> float | None:
        """The limit in seconds."""
        if self.limit_s is None:
            return None
        return self.limit_s + (step_timeout_s if self.and_step else 0.0)


def any_time(why: str) -> Dwell:
    """A state without a deadline, and the reason for that."""
    return Dwell(None, why)


ENDED = any_time("it has ended")
COMES_UP = any_time("as long as the worker comes up, which has deadlines of its own")
COMES_UP_AGAIN = any_time("as long as the worker comes up again, which has deadlines of its own")
