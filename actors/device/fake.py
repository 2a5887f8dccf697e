"""A device and a tokenizer without weights, for tests of everything around them and for measuring the loop.

Fakes, not mocks: they do what they promise, only simply. The device's next token is a fixed function of the last one;
a test that wants to see what the KV blocks hold uses the simulator's device instead.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from novainfer.fsm.messages.events import Chat, PromptKind
from novainfer.fsm.messages.mode import CHECKPOINT, Mode
from novainfer.fsm.messages.step import NO_TOKEN, SAMPLED, Logprobs, StepDone, StepMasks, StepPlan
from novainfer.fsm.parsing.formats import Formats
from novainfer.fsm.text import TokenizerInfo, Vocabulary

EOS = 256  # after the 256 byte tokens
HIDDEN_SIZE = 4


def successor(token_id: int) -> int:
    """The token after `token_id`: the next printable byte, round and round; never EOS."""
    return 32 + (token_id - 31) % 95


def hidden_state(token_id: int) -> tuple[float, ...]:
    """That of a token: of itself alone."""
    return float(token_id), 1.0, -token_id / 2, 0.5


def pooled(plan: StepPlan) -> list[bytes]:
    """The sums that `plan` asks for."""
    ends, found = list(accumulate(plan.query_lens)), list[bytes]()
    for seq, count in zip(plan.pool_seqs, plan.pool_lens, strict=True):
        rows = [hidden_state(token_id) for token_id in plan.input_ids[ends[seq] - count : ends[seq]]]
        found.append(struct.pack(f"<{HIDDEN_SIZE}d", *map(sum, zip(*rows, strict=True))))
    return found


class FakeDevice:
    """Answers at once, or after `step_s` seconds.

    `on_step(plan)` runs before each step and may raise, or wait: it is in the device's thread. A reconfiguration finds
    room for `num_blocks_max` blocks (None: for any number).
    """

    def __init__(
        self,
        *,
        num_blocks: int = 4096,
        max_model_len: int = 2048,
        next_token: Callable[[int], int] = successor,
        on_step: Callable[[StepPlan], None] | None = None,
        step_s: float = 0.0,
        num_blocks_max: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._num_blocks_max = num_blocks_max
        self.max_model_len = max_model_len
        self._next = next_token
        self._on_step = on_step
        self._step_s = step_s
        self._last: dict[int, int] = {}  # the token that each slot was given last
        self.is_closed = False

    def load(self, precision: str | None = None) -> dict[str, Any]:
        """A vocabulary of bytes, and one mode, in the precision that is wanted."""
        return {
            "max_model_len": self.max_model_len,
            "vocab_size": EOS + 1,
            "eos_token_ids": [EOS],
            "dtype": "none",
            "hidden_size": HIDDEN_SIZE,
            "modes": [msgspec.structs.asdict(Mode(precision=precision or CHECKPOINT))],
        }

    def fit(self, num_blocks: int | None = None, *, is_new: bool = False) -> dict[str, Any]:
        """As many blocks as the test wants; raises MemoryError for new ones beyond `num_blocks_max`."""
        num_blocks = num_blocks or self.num_blocks
        if is_new and self._num_blocks_max is not None and num_blocks > self._num_blocks_max:
            raise MemoryError(f"at most {self._num_blocks_max} blocks fit")
        return {"num_blocks": num_blocks}

    def warm(self, *, measures: bool = True) -> None:
        """Nothing to warm."""

    def run(self, plan: StepPlan) -> StepDone:
        """One successor for each sampled row, and one more for each draft that is one; drafts are right."""
        if self._on_step is not None:
            self._on_step(plan)
        if self._step_s:
            time.sleep(self._step_s)
        ends = list(accumulate(plan.query_lens))
        ids = self._with_sampled(plan, ends) if plan.after else plan.input_ids
        if not plan.num_drafts and not plan.num_drafts_wanted:
            if len(ids) == len(plan.sample_seqs):  # each row is one token
                slots, one_each = plan.slots, list(map(self._next, ids))
            else:
                slots = [plan.slots[seq] for seq in plan.sample_seqs]
                one_each = [self._next(ids[ends[seq] - 1]) for seq in plan.sample_seqs]
            self._last.update(zip(slots, one_each, strict=True))
            return StepDone(plan.step_id, plan.epoch, one_each, scores=self._scores(plan), pooled=pooled(plan))
        none = [0] * len(plan.sample_seqs)
        tokens: list[int] = []
        num_tokens: list[int] = []
        drafts: list[list[int]] = []
        rows = zip(plan.sample_seqs, plan.num_drafts or none, plan.num_drafts_wanted or none, strict=True)
        for seq, num_drafts, num_wanted in rows:
            before = len(tokens)
            for at in range(ends[seq] - 1 - num_drafts, ends[seq]):
                tokens.append(self._next(ids[at]))
                if at + 1 == ends[seq] or tokens[-1] != ids[at + 1]:
                    break
            num_tokens.append(len(tokens) - before)
            drafts.append([])
            self._last[plan.slots[seq]] = tokens[-1]
            for _ in range(num_wanted):
                drafts[-1].append(self._next(drafts[-1][-1] if drafts[-1] else tokens[-1]))
        return StepDone(
            *(plan.step_id, plan.epoch, tokens),
            num_tokens=num_tokens,
            draft_token_ids=drafts,
            scores=self._scores(plan),
            pooled=pooled(plan),
        )

    def _scores(self, plan: StepPlan) -> list[Logprobs]:
        """A token scores minus its distance from the successor of the one before it, which is the most likely one."""
        found: list[Logprobs] = []
        for row, token_id, top in zip(plan.score_rows, plan.score_ids, plan.score_tops, strict=True):
            expected = self._next(plan.input_ids[row])
            found.append((float(-abs(expected - token_id)), [expected][:top], [0.0][:top]))
        return found

    def _with_sampled(self, plan: StepPlan, ends: list[int]) -> list[int]:
        """The input, with the token that its slot was given last for each `SAMPLED`, which only ends a row."""
        ids = list(plan.input_ids)
        for slot, end in zip(plan.slots, ends, strict=True):
            if ids[end - 1] == SAMPLED:
                token_id = self._last[slot]
                ids[end - 1] = 0 if token_id == NO_TOKEN else token_id
        return ids

    def give(self, masks: StepMasks) -> None:
        """It obeys no masks."""

    def switch(self, mode: Mode) -> None:
        """It computes the same in every mode."""

    def reclaim(self) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Remember that it was closed."""
        self.is_closed = True

    def is_usable(self) -> bool:
        """Always."""
        return True


