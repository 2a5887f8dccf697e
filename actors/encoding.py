"""The tokenizer's thread: loads the tokenizer, encodes all prompts that wait as one batch, and checks what comes out.

A batch takes milliseconds that the loop does not have; the tokenizer itself is in `novainfer.actors.tokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from novainfer.actors.thread import JobThread
from novainfer.actors.tokenizer import Tokenizer, encode_jobs
from novainfer.fsm.events import Encoded, EncodeFailed
from novainfer.fsm.health import Sighting, TokenizerState
from novainfer.fsm.text import Vocabulary

LOAD = "load"  # the thread's first job
BATCH_MAX = 64  # prompts: enough to keep every core busy, and close need not wait for a thousand


class Encoding:
    """`loaded` hears the vocabulary, or why there is none; `deliver`, each Encoded and EncodeFailed. On the loop."""

    def __init__(
        self,
        load: Callable[[], Tokenizer],
        *,
        loaded: Callable[[Vocabulary | Exception], None],
        deliver: Callable[[Encoded | EncodeFailed], None],
    ) -> None:
        self._load = load
        self._loaded = loaded
        self._deliver = deliver
        self._tokenizer: Tokenizer | None = None
        self._num_ids: int | None = None  # of the model, when the tokenizer has more
        self.thread = JobThread("novainfer-tokenizer", self._work, self._take, batch_max=BATCH_MAX)

    def begin(self) -> None:
        """Load the tokenizer."""
        self.thread.put(LOAD)

    def limit_ids(self, num_ids: int) -> None:
        """The model's vocabulary ends here: a prompt with tokens beyond it is no good."""
        self._num_ids = num_ids

    def sighting(self) -> Sighting:
        """What the watchdog sees of the thread."""
        if self._tokenizer is None:
            state = TokenizerState.LOADING
        else:
            state = TokenizerState.ENCODING if self.thread.num_waiting else TokenizerState.IDLE
        return Sighting("tokenizer", state, self.thread.since_s)

    def _work(self, jobs: list[Any]) -> list[Any]:
        """In the thread: load the tokenizer, which is always the first job, and then encode."""
        if self._tokenizer is not None:
            return list(encode_jobs(self._tokenizer, jobs))
        assert jobs == [LOAD]
        try:
            self._tokenizer = self._load()
            return [self._tokenizer.vocabulary()]
        except Exception as error:
            return [error]

    def _take(self, result: Any) -> None:
        if isinstance(result, Vocabulary | Exception):
            self._loaded(result)
        else:
            self._deliver(self._checked(result))

    def _checked(self, result: Encoded | EncodeFailed) -> Encoded | EncodeFailed:
        """`result`, unless the tokenizer used a token that the model has no row for."""
        if self._num_ids is None or isinstance(result, EncodeFailed):
            return result
        highest = max(result.token_ids, default=0)
        if highest < self._num_ids:
            return result
        what = f"the tokenizer's token {highest} is not in the model's vocabulary of {self._num_ids}"
        return EncodeFailed(result.stream_id, f"{what}: this tokenizer belongs to another model", "prompt")
