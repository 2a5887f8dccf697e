"""One client: what it asked for, what it was told, and whether it could have been told so."""

from __future__ import annotations

import struct
from functools import partial
from math import isclose

from novainfer.fsm.messages.events import Arrive, Cause, End, Finished, Rejected
from novainfer.fsm.messages.outputs import Delta, FinishReason
from novainfer.fsm.messages.pooling import Pooling
from novainfer.fsm.simulation.checks.oracle import (
    TOKEN_BYTES,
    Expected,
    Violation,
    expected_embedding,
    expected_run,
    is_refused,
)
from novainfer.fsm.simulation.world.device import expected_logprob


class Client:
    """A client with its `arrive`; `max_len` is the context that the world serves, in tokens."""

    def __init__(self, arrive: Arrive, max_len: int) -> None:
        params, prompt = arrive.params, arrive.prompt
        assert isinstance(prompt, str | list)
        self.arrive = arrive
        self.prompt = [ord(c) for c in prompt] if isinstance(prompt, str) else prompt
        self.tokens: list[list[int]] = [[] for _ in range(params.n)]
        self.texts = [""] * params.n
        self.finished: set[int] = set()
        self.end: End | Finished | Rejected | None = None
        self.was_let_in = False
        self.causes: set[Cause] = set()  # of the cancels that were sent for it
        self.encoding_failed = False
        self.num_reads = 0
        self.reads_when_stalled = -1  # how many there had been when the stream last stalled
        self.was_blamed = False  # one of its requests ended for failures of its own
        self.compile_errors: set[str] = set()  # codes of errors that its grammar may end it with, whatever that is
        self.is_refused = is_refused(len(self.prompt), params, max_len)
        self._expected: list[Expected | None] = [None] * params.n
        self._max_len = max_len

    def expected(self, choice: int) -> Expected:
        """What `choice` must bring; worked out when it first brings something."""
        found = self._expected[choice]
        if found is None:
            found = expected_run(self.prompt, self.arrive.params, self.arrive.seed, choice, self._max_len)
            self._expected[choice] = found
        return found

    def take(self, delta: Delta) -> None:
        """Check a delta: it goes on where the last one ended, and says what it should."""
        params, choice, name = self.arrive.params, delta.index, f"stream {delta.request_id} choice {delta.index}"
        if self.is_refused or not self.was_let_in:
            raise Violation(f"{name}: something came for a request that was refused")
        if choice in self.finished:
            raise Violation(f"{name}: something came after its end")
        if params.pooling is not None:
            self._take_embedding(delta, params.pooling, name)
            return
        if delta.embedding is not None:
            raise Violation(f"{name}: a vector came, and nobody had asked for one")
        expected = self.expected(choice)
        if not self.tokens[choice] and choice == 0 and delta.prompt_token_ids != self.prompt:
            raise Violation(f"{name}: the first delta has the prompt {delta.prompt_token_ids}")
        tokens = self.tokens[choice] = self.tokens[choice] + delta.token_ids
        text = self.texts[choice] = self.texts[choice] + delta.text
        if tokens != expected.token_ids[: len(tokens)]:
            raise Violation(f"{name}: {tokens} are not the first of {expected.token_ids}")
        if not expected.text.startswith(text):
            raise Violation(f"{name}: {text!r} is not the beginning of {expected.text!r}")
        counts = (delta.num_prompt_tokens, delta.num_generated_tokens, delta.seed)
        seed = (self.arrive.seed + choice) % 2**64
        if counts != (len(self.prompt), len(tokens), seed):
            raise Violation(f"{name}: (prompt tokens, generated tokens, seed) are said to be {counts}")
        if delta.num_cached_tokens >= len(self.prompt):
            raise Violation(f"{name}: {delta.num_cached_tokens} of {len(self.prompt)} prompt tokens were cached")
        self._check_logprobs(delta, name)
        if delta.finish_reason is not None:
            self.finished.add(choice)
            said = (delta.finish_reason, delta.stop_reason, tokens, text)
            right = (expected.finish_reason, expected.stop_reason, expected.token_ids, expected.text)
            if said != right:
                raise Violation(f"{name} ended with {said}, not {right} ({params})")

    def _take_embedding(self, delta: Delta, pooling: Pooling, name: str) -> None:
        """A request that is to give a vector gives it at once, and nothing else."""
        self.finished.add(delta.index)
        said = delta.finish_reason, delta.token_ids, delta.text, delta.num_prompt_tokens, delta.prompt_token_ids
        if said != (FinishReason.STOP, [], "", len(self.prompt), self.prompt):
            raise Violation(f"{name} gave {said} beside its vector")
        most = len(self.prompt) - 1 if pooling.kind == "last" else 0
        if delta.num_cached_tokens > most:
            raise Violation(f"{name}: {delta.num_cached_tokens} tokens were cached, of which its vector wants some")
        found = struct.unpack(f"<{len(delta.embedding or b'') // 4}f", delta.embedding or b"")
        right = expected_embedding(self.prompt, pooling)
        if len(found) != len(right) or not all(map(partial(isclose, rel_tol=1e-6), found, right)):
            raise Violation(f"{name}: its vector is {found}, and should be {right}")

    def _check_logprobs(self, delta: Delta, name: str) -> None:
        num_top = self.arrive.params.logprobs
        if num_top is None:
            if delta.logprobs is not None:
                raise Violation(f"{name}: logprobs came, and nobody had asked for them")
            return
        logprobs = delta.logprobs or []
        if [item.token_id for item in logprobs] != delta.token_ids:
            raise Violation(f"{name}: logprobs of {len(logprobs)} tokens for {len(delta.token_ids)}")
        for item in logprobs:
            logprob, ids, values = expected_logprob(item.token_id, num_top)
            top = [(i, TOKEN_BYTES[i], v) for i, v in zip(ids, values, strict=True)]
            if (item.logprob, item.top, item.token) != (logprob, top, TOKEN_BYTES[item.token_id]):
                raise Violation(f"{name}: wrong logprobs {item}")

    def take_end(self, end: End | Finished) -> None:
        """Check the end: it comes once, and there is a reason for it."""
        name = f"stream {self.arrive.stream_id}"
        if self.end is not None:
            raise Violation(f"{name} ended twice: {self.end}, then {end}")
        self.end = end
        if isinstance(end, Finished):
            if len(self.finished) != self.arrive.params.n:
                raise Violation(f"{name} finished before its choices had")
        elif end.error is None:
            if end.cause not in self.causes:
                raise Violation(f"{name} was cancelled ({end.cause}), and nobody had asked for that")
        else:
            possible = {
                "step_failed": self.was_blamed,
                "invalid_value": self.encoding_failed or not self.prompt,
                "context_length_exceeded": self.is_refused and bool(self.prompt),
                "engine_dead": Cause.DRAIN in self.causes,
                "stalled": Cause.STALLED in self.causes,
                "draining": Cause.DRAIN in self.causes,
            }
            if self.arrive.params.structured_outputs is not None and not self.is_refused:
                codes = [self.expected(choice).error_code for choice in range(self.arrive.params.n)]
                for code in ("invalid_value", "grammar_limit", "no_token_allowed"):
                    possible[code] = possible.get(code, False) or code in codes
                possible |= dict.fromkeys(self.compile_errors, True)
            if not possible[end.code]:
                raise Violation(f"{name} ended with {end}, for no reason")