class ByteTokenizer:
    """Token ids are UTF-8 bytes; a chat is its messages' contents, one a line."""

    prompt_kind: PromptKind = "chat"
    formats = Formats()

    def encode_batch(self, prompts: Sequence[str | Chat]) -> list[list[int] | str]:
        """The ids of each prompt, or why it has none."""
        return [list(self._text(prompt).encode()) for prompt in prompts]

    def vocabulary(self) -> Vocabulary:
        """256 bytes and EOS."""
        return Vocabulary.build([bytes([i]) for i in range(256)] + [b"<eos>"], frozenset([EOS]))

    def tokens_min(self, text: str) -> int:
        """Each byte is a token."""
        return len(text.encode())

    def info(self) -> TokenizerInfo:
        """Its name and its one special token."""
        return TokenizerInfo(tokenizer_class=type(self).__name__, eos_token="<eos>")

    def limit_tokens(self, max_tokens: int) -> None:
        """Its chats are as long as their messages."""

    def grammar_source(self) -> str | None:
        """None: the device that goes with it obeys no masks."""
        return None

    def close(self) -> None:
        """It holds nothing."""

    def _text(self, prompt: str | Chat) -> str:
        if isinstance(prompt, str):
            return prompt
        return "\n".join(str(message.get("content", "")) for message in prompt.messages)
